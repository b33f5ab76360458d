"""PyMM's own programs and unit tests, from a checkout of its repositories (`make upstream-pymm`).
Nothing of them is here."""
