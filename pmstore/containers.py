"""Groups: mappings of names to values, arrays, tensors and further groups. The store itself is the outermost one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from pmstore import _ffi, array, dtypes, tensor, values
from pmstore.array import Array, Descriptor
from pmstore.errors import CorruptStoreError, NameExistsError

if TYPE_CHECKING:
    import torch

NAME_MAX_BYTES = 4096


class Core:
    """What a store and its groups share.

    lock: taken around each operation on objects, because what the engine finds holds until the next change only, and for
    the cache. It is never held while waiting for another thread's block (transactions do not take it).
    objects: the arrays and tensors that are alive, by (block or, without bytes, node; descriptor): the same object is
    given out again. A block is not reused while its object lives, so an entry that is found is right, whatever was
    committed, rolled back or renamed since.
    """

    __slots__ = ("__weakref__", "lock", "objects", "path", "pool")

    def __init__(self, pool: _ffi.Pool) -> None:
        self.pool = pool
        self.path = pool.path
        self.lock = threading.RLock()
        self.objects: WeakValueDictionary[tuple[int, bytes], Any] = WeakValueDictionary()
        _cores.add(self)


_cores: WeakSet[Core] = WeakSet()


def _new_locks() -> None:
    for core in _cores:  # another thread may have held one at the fork; in the child it is not there to give it back
        core.lock = threading.RLock()


os.register_at_fork(after_in_child=_new_locks)


@dataclass(frozen=True)
class Entry:
    """One name of a group, as `Group.entries` tells it. `dtype` and `shape` are None for values and groups."""

    name: str
    kind: Literal["value", "array", "tensor", "group"]
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    """Of the data (arrays, tensors) or of the encoded value; 0 for a group."""


def split_name(name: Any) -> list[bytes]:
    """A path's components.

    Raises: TypeError, ValueError.
    """
    if not isinstance(name, str):
        raise TypeError(f"names of a store are str, not {type(name).__name__}: {name!r}")
    try:
        parts = [part.encode() for part in name.split("/")]
    except UnicodeEncodeError as error:
        raise ValueError(f"a name must be encodable as UTF-8: {name!r} ({error.reason})") from None
    for part in parts:
        if not part:
            raise ValueError(
                f"a name is not empty, and '/' separates groups, so that none may stand first, last or twice: {name!r}"
            )
        if len(part) > NAME_MAX_BYTES:
            raise ValueError(
                f"a name has at most {NAME_MAX_BYTES} bytes between slashes, this one has {len(part)}: {name[:40]!r}..."
            )
        if b"\0" in part:
            raise ValueError(f"a name has no NUL character: {name!r}")
    return parts


class Group(MutableMapping[str, Any]):
    """A mapping in the store, named by its path. `"a/b"` is the name `b` of the group `a`; missing groups are created on
    assignment. Iteration is in order of insertion, over the names that were there when it began.

    `group[name]` is an array or tensor **over the heap**, whose writes are part of the next commit, and which is the same
    object as long as it lives; or a copy of a plain value, which has to be assigned again when it changes.

    A group is the path, not the object: if it is removed and made again, this is the new one.

    Raises (all methods): ClosedStoreError, and for changes ReadOnlyStoreError, StoreFullError (nothing changed),
    ForkedStoreError in a fork child; TypeError or ValueError for a name that is no name; CorruptStoreError.
    """

    __slots__ = ("_core", "_parts")

    def __init__(self, core: Core, parts: tuple[bytes, ...]) -> None:
        self._core = core
        self._parts = parts

    # ---- finding ----

    def _walk(self, parts: list[bytes], create: bool) -> int | None:
        """The directory of a path below this group. REQUIRES: the lock. None: a group on the way is not there."""
        pool = self._core.pool
        directory: int | None = _ffi.ROOT
        for part in (*self._parts, *parts):
            assert directory is not None
            try:
                directory = pool.group(directory, part, create=create)
            except NameExistsError:
                if not create:
                    return None
                raise NameExistsError(
                    f"{self._core.path}: {part.decode()!r} is a value or an array, so nothing can be stored under it: "
                    "choose another name, or del it first"
                ) from None
            if directory is None:
                return None
        return directory

    def _directory(self) -> int:
        directory = self._walk([], create=False)
        if directory is None:
            raise KeyError(f"the group {self.name!r} is not in the store any more")
        return directory

    def _find(self, name: Any) -> tuple[list[bytes], _ffi.Found | None]:
        parts = split_name(name)
        directory = self._walk(parts[:-1], create=False)
        return parts, None if directory is None else self._core.pool.find(directory, parts[-1])

    def _load(self, parts: list[bytes], found: _ffi.Found) -> Any:
        if found.kind == _ffi.VALUE:
            return values.decode(found.meta)
        if found.kind == _ffi.GROUP:
            return Group(self._core, (*self._parts, *parts))
        if found.kind != _ffi.ARRAY:
            raise CorruptStoreError(f"{self._core.path}: an object of unknown kind {found.kind}")
        return self._bind(found)

    def _bind(self, found: _ffi.Found) -> Any:
        """The array or tensor over the object's block: the one that is alive, or a new one."""
        core, data = self._core, found.data
        key = (data or -found.node, found.meta)
        alive = core.objects.get(key)
        if alive is not None:
            return alive
        descriptor = Descriptor.unpack(found.meta)
        if descriptor.torch:
            dtype: Any = tensor.dtype_of(descriptor)
        else:
            dtype = array.numpy_dtype(descriptor)
        array.check_bytes(descriptor, dtype.itemsize, found.data_bytes)
        info = core.pool.info
        memory = None
        if found.data_bytes:
            # torch has no read-only tensors; a write to one of a store opened with mode="r" is a segmentation fault.
            read_only = info.read_only and not descriptor.torch
            memory = core.pool.handle.pin(data, info.base + data, found.data_bytes, read_only)
        made: Any
        if descriptor.torch:
            made = tensor.bind(descriptor, memory)
        elif memory is None:
            made = array.empty(descriptor, not info.read_only)
        else:
            made = array.bind(descriptor, memory)
        core.objects[key] = made
        return made

    # ---- the mapping ----

    @property
    def name(self) -> str:
        """The group's path; "" for the store."""
        return b"/".join(self._parts).decode()

    def __getitem__(self, name: str) -> Any:
        """Raises: KeyError."""
        with self._core.lock:
            parts, found = self._find(name)
            if found is None:
                raise KeyError(name)
            return self._load(parts, found)

    def __contains__(self, name: object) -> bool:
        with self._core.lock:
            return self._find(name)[1] is not None

    def __len__(self) -> int:
        with self._core.lock:
            return self._core.pool.count(self._directory())

    def __iter__(self) -> Iterator[str]:
        with self._core.lock:
            names = self._core.pool.names(self._directory())
        return iter([_text(name) for name in names])

    def __setitem__(self, name: str, value: Any) -> None:
        """Copies the value in. What had the name is freed at the next commit; arrays of it stay valid as long as they live.

        An array or tensor assigned to its own name stays where it is (`store["w"] += 1` allocates nothing).
        Durable after the next commit.

        Raises: TypeError for what cannot be stored; NameExistsError if the name is a group.
        """
        parts = split_name(name)
        is_tensor = tensor.is_tensor(value)
        if is_tensor or isinstance(value, np.ndarray):
            self._put_array(parts, value, is_tensor)
            return
        if isinstance(value, Group):
            raise TypeError("a group is not a value: open one with group(name), and assign its items")
        meta = values.encode(value)
        with self._core.lock:
            directory = self._make_way(parts)
            self._core.pool.put_value(directory, parts[-1], meta)

    def _make_way(self, parts: list[bytes]) -> int:
        """The directory for an assignment to the path. REQUIRES: the lock."""
        directory = self._walk(parts[:-1], create=True)
        assert directory is not None
        found = self._core.pool.find(directory, parts[-1])
        if found is not None and found.kind == _ffi.GROUP:
            raise NameExistsError(
                f"{self._core.path}: {parts[-1].decode()!r} is a group: assign to names in it, or del it and all it holds first"
            )
        return directory

    def _put_array(self, parts: list[bytes], value: Any, is_tensor: bool) -> None:
        source: Any  # keeps what the address points to
        if is_tensor:
            source, descriptor = tensor.describe(value)
            address, itemsize = source.data_ptr(), source.element_size()
        else:
            source, descriptor = array.describe(value)
            address, itemsize = array.address(source), source.dtype.itemsize
        data_bytes = array.bytes_of(descriptor.shape, itemsize)
        meta = descriptor.pack()
        core = self._core
        with core.lock:
            directory = self._make_way(parts)
            old = core.pool.find(directory, parts[-1])
            if (
                old is not None
                and data_bytes
                and old.kind == _ffi.ARRAY
                and old.meta == meta
                and core.pool.info.base + old.data == address
            ):
                return  # its own name
            core.pool.put_array(
                directory, parts[-1], meta, data_bytes, fill=_ffi.FILL_COPY, source=address, source_bytes=data_bytes
            )

    def __delitem__(self, name: str) -> None:
        """Removes the object, or the group with all it holds. Room is free after the next commit; works when full.

        Raises: KeyError.
        """
        parts = split_name(name)
        with self._core.lock:
            directory = self._walk(parts[:-1], create=False)
            if directory is None or not self._core.pool.remove(directory, parts[-1]):
                raise KeyError(name)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """`self[name]`, after storing default there if there is nothing: what is returned is the stored one."""
        with self._core.lock:
            if name not in self:
                self[name] = default
            return self[name]

    def clear(self) -> None:
        """Removes everything in this group."""
        with self._core.lock:
            for name in list(self):
                del self[name]

    # As for any handle of something outside: two are equal if they are one. Comparing contents would compare arrays.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    # ---- making arrays ----

    def _create(self, name: str, descriptor: Descriptor, itemsize: int, fill: int, pattern: bytes = b"") -> Any:
        parts = split_name(name)
        data_bytes = array.bytes_of(descriptor.shape, itemsize)
        if data_bytes > array.LARGEST_BYTES:
            raise ValueError(f"an array of shape {descriptor.shape} is larger than any memory")
        core = self._core
        meta = descriptor.pack()
        source = np.frombuffer(pattern, np.uint8) if pattern else np.empty(0, np.uint8)
        with core.lock:
            directory = self._walk(parts[:-1], create=True)
            assert directory is not None
            try:
                core.pool.put_array(
                    directory,
                    parts[-1],
                    meta,
                    data_bytes,
                    fill=fill,
                    source=array.address(source),
                    source_bytes=len(pattern),
                    must_be_new=True,
                )
            except NameExistsError:
                raise NameExistsError(
                    f"{core.path}: {name!r} is in the store already: use store.require(name, shape, dtype), which returns "
                    f"what is there or creates it, or store[name] = array to replace it"
                ) from None
            found = core.pool.find(directory, parts[-1])
            if found is None:
                raise KeyError(name)  # another thread's block rolled back in this very moment
            return self._bind(found)

    def empty(self, name: str, shape: Any, dtype: Any = np.float64) -> Array:
        """A new array over the heap, of unspecified content. shape: an int or a sequence; dtype: of numpy, no objects.

        The array is 64-byte aligned and stays where it is; it is in the store after the next commit.

        Raises: NameExistsError, StoreFullError, TypeError (dtype).
        """
        descriptor, itemsize = _numpy_descriptor(shape, dtype)
        result: Array = self._create(name, descriptor, itemsize, _ffi.FILL_NONE)
        return result

    def zeros(self, name: str, shape: Any, dtype: Any = np.float64) -> Array:
        """As `empty`, filled with zeros."""
        descriptor, itemsize = _numpy_descriptor(shape, dtype)
        result: Array = self._create(name, descriptor, itemsize, _ffi.FILL_ZERO)
        return result

    def full(self, name: str, shape: Any, fill_value: Any, dtype: Any = None) -> Array:
        """As `empty`, filled with the value. dtype: None = that of the value."""
        element = np.asarray(fill_value, dtype=dtype)
        descriptor, itemsize = _numpy_descriptor(shape, element.dtype)
        if element.ndim == 0 and itemsize:
            result: Array = self._create(name, descriptor, itemsize, _ffi.FILL_PATTERN, element.tobytes())
            return result
        np.broadcast_to(element, descriptor.shape)  # raises before anything is made
        result = self._create(name, descriptor, itemsize, _ffi.FILL_NONE)
        result[...] = element
        return result

    def tensor(self, name: str, shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new torch tensor over the heap, filled with zeros. dtype: None = torch's default.

        Raises: as `empty`; ImportError without torch.
        """
        import torch

        descriptor, itemsize = _torch_descriptor(shape, torch.get_default_dtype() if dtype is None else dtype)
        result: torch.Tensor = self._create(name, descriptor, itemsize, _ffi.FILL_ZERO)
        return result

    def require(self, name: str, shape: Any, dtype: Any = np.float64) -> Any:
        """The array of that name, shape and dtype (a tensor if it is a torch dtype): what is there, or a new one of zeros.

        Raises: NameExistsError if something else has the name; the message says what.
        """
        is_torch = dtypes.is_torch_dtype(dtype)
        descriptor, itemsize = (_torch_descriptor if is_torch else _numpy_descriptor)(shape, dtype)
        with self._core.lock:
            parts, found = self._find(name)
            if found is None:
                return self._create(name, descriptor, itemsize, _ffi.FILL_ZERO)
            if found.kind == _ffi.ARRAY:
                there = Descriptor.unpack(found.meta)
                if (there.torch, there.dtype, there.shape) == (descriptor.torch, descriptor.dtype, descriptor.shape):
                    return self._load(parts, found)
                what = f"{'a tensor' if there.torch else 'an array'} of shape {there.shape}, dtype {there.dtype_name()}"
            else:
                what = "a group" if found.kind == _ffi.GROUP else "a plain value"
            raise NameExistsError(
                f"{self._core.path}: {name!r} is {what}; required was shape {descriptor.shape}, "
                f"dtype {descriptor.dtype_name()}: del it first, or use another name"
            )

    def group(self, name: str) -> Group:
        """The group of that name, opened or created.

        Raises: NameExistsError if the name is no group.
        """
        parts = split_name(name)
        with self._core.lock:
            if self._walk(parts, create=not self._core.pool.info.read_only) is None:
                raise KeyError(name)
        return Group(self._core, (*self._parts, *parts))

    # ---- looking at it ----

    def entries(self) -> list[Entry]:
        """What is in this group, in order of insertion, without touching the data.

        Raises: CorruptStoreError.
        """
        with self._core.lock:
            found = self._core.pool.entries(self._directory())
        return [_entry(_text(name), thing) for name, thing in found]

    def __repr__(self) -> str:
        if self._core.pool.handle.closed:
            return f"<pmstore.Group {self.name!r} of {self._core.path!r}, closed>"
        return f"<pmstore.Group {self.name!r} of {self._core.path!r}, {len(self)} names>"


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise CorruptStoreError(f"a name in the store is not UTF-8: {name[:40]!r}") from error


def _entry(name: str, found: _ffi.Found) -> Entry:
    if found.kind == _ffi.GROUP:
        return Entry(name, "group", None, None, 0)
    if found.kind == _ffi.VALUE:
        return Entry(name, "value", None, None, len(found.meta))
    descriptor = Descriptor.unpack(found.meta)
    kind: Literal["tensor", "array"] = "tensor" if descriptor.torch else "array"
    return Entry(name, kind, descriptor.dtype_name(), descriptor.shape, found.data_bytes)


def _numpy_descriptor(shape: Any, dtype: Any) -> tuple[Descriptor, int]:
    if dtypes.is_torch_dtype(dtype):
        raise TypeError(f"{dtype} is a torch dtype: make tensors with store.tensor(name, shape, dtype)")
    element = np.dtype(dtype)
    if element.char in "SUV" and element.itemsize == 0:
        element = np.empty(0, element).dtype  # numpy makes 'U' a string of one character here
    lengths = array.normal_shape(shape)
    while element.subdtype is not None:  # elements that are arrays lengthen the shape, as everywhere in numpy
        element, inner = element.subdtype
        lengths += inner
    return Descriptor(False, dtypes.encode_numpy(element), lengths), element.itemsize


def _torch_descriptor(shape: Any, dtype: torch.dtype) -> tuple[Descriptor, int]:
    return Descriptor(True, dtypes.encode_torch(dtype), array.normal_shape(shape)), dtype.itemsize
