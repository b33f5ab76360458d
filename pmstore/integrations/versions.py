"""Says which versions of a framework a plug-in was tested with."""

from __future__ import annotations

import re
import warnings
from importlib import metadata

_told: set[str] = set()


def tested(package: str, oldest: str, newest: str) -> None:
    """Warns once in a process if the installed package is older than the oldest version that the
    plug-in was tested with. Nothing is said of newer ones.

    package: its name on PyPI. oldest, newest: as "2.4" or "2.4.1".
    """
    installed = metadata.version(package)
    if package in _told or release(installed) >= release(oldest):
        return
    _told.add(package)
    warnings.warn(
        f"{package} {installed} is older than what pmstore was tested with ({oldest} to {newest}). "
        f"It may work; if it does not: pip install '{package}>={oldest}'",
        RuntimeWarning,
        stacklevel=3,
    )


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with, for comparing.

    >>> release("2.13.0+cpu") >= release("2.4"), release("1.9rc1")
    (True, (1, 9))
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
