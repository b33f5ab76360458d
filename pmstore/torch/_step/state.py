"""The step that is open: the part of a run's time that is kept whole or taken back whole."""

from __future__ import annotations

from asyncio import _get_running_loop, current_task
from collections.abc import Mapping
from enum import Enum
from threading import get_ident
from typing import Any

import torch
from torch import nn

from pmstore.errors import TransactionError


class StepState(Enum):
    """What is known of the step that the program is in."""

    IDLE = "no step is open"
    OPEN = "a step is open"
    MARKED = "the program said that the open step is complete"
    ENDED = "run.commit() has ended the step, and the program is still in its scope"


class Kind(Enum):
    """What a step is of. A head and a tail of an epoch are kept and taken back as steps are, but
    are not counted as such."""

    HEAD = "the head of an epoch", False
    BATCH = "a batch", True
    TAIL = "the tail of an epoch", False
    NUMBER = "run.steps()", True
    HAND = "run.next_step()", True

    def __init__(self, called: str, counted: bool) -> None:
        self.called = called
        self.counted = counted


class Event(Enum):
    BEGIN = "a step begins"
    END = "the next step is asked for"
    MARK = "run.end_step() or run.stop()"
    COMMIT = "run.commit()"
    UPDATE = "optimizer.step()"
    BACK = "the store goes back to its last commit"


_OUTSIDE = (
    "outside of a step: iterate run.epochs(), run.batches() or run.steps(), or write `with "
    "run.next_step():` around what belongs together"
)
_NESTED = "a step has no steps in it, and one of {kind} is open"
_TWICE = (
    "this step was ended already. What follows run.end_step() in a step is kept with it, what "
    "follows run.commit() goes with the next one"
)
_AFTER_COMMIT = (
    "this step was ended by run.commit(), so that an update after it would belong to no batch: "
    "call run.commit() after the last update, or make each update in `with run.next_step():`"
)
IDLE, OPEN, MARKED, ENDED = StepState
"""As names: to look for one in its class takes ten times as long, and a step asks for twenty."""
TABLE: Mapping[tuple[StepState, Event], StepState | str] = {
    (IDLE, Event.BEGIN): OPEN,
    (IDLE, Event.END): IDLE,
    (IDLE, Event.MARK): _OUTSIDE,
    (IDLE, Event.COMMIT): IDLE,
    (IDLE, Event.UPDATE): _OUTSIDE,
    (OPEN, Event.BEGIN): _NESTED,
    (OPEN, Event.END): IDLE,
    (OPEN, Event.MARK): MARKED,
    (OPEN, Event.COMMIT): ENDED,
    (OPEN, Event.UPDATE): OPEN,
    (MARKED, Event.BEGIN): _NESTED,
    (MARKED, Event.END): IDLE,
    (MARKED, Event.MARK): _TWICE,
    (MARKED, Event.COMMIT): ENDED,
    (MARKED, Event.UPDATE): MARKED,
    (ENDED, Event.BEGIN): _NESTED,
    (ENDED, Event.END): IDLE,
    (ENDED, Event.MARK): _TWICE,
    (ENDED, Event.COMMIT): ENDED,
    (ENDED, Event.UPDATE): _AFTER_COMMIT,
    **{(state, Event.BACK): IDLE for state in StepState},
}
"""What follows, or why the event is refused. A step that is left is told by its state: one that is
OPEN is taken back, one that is MARKED or ENDED is kept."""


class OpenStep:
    """The state of the step that a run is in. One thread, and in it one task, asks for steps,
    computes and ends them.

    Attributes:
        kind: of the step, or of the last one.
        within: the program is in the block of `with run.next_step()`.
        used: a training forward or an update was made in it.
        updating: updates by optimizers that have begun and not returned.
        values: what `run.log` was given in it, by name.
        stopping: `run.stop()` was called; the loop ends when the next step is asked for.
        thread: that the step was begun in; task: of asyncio, or None.
    """

    def __init__(self) -> None:
        self.state: StepState = IDLE
        self.kind: Kind = Kind.HAND
        self.within: bool = False
        self.used: bool = False
        self.updating: int = 0
        self.values: dict[str, Any] = {}
        self.stopping: bool = False
        self.thread: int = 0
        self.task: Any = None

    def go(self, event: Event, called: str = "") -> None:
        """Goes on as the table says. called: what the program called, for the message.

        Raises: TransactionError: the event is refused.
        """
        to = TABLE[self.state, event]
        if to.__class__ is str:
            told = to.format(kind=self.kind.called)
            raise TransactionError(f"{called}: {told}" if called else told)
        self.state = to  # type: ignore[assignment]

    def begin(self, kind: Kind) -> None:
        """A step begins. Raises: TransactionError: another one is open."""
        if self.state is not IDLE:
            self.go(Event.BEGIN)
        self.state = OPEN
        self.kind = kind
        self.used = False
        self.thread = get_ident()
        self.task = current_task() if _get_running_loop() is not None else None

    def close(self, event: Event = Event.END) -> None:
        """It has ended, or was taken back."""
        self.go(event)
        self.within = self.used = False
        self.updating = 0

    @property
    def left(self) -> bool:
        """It is by hand, and its block was left, so that it is complete."""
        return self.state is MARKED and self.kind is Kind.HAND and not self.within

    def update(self) -> None:
        """An optimizer's step begins. Raises: TransactionError: outside of a step."""
        if self.state is not OPEN:
            self.go(Event.UPDATE, "optimizer.step()")
        if self.thread != get_ident() or self.task is not None:
            self.check_caller()
        self.used = True
        self.updating += 1

    def check_caller(self) -> None:
        """Raises: TransactionError: another thread or task has begun the step."""
        mine = self.thread == get_ident()
        if mine and self.task is not None and not self.task.done():
            now = current_task() if _get_running_loop() is not None else None
            mine = now is self.task
        if not mine:
            what = "task of asyncio" if self.thread == get_ident() else "thread"
            raise TransactionError(
                f"a step of the run was begun in another {what}. One {what} asks for the batches, "
                "trains on them and ends steps; DataLoader(num_workers=...) loads ahead by itself"
            )

    def check_whole(self) -> None:
        """Raises: TransactionError: an update was left by an error."""
        if self.updating:
            raise TransactionError(
                "optimizer.step() was left by an error that the program has caught, so that half "
                "an update is in this step: take the step back by run.rollback()"
            )


class BeforeForward:
    """A model's forward hook. It notes that the step was used, and refuses other threads. A copy of
    the model, by `deepcopy` or pickle, has one that does nothing."""

    __slots__ = ("step",)

    def __init__(self, step: OpenStep | None = None) -> None:
        self.step = step

    def __call__(self, module: nn.Module, args: Any) -> None:
        step = self.step
        if step is None or not module.training or not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling():
            step.used = True  # whether one is open is not asked: that would be compiled again
            return
        if step.state is IDLE:
            return
        other = step.task is not None or get_ident() != step.thread
        if other and not (_recomputes() or _is_replica(module)):
            step.check_caller()
        step.used = True

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":  # asked for by torch.jit.script
            name = (
                "an attached model has a hook, which torch.jit.script cannot compile: call "
                "run.detach() before"
            )
        raise AttributeError(name)

    def __deepcopy__(self, memo: object) -> BeforeForward:
        return BeforeForward()

    def __reduce__(self) -> tuple[type[BeforeForward], tuple[()]]:
        return BeforeForward, ()


def _recomputes() -> bool:
    """Whether a backward goes on in this thread, which computes forwards of checkpoints again."""
    return bool(torch._C._current_graph_task_id() != -1)


def _is_replica(module: nn.Module) -> bool:
    """Whether torch.nn.DataParallel has made it, for a thread of its own."""
    return bool(getattr(module, "_is_replica", False))
