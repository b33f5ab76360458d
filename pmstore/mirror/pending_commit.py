"""The handle of a commit under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pmstore._base.workers import Worker
from pmstore._engine.landing import COPIED, DONE, NEW, SEALED, Landing
from pmstore.errors import MirrorError, TransactionError

_SLICE_SECONDS = 0.05  # between two looks at signals
_LATE_SECONDS = 1.0  # copies that take longer are asked whether the device failed


class Batch(Protocol):
    """Copies from one device that a copier has started."""

    may_fail: bool
    """Whether `check` can ever raise: then it is asked now and then while the copies are under
    way."""

    def fence(self) -> bool:
        """Orders what the program gives the device to do from now on behind the copies' reading.
        False: the device cannot, so the program has to wait until they are over."""
        ...

    def check(self) -> None:
        """Raises what went wrong with the copies, if anything did. Does not wait."""
        ...

    def synchronize(self) -> None:
        """Waits until the copies are over.

        Raises: what went wrong with them.
        """
        ...

    def release(self) -> None:
        """Gives staging memory back. REQUIRES: the copies are over."""
        ...


class PendingCommit:
    """A commit that `Store.commit(wait=False)` has started.

    What was written into the store until then is part of it. From then on calls of the store, and
    first writes into its arrays, wait until it is over: they belong to the next transaction. Arrays
    can be read meanwhile.

    It is finished whether or not somebody holds on to it. If it failed and nobody was told, the
    store's next commit, transaction or close raises its error.
    """

    __slots__ = (
        *("_abandoned", "_batches", "_cause", "_error", "_finished", "_landing", "_late"),
        *("_over", "_told"),
    )

    def __init__(
        self, landing: Landing, batches: Sequence[Batch], over: Callable[[bool], None]
    ) -> None:
        """Takes a commit that is to be started. over: called once, with whether it committed."""
        self._landing = landing
        self._batches = tuple(batches)
        self._over = over
        self._late = time.monotonic() + _LATE_SECONDS
        self._cause: BaseException | None = None
        self._error: BaseException | None = None
        self._finished = False
        self._told = False
        self._abandoned = False

    def start(self, fenced: bool) -> None:
        """Starts it, and returns when nothing that is stored later is part of it. Interrupted
        before that, it does not happen, or it is as if `fence` had been called.

        fenced: as if `fence` had been called, before anything can interrupt; unless a device copies
            beside memory of the host.
        """
        waits = [batch for batch in self._batches if fenced and not batch.fence()]
        may_fail = any(batch.may_fail for batch in self._batches)
        try:
            # copies that may never come are waited for here, where they are looked after
            self._landing.start(COPIED if waits and not may_fail else NEW)
        except BaseException:
            if not self.started:
                # another thread may wait for it already
                self._finished = self._told = self._abandoned = True
                raise
            self.fence()
            raise
        if may_fail:
            Worker("pmstore-mirror", self._watch).start()
        try:
            self._wait_for(COPIED if waits else SEALED, None)
        except BaseException:
            self._landing.give_up()
            self.fence()
            raise

    @property
    def started(self) -> bool:
        """Whether the engine has it: it goes on, or is over."""
        return self._landing.started

    @property
    def done(self) -> bool:
        """Whether it is over: durable, as far as the store's domain reaches, or failed (then `wait`
        raises)."""
        return self._abandoned or self._landing.wait(DONE, 0)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the commit is durable. timeout: seconds; None: as long as the store's mirrors
        may take.

        Raises: TimeoutError: not over yet, it goes on. MirrorError: a copy failed or was late, or
            another thread's block came in between; StoreFullError, OSError: the commit failed. Then
            it did not happen, and everything is pending still.
        """
        self._wait_for(DONE, timeout)
        self._finish()
        self._told = True
        if self._error is not None:
            raise self._error

    def fence(self) -> None:
        """Lets the mirrored tensors be written again afterwards, without touching what is being
        committed.

        On an accelerator this orders the current stream behind the copies and returns at once;
        tensors in host memory are waited for until they have been read. Call it before the next
        optimizer step; `pmstore.torch.attach` does.
        """
        for batch in self._batches:
            if not batch.fence():
                self._wait_for(COPIED, None)

    def wait_over(self) -> None:
        """Waits until the commit is over, and tells nobody what came of it."""
        self._wait_for(DONE, None)

    def join(self) -> None:
        """Waits as `wait` does, but raises only an error that nobody was told of."""
        if not self._told or not self._finished:
            self.wait()

    def join_quietly(self) -> None:
        """Waits until the commit is over, and raises nothing, even if it failed."""
        self.wait_over()
        self._finish()
        self._told = True

    def _wait_for(self, phase: int, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._landing.wait(
            phase,
            _SLICE_SECONDS
            if end is None
            else min(_SLICE_SECONDS, max(0.0, end - time.monotonic())),
        ):
            if self._abandoned:
                return
            self._look_after()
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"the commit was not over after {timeout} seconds; it goes on")

    def _watch(self) -> None:
        """Looks after the copies in a thread: callers that wait for the store do not look after
        them, and must not wait for copies that failed."""
        while self._cause is None and not self._landing.wait(DONE, _LATE_SECONDS):
            self._look_after()

    def _look_after(self) -> None:
        """Asks the device only of copies that are late: CUDA takes the question amiss while a graph
        is captured."""
        if self._cause is None and time.monotonic() >= self._late:
            self._late = time.monotonic() + _LATE_SECONDS
            self._ask()

    def _ask(self) -> None:
        try:
            for batch in self._batches:
                batch.check()
        except Exception as error:
            self._cause = error
            self._landing.give_up()

    def _finish(self) -> None:
        if self._finished:
            return
        try:
            self._landing.result()
        except TransactionError as error:
            if self._cause is None:
                self._ask()
            self._error = MirrorError(str(error))
            self._error.__cause__ = self._cause
        except KeyError as error:
            self._error = MirrorError(
                f"a mirror's slots have gone since this commit was prepared: commit again ({error})"
            )
        except Exception as error:
            self._error = error
        for batch in self._batches:
            batch.release()
        self._finished = True
        self._over(self._error is None)
