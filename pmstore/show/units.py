"""Numbers, times and sizes for people."""

from __future__ import annotations

import math
import time

from pmstore._base.text import counted


def number(value: float) -> str:
    """Writes a number with four digits.

    >>> number(0.000123456), number(1234567), number(3.0), number(float("nan"))
    ('0.0001235', '1,234,567', '3', '-')
    """
    if not math.isfinite(value):
        return "-" if value != value else ("inf" if value > 0 else "-inf")
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def seconds(value: float) -> str:
    """Writes a span of time with its unit.

    >>> seconds(0.0000123), seconds(0.25), seconds(90.0), seconds(7260.0), seconds(2e5)
    ('12.3 us', '250 ms', '1 min 30 s', '2 h 1 min', '2 d 7 h')
    >>> seconds(0.0009996), seconds(0.9999), seconds(59.96)
    ('1 ms', '1 s', '1 min 0 s')
    """
    if not math.isfinite(value):
        return "-"
    if abs(value) < 0.9995e-3:  # three digits round the rest up
        return f"{value * 1e6:.3g} us"
    if abs(value) < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if abs(value) < 59.95:
        return f"{value:.3g} s"
    whole = round(value)
    for unit, name, smaller, least in (
        *((60, "min", 1, "s"), (3600, "h", 60, "min"), (86400, "d", 3600, "h")),
    ):
        if whole < unit * (86400 if name == "d" else {"min": 60, "h": 24}[name]):
            return f"{whole // unit} {name} {whole % unit // smaller} {least}"
    return f"{whole // 86400:,} d"


def size(count: float) -> str:
    """Writes a number of bytes with its unit.

    >>> size(100), size(123456), size(5 << 30), size((1 << 20) - 1)
    ('100 bytes', '120.6 KiB', '5.0 GiB', '1.0 MiB')
    """
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < (1024 if unit == "bytes" else 1023.95):
            return counted(round(count), "byte") if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def is_logarithmic(low: float, high: float) -> bool:
    """Says whether an axis from `low` to `high` reads better by its logarithm.

    >>> is_logarithmic(0.01, 20.0), is_logarithmic(1.0, 20.0), is_logarithmic(0.0, 20.0)
    (True, False, False)
    """
    return low > 0.0 and high / low > 50.0


def moment(unix: float) -> str:
    """Writes a point in time, in this machine's time zone."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))
    except (ValueError, OverflowError, OSError):
        return "-"
