"""What a check found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["passed", "failed", "not checked"]


class WrongError(AssertionError):
    """The product did something wrong."""


class NotCheckedError(Exception):
    """Why something could not be looked at here."""


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure to reach. It is reported, and fails nothing: machines differ."""

    name: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        if math.isnan(self.value):
            return False
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        """
        >>> print(Aim("rate / plain", 0.5, 0.9, at_least=True))
        MISSED rate / plain: 0.5 (aim >= 0.9)
        """
        sign = ">=" if self.at_least else "<="
        word = "met" if self.met else "MISSED"
        return f"{word:6} {self.name}: {self.value:.4g} (aim {sign} {self.bound:g})"


@dataclass(slots=True)
class Outcome:
    """Of one check. A check fills in figures and aims, and says what it could not look at."""

    name: str
    status: Status = "passed"
    why: str = ""
    seconds: float = 0.0
    figures: dict[str, float | str] = field(default_factory=dict)
    aims: list[Aim] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What of it could not be checked here, and why."""


def require(ok: object, what: str) -> None:
    """Raises: WrongError."""
    if not ok:
        raise WrongError(what)
