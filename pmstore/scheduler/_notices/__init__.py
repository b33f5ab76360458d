"""Notices that the process is about to end."""
