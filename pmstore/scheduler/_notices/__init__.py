"""Hears notices that the process is about to end."""
