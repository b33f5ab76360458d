"""An open store: transactions, mirrors, tiers, the end."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload
from weakref import WeakValueDictionary, ref

from pmstore.base.alive import alive
from pmstore.engine._binding import Transaction
from pmstore.engine.constants import ROLLED_BACK
from pmstore.engine.history import History
from pmstore.errors import ClosedStoreError
from pmstore.extras import optional
from pmstore.objects.core import Core
from pmstore.objects.guards import Guard, Guards, tell
from pmstore.objects.root import Root

if TYPE_CHECKING:
    import torch

    from pmstore.mirror.mirror import Mirror
    from pmstore.mirror.mirrors import Mirrors
    from pmstore.mirror.pending import PendingCommit
    from pmstore.tiers.config import TierConfig
    from pmstore.tiers.handle import Flush
    from pmstore.tiers.manager import Tiers

_LEAVING_SECONDS = 10.0
"""That leaving the store's `with` waits for another thread's transaction block. It ends: that
thread may be waiting for this one."""


class Store(Root):
    """An open store, made by `pmstore.open`: a mapping of names to arrays, tensors, values and
    groups (see `Group`).

    The store is always inside a transaction, as a DB-API connection is: what was written since the
    last commit is uncommitted, and undone by `rollback`, by `close` and by a crash.

    Leaving `with pmstore.open(...) as store:` commits, also by `sys.exit(0)`; an exception rolls
    back. Where a training run is attached (`pmstore.torch.attach`), an exit, and leaving in the
    middle of a step, roll back too, with a warning that says what is lost. TransactionError, with
    the store closed: a transaction block was open, and is rolled back (see `transaction`).

    One process may have a file open for writing. In it, many threads and tasks may write;
    transaction blocks take turns.
    """

    __slots__ = ("__weakref__", "_guards", "_mirrors", "_tiers")

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._guards = Guards()
        self._tiers: Tiers | None = None
        self._mirrors: Mirrors | None = None
        _open_stores[id(self)] = self

    # ---- transactions ----

    def guard_commits(self, guard: Guard) -> None:
        """Has a guard asked before every commit: `commit`, entering and leaving `transaction`,
        leaving the store's `with`.

        While it says that what is pending is half of something, as a training step under way, they
        raise TransactionError, and leaving the `with` rolls back and says so. It is forgotten when
        nothing else holds it.
        """
        self._guards.add(guard)
        self._hook()

    def refuse_half(self, but: Guard) -> None:
        """Raises: TransactionError: a commit now would raise it, on account of another guard."""
        self._guards.refuse_half(but)

    def _hook(self) -> None:
        """Has transaction blocks ask guards and mirrors."""
        reference = ref(self)

        def hook(when: int) -> None:
            if (store := reference()) is None:
                return
            if when != ROLLED_BACK:
                store._guards.refuse_half()
            if store._mirrors is not None:
                store._mirrors.hook(when)

        self._core.pool.handle.hook = hook

    def transaction(self, writes: Sequence[Any] = (), timeout: float | None = 60.0) -> Transaction:
        """`with store.transaction(): ...` is a transaction block: it happens as a whole or not at
        all.

        Entering commits what is pending. Leaving commits; leaving with an exception undoes what was
        written inside. Durable on leaving, as far as the domain goes. A transaction block inside
        another joins it: the outermost decides. So an exception that is caught around an inner one
        leaves what the inner one wrote in the outer one, and is committed with it. To undo it
        alone, make it the outermost.

        A transaction block belongs to the thread that enters it and, where an event loop of asyncio
        runs, to the running task. While it is open nobody else changes the store by a call:
        entering another waits, and every other call that would (assignments, `del`, making arrays,
        groups, lists and slots, `will_write`, `commit`, `rollback`) raises TransactionError. Reads
        go on, and see what was written inside so far. What others store into arrays, which needs no
        call, is part of the open transaction: committed with it, or undone with it.

        `with` waits for other threads. A task would wait for another of its own thread for ever, so
        that raises: `async with store.transaction()` waits for tasks and threads, and lets the loop
        go on.

        A transaction block that nobody can leave any more, as its thread or task has ended or its
        generator was closed elsewhere, is undone; a `commit` that finds one says so, once. Leaving
        the store's `with` waits 10 seconds for those of other threads; `close` waits for none. One
        that is open then is undone whole, never committed by half.

        A generator that yields inside a transaction block keeps it open until it ends, and what
        others of its thread write meanwhile goes with it: do not yield there, or close the
        generator at once (`contextlib.closing`).

        writes: arrays and tensors of this store that are written inside. They are captured at once
            on entering, which saves a page fault for each piece. Others may be written too.
        timeout: seconds to wait for the transaction block of another thread (or task, `async
            with`); None: for ever.

        Raises (on entering): TransactionError that names the thread or task in the way; ValueError
        or TypeError for writes that are not of this store. On leaving: StoreFullError or OSError if
        the commit fails; then what was written inside is rolled back.
        TransactionError: another thread or task leaves it than entered it, or it was undone before,
            as told above.

        >>> import pmstore, tempfile
        >>> with tempfile.TemporaryDirectory() as folder, pmstore.open(f"{folder}/run.pm") as store:
        ...     a = store.zeros("a", 3)
        ...     with store.transaction(writes=[a]):
        ...         a[0] = 1
        ...     a.tolist()
        [1.0, 0.0, 0.0]
        """
        return self._core.pool.handle.transaction(writes, timeout)

    def will_write(self, *arrays: Any) -> None:
        """Captures arrays and tensors of this store before they are written: with one fence, and
        without page faults.

        Needed before system calls that write into an array (`readinto`, `recv_into`): the kernel
        gets no page fault.

        Raises: ValueError, TypeError for what is not of this store.
        """
        self._core.pool.will_write(arrays)

    def written(self, arrays: Sequence[Any] = ()) -> bool:
        """Whether a byte of these arrays and tensors of this store is another than in the last
        commit. Without any: whether anything was written at all. Looks at what was written only, so
        it costs no more than that.

        Raises: ValueError, TypeError for what is not of this store.
        """
        return self._core.pool.handle.written(arrays)

    @overload
    def commit(self, wait: Literal[True] = True) -> None: ...

    @overload
    def commit(self, wait: Literal[False]) -> PendingCommit: ...

    def commit(self, wait: bool = True) -> PendingCommit | None:
        """Makes everything written since the last commit the state that survives. Durable on
        return.

        With wait=False it is durable when the handle that is returned says so. What was written
        before is in the commit. Calls of the store and first writes into its arrays wait from then
        on until it is over, and belong to the next transaction. What the commit copies from
        `mirror`ed tensors may be written again after `fence()` of the handle.

        Raises: TransactionError inside a transaction block, while another thread or task is in
            one, or in the middle of a training step (see `pmstore.torch.attach`); StoreFullError,
            OSError; MirrorError: a copy from a device failed; MovedError: an array or tensor left
            the store's memory for good (see `Group`).
        """
        if self._guards:
            self._guards.refuse_half()
        if self._mirrors is not None:
            self._mirrors.join()
        if wait and (self._mirrors is None or self._mirrors.empty):
            self._core.pool.handle.commit()
            return None
        self._core.pool.handle.take_in_moved()
        pending = self.open_mirrors().commit()
        if not wait:
            return pending
        pending.wait()
        return None

    def rollback(self) -> None:
        """Back to the last commit, in memory too: arrays show what they held then.

        An array that was made since is no longer in the store; it stays readable.

        Raises: TransactionError inside a transaction block, or while another thread or task is in
            one.
        """
        self._go_back(self._core.pool.rollback)

    def rewind(self) -> None:
        """Back to the commit before the last, if it is held (`holds`; see `hold` of
        `pmstore.open`): once. What is pending is rolled back.

        It is a commit, with an epoch of its own, whose content is that version's: durable on
        return, and a crash leaves the last commit, still with the version before it, or the end.

        Raises: TransactionError: nothing is held; and as `rollback`.
        """
        self._go_back(self._core.pool.back)

    def _go_back(self, step: Callable[[], None]) -> None:
        if self._mirrors is not None:
            self._mirrors.before_rollback()
        with self._core.lock:
            step()
        if self._mirrors is not None:
            self._mirrors.restore()

    @property
    def in_transaction(self) -> bool:
        """Whether the caller, thread or task, is in a transaction block."""
        return self._core.pool.block_depth() > 0

    # ---- life ----

    def close(self) -> None:
        """Rolls back what is uncommitted, transaction blocks of other threads too, and gives the
        file up. Idempotent.

        Arrays and tensors that are still alive become private copies at the same addresses. In a
        fork child, where the store is the parent's, nothing happens.

        Raises: OSError if the last commits cannot be synced; closed nevertheless.
        """
        self._close(False, False)

    def _close(self, commit: bool, raising: bool) -> None:
        """raising: something, that goes on afterwards."""
        if self.closed:
            return
        ours = self._core.process == os.getpid()
        lost: list[str] = []

        def may_commit() -> bool:
            if self._guards.half() or (raising and self._guards.running()):
                lost.extend(self._guards.lost(True))
                return False
            self._core.pool.handle.take_in_moved()
            if self._mirrors is not None:
                self._mirrors.arm()
            return True

        def end() -> None:
            try:
                if not commit and ours:
                    lost.extend(self._guards.lost(False))
            finally:
                self._end()

        try:
            self._core.pool.handle.close(commit, _LEAVING_SECONDS, may_commit, end)
        except BaseException:
            raising = True
            raise
        finally:
            if ours:
                self._guards.ended()
                tell(lost, raising)

    def _end(self) -> None:
        """Flushes under way are finished before the state that they read goes; an interrupt ends
        the waiting, and them."""
        try:
            if self._tiers is not None:
                self._tiers.close()
        finally:
            if self._tiers is not None:
                self._tiers.abandon()
            if self._mirrors is not None:
                self._mirrors.close()

    def __enter__(self) -> Store:
        if self.closed:
            raise ClosedStoreError(f"{self.path}: the store is closed: open it again")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # sys.exit() and sys.exit(0) are an orderly end; any other code, or text, is a failure.
        orderly = kind is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        self._close(orderly, kind is not None)

    # ---- mirrors ----

    def mirror(self, name: str, tensor: torch.Tensor) -> Mirror:
        """Mirrors a tensor that lives on an accelerator: every commit copies it into slots of the
        store (see `slots`).

        It stays where it is. If the store holds slots of that name already, their current version
        is copied into the tensor, once (`Mirror.resumed`). A commit, whatever its kind, holds all
        mirrored tensors as they are when it begins; it takes effect as a whole when their copies
        have landed. A roll back copies the last commit's version back. `commit(wait=False)` copies
        while the program goes on. Tensors in host memory can be mirrored too: they are then not in
        the heap, and cost no page faults.

        tensor: on cuda or cpu, dense and contiguous.

        Raises: MirrorError: a device that cannot be mirrored; NameExistsError: the name is
            something else, or of another shape or dtype; TypeError; StoreFullError.
        """
        with optional:
            from pmstore.mirror.adding import add

        return add(self, self.open_mirrors(), name, tensor)

    def open_mirrors(self) -> Mirrors:
        """What this store mirrors, for parts of pmstore that add to it."""
        if self._mirrors is None:
            from pmstore.mirror.mirrors import Mirrors

            self._mirrors = Mirrors(self._core)
            self._hook()
        return self._mirrors

    # ---- tiers ----

    @property
    def tiers(self) -> Mapping[str, TierConfig]:
        """The tiers that the store has, by name."""
        return self._open_tiers().configs

    def _open_tiers(self) -> Tiers:
        if self._tiers is None:
            from pmstore.tiers.manager import Tiers

            with self._core.lock:  # two of them would write to the same tiers
                if self._tiers is None:
                    made = Tiers(self._core.pool)
                    made.load(self)
                    self._tiers = made
        return self._tiers

    def add_tier(
        self, name: str, tier: TierConfig | str | os.PathLike[str] = "", **fields: NoReturn
    ) -> None:
        """Adds a place that committed state is flushed to, or changes one. The store remembers it
        (from the next commit on).

            store.add_tier("disk", "/mnt/checkpoints/run")
            store.add_tier("s3", TierConfig("s3://bucket/run", keep=3, every=500))

        What it remembers counts where this file had the tier added, by this user. A store that was
        copied, restored or came from elsewhere names its tiers in a warning, and does not flush to
        them by itself: add them again, or `pmstore trust` it.

        tier: a URL or path alone is a `TierConfig` of it, with defaults for all else. Given again,
            it replaces all that was said of the tier before.

        Raises: TierError, ValueError, TypeError.
        """
        if fields:
            from pmstore.tiers.config import wrong_fields

            raise wrong_fields(name, fields)
        self._open_tiers().add(self, name, tier)

    def remove_tier(self, name: str) -> None:
        """Forgets a tier, after its flush under way. What is in it stays.

        Raises: TierError: there is none of that name.
        """
        self._open_tiers().remove(self, name)

    def flush(
        self,
        tier: str,
        *,
        wait: bool = False,
        full: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> Flush:
        """Flushes the last commit to a tier, in the background; the store is used as before
        meanwhile.

        Only chunks that changed since this process's last flush to the tier are written; full: all
        of them. The epoch counts when its manifest is there, and then survives this machine as far
        as the tier does; epochs beyond `keep` are deleted after that (`drain` waits for it). Up to
        eight flushes to a tier wait for each other, a further call for the first of them. wait:
        return when it counts. progress: called with (bytes written, bytes to write) ten times a
        second and at the end, on some thread; it may use the store, wait for the flush, drain or
        close.

        Raises: TierError, OSError: of the flush before, if nobody was told; with wait of this one.
        """
        handle = self._open_tiers().flush(tier, full, progress)
        return handle.wait() if wait else handle

    def flush_if_idle(self, tier: str) -> Flush | None:
        """As `flush`, unless the tier's last flush is still under way, or deletes old epochs: then
        None.

        Raises: as `flush`.
        """
        tiers = self._open_tiers()
        return tiers.flush(tier, False) if tiers.idle(tier) else None

    def drain(self, timeout: float | None = None) -> None:
        """Waits for all flushes under way, and until old epochs are deleted.

        Raises: TimeoutError after timeout seconds; TierError, OSError: of a flush that nobody was
            told of.
        """
        if self._tiers is not None:
            self._tiers.drain(timeout)

    # ---- what belongs to this file, not to what is in it ----

    @property
    def history(self) -> History:
        """How the runs that had the store open ended. No roll back touches it."""
        return History(self._core.pool)

    def hand_over(self, heir: Store) -> None:
        """To a store that takes this one's place with all that it holds: its history, and that
        tiers were added here. The latter is pending there."""
        from pmstore.tiers.manager import hand_over

        self.history.hand_over(heir.history)
        hand_over(self, heir)


_open_stores: WeakValueDictionary[int, Store] = WeakValueDictionary()


def _close_all() -> None:
    with ExitStack() as closing:  # all of them, whatever one of them raises
        for store in alive(_open_stores):
            closing.callback(store.close)


# A store that is still open at exit is closed cleanly, as a file is flushed: uncommitted writes are
# rolled back.
atexit.register(_close_all)
