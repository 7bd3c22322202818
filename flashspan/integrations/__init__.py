"""Plug-ins that bring flashspan's attention to other people's models. Each imports its library only when it is used."""
