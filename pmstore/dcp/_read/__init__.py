"""Reads checkpoints: from folders, runs and epochs."""
