"""One measured figure, and times in words: what the harness makes, and plots and results show."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """One method in one case. Times in microseconds.

    ratio: to the yardstick of the case, which the title of the table names.
    """

    method: str
    case: str
    median_us: float
    min_us: float
    max_us: float
    durability: str
    ratio: float | None = None
    extra: dict[str, float] = field(default_factory=dict)
    """Further measured figures of this row: counts, bytes, shares."""
    note: str = ""
    """Why there is no figure, where there is none (the times are NaN then; null in JSON)."""
    rounds: int = 0
    """How often it was measured; 0: the figure is a count or a sum."""

    @property
    def measured(self) -> bool:
        return not math.isnan(self.median_us)


def time_text(us: float) -> str:
    """Microseconds for people.

    >>> time_text(2.412), time_text(5300), time_text(4.69e6)
    ('2.41 us', '5.3 ms', '4.69 s')
    """
    for limit, divisor, unit in ((1e3, 1.0, "us"), (1e6, 1e3, "ms")):
        if us < limit:
            return f"{us / divisor:.3g} {unit}"
    return f"{us / 1e6:.3g} s"
