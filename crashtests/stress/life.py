"""One program, from its fork to its kill: it opens the store, checks what the one before left, and
lets its actors run."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pmstore
from crashtests.stress import board as b
from crashtests.stress.board import Board
from crashtests.stress.content import WrongError
from pmstore.testing import crashboard

PATIENCE_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
FAILED_EXIT = 9

REFUSED = (pmstore.TransactionError, pmstore.ClosedStoreError, pmstore.MirrorError)
"""What any call may answer while others use the store: it did nothing."""


@dataclass(frozen=True)
class Plan:
    """What a life does, as far as a seed decides it.

    reopen: the main thread leaves the store's `with` now and then, and opens it again. rollbacks:
        threads undo what others have written outside of blocks. signals, finalizers: handlers and
        `__del__` use the store. hold: the version before each commit is held. compacts: the store
        is compacted before it is opened. switch_seconds: the interval of `sys.setswitchinterval`.
    """

    number: int
    seed: int
    path: Path
    folder: Path
    """Where actors may put files."""
    domain: str
    hot: bool
    switch_seconds: float
    reopen: bool = False
    rollbacks: bool = False
    signals: bool = False
    finalizers: bool = False
    hold: bool = False
    compacts: bool = False
    long: bool = False
    """It goes on until each actor has taken some steps."""
    only_look: bool = False
    """Open, check and end."""
    show_first: bool = False
    """Open for reading, before."""
    examine: bool = False
    """`check` of the whole store, too."""
    kill_opening: int = 0
    kill_running: int = 0
    """Die at that primitive, from the open, or from when the actors run."""
    power_seed: int | None = None
    """Then the file loses what was not durable."""
    memory: str = ""
    """So much is all that there is (`PMSTORE_MEMORY`). "": what the machine has."""


@dataclass
class Session:
    """The store from an open to its close, and objects that a program would hold on to."""

    store: Any
    kept: dict[str, Any] = field(default_factory=dict)

    def keep(self, name: str) -> Any:
        """An object of the store, the same one each time."""
        if name not in self.kept:
            self.kept[name] = self.store[name]
        return self.kept[name]


class Life:
    def __init__(self, plan: Plan, board: Board, make_actors: Callable[[Life], list[Any]]) -> None:
        self.plan = plan
        self.board = board
        self.random = random.Random(plan.seed)
        self.session: Session | None = None
        self.interruptible = False
        self.actors = make_actors(self)

    # ---- what goes wrong ----

    def fail(self, text: str) -> NoReturn:
        """Ends the process, and says why."""
        self.board.fail(text)
        os._exit(FAILED_EXIT)

    def fail_with(self, error: BaseException, doing: str) -> NoReturn:
        told = "".join(traceback.format_exception(error))
        self.fail(f"{doing}: {type(error).__name__}: {error}\n{told}")

    # ---- the store ----

    def open(self, mode: str = "a") -> Any:
        plan = self.plan
        os.environ["PMSTORE_MEMORY"] = plan.memory
        options: dict[str, Any] = {}
        if mode != "r":
            options = {"size": "3MiB", "hot": plan.hot, "hold": plan.hold}
        # A kill leaves the lock to nobody: so the first open waits for none. What this process has
        # just closed, neither.
        return pmstore.open(plan.path, mode, domain=plan.domain, **options)  # type: ignore[arg-type]

    def check(self, store: Any, first: bool) -> None:
        """That nothing acknowledged is missing, and all is whole. first: nobody else runs; takes
        note of what was found."""
        epoch = self.board.words[b.EPOCH]
        if store.epoch < epoch:
            raise WrongError(f"expected epoch {epoch} or later, found {store.epoch}")
        if self.plan.examine:
            problems = store.check().problems
            if problems:
                raise WrongError(f"check: {problems}")
        for actor in self.actors:
            if actor.created:
                actor.check(store, first)
        self.board.words[b.LOOKED] += 1

    def note_commit(self, store: Any) -> None:
        """A commit of the calling thread returned."""
        epoch = store.epoch
        # two threads may race: then the lower one stands, and less is asked for
        if epoch > self.board.words[b.EPOCH]:
            self.board.words[b.EPOCH] = epoch

    def prepare(self, store: Any) -> None:
        for actor in self.actors:
            if not actor.created:
                with store.transaction():
                    actor.create(store)
                actor.created = True
                self.note_commit(store)

    def _compact(self) -> None:
        """Its epochs start again."""
        self.board.words[b.EPOCH] = 0
        with contextlib.suppress(pmstore.TransactionError):  # it holds a version
            pmstore.compact(self.plan.path)

    # ---- running ----

    def run(self) -> NoReturn:
        plan = self.plan
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        threading.excepthook = self._thread_failed
        sys.unraisablehook = self._unraisable
        doing = "opening"
        try:
            if plan.show_first and plan.path.exists():
                with self.open("r") as shown:
                    self.check(shown, False)
            for actor in self.actors:
                actor.ready()
            arm(plan.kill_opening, plan.power_seed, plan.folder)
            if plan.compacts and plan.path.exists():
                doing = "compacting"
                self._compact()
            doing = "opening"
            store = self.open()
            self.board.words[b.PHASE] = b.OPENED
            doing = "looking at what the life before left"
            self.check(store, True)
            if plan.only_look:
                store.close()
                os._exit(0)
            doing = "creating"
            self.prepare(store)
            if plan.kill_running:
                arm(plan.kill_running, None, plan.folder)
            sys.setswitchinterval(plan.switch_seconds)
            if plan.finalizers:
                gc.set_threshold(20, 5, 5)
            for actor in self.actors:
                actor.start(store)
            self.session = Session(store)
            del store
            self.board.words[b.PHASE] = b.RUNNING
            doing = "running"
            for actor in self.actors[1:]:
                threading.Thread(target=actor.run, name=actor.name, daemon=True).start()
            self._signals(plan.signals)
            while True:
                self._run_session()
                if plan.reopen:
                    self._open_again()
        except BaseException as error:
            self.fail_with(error, doing)

    def _run_session(self) -> None:
        """The main thread's part: its actor's steps, and the end of the store's `with`."""
        session = self.session
        assert session is not None
        steps, how = self.random.randrange(1, 12), self.random.randrange(4)
        self._interruptibly(lambda: self.actors[0].run(steps))
        if self.plan.reopen:
            self.session = None
            self._interruptibly(lambda: self._leave(session.store, how))
            end = time.monotonic() + PATIENCE_SECONDS
            # it was interrupted, or refused because another thread is in a block
            while not session.store.closed:
                try:
                    session.store.close()
                except pmstore.TransactionError as error:
                    if time.monotonic() > end:
                        raise WrongError(
                            f"the store cannot be closed in {PATIENCE_SECONDS} s: {error}"
                        ) from error
                    time.sleep(0.001)

    def _leave(self, store: Any, how: int) -> None:
        try:
            with store:
                if how == 0:
                    raise InterruptedError
                if how == 1:
                    store.close()
        except (InterruptedError, *REFUSED):
            pass

    def _open_again(self) -> None:
        gc.collect()  # what an interrupt's traceback may still hold
        store = self.open()
        self.check(store, False)
        self.session = Session(store)

    def _interruptibly(self, work: Callable[[], None]) -> None:
        try:
            self.interruptible = self.plan.signals
            work()
            self.interruptible = False
        except KeyboardInterrupt:  # raised once: the handler has put interruptible off
            pass

    def _signals(self, wanted: bool) -> None:
        if not wanted:
            return
        busy = False
        rng = random.Random(self.plan.seed + 1)

        def handler(number: int, frame: object) -> None:
            nonlocal busy
            if busy:
                return
            busy = True
            began = time.monotonic()
            try:
                self.disturb(rng)
            finally:
                busy = False
                # The main thread has most of the time, however long its store takes.
                signal.setitimer(signal.ITIMER_REAL, 0.001 + 2 * (time.monotonic() - began))
            if self.interruptible and rng.random() < 0.05:
                self.interruptible = False
                raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001)

    def disturb(self, rng: random.Random) -> None:
        """What handlers and finalizers do: anything, in the middle of anything."""
        session = self.session
        if session is not None:
            for actor in self.actors:
                if actor.disturbs:
                    try:
                        actor.disturb(session.store, rng)
                    except REFUSED:
                        pass
                    except WrongError as error:
                        self.fail_with(error, "in a handler or finalizer")

    def _thread_failed(self, args: threading.ExceptHookArgs) -> None:
        error = args.exc_value or args.exc_type()
        self.fail_with(error, f"in a helper thread {args.thread and args.thread.name}")

    def _unraisable(self, args: Any) -> None:
        """Finalizers may fail as other calls may; nothing else."""
        if not isinstance(args.exc_value, (*REFUSED, KeyboardInterrupt, InterruptedError)):
            self.fail_with(args.exc_value or args.exc_type(), f"ignored in {args.object!r}")


def end_with_parent(parent: int) -> None:
    """This process is killed when the thread ends that forked it. parent: the process of that."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt() -> None:
    """This process can wait for the children of its children, once these have ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def arm(primitive: int, power_seed: int | None, folder: Path) -> None:
    """Has this process die at a persistence primitive, counted from now; power: and lose what was
    not durable then.

    The one place that knows how a process asks for this.
    """
    if not primitive:
        return
    if power_seed is None:
        from pmstore.testing import kill_at_primitive

        kill_at_primitive(primitive)
        return
    os.environ.update(
        crashboard.environment(folder / "power.board", at=primitive, power_seed=power_seed)
    )
