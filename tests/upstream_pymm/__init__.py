"""PyMM's own programs and unit tests, from a checkout of its repositories (`make nightly
WHAT=upstream-pymm`). Nothing of them is here."""
