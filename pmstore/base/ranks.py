"""Which rank of several this process is, as its launcher says."""

from __future__ import annotations

import os


def launched() -> tuple[int, int]:
    """Rank, and how many there are: by the variables that torchrun sets, and other launchers for
    torch. (0, 1): nobody says."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
