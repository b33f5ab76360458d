"""A step by hand: `with run.next_step():`."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from pmstore.torch._step.loops import Loops
from pmstore.torch._step.state import OPEN, Event
from pmstore.torch._step.steps import Steps
from pmstore.torch.run_errors import RolledBackError


class NextStep:
    """A step that begins where the block is entered and ends where the next one is; leaving the
    block says that it is complete. `Run.next_step` makes it."""

    __slots__ = ("_loops", "_steps")

    def __init__(self, steps: Steps, loops: Loops) -> None:
        self._steps = steps
        self._loops = loops

    def __enter__(self) -> None:
        self._loops.begin_by_hand()

    def __exit__(self, kind: object, *_: object) -> Literal[False]:
        step = self._steps.step
        if not step.within:
            return False  # it was taken back inside
        step.within = False
        if kind is None:
            if step.state is OPEN:
                step.go(Event.MARK)
        elif self._steps.attached:
            self._steps.dropping()
            # the program's own error goes on; a loop that it goes on with raises
            with suppress(RolledBackError):
                self._steps.roll_back()
        return False
