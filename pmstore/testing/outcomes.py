"""Names the findings of a crash test."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """Says what became of a program that was killed. The members go from best to worst."""

    CLEAN = "clean resume"
    MANUAL = "needs manual work"
    DIFFERENT = "silent resume with different state"
    LOST = "lost work"


@dataclass(frozen=True)
class Kill:
    """One death. primitive: the persistence point, 0 if it came at a random time. acknowledged:
    commits that had returned; found: commits that the store held afterwards, None if there was no
    store yet.

    In a job, victim is the store of the rank that dies, and acknowledged and found are generations
    (without a job's records, steps): the newest that a rank had committed, and the newest that all
    can produce. whole: all processes die, at a point when that rank gets there."""

    primitive: int
    delay_seconds: float
    acknowledged: int = 0
    found: int | None = None
    victim: str = ""
    whole: bool = False

    def __str__(self) -> str:
        when = f"point {self.primitive}" if self.primitive else f"{self.delay_seconds:.3f} s"
        if self.whole:
            return f"all at {when}" + (f" of {self.victim}" if self.primitive else "")
        return f"{self.victim} at {when}" if self.victim else when


@dataclass(frozen=True)
class Trial:
    """One program that was killed and resumed. commits: what the store held at the end (of a job:
    the last step), None if it did not get there."""

    number: int
    kills: tuple[Kill, ...]
    outcome: Outcome
    detail: str
    commits: int | None


@dataclass(frozen=True)
class CrashTestResult:
    """The findings of `crash_test`. `ok`: every trial was a clean resume.

    primitives, commits: of the run that nobody killed. deterministic: a second such run ended in
        the same state; if not, `not_compared` has the names that two such runs leave with different
        contents, and only all others were compared.
    stores: of a job, by rank.
    """

    seed: int
    model: str
    domain: str
    primitives: int
    commits: int
    deterministic: bool
    seconds: float
    trials: tuple[Trial, ...] = field(default=())
    not_compared: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.trials) and all(t.outcome is Outcome.CLEAN for t in self.trials)

    def count(self, outcome: Outcome) -> int:
        return sum(trial.outcome is outcome for trial in self.trials)

    def __str__(self) -> str:
        lines = [
            (
                f"{self.count(Outcome.CLEAN)} of {len(self.trials)} trials resumed cleanly (seed "
                f"{self.seed})"
            )
        ]
        for trial in self.trials:
            if trial.outcome is not Outcome.CLEAN:
                kills = ", ".join(map(str, trial.kills))
                lines.append(
                    f"trial {trial.number}, killed at {kills}: {trial.outcome.value}: "
                    f"{trial.detail}"
                )
        return "\n".join(lines)


class Finding(Exception):
    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
