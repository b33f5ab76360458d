"""What a store, its groups and its lists share: the pool, the objects that are alive, and what is written for an object."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import numpy as np

from pmstore import _ffi, array, tensor, values
from pmstore.alive import alive
from pmstore.array import Descriptor
from pmstore.errors import ClosedStoreError, CorruptStoreError, ForkedStoreError


class Core:
    """What a store and its groups share.

    lock: taken around each operation on objects, because what the engine finds holds until the next change only, and for
    the cache. A roll back and the end of the store take it too: they undo what another thread may just have found. It is
    never held while waiting for another thread's block.
    objects: the arrays and tensors that are alive, by (block or, without bytes, node; descriptor): the same object is
    given out again. A block is not reused while its object lives, so an entry that is found is right, whatever was
    committed, rolled back or renamed since.
    turns: of slots, by path: see `pmstore.slots`.
    removals: changes with every removal of a name: with the pool's `rollbacks` it tells whether a directory or list that
    was found before is still what it was.
    """

    __slots__ = ("__weakref__", "lock", "objects", "path", "pool", "process", "removals", "turns")

    def __init__(self, pool: _ffi.Pool) -> None:
        self.pool = pool
        self.path = pool.path
        self.process = os.getpid()
        self._new_lock()
        self.objects: WeakValueDictionary[tuple[int, bytes], Any] = WeakValueDictionary()
        self.removals = 0
        self.turns: dict[tuple[bytes, ...], Any] = {}
        _cores[id(self)] = self

    def _new_lock(self) -> None:
        self.lock = threading.RLock()
        self.pool.handle.lock = self.lock

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.path}: a store, and what is a part of it, cannot be pickled: give the other process the path, to open it "
            "with mode='r' when it is closed here. Arrays, tensors and values of it can be pickled, as copies"
        )

    def load(self, found: _ffi.Found) -> Any:
        """A value, or the array or tensor over the object's block. REQUIRES: the lock."""
        if found.kind == _ffi.VALUE:
            return values.decode(found.meta)
        if found.kind != _ffi.ARRAY:
            raise CorruptStoreError(f"{self.path}: an object of unknown kind {found.kind}")
        return self.bind(found)

    def bind(self, found: _ffi.Found) -> Any:
        """The array or tensor over the object's block: the one that is alive, or a new one. REQUIRES: the lock."""
        data = found.data
        key = (data or -found.node, found.meta)
        alive = self.objects.get(key)
        if alive is not None:
            return alive
        descriptor = Descriptor.unpack(found.meta)
        dtype: Any = tensor.dtype_of(descriptor) if descriptor.torch else descriptor.in_numpy[0]
        array.check_bytes(descriptor, dtype.itemsize, found.data_bytes)
        info = self.pool.info
        memory = None
        if found.data_bytes:
            # torch has no read-only tensors; a write to one of a store opened with mode="r" is a segmentation fault.
            read_only = info.read_only and not descriptor.torch
            memory = self.pool.handle.pin(data, info.base + data, found.data_bytes, read_only)
        made: Any
        if descriptor.torch:
            made = tensor.bind(descriptor, memory)
            if not info.read_only:
                _declare_collectives()
        elif memory is None:
            made = array.empty(descriptor, not info.read_only)
        else:
            made = array.bind(descriptor, memory)
        self.objects[key] = made
        return made


def represent(core: Core, kind: str, name: str, state: Callable[[], str]) -> str:
    """The repr of something in a store, whatever became of it: a debugger asks at any time. state: while it is there."""
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


def is_captured(address: int) -> bool:
    """Whether a store to the address is captured: it is in the heap of a store that this process has open for writing."""
    for core in alive(_cores):
        info = core.pool.info
        if 0 <= address - info.base < info.reserve_bytes and not core.pool.handle.closed:  # else others may lie there now
            return not info.read_only and core.process == os.getpid()
    return False


def _declare_collectives() -> None:
    from pmstore import collectives  # needs torch, which is there now

    collectives.install(is_captured)


def _new_locks() -> None:
    for core in alive(_cores):  # another thread may have held one at the fork; in the child it is not there to give it back
        core._new_lock()


os.register_at_fork(after_in_child=_new_locks)


class Payload(NamedTuple):
    """What is written for an object: its description, and for an array the bytes to copy. `Pool.splice` takes these."""

    kind: int
    meta: bytes
    data_bytes: int = 0
    address: int = 0
    source: object = None
    """Keeps what the address points to."""

    def is_at(self, core: Core, found: _ffi.Found | None) -> bool:
        """Whether the object there is this very array: an assignment of an object to its own place writes nothing."""
        return (
            found is not None
            and self.data_bytes > 0
            and found.kind == _ffi.ARRAY
            and found.meta == self.meta
            and core.pool.info.base + found.data == self.address
        )


def payload(value: Any) -> Payload:
    """Describes an array, a tensor or a plain value.

    Raises: TypeError for what cannot be stored; ValueError.
    """
    source: Any
    if type(value) in values.LEAVES:  # the usual case
        return Payload(_ffi.VALUE, values.encode(value))
    if isinstance(value, np.ndarray):
        source, descriptor = array.describe(value)
        address, itemsize = array.address(source), source.dtype.itemsize
    elif tensor.is_tensor(value):
        source, descriptor = tensor.describe(value)
        address, itemsize = source.data_ptr(), source.element_size()
    else:
        return Payload(_ffi.VALUE, values.encode(value))
    return Payload(_ffi.ARRAY, descriptor.pack(), array.bytes_of(descriptor.shape, itemsize), address, source)
