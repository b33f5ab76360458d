"""When a run commits: the seam for schedulers."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["CommitPolicy", "EverySteps"]


@runtime_checkable
class CommitPolicy(Protocol):
    """Asked at the end of every step."""

    def should_commit(self, step: int, loss: float | None) -> bool:
        """Whether the run shall commit now.

        Args:
            step: finished steps, this one included; counted from the start of the run, not of the process.
            loss: what `run.commit` was given, as a float; None if nothing.
        """
        ...


class EverySteps:
    """Commits every `steps` steps.

    >>> [EverySteps(3).should_commit(step, None) for step in range(1, 7)]
    [False, False, True, False, False, True]
    """

    def __init__(self, steps: int) -> None:
        """Raises ValueError if steps is not at least 1."""
        if steps < 1:
            raise ValueError(f"steps is the number of steps between commits, at least 1, not {steps}")
        self.steps = steps

    def should_commit(self, step: int, loss: float | None) -> bool:
        return step % self.steps == 0
