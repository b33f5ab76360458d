"""Random state: torch's, numpy's and Python's defaults, and the generators of a program."""
