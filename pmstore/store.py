"""An open store: what it says of itself, transactions, mirrors, tiers, the end."""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import WeakValueDictionary, ref

from pmstore._base.text import counted
from pmstore._base.weak_registry import alive
from pmstore._engine._binding import Transaction
from pmstore._engine.constants import ROLLED_BACK
from pmstore._engine.follower import Following
from pmstore._engine.pool import exiting
from pmstore.errors import ClosedStoreError, ForkedStoreError
from pmstore.extras import optional
from pmstore.objects.containers import Group
from pmstore.objects.core import Core
from pmstore.objects.guards import Guard, Guards, tell

if TYPE_CHECKING:
    import torch

    from pmstore._engine.history import History
    from pmstore._engine.snapshot import Snapshot
    from pmstore._engine.store_info import CheckReport, Info, Recovery, SegmentUsage, Stats
    from pmstore.mirror.mirror import Mirror
    from pmstore.mirror.mirrors import Mirrors
    from pmstore.mirror.pending_commit import PendingCommit
    from pmstore.tiers._flush.flush import Flush, TierState
    from pmstore.tiers.config import TierConfig
    from pmstore.tiers.tiers import Tiers

# What reports and tiers need is imported when one is asked for: to make the classes of the reports
# takes as long as to open a store.

_LEAVING_SECONDS = 10.0
"""How long leaving the store's `with` waits for another thread's transaction block. The wait ends:
that thread may be waiting for this one."""


class Store(Group):
    """An open store, made by `pmstore.open`: a mapping of names to arrays, tensors, values and
    groups (see `Group`).

    The store is always inside a transaction, as a DB-API connection is: what was written since the
    last commit is uncommitted, and undone by `rollback`, by `close` and by a crash.

    Leaving `with pmstore.open(...) as store:` normally commits. An error, Ctrl-C or an exit, with
    any status, takes back what is pending. Where a training run is attached
    (`pmstore.torch.attach`), so does leaving in the middle of a step, and it raises.
    TransactionError, with the store closed: a transaction block was open, and is rolled back (see
    `transaction`).

    One process may have a file open for writing. In it, many threads and tasks may write;
    transaction blocks take turns.
    """

    __slots__ = ("__weakref__", "_guards", "_mirrors", "_tiers")

    def __init__(self, core: Core) -> None:
        super().__init__(core, ())
        self._guards = Guards()
        self._mirrors: Mirrors | None = None
        self._tiers: Tiers | None = None
        _open_stores[id(self)] = self

    def __repr__(self) -> str:
        if self.closed:
            return f"<pmstore.Store {self.path!r}, closed>"
        try:
            return (
                f"<pmstore.Store {self.path!r}, domain {self.domain}, epoch {self.epoch}, "
                f"{counted(len(self), 'name')}>"
            )
        except ForkedStoreError:
            return f"<pmstore.Store {self.path!r}, of the parent process>"

    # ---- what it says of itself ----

    @property
    def closed(self) -> bool:
        """Whether the store was closed, by `close` or by leaving its `with`."""
        return self._core.pool.handle.closed

    @property
    def path(self) -> str:
        """The path of the file, as it was given to `open`."""
        return self._core.path

    @property
    def domain(self) -> str:
        """The domain in force: "dax", "file", "process" or "emulated". `SURVIVES` says what each
        survives."""
        return self._core.pool.info.domain

    @property
    def mode(self) -> Literal["r", "r+"]:
        """The mode in which the store is open: "r" to read it, "r+" to write it too."""
        return "r" if self._core.pool.info.read_only else "r+"

    @property
    def epoch(self) -> int:
        """Number of commits since the store was made."""
        pool = self._core.pool
        if pool.handle.closed:
            raise ClosedStoreError(f"{self.path}: the store is closed: open it again")
        return pool.epoch()

    @property
    def recovery(self) -> Recovery:
        """A report of what the open had to undo or replay."""
        from pmstore._engine.store_info import recovery_of

        return recovery_of(self._core.pool.info)

    @property
    def rollbacks(self) -> int:
        """Changes whenever a roll back, or a reader's `refresh`, did: what was remembered of the
        store before it may be wrong."""
        return self._core.pool.rollbacks() + self._core.moves

    @property
    def holds(self) -> bool:
        """Whether the version before the last commit is held, so that `Store.rewind` can go back to
        it (see `hold` of `pmstore.open`)."""
        return bool(self._core.pool.holds())

    def stats(self) -> Stats:
        """Returns sizes and counts as they are now."""
        from pmstore._engine import inspection

        return inspection.stats(self._core.pool)

    def info(self) -> Info:
        """Returns a summary of the store: what a person asks first."""
        from pmstore._engine.store_info import SURVIVES, Info
        from pmstore.objects.job_record import jobs

        info, stats = self._core.pool.info, self.stats()
        return Info(
            path=self.path,
            domain=info.domain,
            survives=SURVIVES[info.domain],
            flush=info.flush,
            read_only=info.read_only,
            epoch=stats.epoch,
            names=len(self),
            file_bytes=stats.file_bytes,
            used_bytes=stats.used_bytes,
            free_bytes=stats.free_bytes,
            opens=info.opens,
            unclean_opens=info.unclean_opens,
            uuid=info.uuid.hex(),
            recovery=self.recovery,
            held=bool(self._core.pool.holds()),
            in_doubt=self._core.pool.in_doubt,
            jobs=jobs(self),
        )

    def usage(self) -> tuple[SegmentUsage, ...]:
        """Returns what is in use of each segment of the file, and where: a map of the heap. Reads
        the page tables, not the data."""
        from pmstore._engine import inspection

        return inspection.usage(self._core.pool)

    def check(self, *, progress: Callable[[int, int], object] | None = None) -> CheckReport:
        """Examines the whole store: allocator, directories, that every value and description
        decodes, and that slots are pairs. It changes nothing, takes microseconds for each object,
        and does not read arrays.

        progress: called on a thread, some times a second, with objects looked at and in all, as
            far as that is known.
        """
        from pmstore._base.workers import progress as telling
        from pmstore._engine.inspection import Check
        from pmstore._engine.store_info import CheckReport
        from pmstore.objects import soundness

        check = Check()
        with self._core.lock, telling(lambda: check.looks, progress):
            counts, problems = check.run(self._core.pool)
            if not problems:  # otherwise the directories cannot be walked
                problems = soundness.problems(self._core.pool, check.decoded)
        return CheckReport(**counts, problems=tuple(problems))

    # ---- transactions ----

    def _guard_commits(self, guard: Guard) -> None:
        """Has a guard asked before every commit: `commit`, entering and leaving `transaction`,
        leaving the store's `with`.

        While it says that what is pending is half of something, as a training step under way, they
        raise TransactionError, and leaving the `with` rolls back and says so. It is forgotten when
        nothing else holds it.
        """
        self._guards.add(guard)
        self._hook()

    def _pin_committed(self) -> Snapshot | None:
        """Pins the last commit, and returns it, if it is what the program sees in arrays and
        tensors; otherwise returns None. Idle slots do not count: see `idle_blocks`. No commit waits
        for the pin: pages that commits overwrite are kept in memory, at most as much as the store
        holds. `close` waits until the pin is closed."""
        from pmstore._engine.snapshot import Snapshot

        snapshot = Snapshot(self._core.pool, self._core.pool.info.reserve_bytes)
        if self.written() or self._guards.half() or snapshot.epoch != self.epoch:
            snapshot.close()
            return None
        self._core.pool.pins.add(snapshot)
        return snapshot

    def _hook(self) -> None:
        """Has transaction blocks ask guards and mirrors."""
        reference = ref(self)

        def hook(when: int) -> None:
            if (store := reference()) is None:
                return
            if when != ROLLED_BACK:
                store._guards.before_commit()
            if store._mirrors is not None:
                store._mirrors.hook(when)
            # of the outermost block: an inner one undoes nothing
            if when == ROLLED_BACK and not store._core.pool.block_depth() and not store.closed:
                store._guards.went_back()

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
        go on, and see what was written inside so far. What others write into arrays, which needs no
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
        if self._core.job is not None:  # which says why; entering would take it for a job that died
            self._guards.before_commit()
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
        """Returns whether a byte of these arrays and tensors of this store is another one than in
        the last commit. Without arrays it returns whether anything was written at all. It looks
        only at what was written, so it costs no more than that.

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
        self._guards.before_commit()
        if self._mirrors is not None:
            self._mirrors.join()
        if wait and (self._mirrors is None or self._mirrors.empty):
            self._core.pool.handle.commit()
            return None
        self._core.pool.handle.take_in_moved()
        pending = self._open_mirrors().commit()
        if not wait:
            return pending
        pending.wait()
        return None

    def rollback(self) -> None:
        """Takes the store back to the last commit, in memory too: arrays show what they held then.

        An array that was made since is no longer in the store; it stays readable.

        Raises: TransactionError inside a transaction block, or while another thread or task is in
            one.
        """
        self._go_back(self._core.pool.rollback)

    def rewind(self) -> None:
        """Takes the store back to the commit before the last, once, if that is held (`holds`; see
        `hold` of `pmstore.open`). What is pending is rolled back.

        It is a commit, with an epoch of its own, whose content is that version's: durable on
        return, and a crash leaves the last commit, still with the version before it, or the end.

        Raises: TransactionError: nothing is held; InDoubtError: for a job; and as `rollback`.
        """
        if self._core.job is not None:
            raise self._core.job.alone("rewind()")
        self._go_back(self._core.pool.rewind)

    def _go_back(self, step: Callable[[], None]) -> None:
        if self._mirrors is not None:
            self._mirrors.before_rollback()
        with self._core.lock:
            step()
        if self._mirrors is not None:
            self._mirrors.restore()
        self._guards.went_back()

    @property
    def in_transaction(self) -> bool:
        """Whether the caller, a thread or a task, is in a transaction block."""
        return self._core.pool.block_depth() > 0

    # ---- reading beside a writer ----

    def refresh(self, keep: bool = False) -> bool:
        """Shows the last commit of the process that writes to the store, which is open here with
        mode "r". Returns whether it is another commit than the one that was shown.

        Arrays and tensors that were read before stay what they were; look them up again. In an
        event loop, write `await asyncio.to_thread(store.refresh)`: a writer that is stopped is
        waited for, up to 10 seconds.

        keep: asks the writer to keep this commit for this reader until all of it was read, for up
            to a minute after the last read: as much memory of the writer's as it holds. Without it
            the writer keeps a part (at most 64 MiB), and a large array that is rewritten while it
            is read, or before, raises SnapshotLostError. The writer never waits for a reader: it
            gives up what it keeps first.

        Raises: StoreLockedError: a process writes to it and does not answer; SnapshotLostError:
            another store lies at its path; TransactionError: it was not opened with mode="r", or
            with lock=True; and as `pmstore.open`.
        """
        return self._core.refresh(keep)

    def follow(self, timeout: float | None = None) -> Following:
        """Waits for commits of the process that writes, shows each newest one (`refresh`), and
        yields its epoch. Commits that come faster than they are asked for are passed over.

            for epoch in store.follow():  # or, where an event loop runs: async for
                plot(store["losses"])

        timeout: seconds without a new commit, after which it ends; None: it never does. `close()`
        of what is returned ends it, from another thread too.

        Raises: TypeError, ValueError: timeout is no such number; then as `refresh`.
        """
        if timeout is not None and math.isnan(timeout):
            raise ValueError(f"timeout is a number of seconds, not {timeout}")
        return Following(self.refresh, lambda: self.epoch, timeout)

    # ---- life ----

    def close(self) -> None:
        """Rolls back what is uncommitted, transaction blocks of other threads too, and gives the
        file up. Idempotent.

        Arrays and tensors that are still alive become private, at the same addresses. It returns at
        once; who opens the file waits until what they show of it is copied, in the background.
        In a fork child, where the store is the parent's, nothing happens.

        Raises: OSError if the last commits cannot be synced; closed nevertheless.
        """
        if not self.closed and self._core.process == os.getpid():
            self._guards.dropping()
        self._close(False, False)

    def _close(self, commit: bool, raising: bool, kept: bool = False) -> None:
        """Closes the store. commit: commits what is pending, unless a guard says that it is half of
        something. raising: an error or an exit goes on afterwards. kept: what was pending is
        committed already."""
        if self.closed:
            return
        ours = self._core.process == os.getpid()
        lost: list[str] = []

        def may_commit() -> bool:
            nonlocal kept
            if self._guards.half():
                lost.extend(self._guards.lost())
                return False
            self._core.pool.handle.take_in_moved()
            if self._mirrors is not None:
                self._mirrors.arm()
            kept = True
            return True

        def end() -> None:
            try:
                if ours:
                    self._guards.ending(kept, raising)
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
        """Ends flushes and copies that are under way, before the state that they read goes. It
        waits for them; an interrupt ends the waiting, and them."""
        try:
            if self._core.process == os.getpid():
                self._core.pool.pins.wait()
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
        """Commits what is pending where the block is left normally. An error, Ctrl-C or an exit,
        with any status, takes it back."""
        kept = False
        if not self.closed and self._core.process == os.getpid():
            if kind is not None:
                self._guards.dropping()
            else:
                try:
                    kept = self._guards.leaving()
                except BaseException:
                    self._close(False, True)
                    raise
        self._close(kind is None and not kept, kind is not None, kept)

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
            from pmstore.mirror.registration import add

        return add(self, self._open_mirrors(), name, tensor)

    def _open_mirrors(self) -> Mirrors:
        """Returns the store's mirrors, for parts of pmstore that add to them."""
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
            from pmstore.tiers.tiers import Tiers

            with self._core.lock:  # two of them would write to the same tiers
                if self._tiers is None:
                    made = Tiers(self._core.pool)
                    made.load(self)
                    self._tiers = made
        return self._tiers

    def add_tier(self, name: str, tier: TierConfig | str | os.PathLike[str]) -> None:
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
        """Flushes as `flush` does, unless the tier's last flush is still under way, or deletes old
        epochs: then it returns None.

        Raises: as `flush`.
        """
        tiers = self._open_tiers()
        return tiers.flush(tier, False) if tiers.idle(tier) else None

    def tier_states(self) -> list[TierState]:
        """How far this process's flushes are, for each tier that it has flushed to. Waits for
        nothing."""
        return [] if self._tiers is None else self._tiers.states()

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
        """The record of how the runs that had the store open ended. No roll back touches it."""
        from pmstore._engine.history import History

        return History(self._core.pool)

    def _hand_over(self, heir: Store) -> None:
        """Gives a store that takes this one's place its history, and the note that tiers were added
        here. That note is pending there."""
        from pmstore.tiers.tiers import hand_over

        self.history.hand_over(heir.history)
        hand_over(self, heir)


_open_stores: WeakValueDictionary[int, Store] = WeakValueDictionary()


def writable_stores() -> list[Store]:
    """Returns the stores that this process has open for writing."""
    return [
        store
        for store in alive(_open_stores)
        if not store.closed and store.mode != "r" and store._core.process == os.getpid()
    ]


def _close_all() -> None:
    exiting()
    with ExitStack() as closing:  # all of them, whatever one of them raises
        for store in alive(_open_stores):
            closing.callback(store.close)


# A store that is still open at exit is closed cleanly, as a file is flushed: uncommitted writes are
# rolled back.
atexit.register(_close_all)
