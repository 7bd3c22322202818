"""Plug-ins for flashspan's attention in models of other libraries. Each imports its library only when it is used."""
