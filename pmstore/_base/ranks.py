"""Finds out which rank of several this process is, as its launcher says."""

from __future__ import annotations

import os


def launched() -> tuple[int, int]:
    """Returns this process's rank, and how many ranks there are, by the variables that torchrun and
    other launchers for torch set. Returns (0, 1) if they are not set."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
