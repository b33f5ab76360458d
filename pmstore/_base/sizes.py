"""Reads sizes as people write them."""

from __future__ import annotations

import re

_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{prefix + "b": 1000 ** (power + 1) for power, prefix in enumerate("kmgtpe")},
    **{prefix + "ib": 1024 ** (power + 1) for power, prefix in enumerate("kmgtpe")},
}


def parse_size(size: int | str | None, what: str = "size") -> int:
    """Returns the bytes of `4096`, `"4GiB"` (1024) or `"500 MB"` (1000); None is 0.

    Raises: TypeError, ValueError.

    >>> parse_size("4GiB"), parse_size("1.5 MB"), parse_size(None)
    (4294967296, 1500000, 0)
    """
    if size is None:
        return 0
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(
                f"{what}={size!r} is not a size: use bytes, or a str like '500MB', '4GiB'"
            )
        unit = _UNITS[match[2].lower()]
        bytes_ = round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    elif isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(f"{what} is an int (bytes) or a str like '4GiB', not {type(size).__name__}")
    else:
        bytes_ = size.__index__()
    if not 0 < bytes_ < 1 << 62:
        raise ValueError(f"{what}={size!r} is not the size of a file")
    return bytes_
