"""Finished steps that no commit holds yet, and what becomes of them when the program is ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import torch

from pmstore import Store
from pmstore.course.writer import clock
from pmstore.errors import TransactionError
from pmstore.scheduler.warned import tell

if TYPE_CHECKING:
    from pmstore.torch._step.steps import Steps  # upward: a commit of them is one of the run

_MOST_BYTES = 1 << 20
"""That may be pending beside the run's tensors: they are summed up at the end of each step that is
not committed, at about 0.1 ms a MiB. With the tensors it may be so much too, or more where steps
take long."""

_BYTES_A_SECOND = 100e6  # of a step: one or two percent of its time

_LOADING = frozenset(
    f"pmstore.torch._data.{name}"
    for name in ("batches", "choose", "dataloader", "replay", "samples", "source")
)
_WAITING = frozenset(("wait", "wait_for", "join", "acquire", "_wait_for_tstate_lock"))
"""Functions of threading that hold none of its own locks, as others do."""


class Whole(NamedTuple):
    """A sum over every byte that was pending when the last step ended."""

    sum: int
    most: int

    def is_pending(self, store: Store) -> bool:
        """Whether that is pending now, and nothing else."""
        return store._core.pool.handle.pending_sum([], self.most) == self.sum


class Finished:
    """Knows whether a commit now would be of the finished steps and nothing else.

    What is pending is compared with what was pending when the last step ended: by a sum over every
    byte, if that takes little of a step's time. Else tensors of the run are watched by torch's
    counters of writes in place and at a few places in each. These miss what `.data`, numpy and some
    layers write, so that nothing is known any more once the next step has computed something, nor
    if steps are made by something else than the run's optimizers.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._sum: int | None = None
        self._all = False  # the sum is over every byte
        self._sizes: list[torch.Tensor] = []  # of mirrored tensors, where these are
        self._updated = False  # the last step by an optimizer of the run
        self._most = _MOST_BYTES
        self._at = time.monotonic()
        self._thread = threading.get_ident()  # that ends steps
        self._told = False  # that a commit for a notice failed

    def begin(self) -> None:
        """A step is about to end."""
        self._thread = threading.get_ident()
        self._sum = None
        self._updated = self._steps.begun.updating

    def set(self) -> None:
        """It has ended, and what it made is pending."""
        now = time.monotonic()
        self._most = max(_MOST_BYTES, int((now - self._at) * _BYTES_A_SECOND))
        self._at = now
        self._all = self._steps.pieces.captured
        self._sizes = self._mirrored()
        self._sum = self._now()  # last: an interrupt before it leaves nothing known
        if self._sum is None and self._all:
            self._all = False
            self._sum = self._now()

    def forget(self) -> None:
        """What is pending is something else."""
        self._sum = None

    @property
    def whole(self) -> Whole | None:
        """None: it is committed, or not known to every byte."""
        return Whole(self._sum, self._most) if self._all and self._sum is not None else None

    def _now(self) -> int | None:
        handle = self._steps.store._core.pool.handle
        return handle.pending_sum([] if self._all else self._steps.pieces.memory(), self._most)

    def _mirrored(self) -> list[torch.Tensor]:
        """A number of each mirrored tensor, which most writes change. Nobody waits for it."""
        pieces = self._steps.pieces
        if pieces.pack is None:
            return []
        sizes: list[torch.Tensor] = []
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in {id(one): one.detach() for one in pieces.tensors()}.values():
            if tensor.dtype in (torch.float16, torch.bfloat16):
                sizes.append(torch.linalg.vector_norm(tensor, dtype=torch.float32))
            elif tensor.dtype in (torch.float32, torch.float64):
                kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        return sizes + [torch.stack(torch._foreach_norm(some)) for some in kinds.values()]

    def _alone(self) -> bool:
        """Whether nothing else is pending. False too if it is not known: too much is pending."""
        begun = self._steps.begun
        if self._sum is None or begun.updating or begun.written():
            return False
        if not self._all and (begun.forward or not self._updated):
            return False
        return self._sum == self._now() and all(map(torch.equal, self._sizes, self._mirrored()))

    def secure(self, frame: FrameType | None) -> bool:
        """A notice has come, and the program is anywhere: in an evaluation, between two data
        epochs, or in a step that takes long. Finished steps are committed, if nothing of the next
        was written; else that step's end commits them. In the main thread, between two instructions
        of the program, in that frame.

        Returns: whether it is done. Else it has to be called again.
        """
        if self._thread != threading.get_ident():
            return True
        if _inside(frame):
            return False
        try:
            self.keep("preemption notice")
        except Exception as error:
            # The program is anywhere, and may take an error for its own, or drop it.
            if not self._told:
                self._told = True
                tell(
                    "a preemption notice has come, and the commit of the finished steps failed; it "
                    f"is tried again: {error}"
                )
            return False
        return True

    def keep(self, reason: str) -> bool:
        """Commits them, unless something was written since the last of them ended: it may be half
        of the next, or belong to it. Ranks of a job do not: they commit the same steps.

        Returns: whether it did. Raises: what a commit raises.
        """
        steps = self._steps
        if steps.job is not None or not steps.attached or steps.rolled_back or steps.transactions:
            return False
        if steps.progress.finished == steps.progress.committed or steps.store.in_transaction:
            return False
        if steps.store._guards.half_of_others(steps) or not self._alone():
            return False
        began = clock()
        ended, steps.begun.ended = steps.begun.ended, True  # one that has begun has not written
        try:
            steps.schedule.keep(reason)
        finally:
            steps.begun.ended = ended
        self._sum = None
        steps.begun.committed()
        steps.committed(began)
        return True

    def none_lost(self) -> bool:
        """Whether an end now takes nothing back."""
        steps = self._steps
        if steps.rolled_back or steps.store.in_transaction:
            return False
        return not (steps.transactions or steps.begun.updating or steps.store.written())

    def commit(self, reason: str) -> None:
        """Commits what is pending. REQUIRES: no step is under way, and the run is in no job.

        Raises: what a commit raises.
        """
        steps = self._steps
        began = clock()
        steps.store.refuse_half(but=steps)
        steps.schedule.keep(reason)
        self._sum = None
        steps.begun.end(committed=True)
        steps.committed(began)

    @contextmanager
    def validation(self) -> Iterator[None]:
        """See `Run.validation`."""
        steps = self._steps
        steps.require()
        if why := steps.half():
            raise TransactionError(why)
        if steps.job is None and steps.store.written():
            self.commit("before a validation")
        began = clock()
        try:
            with steps.schedule.paused():
                yield
        finally:
            steps.course.stake.pause(clock() - began)


def _inside(frame: FrameType | None) -> bool:
    """Whether the interrupted program is in the middle of an operation of pmstore, or holds a lock
    that a commit may need. While it waits for a batch it is not: that leaves the store alone."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "logging" or (module.startswith("pmstore.") and module not in _LOADING):
            return True
        if module == "threading" and frame.f_code.co_name not in _WAITING:
            return True
        frame = frame.f_back
    return False
