"""What a store, its groups and its lists share: the pool, the objects that are alive, and what is
written for an object."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol
from weakref import WeakValueDictionary, ref

import numpy as np

from pmstore._base.weak_registry import alive
from pmstore._engine._binding import Memory
from pmstore._engine.constants import ARRAY, VALUE
from pmstore._engine.failures import damaged, placed
from pmstore._engine.pool import Found, Pool
from pmstore.errors import (
    ClosedStoreError,
    CorruptStoreError,
    ForkedStoreError,
    MovedError,
    SnapshotLostError,
    TransactionError,
)
from pmstore.objects import array, tensor, values
from pmstore.objects.array import Descriptor


class Job(Protocol):
    """The job of a store that is committed together with other stores."""

    def settle(self) -> None:
        """Waits until all ranks have the last commit: then the version before it may be let go."""

    def alone(self, what: str) -> TransactionError:
        """Returns the error for what no rank may do by itself."""
        ...

    def give_way(self) -> None:
        """Ends what the job does with the store, which is about to join a job anew."""


class Core:
    """What a store and its groups share.

    lock: taken around each operation on objects, because what the engine finds holds until the next
        change only, and for the cache. A roll back and the end of the store take it too: they undo
        what another thread may just have found. It is never held while waiting for another thread's
        block.
    It does not keep out signal handlers and finalizers, which run in the thread that has it,
    between any two steps: so whatever is to be used is found and pinned in one call (`Pool.get`),
    and is checked afterwards, never looked up again.
    empty: the arrays and tensors without bytes that are alive, by node and description. Those with
        bytes are found by their block, which is not reused while they live: `_memory.c`.
    turns: of slots, by path: see `pmstore.objects.slots`.
    job: of several ranks, that the store is in.
    again: of a reader beside writers: opens the store as it is now. moves: how often that was done.
    """

    __slots__ = (
        *("__weakref__", "again", "empty", "job", "lock", "moves", "path", "pool", "process"),
        "turns",
    )

    def __init__(self, pool: Pool, again: Callable[[bool], Pool] | None = None) -> None:
        self.path: str = pool.path
        self.process: int = os.getpid()
        self.lock: threading.RLock = threading.RLock()
        self.job: Job | None = None
        self.again = again
        self.moves: int = 0
        self._take(pool)
        _cores[id(self)] = self

    def _take(self, pool: Pool) -> None:
        """Takes the pool, and forgets what was known of the one before. The pool is set last: an
        interrupt on the way leaves what was there before it."""
        pool.handle.lock = self.lock
        self.empty: WeakValueDictionary[tuple[int, bytes], Any] = WeakValueDictionary()
        self.turns: dict[tuple[bytes, ...], Any] = {}
        reference = ref(self)

        def take_in(memories: list[Memory]) -> None:
            if (core := reference()) is not None:
                core.take_in(memories)

        pool.handle.take_in = take_in
        self.pool = pool

    def refresh(self, keep: bool) -> bool:
        """Shows the writer's last commit: see `Store.refresh`, also for `keep`."""
        if self.again is None:
            raise TransactionError(
                f"{self.path}: only a store that was opened with mode='r', without lock=True, is "
                "read beside a writer: what this one shows is the state that it is in"
            )
        with self.lock:
            old = self.pool
            if not (keep or old.is_old() or self._is_replaced()):
                return False
            new, shown = self.again(keep), old.epoch()
            if new.info.uuid != old.info.uuid:
                new.handle.close(False, 0.0, lambda: False, lambda: None)
                raise SnapshotLostError(
                    f"{self.path}: another store lies there now: what this reader shows of its own "
                    "stays as it is, and nothing more of it can be read. Close it, and open the "
                    "path again"
                )
            try:
                self._take(new)
            finally:
                self.moves += 1
            old.handle.close(False, 0.0, lambda: False, lambda: None)
            return new.epoch() != shown

    def _is_replaced(self) -> bool:
        """Returns whether the path names another file now, or none."""
        try:
            return os.stat(self.path).st_ino != self.pool.info.inode
        except OSError:
            return True

    def _new_lock(self) -> None:
        self.lock = threading.RLock()
        self.pool.handle.lock = self.lock

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.path}: a store, and what is a part of it, cannot be pickled: give the other "
            "process the path, to open it with mode='r'. Arrays, tensors "
            "and values of it can be pickled, as copies"
        )

    # Only the next three decode what the file says. Their errors name the file, and the place in
    # it.

    def load(self, found: Any, name: str) -> Any:
        """Returns what `Pool.get`, `item` and `slot` found, as the program sees it: a value, or the
        array or tensor over the object's block.

        name: for messages. REQUIRES: the lock. Raises: CorruptStoreError.
        """
        if type(found) is not Found:
            return found  # the array or tensor that is alive
        if found.kind == VALUE:
            try:
                return values.look_up(found.meta)
            except CorruptStoreError as error:
                raise placed(self.path, error, found.node) from error
        if found.kind != ARRAY:
            raise damaged(
                self.path, f"an object of kind {found.kind}, which is none of a value", found.node
            )
        try:
            return self._bind(found, name)
        except CorruptStoreError as error:
            raise placed(self.path, error, found.node) from error

    def describe(self, found: Found) -> Descriptor:
        """Returns the whole description of an array or tensor, without touching its data.

        Raises: CorruptStoreError.
        """
        try:
            descriptor = Descriptor.unpack(found.meta)
            descriptor.check_dtype()
            return descriptor
        except CorruptStoreError as error:
            raise placed(self.path, error, found.node) from error

    def _bind(self, found: Found, name: str) -> Any:
        """Returns the array or tensor over the object's block: the one that is alive, or a new
        one."""
        descriptor = Descriptor.unpack(found.meta)
        dtype: Any = tensor.dtype_of(descriptor) if descriptor.torch else descriptor.in_numpy[0]
        array.check_bytes(descriptor, dtype.itemsize, found.data_bytes)
        memory = found.memory
        if memory is None:
            return self._bind_empty(found, descriptor, dtype)
        if not self.pool.info.read_only and memory.moved() is not None:
            self.take_in([memory])  # `give` finds it then
        made: Any
        if descriptor.torch:
            # torch has no read-only tensors; a write to one of a store opened with mode="r" is a
            # segmentation fault.
            memory.read_only = False
            made = tensor.bind(descriptor, memory)
            if not self.pool.info.read_only:
                _watch_torch()
            return memory.give(made, found.meta, name, None)
        return memory.give(array.bind(descriptor, memory), found.meta, name, dtype)

    def _bind_empty(self, found: Found, descriptor: Descriptor, dtype: Any) -> Any:
        key = (found.node, found.meta)
        alive = self.empty.get(key)
        if alive is not None and tuple(alive.shape) == descriptor.shape and alive.dtype == dtype:
            return alive
        writable = not self.pool.info.read_only
        made: Any = (
            tensor.bind(descriptor, None) if descriptor.torch else array.empty(descriptor, writable)
        )
        self.empty[key] = made
        return made

    def take_in(self, memories: list[Memory]) -> None:
        """Copies back what was given out over these memories and has left them, and binds it to
        them again. What was removed from the store since stays the program's own.

        Raises: MovedError for what cannot be.
        """
        for memory in memories:
            moved = memory.moved()
            if moved is None:
                memory.settle(False)
            elif not self.pool.is_live(memory.data):
                memory.settle(True)  # removed or replaced since: it is the program's own
            else:
                assert memory.meta is not None
                self._take_back(memory, moved, Descriptor.unpack(memory.meta))

    def _take_back(self, memory: Memory, moved: Any, descriptor: Descriptor) -> None:
        if isinstance(moved, np.ndarray):
            why = "numpy was told to use other memory for it"
        else:
            why = tensor.cannot_return(moved, descriptor)
        if why:
            name = memory.name
            raise MovedError(
                f"{self.path}: {name!r} left the store: {why}. What it holds now is not stored. "
                f"Assign it, store[{name!r}] = x: that stores a copy, and leaves x to the program; "
                "or let go of x, and look the stored one up again. To write in place, use x[...] = "
                "values or x.copy_(values); to give other processes a copy, "
                "x.clone().share_memory_()"
            )
        tensor.take_back(moved, descriptor, memory)
        memory.settle(False)


def represent(core: Core, kind: str, name: str, state: Callable[[], str]) -> str:
    """Returns the repr of something in a store. It never raises for what became of the store: a
    debugger asks at any time. state: describes the object while it is there."""
    try:
        told = state()
    except KeyError:
        told = "not in the store any more"
    except ClosedStoreError:
        told = "closed"
    except ForkedStoreError:
        told = "of the parent process"
    except CorruptStoreError:
        told = "damaged"
    return f"<pmstore.{kind} {name!r} of {core.path!r}, {told}>"


_cores: WeakValueDictionary[int, Core] = WeakValueDictionary()


def owner(address: int) -> str | None:
    """Returns the path of the store in whose heap the address is, if this process has the store
    open for writing: a write to the address is captured then. Otherwise returns None."""
    for core in alive(_cores):
        info = core.pool.info
        # after the close, other memory may lie there
        if 0 <= address - info.base < info.reserve_bytes and not core.pool.handle.closed:
            return core.path if not info.read_only and core.process == os.getpid() else None
    return None


def in_heap(address: int) -> bool:
    """Returns whether the heap of a store is there, or was, if that is closed: a tensor of it may
    be alive."""
    heaps = [core.pool.info for core in alive(_cores)]
    return any(0 <= address - one.base < one.reserve_bytes for one in heaps)


def is_captured(address: int) -> bool:
    """Returns whether a write to the address is captured."""
    return owner(address) is not None


def _watch_torch() -> None:
    from pmstore.objects import (
        collectives,
        torch_hooks,  # this needs torch, which is imported by now
    )

    collectives.install(is_captured)
    torch_hooks.install(owner)


def _new_locks() -> None:
    # another thread may have held one at the fork; in the child it is not there to give it back
    for core in alive(_cores):
        core._new_lock()


os.register_at_fork(after_in_child=_new_locks)


class Payload(NamedTuple):
    """What is written for an object: its description, and for an array the bytes to copy.
    `Pool.splice` takes payloads."""

    kind: int
    meta: bytes
    data_bytes: int = 0
    address: int = 0
    source: object = None
    """Keeps what the address points to."""


def payload(value: Any) -> Payload:
    """Describes an array, a tensor or a plain value.

    Raises: TypeError for what cannot be stored; ValueError.
    """
    source: Any
    if type(value) in values.LEAVES:  # the usual case
        return Payload(VALUE, values.encode(value))
    if type(value) is values.Encoded:
        return Payload(VALUE, value)
    if isinstance(value, np.ndarray):
        source, descriptor = array.describe(value)
        address, itemsize = array.address(source), source.dtype.itemsize
    elif tensor.is_tensor(value):
        source, descriptor = tensor.describe(value)
        address, itemsize = source.data_ptr(), source.element_size()
    else:
        return Payload(VALUE, values.encode(value))
    return Payload(
        ARRAY, descriptor.pack(), array.bytes_of(descriptor.shape, itemsize), address, source
    )
