"""Crash tests: every image that a crash may leave, and what the engine makes of it.
`python -m crashtests --help`."""
