"""Makes an exception of a status of the engine. This is done here alone."""

from __future__ import annotations

import errno
import os
import sys
import threading
from typing import Any, NoReturn

from pmstore import errors
from pmstore._base.ranks import launched
from pmstore._engine._native import ffi as _ffi
from pmstore._engine._native import lib as _lib


def lock_holders(path: str, writing: bool = False) -> list[int]:
    """Returns the ids of the processes that hold an flock on the file, as /proc/locks tells them;
    none where it does not. writing: only those that keep all others out."""
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
            if pid > 0 and pid not in pids and not (writing and fields[3] != "WRITE"):
                pids.append(pid)
    return pids


def _process_name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
            return f"process {pid} ({comm.read().strip()})"
    except OSError:
        return f"process {pid}"


def _locked(path: str, what: str) -> errors.StoreLockedError:
    pids = lock_holders(path)
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
    rank, world = launched()
    if world > 1 and pids != [os.getpid()]:
        remedy = (
            f"this process is rank {rank} of {world}: if that is another rank, name the store by "
            f"rank, as run{rank}.pm, for each has one of its own. Else {remedy}"
        )
    problem = f"the store is held open by {who}"
    if what.startswith("closed"):
        problem = f"the store was closed by {who}, where arrays of it are alive and still copied"
        remedy = "wait with lock_timeout=seconds, or let go of the arrays there"
    if "readers" in what:  # mode r, beside a writer
        problem += f", and {what} (is it stopped, in another container, of another version?)"
        remedy = (
            "a container with a network namespace of its own does not show its stores to others, "
            "nor does another version of pmstore. Wait with lock_timeout=seconds"
        )
    error = errors.StoreLockedError(errno.EAGAIN, f"{problem}: {remedy}", path)
    error.problem = problem
    error.pid = pids[0] if pids else None
    return error


def _amounts(needed: int, available: int) -> str:
    return f" ({needed:,} bytes needed, {available:,} to be had)" if needed else ""


def _full(path: str, what: str, needed: int, available: int) -> errors.StoreFullError:
    amounts = _amounts(needed, available)
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
    """Returns the name of a task of the running event loop, in words. An address that belongs to no
    task is that of a callback."""
    try:
        tasks = sys.modules["asyncio"].all_tasks()
    except RuntimeError:
        return "a task whose event loop does not run now"
    for task in tasks:
        if id(task) == address:
            return f"task {task.get_name()!r}"
    return "a callback of the event loop"


def _busy(path: str, what: str, holder: int, task: int) -> errors.TransactionError:
    """Returns the error for a call that another thread's or task's transaction block keeps out.
    holder: the thread in whose block the store is; 0: it is the caller's own thread, in another
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
    """Returns the error for a file that breaks a rule. It names the file, and the place in it where
    there is one."""
    problem = f"the store is damaged{'' if offset is None else f' (at byte {offset:,})'}: {what}"
    remedy = "Restore it from a tier or a copy; mode='r' may still read parts of it"
    return _corrupt(path, problem, remedy, offset)


def _cut_short(path: str, needed: int, available: int) -> errors.CorruptStoreError:
    problem = (
        f"the end of the store is missing: the file has {available:,} bytes, its superblock says "
        f"{needed:,}"
    )
    remedy = (
        "If it is a copy or a download, make it again, whole. Else restore the store from a tier"
    )
    return _corrupt(path, problem, remedy, available)


def _corrupt(path: str, problem: str, remedy: str, offset: int | None) -> errors.CorruptStoreError:
    made = errors.CorruptStoreError(f"{path}: {problem}. {remedy}")
    made.path, made.problem, made.offset = path, problem, offset
    return made


def placed(path: str, error: errors.CorruptStoreError, offset: int) -> errors.CorruptStoreError:
    """Returns the error with the file and the place in it, for callers that decode bytes and know
    neither. An error that names a file already is returned as it is."""
    if error.path:
        return error
    made = damaged(path, str(error), offset)
    made.__cause__ = error
    return made


def in_doubt(path: str, what: str) -> errors.InDoubtError:
    """Returns the error for what would end a version that is held for a job."""
    problem = (
        "the version before the last commit is held for a job of several ranks, and it is not "
        f"known that all ranks have the last commit: {what}"
    )
    made = errors.InDoubtError(
        f"{path}: {problem}. Attach it in its job again (attach(..., process_group=...)), or "
        f"decide by hand: pmstore resolve {path} --keep, or --back"
    )
    made.path, made.problem = path, problem
    return made


def _exception(path: str, error: Any) -> Exception:
    """Returns the exception that a struct pms_error * describes."""
    status = error.status
    what = _ffi.string(error.what).decode("ascii", "replace")
    made: Exception
    problem = ""
    if status == _lib.PMS_E_OS:
        why = f"{os.strerror(error.sys_errno)} ({what})"
        if error.available:
            why += _amounts(error.needed, error.available)
        if what.startswith("syncing"):
            why += (
                ". Whether it is durable is unknown, so nothing more is written: close the store "
                "and open it again"
            )
        return OSError(error.sys_errno, why, path)
    if status == _lib.PMS_E_LOCKED:
        made = _locked(path, what)
    elif status == _lib.PMS_E_FULL:
        made = _full(path, what, error.needed, error.available)
    elif status == _lib.PMS_E_CORRUPT and error.needed:
        return _cut_short(path, error.needed, error.available)
    elif status == _lib.PMS_E_CORRUPT:
        return damaged(path, what, error.offset)
    elif status == _lib.PMS_E_NOT_A_STORE:
        problem = f"{what}. It was left as it is"
        made = errors.NotAStoreError(f"{path}: {problem}; give the path of a store")
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
            "and give it the arrays and values. Or open the store in the child with mode='r': it "
            "shows the last commit"
        )
    elif status == _lib.PMS_E_CLOSED:
        made = errors.ClosedStoreError(
            f"{path}: the store is closed, and what was not committed was rolled back: open it "
            "again. (Arrays of it stay usable, as private copies)"
        )
    elif status == _lib.PMS_E_READONLY:
        opened_so = what == "the store is open for reading"  # otherwise a sync has failed
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
        remedy = "Open it with domain='file', or 'process' on tmpfs"
        made = errors.DomainError(errno.EOPNOTSUPP, f"{what}. {remedy}", path)
    elif status == _lib.PMS_E_INDOUBT:
        return in_doubt(path, what)
    elif status == _lib.PMS_E_LOST:
        problem = f"what this reader shows cannot be read any more: {what}"
        made = errors.SnapshotLostError(
            f"{path}: {problem}. store.refresh() shows the last commit; refresh(keep=True) asks "
            "the writer to keep it until all of it was read. Arrays that were read before stay as "
            "they are"
        )
    elif status == _lib.PMS_E_STATE:
        made = errors.TransactionError(f"{path}: {what}")
    elif status == _lib.PMS_E_NOT_FOUND:
        return errors.NoSuchNameError(f"{path}: {what}")
    else:  # PMS_E_INVALID
        return ValueError(f"{path}: {what}")
    made.path = path
    made.problem = made.problem or problem
    return made


def fail(path: str, status: int, error: Any) -> NoReturn:
    """Raises what the error says of the call that returned the status."""
    if error.status != status:
        what = _ffi.string(error.what).decode("ascii", "replace")
        raise SystemError(
            f"pmstore: a call failed with status {status}, its error has {error.status}: {what}"
        )
    raise _exception(path, error)


def call(path: str, function: Any, *arguments: Any) -> None:
    """Calls a function of the engine that takes no pool: function(arguments, error). Raises: what
    its status says."""
    error = _ffi.new("struct pms_error *")
    if status := function(*arguments, error):
        fail(path, status, error)


def fail_at(path: str, address: int) -> NoReturn:
    """Raises what the error at the address says: `fail` for _binding.c, which has only the
    address."""
    raise _exception(path, _ffi.cast("struct pms_error *", address)) from None


_EXISTS = "the file exists: use mode='a' to open it, or 'w' to replace it"
_MISSING = "no such store: use mode='a' or 'x' to create it"


def fail_open(path: str, mode: str, address: int) -> NoReturn:
    """Raises what the error says of `open`: there a name that exists, or does not exist, is that of
    a file."""
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
