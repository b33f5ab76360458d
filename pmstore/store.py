"""The store: opening, transactions, and what it says of itself."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import WeakMethod, WeakValueDictionary, ref

from pmstore.base.alive import alive
from pmstore.base.words import counted
from pmstore.engine import _ffi
from pmstore.engine._binding import Transaction
from pmstore.engine.reports import SURVIVES, CheckReport, Info, Recovery, SegmentUsage, Stats
from pmstore.errors import (
    ClosedStoreError,
    CorruptStoreError,
    ForkedStoreError,
    FormatVersionError,
    TierError,
)
from pmstore.extras import optional
from pmstore.objects import array, slots, values
from pmstore.objects.containers import Group
from pmstore.objects.core import Core

if TYPE_CHECKING:
    import torch

    from pmstore.mirror.mirror import Mirror
    from pmstore.mirror.mirrors import Mirrors
    from pmstore.mirror.pending import PendingCommit
    from pmstore.tiers.config import TierConfig
    from pmstore.tiers.handle import Flush
    from pmstore.tiers.manager import Tiers

Mode = Literal["r", "r+", "a", "w", "x"]
Domain = Literal["auto", "dax", "file", "process", "emulated"]

_LEAVING_SECONDS = 10.0
"""That leaving the store's `with` waits for another thread's block. It ends: that thread may be
waiting for this one."""

_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{prefix + "b": 1000 ** (power + 1) for power, prefix in enumerate("kmgt")},
    **{prefix + "ib": 1024 ** (power + 1) for power, prefix in enumerate("kmgt")},
}


def parse_size(size: int | str | None, what: str = "size") -> int:
    """Bytes of `4096`, `"4GiB"` (1024) or `"500 MB"` (1000); None is 0.

    Raises: TypeError, ValueError.

    >>> parse_size("4GiB"), parse_size("1.5 MB"), parse_size(None)
    (4294967296, 1500000, 0)
    """
    if size is None:
        return 0
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(
                f"{what}={size!r} is not a size: use bytes, or a str like '500MB', '4GiB'"
            )
        unit = _UNITS[match[2].lower()]
        bytes_ = round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    elif isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(f"{what} is an int (bytes) or a str like '4GiB', not {type(size).__name__}")
    else:
        bytes_ = size.__index__()
    if not 0 < bytes_ < 1 << 62:
        raise ValueError(f"{what}={size!r} is not the size of a file")
    return bytes_


class Store(Group):
    """An open store, made by `pmstore.open`: a mapping of names to arrays, tensors, values and
    groups (see `Group`).

    The store is always inside a transaction, as a DB-API connection is: what was written since the
    last commit is uncommitted, and undone by `rollback`, by `close` and by a crash.

    Leaving `with pmstore.open(...) as store:` commits, also by `sys.exit(0)`; an exception rolls
    back. TransactionError, with the store closed: a block was open, and is rolled back (see
    `transaction`).

    One process may have a file open for writing. In it, many threads and tasks may write; blocks of
    `transaction` take turns.
    """

    __slots__ = ("__weakref__", "_guards", "_mirrors", "_recovery", "_tiers")

    def __init__(self, core: Core) -> None:
        super().__init__(core, ())
        info = core.pool.info
        self._recovery = Recovery(
            **{field.name: getattr(info, field.name) for field in fields(Recovery)}
        )
        self._guards: list[WeakMethod[Callable[[], None]]] = []
        self._tiers: Tiers | None = None
        self._mirrors: Mirrors | None = None
        _open_stores[id(self)] = self

    # ---- transactions ----

    def guard_commits(self, guard: Callable[[], None]) -> None:
        """Has a bound method called before `commit`, before `transaction` and before leaving the
        store's `with` commits.

        It raises if what is pending is half of something, as a training step under way: then
        nothing is committed, and leaving the `with` rolls back and raises. It must not write. It is
        forgotten with the object it belongs to.
        """
        self._guards.append(WeakMethod(guard))

    def _ask_guards(self) -> None:
        for reference in self._guards:
            if (guard := reference()) is not None:
                guard()

    def transaction(self, writes: Sequence[Any] = (), timeout: float | None = 60.0) -> Transaction:
        """A block that happens as a whole or not at all: `with store.transaction(): ...`.

        Entering commits what is pending. Leaving commits; leaving with an exception undoes the
        block. Durable on leaving, as far as the domain goes. A block inside a block joins it: the
        outermost decides. So an exception that is caught around an inner block leaves what the
        inner block wrote in the outer one, and is committed with it; undoing it alone needs an
        outermost block of its own.

        A block belongs to the thread that enters it and, where an event loop of asyncio runs, to
        the running task. While it is open nobody else changes the store by a call: entering a block
        waits, and every other call that would (assignments, `del`, making arrays, groups, lists and
        slots, `will_write`, `commit`, `rollback`) raises TransactionError. Reads go on, and see
        what the block has written so far. What others store into arrays, which needs no call, is
        part of the open block: committed with it, or undone with it. `with` waits for other
        threads; a task would wait for another of its own thread for ever, so that raises:
        `async with store.transaction()` waits for tasks and threads, and lets the loop go on. A
        block that nobody can leave any more, as its thread or task has ended or its generator was
        closed elsewhere, is undone; a `commit` that finds one says so, once. Leaving the store's
        `with` waits 10 seconds for other threads' blocks; `close` waits for none. A block that is
        open then is undone whole, never committed by half. A generator that yields inside a block
        keeps it open until it ends, and what others of its thread write meanwhile goes with it: do
        not yield there, or close the generator at once (`contextlib.closing`).

        writes: arrays and tensors of this store that the block writes. They are captured at once on
            entering, which saves a page fault for each piece. Others may be written too.
        timeout: seconds to wait for the block of another thread (or task, `async with`); None: for
            ever.

        Raises (on entering): TransactionError that names the thread or task in the way; ValueError
        or TypeError for writes that are not of this store. On leaving: StoreFullError or OSError if
        the commit fails; then the block is rolled back.
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
        if self._guards and not self.in_transaction:
            self._ask_guards()
        return self._core.pool.handle.transaction(writes, timeout)

    def will_write(self, *arrays: Any) -> None:
        """Captures arrays and tensors of this store before they are written: with one fence, and
        without page faults.

        Needed before system calls that write into an array (`readinto`, `recv_into`): the kernel
        gets no page fault.

        Raises: ValueError, TypeError for what is not of this store.
        """
        self._core.pool.will_write(arrays)

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

        Raises: TransactionError inside a block of `transaction`, while another thread or task is in
            one, or in the middle of a training step (see `pmstore.torch.attach`); StoreFullError,
            OSError; MirrorError: a copy from a device failed; MovedError: an array or tensor left
            the store's memory for good (see `Group`).
        """
        if self._guards:
            self._ask_guards()
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

        Raises: TransactionError inside a block, or while another thread or task is in one.
        """
        if self._mirrors is not None:
            self._mirrors.before_rollback()
        with self._core.lock:
            self._core.pool.rollback()
        if self._mirrors is not None:
            self._mirrors.restore()

    @property
    def in_transaction(self) -> bool:
        """Whether the caller, thread or task, is in a block of `transaction`."""
        return self._core.pool.block_depth() > 0

    # ---- life ----

    def close(self) -> None:
        """Rolls back what is uncommitted, blocks of other threads too, and gives the file up.
        Idempotent.

        Arrays and tensors that are still alive become private copies at the same addresses. In a
        fork child, where the store is the parent's, nothing happens.

        Raises: OSError if the last commits cannot be synced; closed nevertheless.
        """
        self._close(False)

    @property
    def closed(self) -> bool:
        return self._core.pool.handle.closed

    def _close(self, commit: bool) -> None:
        self._core.pool.handle.close(commit, _LEAVING_SECONDS, self._ask_before_leaving, self._end)

    def _ask_before_leaving(self) -> None:
        self._ask_guards()
        self._core.pool.handle.take_in_moved()
        if self._mirrors is not None:
            self._mirrors.arm()

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # sys.exit() and sys.exit(0) are an orderly end; any other code, or text, is a failure.
        self._close(kind is None or (isinstance(error, SystemExit) and error.code in (None, 0)))

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
            from pmstore.mirror.mirror import add

        return add(self, self._core, self.open_mirrors(), name, tensor)

    def open_mirrors(self) -> Mirrors:
        """What this store mirrors, for parts of pmstore that add to it."""
        if self._mirrors is None:
            from pmstore.mirror.mirrors import Mirrors

            self._mirrors = made = Mirrors(self._core)
            reference = ref(made)

            def hook(when: int) -> None:
                if (mirrors := reference()) is not None:
                    mirrors.hook(when)

            self._core.pool.handle.mirrors = hook
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
        self,
        name: str,
        url: str | os.PathLike[str],
        *,
        keep: int | None = None,
        every: int | None = None,
        max_rate: int | str | None = None,
        memory: int | str | None = None,
        max_wait_seconds: float | None = 60.0,
        stall_seconds: float | None = 300.0,
        on_error: Literal["raise", "warn"] = "raise",
        chunk_bytes: int = 256 << 10,
        rank: int = 0,
        world_size: int = 1,
        run: str | None = None,
        replicated: Sequence[str] = (),
        mode: int | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        """Adds a place that committed state is flushed to, or changes one. The store remembers it
        (from the next commit on).

        What it remembers counts where this file had the tier added, by this user. A store that was
        copied, restored or came from elsewhere names its tiers in a warning, and does not flush to
        them by itself: add them again, or `pmstore trust` it.

        url: a local directory (remembered by its absolute path), or any URL of fsspec
            ("s3://bucket/run"; `pip install 'pmstore[s3]'`); "{rank}" in it is the rank.
            storage_options: for fsspec; not remembered, they may hold credentials.
        keep: how many epochs stay; None: all. every: flushed by itself when so many commits have
            been made since the last time.
        max_rate: bytes a second; None: no limit.
        memory: for content that commits change while a flush still needs it; None: a quarter of the
            state. A commit that would need more waits for the flush, at most max_wait_seconds
            (None: for ever); then the flush fails, not the commit. The flush's buffers, up to 16
            MiB, come on top.
        stall_seconds: a flush to a remote place without progress for so long fails.
        on_error: what the next flush does about one that failed and that nobody was told of. (Those
            that `every` or a scheduler begins warn, and go on.)
        rank, world_size, run: of several ranks whose epochs belong together; run names what they
            have in common.
        mode: permissions of files in a local directory, such as 0o640, for those who share it,
            whatever the umask; directories that are made let in whoever may read. None: files as
            private as the store, directories 0o700.
        replicated: patterns of names ("run/model/*") of arrays that are the same at all ranks: each
            rank flushes its share.

        Raises: TierError, ValueError, TypeError.
        """
        from pmstore.tiers.backend import normal_url
        from pmstore.tiers.config import TierConfig

        config = TierConfig(
            url=normal_url(url),
            keep=keep,
            every=every,
            chunk_bytes=chunk_bytes,
            max_bytes_per_second=parse_size(max_rate, "max_rate"),
            memory_bytes=parse_size(memory, "memory"),
            max_wait_seconds=max_wait_seconds,
            stall_seconds=stall_seconds,
            on_error=on_error,
            rank=rank,
            world_size=world_size,
            run=run,
            replicated=replicated,
            mode=mode,
            storage_options=storage_options,
        )
        self._open_tiers().add(self, name, config)

    def remove_tier(self, name: str) -> None:
        """Forgets a tier, after its flush under way. What is in it stays.

        Raises: KeyError.
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

    # ---- what it says of itself ----

    @property
    def path(self) -> str:
        """The file, as it was given to `open`."""
        return self._core.path

    @property
    def domain(self) -> str:
        """The domain in force: "dax", "file", "process" or "emulated". `SURVIVES` says what each
        survives."""
        return self._core.pool.info.domain

    @property
    def mode(self) -> Literal["r", "r+"]:
        """Whether it can be written."""
        return "r" if self._core.pool.info.read_only else "r+"

    @property
    def epoch(self) -> int:
        """Number of commits since the store was made."""
        if self.closed:
            raise ClosedStoreError(f"{self.path}: the store is closed: open it again")
        return self._core.pool.epoch()

    @property
    def recovery(self) -> Recovery:
        """What the open had to undo or replay."""
        return self._recovery

    @property
    def rollbacks(self) -> int:
        """Changes whenever a roll back did: what was remembered of the store before it may be
        wrong."""
        return self._core.pool.rollbacks()

    def stats(self) -> Stats:
        """Sizes and counts, now."""
        return Stats(**self._core.pool.stats())

    def info(self) -> Info:
        """What a person asks first."""
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
            recovery=self._recovery,
        )

    def usage(self) -> tuple[SegmentUsage, ...]:
        """What is in use of the file's segments, and where: a map of the heap. Reads the page
        tables, not the data."""
        return tuple(SegmentUsage(**segment) for segment in self._core.pool.usage())

    def check(self) -> CheckReport:
        """Examines the whole store: allocator, directories, that every value and description
        decodes, and that slots are pairs. Reads only."""
        with self._core.lock:
            counts, problems = self._core.pool.check()
            if not problems:  # else the directories are not to be walked
                problems = self._check_objects()
        return CheckReport(**counts, problems=tuple(problems))

    def _check_objects(self) -> list[str]:
        problems = []
        for raw, found in self._core.pool.tree():
            try:
                if found.kind == _ffi.GROUP:
                    if found.meta:
                        slots.check(self._core.pool, found)
                elif found.kind == _ffi.LIST:
                    self._check_items(found.data)
                else:
                    self._check_object(found)
            except CorruptStoreError as error:
                problems.append(f"{raw.decode()!r}: {error}")
            except FormatVersionError:
                pass  # sound, and to be read where it was written
        return problems

    def _check_items(self, items: int) -> None:
        for at in range(self._core.pool.list_count(items)):
            found = self._core.pool.item(items, b"", at, True)
            if found is None:
                raise CorruptStoreError("a list is shorter than it says")
            try:
                self._check_object(found)
            except CorruptStoreError as error:
                raise CorruptStoreError(f"item {at}: {error}") from error

    @staticmethod
    def _check_object(found: _ffi.Found) -> None:
        if found.kind == _ffi.VALUE:
            values.decode(found.meta)
            return
        descriptor = array.Descriptor.unpack(found.meta)
        if not descriptor.torch:  # torch is not imported for this
            array.check_bytes(descriptor, array.numpy_dtype(descriptor).itemsize, found.data_bytes)

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


_open_stores: WeakValueDictionary[int, Store] = WeakValueDictionary()


def _close_all() -> None:
    with ExitStack() as closing:  # all of them, whatever one of them raises
        for store in alive(_open_stores):
            closing.callback(store.close)


# A store that is still open at exit is closed cleanly, as a file is flushed: uncommitted writes are
# rolled back.
atexit.register(_close_all)


def open(
    path: str | os.PathLike[str],
    mode: Mode = "a",
    *,
    size: int | str | None = None,
    max_size: int | str | None = None,
    domain: Domain = "auto",
    lock_timeout: float | None = 0.0,
    hot: bool = True,
    force: bool = False,
) -> Store:
    """Opens or creates a store.

    mode: "a" opens, or creates if there is none or an empty file; "r+" opens; "w" creates,
        replacing what is there; "x" creates, and there must be nothing; "r" opens for reading: it
        excludes writers, and shows a crashed file as of its last commit without changing it. Arrays
        are then not writeable.
    size: of a new file, in bytes or as "4GiB" (default 64 MiB, at least 1 MiB). It grows by itself.
    max_size: the file never grows beyond; it replaces what an existing store was given before.
        None: that, or no limit but the file system.
    domain: what a commit survives (see `SURVIVES`); "auto": "dax" where the file system can,
        "process" on tmpfs, else "file".
    lock_timeout: seconds to wait for another process that has the store open; 0: none; None: for
        ever.
    hot: False protects all pages again at every commit (slower; no assumption about writers being
        quiet at a commit).
    force: open a store that UncleanMachineCrashError or UncleanCopyError would refuse. It may be
        torn.

    Raises:
        StoreLockedError: it is open elsewhere; names the process.
        NotAStoreError, CorruptStoreError, FormatVersionError, UncleanMachineCrashError,
            UncleanCopyError: of an existing file.
        StoreFullError: no room for the file. DomainError: the domain is not to be had here.
        FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, OSError; ValueError,
            TypeError for arguments.

    >>> import tempfile
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder,
    ...     open(f"{folder}/run.pm", size="8MiB") as store,
    ... ):
    ...     w = store.zeros("w", (2, 2), "float32")
    ...     store["config"] = {"lr": 1e-3}
    ...     with store.transaction():
    ...         w += 1
    ...         store["step"] = 1
    ...     sorted(store), store.check().problems
    (['config', 'step', 'w'], ())
    """
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError(f"path is a str or a path of str, not {type(name).__name__}")
    if "\0" in name:
        raise ValueError("a path has no NUL character")
    if mode not in _ffi.MODES:
        raise ValueError(f"mode={mode!r}: use one of {', '.join(map(repr, _ffi.MODES))}")
    if domain not in _ffi.DOMAINS:
        raise ValueError(f"domain={domain!r}: use one of {', '.join(map(repr, _ffi.DOMAINS))}")
    size_bytes = parse_size(size)
    if size is not None and size_bytes < _ffi.MIN_SIZE_BYTES:
        raise ValueError(
            f"size={size!r} is too small: a store needs at least {_ffi.MIN_SIZE_BYTES} bytes (1 "
            "MiB)"
        )
    pool = _ffi.Pool(
        name,
        mode,
        size_bytes=size_bytes,
        max_size_bytes=parse_size(max_size, "max_size"),
        domain=domain,
        lock_timeout_seconds=lock_timeout,
        hot=hot,
        force=force,
        ranges=array.span,
    )
    store = Store(Core(pool))
    if mode != "r":
        try:
            # told to whoever uses them
            with suppress(TierError, CorruptStoreError, FormatVersionError):
                if ".pmstore" in store:
                    store._open_tiers()  # those that are flushed by themselves begin to be
        except Warning:  # of a tier that was not added here, where warnings are errors
            store.close()
            raise
    return store
