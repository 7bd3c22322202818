"""One file for each benchmark of `flashspan bench`."""
