"""The engine, typed: the only importer of the compiled module, and the only place where a status
becomes an exception.

Every method is one call of native/store/store.h, and so either happened as a whole or not at all,
whatever interrupts Python. Nothing here looks into names, descriptors or values: they are bytes.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, NoReturn

from pmstore import errors
from pmstore.engine import _binding
from pmstore.engine._native import ffi as _ffi
from pmstore.engine._native import lib as _lib

MODES = {
    "r": _lib.PMS_MODE_READ,
    "r+": _lib.PMS_MODE_READ_WRITE,
    "a": _lib.PMS_MODE_APPEND,
    "w": _lib.PMS_MODE_TRUNCATE,
    "x": _lib.PMS_MODE_EXCLUSIVE,
}
DOMAINS: dict[str, int] = {
    "auto": _lib.PMS_DOMAIN_AUTO,
    "dax": _lib.PMS_DOMAIN_DAX,
    "file": _lib.PMS_DOMAIN_FILE,
    "process": _lib.PMS_DOMAIN_PROCESS,
    "emulated": _lib.PMS_DOMAIN_EMULATED,
}
FLUSHES: dict[int, str] = {
    _lib.PMS_FLUSH_NONE: "none",
    _lib.PMS_FLUSH_CLFLUSH: "clflush",
    _lib.PMS_FLUSH_CLFLUSHOPT: "clflushopt",
    _lib.PMS_FLUSH_CLWB: "clwb",
    _lib.PMS_FLUSH_CVAP: "dc cvap",
    _lib.PMS_FLUSH_CVAC: "dc cvac",
}
VALUE: int = _lib.PMS_OBJECT_VALUE
ARRAY: int = _lib.PMS_OBJECT_ARRAY
GROUP: int = _lib.PMS_OBJECT_GROUP
LIST: int = _lib.PMS_OBJECT_LIST
FILL_NONE: int = _lib.PMS_FILL_NONE
FILL_ZERO: int = _lib.PMS_FILL_ZERO
FILL_COPY: int = _lib.PMS_FILL_COPY
FILL_PATTERN: int = _lib.PMS_FILL_PATTERN
FILL_SLOT: int = _lib.PMS_FILL_SLOT
DEFAULT_SIZE_BYTES: int = _lib.PMS_DEFAULT_SIZE
MIN_SIZE_BYTES: int = _lib.PMS_MIN_SIZE
HISTORY_BYTES: int = _lib.PMS_HISTORY_BYTES

_NOT_FOUND: int = _lib.PMS_E_NOT_FOUND

GROUPS_MAX: int = _lib.PMS_GROUPS_MAX
ROOT = 0
"""The directory of the store itself."""

native, native_ffi = _lib, _ffi
"""For snapshot.py and landing.py, the bindings of native/flush/chunks.h and
native/commit/landing.h; `fail` makes its exceptions."""


Found = _binding.Found
"""One object of a directory or a list, copied out of the engine: kind, data, data_bytes, meta,
node; and memory, of an array that was found to be used: its block, pinned."""

SLOT_CURRENT: int = _lib.PMS_SLOT_CURRENT
SLOT_IDLE: int = _lib.PMS_SLOT_IDLE
SLOT_NEXT: int = _lib.PMS_SLOT_NEXT

LIST_END = -1
"""The index behind the last item, for `Pool.splice`."""

OPTIM_ADAM, OPTIM_ADAMW, OPTIM_SGD = 1, 2, 3


def optim_step(table: int, count: int, hyper: dict[str, float]) -> None:
    """One step of an optimizer, by all cores, without the GIL. table: address of `count` structs as
    native/optim/optim.h says."""
    _lib.pms_optim_step(
        _ffi.cast("struct pms_optim_tensor *", table),
        count,
        _ffi.new("struct pms_optim_hyper *", hyper),
    )


def optim_limit(instruction_set: int) -> None:
    """For tests: the widest instruction set that `optim_step` uses from now on: 0 portable, 1 AVX2,
    2 AVX-512 (the default)."""
    _lib.pms_optim_limit(instruction_set)


@dataclass(frozen=True)
class PoolInfo:
    """struct pms_info: what is fixed from open on."""

    base: int
    reserve_bytes: int
    domain: str
    flush: str
    sync_mapping: bool
    read_only: bool
    created: bool
    clean: bool
    undone_entries: int
    undone_bytes: int
    replayed_records: int
    replayed_bytes: int
    torn: bool
    asked_domain: str
    """At creation; "auto" decides at every open."""
    opens: int
    unclean_opens: int
    max_bytes: int
    """Of the file ever; 0: until the file system is full."""
    uuid: bytes
    inode: int
    """Of the file: a copy has another one."""
    permissions: int
    """Of the file, when it was opened."""


class SlotPair(NamedTuple):
    """struct pms_slot_pair. Holds until the next change."""

    group: int
    data: tuple[int, int]
    """Blocks of the two arrays; 0: without bytes."""
    bytes: int
    current: int


# ---- a status becomes an exception ---------------------------------------------------------------


def _address(name: str) -> int:
    return int(_ffi.cast("uintptr_t", _ffi.addressof(_lib, name)))


def _lock_holders(path: str) -> list[int]:
    """Process ids that hold an flock on the file, as /proc/locks tells; none where it does not."""
    try:
        status = os.stat(path)
        with open("/proc/locks", encoding="ascii", errors="replace") as locks:
            lines = locks.read().splitlines()
    except OSError:
        return []
    where = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    pids = []
    for line in lines:
        # 1: FLOCK  ADVISORY  WRITE 1234 fe:01:5678 0 EOF     ("1: -> FLOCK ..." is one that waits)
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == where and fields[4].isdigit():
            pid = int(fields[4])
            if pid > 0 and pid not in pids:
                pids.append(pid)
    return pids


def _process_name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
            return f"process {pid} ({comm.read().strip()})"
    except OSError:
        return f"process {pid}"


def _locked(path: str) -> errors.StoreLockedError:
    pids = _lock_holders(path)
    if pids == [os.getpid()]:
        who, remedy = "this process", "close the Store that has it open, or use that one"
    elif pids:
        who = ", ".join(map(_process_name, pids))
        remedy = "stop it, or wait for it with lock_timeout=seconds"
    else:
        who, remedy = (
            "another process or another open in this one",
            "close it, or wait with lock_timeout=seconds",
        )
    problem = f"the store is held open by {who}"
    error = errors.StoreLockedError(errno.EAGAIN, f"{problem}: {remedy}", path)
    error.problem = problem
    error.pid = pids[0] if pids else None
    return error


def _full(path: str, what: str, needed: int, available: int) -> errors.StoreFullError:
    amounts = f" ({needed:,} bytes needed, {available:,} to be had)" if needed else ""
    problem = f"no room in the store{amounts}: {what}. Nothing was changed"
    error = errors.StoreFullError(
        errno.ENOSPC,
        f"{problem}. Delete objects and commit, free space on the file system, or open with a "
        "larger max_size (a store takes about twice the bytes of what it holds, for its log)",
        path,
    )
    error.problem = problem
    error.needed_bytes, error.available_bytes = needed, available
    return error


def _thread_name(native_id: int) -> str:
    # Not `threading.enumerate()`: it holds a lock, under which a finalizer may wait for the
    # store's, which we may hold.
    alive: dict[int, threading.Thread] = getattr(threading, "_active", {})
    for thread in alive.copy().values():
        if thread.native_id == native_id:
            return f"thread {thread.name!r} (thread id {native_id})"
    return f"thread id {native_id}"


def _task_name(address: int) -> str:
    """Of a task of the running event loop; a callback of it is none."""
    try:
        tasks = sys.modules["asyncio"].all_tasks()
    except RuntimeError:
        return "a task whose event loop does not run now"
    for task in tasks:
        if id(task) == address:
            return f"task {task.get_name()!r}"
    return "a callback of the event loop"


def _busy(path: str, what: str, holder: int, task: int) -> errors.TransactionError:
    """holder: the thread in whose block the store is; 0: it is the caller's own thread, in another
    task."""
    owner = _thread_name(holder) if holder else _task_name(task)
    if what == "open when the store was closed":
        remedy = (
            "all that was written since it was entered is rolled back. Join threads before the "
            "store is left"
        )
    elif holder:
        remedy = (
            "`with store.transaction():` waits for it (timeout=), all else that changes the store "
            "does not. If who opened it waits for this thread, return the result to it, to be "
            "stored there"
        )
    else:
        remedy = (
            "`async with store.transaction():` waits for it, and lets the event loop go on. If "
            "that task waits for this one, return the result to it, to be stored there"
        )
    error = errors.TransactionError(
        f"{path}: the transaction of {owner} is open ({what}): {remedy}"
    )
    error.owner = owner
    return error


def damaged(path: str, what: str, offset: int | None = None) -> errors.CorruptStoreError:
    """The error for a file that breaks a rule: names the file, and the place in it where there is
    one."""
    problem = f"the store is damaged{'' if offset is None else f' (at byte {offset:,})'}: {what}"
    made = errors.CorruptStoreError(
        f"{path}: {problem}. Restore it from a tier or a copy; mode='r' may still read parts of it"
    )
    made.path, made.problem, made.offset = path, problem, offset
    return made


def placed(path: str, error: errors.CorruptStoreError, offset: int) -> errors.CorruptStoreError:
    """For one of those who decode bytes, and know neither file nor place."""
    if error.path:
        return error
    made = damaged(path, str(error), offset)
    made.__cause__ = error
    return made


def _exception(path: str, error: Any) -> Exception:
    """The exception for a struct pms_error *."""
    status = error.status
    what = _ffi.string(error.what).decode("ascii", "replace")
    made: Exception
    problem = ""
    if status == _lib.PMS_E_OS:
        why = f"{os.strerror(error.sys_errno)} ({what})"
        if what == "syncing a commit":
            why += (
                ". Whether it is durable is unknown, so nothing more is written: close the store "
                "and open it again"
            )
        return OSError(error.sys_errno, why, path)
    if status == _lib.PMS_E_LOCKED:
        made = _locked(path)
    elif status == _lib.PMS_E_FULL:
        made = _full(path, what, error.needed, error.available)
    elif status == _lib.PMS_E_CORRUPT:
        return damaged(path, what, error.offset)
    elif status == _lib.PMS_E_NOT_A_STORE:
        problem = f"{what}. It was left as it is"
        made = errors.NotAStoreError(
            f"{path}: {problem}; give another path, or mode='w' to replace it with a new store"
        )
    elif status == _lib.PMS_E_VERSION:
        made = errors.FormatVersionError(
            f"{path}: {what}. Open it with the version of pmstore that wrote it"
        )
    elif status == _lib.PMS_E_UNCLEAN:
        problem = (
            f"{what}, and its domain survives the death of the process only: it may hold a mixture "
            "of old and new bytes"
        )
        made = errors.UncleanMachineCrashError(
            errno.EUCLEAN,
            f"{problem}. Restore it from a tier or a copy, or accept it with `pmstore repair`, or "
            "look at it with open(..., force=True)",
            path,
        )
    elif status == _lib.PMS_E_COPIED:
        problem = (
            "the file is a copy that was made while a process wrote to the store: it is a mixture "
            "of bytes of different moments"
        )
        made = errors.UncleanCopyError(
            errno.EUCLEAN,
            f"{problem}. Close the original and copy it then; for copies beside a writer there are "
            "tiers (store.add_tier, store.flush). To look at this one all the same: open(..., "
            "force=True)",
            path,
        )
    elif status == _lib.PMS_E_BUSY:
        made = _busy(path, what, error.holder, error.offset)
    elif status == _lib.PMS_E_FORKED:
        made = errors.ForkedStoreError(
            f"{path}: the store belongs to the parent process. In a fork child its arrays can be "
            "read, but no call of it is answered: look up before the fork what the child needs, "
            "and give it the arrays and values. Or open the store with mode='r' after the parent "
            "has closed it"
        )
    elif status == _lib.PMS_E_CLOSED:
        made = errors.ClosedStoreError(
            f"{path}: the store is closed, and what was not committed was rolled back: open it "
            "again. (Arrays of it stay usable, as private copies)"
        )
    elif status == _lib.PMS_E_READONLY:
        opened_so = what == "the store is open for reading"  # else a sync has failed
        remedy = (
            "Open it with mode='r+' or 'a'"
            if opened_so
            else "Close it and open it again; meanwhile it can be read"
        )
        made = errors.ReadOnlyStoreError(
            errno.EROFS, f"the store cannot be written: {what}. {remedy}", path
        )
    elif status == _lib.PMS_E_EXISTS:
        made = errors.NameExistsError(f"{path}: {what}")
    elif status == _lib.PMS_E_UNSUPPORTED:
        problem = what
        made = errors.DomainError(
            errno.EOPNOTSUPP, f"{what}. Open it with domain='file', or 'process' on tmpfs", path
        )
    elif status == _lib.PMS_E_STATE:
        made = errors.TransactionError(f"{path}: {what}")
    elif status == _lib.PMS_E_NOT_FOUND:
        return KeyError(f"{path}: {what}")
    else:  # PMS_E_INVALID
        return ValueError(f"{path}: {what}")
    made.path = path
    made.problem = made.problem or problem
    return made


def _fail(path: str, error: Any) -> NoReturn:
    raise _exception(path, error)


fail = _fail


def _fail_at(path: str, address: int) -> NoReturn:
    """`_fail` for _binding.c, which has the struct's address."""
    raise _exception(path, _ffi.cast("struct pms_error *", address)) from None


_EXISTS = "the file exists: use mode='a' to open it, or 'w' to replace it"
_MISSING = "no such store: use mode='a' or 'x' to create it"


def _fail_open(path: str, mode: str, address: int) -> NoReturn:
    """Of `open`, where a name that exists or not is a file's."""
    error = _ffi.cast("struct pms_error *", address)
    if error.status == _lib.PMS_E_EXISTS:
        raise FileExistsError(errno.EEXIST, _EXISTS, path)
    if error.status == _lib.PMS_E_NOT_FOUND:
        raise FileNotFoundError(errno.ENOENT, _MISSING, path)
    made = _exception(path, error)
    if isinstance(made, FileExistsError):
        made = FileExistsError(errno.EEXIST, _EXISTS, path)
    elif isinstance(made, FileNotFoundError) and mode in ("r", "r+"):
        made = FileNotFoundError(errno.ENOENT, _MISSING, path)
    raise made


# ---- a store -------------------------------------------------------------------------------------


class Pool:
    """One open store: `struct pms_pool` behind a `_binding.Handle`, which owns it.

    Directories are numbers (`ROOT`, or what `group` returns); they hold until a group is removed or
    a roll back. A path is walked from a directory on, in the step that uses it: names with a NUL
    between two, groups but for the last.
    """

    __slots__ = (
        "_errors",
        "_p",
        "find",
        "get",
        "handle",
        "info",
        "item",
        "path",
        "put_value",
        "rollbacks",
        "slot",
        "splice",
        "will_write",
    )

    def __init__(
        self,
        path: str,
        mode: str,
        *,
        size_bytes: int,
        max_size_bytes: int,
        domain: str,
        lock_timeout_seconds: float | None,
        hot: bool,
        force: bool,
        ranges: Callable[[Any], Iterable[tuple[int, int]]],
    ) -> None:
        """Opens the file. ranges: (address, bytes) pairs of an object that has no buffer, for
        declared writes.

        Raises: what `pmstore.open` says.
        """
        options = _ffi.new(
            "struct pms_options *",
            {
                "size": size_bytes,
                "max_size": max_size_bytes,
                "mode": MODES[mode],
                "domain": DOMAINS[domain],
                "hot": hot,
                "force": force,
            },
        )
        self.path = path
        # One callable for failures of open and for later ones: the handle exists when open has
        # succeeded.
        opened = False

        def fail(address: int) -> NoReturn:
            if opened:
                _fail_at(path, address)
            _fail_open(path, mode, address)

        self.handle = _binding.Handle(
            os.fsencode(path),
            int(_ffi.cast("uintptr_t", options)),
            lock_timeout_seconds,
            fail,
            ranges,
        )
        opened = True
        self._p = _ffi.cast("struct pms_pool *", self.handle.pool)
        # One of each from the start: a handler of IndexError that an interrupt ends may keep its
        # traceback, and this pool.
        self._errors: list[Any] = [_ffi.new("struct pms_error *")]
        # What look-ups call is functions of the handle itself: see _objects.c. Each walks its path
        # in the step that uses what is there. The caller of `get`, `item` and `slot` keeps other
        # threads from removing meanwhile what they find.
        handle = self.handle
        self.will_write: Callable[[Sequence[Any]], None] = handle.will_write
        self.rollbacks: Callable[[], int] = handle.rollbacks
        self.find: Callable[[int, bytes], Found | None] = handle.find
        self.get: Callable[[int, bytes, bool], Any] = handle.get
        self.item: Callable[[int, bytes, int, bool], Any] = handle.item
        self.slot: Callable[[int, bytes, int], Any] = handle.slot
        self.put_value: Callable[[int, bytes, bytes], None] = handle.put_value
        self.splice: Callable[[int, bytes, int, int, int, Sequence[tuple[Any, ...]]], None] = (
            handle.splice
        )
        self.info = self._read_info()
        handle.base, handle.read_only = self.info.base, self.info.read_only

    @property
    def raw(self) -> Any:
        """`struct pms_pool *`, for the binding of snapshots."""
        return self._p

    # A call needs a struct for its error: taken from a list, and put back if nothing went wrong, so
    # that threads, signal handlers and finalizers that call in the middle never share one.
    def _error(self) -> Any:
        try:
            return self._errors.pop()
        except IndexError:
            return _ffi.new("struct pms_error *")

    def _read_info(self) -> PoolInfo:
        raw = _ffi.new("struct pms_info *")
        _lib.pms_pool_info(self._p, raw)
        names = {number: name for name, number in DOMAINS.items()}
        return PoolInfo(
            base=raw.base,
            reserve_bytes=raw.reserve_bytes,
            domain=names[raw.domain],
            flush=FLUSHES[raw.flush],
            sync_mapping=bool(raw.sync_mapping),
            read_only=bool(raw.read_only),
            created=bool(raw.created),
            clean=bool(raw.clean),
            undone_entries=raw.undone_entries,
            undone_bytes=raw.undone_bytes,
            replayed_records=raw.replayed_records,
            replayed_bytes=raw.replayed_bytes,
            torn=bool(raw.torn),
            asked_domain=names[raw.asked_domain],
            opens=raw.opens,
            unclean_opens=raw.unclean_opens,
            max_bytes=raw.max_bytes,
            uuid=bytes(_ffi.buffer(raw.uuid)),
            inode=raw.inode,
            permissions=raw.permissions,
        )

    # -- transactions

    def rollback(self) -> None:
        error = self._error()
        if _lib.pms_rollback(self._p, error):
            _fail(self.path, error)
        self._errors.append(error)

    def block_depth(self) -> int:
        """Of the calling thread's block; 0 = it is in none."""
        return int(_lib.pms_txblock_depth(self._p))

    def epoch(self) -> int:
        return int(_lib.pms_epoch(self._p))

    # -- objects

    def entries(self, directory: int) -> list[tuple[bytes, Found]]:
        """All names of a directory with their objects, in order of insertion."""
        return list(self.scan(directory))

    def scan(self, directory: int) -> Iterator[tuple[bytes, Found]]:
        """As `entries`, one by one. REQUIRES: nobody changes the directory meanwhile."""
        node = 0
        while (entry := self.handle.next(directory, node)) is not None:
            yield entry
            node = entry[1].node

    def tree(self, directory: int = ROOT) -> Iterator[tuple[bytes, Found]]:
        """All objects below a directory with their paths, a group before what is in it. REQUIRES:
        nobody changes any meanwhile.

        Raises: CorruptStoreError, also if groups contain each other, or more than GROUPS_MAX of
            them.
        """
        seen = {directory}
        open_groups = [(b"", self.scan(directory))]
        while open_groups:
            prefix, rest = open_groups[-1]
            for name, found in rest:
                yield prefix + name, found
                if found.kind == GROUP:
                    if found.data in seen:
                        path = (prefix + name)[:200].decode(errors="backslashreplace")
                        raise damaged(
                            self.path,
                            f"groups contain each other: {path!r} is met twice",
                            found.node,
                        )
                    seen.add(found.data)
                    if len(open_groups) > GROUPS_MAX:
                        raise errors.CorruptStoreError(
                            f"{self.path}: a group is in more than {GROUPS_MAX - 1} others"
                        )
                    open_groups.append((prefix + name + b"/", self.scan(found.data)))
                    break
            else:
                open_groups.pop()

    def names(self, directory: int, after: int, limit: int) -> list[bytes]:
        """At most `limit` names in order of insertion, from the one behind the node `after` on (0:
        from the first)."""
        result: list[bytes] = []
        node = after
        while len(result) < limit and (entry := self.handle.next(directory, node)) is not None:
            result.append(entry[0])
            node = entry[1].node
        return result

    def count(self, directory: int) -> int:
        error = self._error()
        count = _ffi.new("uint64_t *")
        if _lib.pms_object_count(self._p, directory, count, error):
            _fail(self.path, error)
        self._errors.append(error)
        return int(count[0])

    def put_array(
        self,
        directory: int,
        name: bytes,
        meta: bytes,
        data_bytes: int,
        *,
        fill: int = FILL_ZERO,
        source: int = 0,
        source_bytes: int = 0,
        must_be_new: bool = False,
    ) -> int:
        """Allocates, fills, publishes. source: address of source_bytes bytes. Returns the block's
        offset.

        Raises: NameExistsError if it must be new and is not; StoreFullError.
        """
        error = self._error()
        data = _ffi.new("uint64_t *")
        status = _lib.pms_object_put_array(
            self._p,
            directory,
            name,
            len(name),
            meta,
            len(meta),
            data_bytes,
            fill,
            _ffi.cast("void *", source),
            source_bytes,
            must_be_new,
            data,
            error,
        )
        if status:
            _fail(self.path, error)
        self._errors.append(error)
        return int(data[0])

    def group(self, directory: int, name: bytes, *, create: bool) -> int | None:
        """The group's directory; None if there is none and it is not to be created.

        Raises: NameExistsError if the name is another kind of object.
        """
        error = self._error()
        group = _ffi.new("uint64_t *")
        status = _lib.pms_object_group(self._p, directory, name, len(name), create, group, error)
        if status and (create or status != _lib.PMS_E_NOT_FOUND):
            _fail(self.path, error)
        self._errors.append(error)
        return None if status else int(group[0])

    def open_list(self, directory: int, name: bytes, *, create: bool) -> int | None:
        """As `group`, for a list: a number that holds until the list is removed or a roll back."""
        error = self._error()
        list_ = _ffi.new("uint64_t *")
        status = _lib.pms_object_list(self._p, directory, name, len(name), create, list_, error)
        if status and (create or status != _lib.PMS_E_NOT_FOUND):
            _fail(self.path, error)
        self._errors.append(error)
        return None if status else int(list_[0])

    def describe_group(self, directory: int, name: bytes, meta: bytes) -> None:
        """Puts a description beside a group's name."""
        error = self._error()
        if _lib.pms_object_describe_group(
            self._p, directory, name, len(name), meta, len(meta), error
        ):
            _fail(self.path, error)
        self._errors.append(error)

    def make_slots(
        self, directory: int, path: bytes, about: bytes, meta: bytes, data_bytes: int
    ) -> None:
        """A pair of arrays of zeros, in one step. about: which one is current.

        Raises: NameExistsError, StoreFullError.
        """
        error = self._error()
        status = _lib.pms_object_make_slots(
            self._p,
            directory,
            path,
            len(path),
            about,
            len(about),
            meta,
            len(meta),
            data_bytes,
            error,
        )
        if status:
            _fail(self.path, error)
        self._errors.append(error)

    def slot_find(self, directory: int, path: bytes) -> SlotPair | None:
        """None: no slots are there."""
        error, pair = self._error(), _ffi.new("struct pms_slot_pair *")
        status = _lib.pms_slot_find(self._p, directory, path, len(path), pair, error)
        if status and status != _NOT_FOUND:
            _fail(self.path, error)
        self._errors.append(error)
        return (
            None
            if status
            else SlotPair(pair.group, (pair.data[0], pair.data[1]), pair.bytes, pair.current)
        )

    def is_live(self, data: int) -> bool:
        """Whether a name or a list has the block."""
        error = self._error()
        live = bool(_lib.pms_is_live(self._p, data, error))
        self._errors.append(error)
        return live

    def remove(self, directory: int, name: bytes) -> bool:
        """Removes the object, a group with all it holds. False if there is none."""
        error = self._error()
        status = _lib.pms_object_remove(self._p, directory, name, len(name), error)
        if status and status != _lib.PMS_E_NOT_FOUND:
            _fail(self.path, error)
        self._errors.append(error)
        return not status

    # -- lists

    def list_count(self, directory: int, path: bytes = b"") -> int:
        """Items of the list at the path; without one, of the list itself that `open_list` gave.

        Raises: KeyError.
        """
        error = self._error()
        count = _ffi.new("uint64_t *")
        if _lib.pms_sequence_count(self._p, directory, path, len(path), count, error):
            _fail(self.path, error)
        self._errors.append(error)
        return int(count[0])

    # -- the record outside transactions

    def read_history(self) -> bytes:
        """HISTORY_BYTES bytes; zeros until something was written."""
        error = self._error()
        raw = _ffi.new("unsigned char[]", HISTORY_BYTES)
        if _lib.pms_history_read(self._p, raw, error):
            _fail(self.path, error)
        self._errors.append(error)
        return bytes(_ffi.buffer(raw))

    def write_history(self, data: bytes) -> None:
        """Replaces it, padded with zeros. Neither commits nor rolls back with anything."""
        error = self._error()
        if _lib.pms_history_write(self._p, data, len(data), error):
            _fail(self.path, error)
        self._errors.append(error)

    # -- looking at it

    def stats(self) -> dict[str, int]:
        error = self._error()
        raw = _ffi.new("struct pms_stats *")
        if _lib.pms_pool_stats(self._p, raw, error):
            _fail(self.path, error)
        self._errors.append(error)
        return {field: getattr(raw, field) for field, _ in _ffi.typeof("struct pms_stats").fields}

    def check(self) -> tuple[dict[str, int], list[str]]:
        """Counts, and the problems found (the first PMS_CHECK_PROBLEMS in words, then how many
        more)."""
        error = self._error()
        raw = _ffi.new("struct pms_check_report *")
        if _lib.pms_check(self._p, raw, error):
            _fail(self.path, error)
        self._errors.append(error)
        told = min(raw.problem_count, _lib.PMS_CHECK_PROBLEMS)
        problems = [_ffi.string(raw.problem[i]).decode("ascii", "replace") for i in range(told)]
        if raw.problem_count > told:
            problems.append(f"and {raw.problem_count - told} more")
        fields = (
            "blocks",
            "names",
            "groups",
            "lists",
            "extents",
            "leaks",
            "leaked_bytes",
            "sound_copies",
        )
        return {field: getattr(raw, field) for field in fields}, problems

    def free_leaks(self) -> int:
        """Frees blocks that belong to nobody, in the running transaction. Returns their number.

        Raises: CorruptStoreError if the check finds other problems too.
        """
        error = self._error()
        raw = _ffi.new("struct pms_check_report *")
        if _lib.pms_free_leaks(self._p, raw, error):
            _fail(self.path, error)
        self._errors.append(error)
        return int(raw.leaks)

    def mend_superblock(self) -> None:
        """Writes the superblock in use into its other copy. Durable on return."""
        error = self._error()
        if _lib.pms_mend_superblock(self._p, error):
            _fail(self.path, error)
        self._errors.append(error)

    def usage(self) -> list[dict[str, Any]]:
        """struct pms_segment_usage of each segment."""
        error = self._error()
        raw = _ffi.new("struct pms_segment_usage[]", _lib.PMS_USAGE_SEGMENTS)
        count = _ffi.new("uint32_t *")
        if _lib.pms_usage(self._p, raw, count, error):
            _fail(self.path, error)
        self._errors.append(error)
        plain = [
            field for field, _ in _ffi.typeof("struct pms_segment_usage").fields if field != "cell"
        ]
        return [
            {**{field: getattr(raw[i], field) for field in plain}, "cells": tuple(raw[i].cell)}
            for i in range(count[0])
        ]


# ---- the process ---------------------------------------------------------------------------------


def kill_at_primitive(count: int) -> None:
    """SIGKILLs this process at the count-th persistence primitive from now; 0: never. For crash
    tests."""
    _lib.pms_debug_kill_at(count)


def primitives_seen() -> int:
    """Persistence primitives since the last `kill_at_primitive`."""
    return int(_lib.pms_debug_primitives())


def _handler_first(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        _lib.pms_handler_install()
        return result

    return wrapper


# faulthandler.enable() puts a SIGSEGV handler over the engine's, for which a first write into a
# protected page is not an error. The engine notices that at its next call, but the next thing may
# be a write by numpy, without a call. So enable (and disable, which restores what was there before
# it) are followed by putting the engine's handler first again, chained to the new one: a real
# segmentation fault still prints its traceback.
faulthandler.enable = _handler_first(faulthandler.enable)
faulthandler.disable = _handler_first(faulthandler.disable)

_binding.bind(
    *map(
        _address,
        (
            "pms_pool_open",
            "pms_pool_close",
            "pms_pool_release",
            "pms_txblock_enter",
            "pms_txblock_commit_pending",
            "pms_txblock_leave",
            "pms_txblock_wait",
            "pms_txblock_depth",
            "pms_txblock_set_tasks",
            "pms_will_write",
            "pms_object_get",
            "pms_unpin",
            "pms_rollbacks",
            "pms_object_find",
            "pms_object_next",
            "pms_sequence_get",
            "pms_object_put_value",
            "pms_slot_flip",
            "pms_epoch",
            "pms_sequence_splice",
            "pms_put_backs",
            "pms_slot_get",
            "pms_commit",
        ),
    )
)
