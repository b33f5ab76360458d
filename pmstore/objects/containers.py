"""Groups: mappings of names to values, arrays, tensors, lists and further groups. The store itself
is the outermost one."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pmstore.base import notebook
from pmstore.base.words import counted
from pmstore.engine.constants import (
    ARRAY,
    FILL_COPY,
    FILL_NONE,
    FILL_PATTERN,
    FILL_ZERO,
    GROUP,
    GROUPS_MAX,
    LIST,
    ROOT,
    VALUE,
)
from pmstore.engine.failures import damaged
from pmstore.engine.pool import Found
from pmstore.errors import CorruptStoreError, NameExistsError, PmstoreError
from pmstore.extras import optional
from pmstore.objects import array, dtypes
from pmstore.objects.array import Array, Descriptor
from pmstore.objects.core import Core, payload, represent
from pmstore.objects.lists import List
from pmstore.objects.slots import Slots
from pmstore.objects.slots import pack as pack_slots

if TYPE_CHECKING:
    import torch

NAME_MAX_BYTES = 4096
GROUPS_MAX = GROUPS_MAX
_BATCH = 1000
"""Names that an iteration reads at a time."""


@dataclass(frozen=True)
class Entry:
    """One name of a group, as `Group.entries` tells it. `dtype` and `shape` are None for values,
    groups and lists."""

    name: str
    kind: Literal["value", "array", "tensor", "group", "list", "slots"]
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    """Of the data (arrays, tensors; slots: of one version) or of the encoded value; 0 for groups
    and lists."""


def split_name(name: Any) -> list[bytes]:
    """A path's components.

    Raises: TypeError, ValueError.
    """
    if type(name) is str and name.isidentifier() and len(name) < 1000:
        return [name.encode()]  # the usual case
    if not isinstance(name, str):
        raise TypeError(f"names of a store are str, not {type(name).__name__}: {name!r}")
    try:
        parts = [part.encode() for part in name.split("/")]
    except UnicodeEncodeError as error:
        raise ValueError(f"a name must be encodable as UTF-8: {name!r} ({error.reason})") from None
    if len(parts) > GROUPS_MAX + 1:
        raise ValueError(
            f"a name lies in at most {GROUPS_MAX} groups within each other, this path in "
            f"{len(parts) - 1}"
        )
    for part in parts:
        if not part:
            raise ValueError(
                "a name is not empty, and '/' separates groups, so that none may stand first, last "
                f"or twice: {name!r}"
            )
        if len(part) > NAME_MAX_BYTES:
            raise ValueError(
                f"a name has at most {NAME_MAX_BYTES} bytes between slashes, this one has "
                f"{len(part)}: {name[:40]!r}..."
            )
        if b"\0" in part:
            raise ValueError(f"a name has no NUL character: {name!r}")
    return parts


class Group(MutableMapping[str, Any]):
    """A mapping in the store, named by its path. `"a/b"` is the name `b` of the group `a`; missing
    groups are created on assignment. Iteration is in order of insertion; what it has passed may be
    removed. It streams: of more than 1,000 names it holds no more at a time, and a RuntimeError
    says that it cannot go on because the name that is next was removed.

    `group[name]` is an array or tensor **over the heap**, whose writes are part of the next commit,
    and which is the same object as long as it lives; or a copy of a plain value, which has to be
    assigned again when it changes.

    A group is the path, not the object: if it is removed and made again, this is the new one.

    An array or tensor that is altered in place (`x.shape = ...`) is the program's: the store gives
    out a new one, over the same memory. A tensor that was told to use other memory (`x.data = ...`)
    is copied back into the store's, and lies there again, by the next look-up or commit; one that
    cannot be (another shape or dtype, shared memory) raises MovedError there.

    Raises (all methods): ClosedStoreError; TypeError or ValueError for a name that is no name;
    CorruptStoreError; and for changes ReadOnlyStoreError, StoreFullError (nothing changed),
    ForkedStoreError in a fork child, TransactionError while another thread or task is in a block
    (see `Store.transaction`).
    """

    __slots__ = ("_core", "_parts", "_prefix")

    def __init__(self, core: Core, parts: tuple[bytes, ...]) -> None:
        self._core = core
        self._parts = parts
        self._prefix = b"".join(part + b"\0" for part in parts)  # of the engine's paths

    # ---- finding ----

    def _path(self, name: Any) -> bytes:
        """The path from the root on, as the engine takes it. Raises: TypeError, ValueError."""
        if type(name) is str and name.isidentifier() and len(name) < 1000:
            return self._prefix + name.encode()  # the usual case
        parts = split_name(name)
        if len(self._parts) + len(parts) > GROUPS_MAX + 1:
            raise self._too_deep()
        return self._prefix + b"\0".join(parts)

    def _group_path(self, name: Any) -> bytes:
        """Of what is a group itself."""
        path = self._path(name)
        if path.count(b"\0") >= GROUPS_MAX:
            raise self._too_deep()
        return path

    def _too_deep(self) -> ValueError:
        return ValueError(
            f"{self._core.path}: a store has at most {GROUPS_MAX} groups within each other: use "
            "longer names, or lists"
        )

    def _full(self, name: str) -> tuple[bytes, ...]:
        return (*self._parts, *split_name(name))

    def _directory(self) -> int:
        """Holds until the next change."""
        if not self._parts:
            return ROOT
        found = self._core.pool.find(ROOT, self._prefix[:-1])
        if found is None or found.kind != GROUP:
            raise KeyError(f"the group {self.name!r} is not in the store any more")
        return found.data

    def _load(self, name: str, found: Any) -> Any:
        """Of what `Pool.get` gave. REQUIRES: the lock."""
        if type(found) is Found:
            if found.kind == GROUP:
                # who walks down by such handles comes to an end
                if len(self._parts) + name.count("/") >= GROUPS_MAX:
                    raise CorruptStoreError(
                        f"{self._core.path}: a group is in more than {GROUPS_MAX - 1} others"
                    )
                return (Slots if found.meta else Group)(self._core, self._full(name))
            if found.kind == LIST:
                return List(self._core, self._full(name))
        return self._core.load(found, name)

    def _told_more(self, name: str, error: NameExistsError) -> NameExistsError:
        """What is in the way, where the engine refused to put something there."""
        parts, pool, path = self._full(name), self._core.pool, self._core.path
        for at in range(1, len(parts)):
            found = pool.find(ROOT, b"\0".join(parts[:at]))
            if found is not None and found.kind != GROUP:
                return NameExistsError(
                    f"{path}: {parts[at - 1].decode()!r} is no group, so nothing can be stored "
                    "under it: choose another name, or del it first"
                )
            if found is not None and found.meta:
                return NameExistsError(
                    f"{path}: {parts[at - 1].decode()!r} is a pair of slots, and names below it "
                    "are its own: write .next and flip(), or del the pair first"
                )
        found = pool.find(ROOT, b"\0".join(parts))
        if found is None or found.kind not in (GROUP, LIST):
            return error
        what = "list: assign to its items"
        if found.kind == GROUP:
            what = (
                "pair of slots: write .next and flip()"
                if found.meta
                else "group: assign to names in it"
            )
        return NameExistsError(
            f"{path}: {parts[-1].decode()!r} is a {what}, or del it and all it holds first"
        )

    # ---- the mapping ----

    @property
    def name(self) -> str:
        """The group's path; "" for the store."""
        return b"/".join(self._parts).decode()

    def __getitem__(self, name: str) -> Any:
        """Raises: KeyError."""
        core = self._core
        with core.lock:
            found = core.pool.get(ROOT, self._path(name), False)
            if type(found) is not Found:
                if found is None:
                    raise KeyError(name)
                return found  # the array or tensor that is alive
            return core.load(found, name) if found.kind == VALUE else self._load(name, found)

    def __contains__(self, name: object) -> bool:
        with self._core.lock:
            return self._core.pool.find(ROOT, self._path(name)) is not None

    def __len__(self) -> int:
        with self._core.lock:
            return self._core.pool.count(self._directory())

    def __iter__(self) -> Iterator[str]:
        pool = self._core.pool
        with self._core.lock:
            directory = self._directory()
            names = pool.names(directory, 0, _BATCH + 1)
            left = pool.count(directory)
        return map(bytes.decode, names if len(names) <= _BATCH else self._stream(names, left))

    def _stream(self, names: list[bytes], left: int) -> Iterator[bytes]:
        """Goes on where a batch ended, by the name of what comes next: it is looked up again,
        whatever happened meanwhile."""
        while True:
            following = names.pop() if len(names) > _BATCH else None
            yield from names[:left]
            left -= len(names)
            if following is None or left <= 0:
                return
            with self._core.lock:
                found = self._core.pool.find(ROOT, self._prefix + following)
                if found is None:
                    raise RuntimeError(
                        f"the group {self.name!r} changed while it was iterated: iterate over "
                        "list(group)"
                    )
                names = [following, *self._core.pool.names(self._directory(), found.node, _BATCH)]

    def __setitem__(self, name: str, value: Any) -> None:
        """Copies the value in. What had the name is freed at the next commit; arrays of it stay
        valid as long as they live.

        An array or tensor assigned to its own name stays where it is (`store["w"] += 1` allocates
        nothing). Durable after the next commit.

        Raises: TypeError for what cannot be stored; NameExistsError if the name is a group.
        """
        path = self._path(name)
        if isinstance(value, Slots):
            raise TypeError(
                "slots of a store are not a value: make some with slots(name, shape, dtype), and "
                "fill .next"
            )
        if isinstance(value, (Group, List)):
            if (
                isinstance(value, List)
                and value == List(self._core, self._full(name))
                and name in self
            ):
                return  # store["losses"] += [0.5]
            kind = "group" if isinstance(value, Group) else "list"
            raise TypeError(
                f"a {kind} of a store is not a value: open one with {kind}(name), and assign its "
                "items"
            )
        new, pool = payload(value), self._core.pool
        with self._core.lock:
            try:
                if new.kind == VALUE:
                    pool.put_value(ROOT, path, new.meta)
                else:
                    pool.put_array(
                        ROOT,
                        path,
                        new.meta,
                        new.data_bytes,
                        fill=FILL_COPY,
                        source=new.address,
                        source_bytes=new.data_bytes,
                    )
            except NameExistsError as error:
                raise self._told_more(name, error) from None

    def __delitem__(self, name: str) -> None:
        """Removes the object, or the group with all it holds. Room is free after the next commit;
        works when full.

        Raises: KeyError; NameExistsError for a name below slots.
        """
        with self._core.lock:
            try:
                removed = self._core.pool.remove(ROOT, self._path(name))
            except NameExistsError as error:
                raise self._told_more(name, error) from None
            if not removed:
                raise KeyError(name)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """`self[name]`, after storing default there if there is nothing: what is returned is the
        stored one."""
        with self._core.lock:
            if name not in self:
                self[name] = default
            return self[name]

    def clear(self) -> None:
        """Removes everything in this group."""
        with self._core.lock:
            for name in list(self):
                del self[name]

    # As for any handle of something outside: two are equal if they are one. Comparing contents
    # would compare arrays.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    # ---- making arrays ----

    def _create(
        self, name: str, descriptor: Descriptor, itemsize: int, fill: int, pattern: bytes = b""
    ) -> Any:
        path = self._path(name)
        data_bytes = array.bytes_of(descriptor.shape, itemsize)
        if data_bytes > array.LARGEST_BYTES:
            raise ValueError(f"an array of shape {descriptor.shape} is larger than any memory")
        core = self._core
        meta = descriptor.pack()
        source = np.frombuffer(pattern, np.uint8) if pattern else np.empty(0, np.uint8)
        with core.lock:
            try:
                core.pool.put_array(
                    ROOT,
                    path,
                    meta,
                    data_bytes,
                    fill=fill,
                    source=array.address(source),
                    source_bytes=len(pattern),
                    must_be_new=True,
                )
            except NameExistsError as error:
                if core.pool.find(ROOT, path) is None:
                    raise self._told_more(name, error) from None
                raise NameExistsError(
                    f"{core.path}: {name!r} is in the store already: use store.require(name, "
                    "shape, dtype), which returns what is there or creates it, or store[name] = "
                    "array to replace it"
                ) from None
            found = core.pool.get(ROOT, path, False)
            if found is None:
                # another thread's block rolled back in this very moment, or a signal handler
                # removed it
                raise KeyError(name)
            return self._load(name, found)

    def empty(self, name: str, shape: Any, dtype: Any = np.float64) -> Array:
        """A new array over the heap, of unspecified content. shape: an int or a sequence; dtype: of
        numpy, no objects.

        The array is 64-byte aligned and stays where it is; it is in the store after the next
        commit.

        Raises: NameExistsError, StoreFullError, TypeError (dtype).
        """
        descriptor, itemsize = _numpy_descriptor(shape, dtype)
        result: Array = self._create(name, descriptor, itemsize, FILL_NONE)
        return result

    def zeros(self, name: str, shape: Any, dtype: Any = np.float64) -> Array:
        """As `empty`, filled with zeros."""
        descriptor, itemsize = _numpy_descriptor(shape, dtype)
        result: Array = self._create(name, descriptor, itemsize, FILL_ZERO)
        return result

    def full(self, name: str, shape: Any, fill_value: Any, dtype: Any = None) -> Array:
        """As `empty`, filled with the value. dtype: None = that of the value."""
        element = np.asarray(fill_value, dtype=dtype)
        descriptor, itemsize = _numpy_descriptor(shape, element.dtype)
        if element.ndim == 0 and itemsize:
            result: Array = self._create(
                name, descriptor, itemsize, FILL_PATTERN, element.tobytes()
            )
            return result
        np.broadcast_to(element, descriptor.shape)  # raises before anything is made
        result = self._create(name, descriptor, itemsize, FILL_NONE)
        result[...] = element
        return result

    def tensor(self, name: str, shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new torch tensor over the heap, filled with zeros. dtype: None = torch's default.

        Raises: as `empty`; ModuleNotFoundError without torch.
        """
        with optional:
            import torch

        descriptor, itemsize = _torch_descriptor(
            shape, torch.get_default_dtype() if dtype is None else dtype
        )
        result: torch.Tensor = self._create(name, descriptor, itemsize, FILL_ZERO)
        return result

    def require(self, name: str, shape: Any, dtype: Any = np.float64) -> Any:
        """The array of that name, shape and dtype (a tensor if it is a torch dtype): what is there,
        or a new one of zeros.

        Raises: NameExistsError if something else has the name; the message says what.
        """
        is_torch = dtypes.is_torch_dtype(dtype)
        descriptor, itemsize = (_torch_descriptor if is_torch else _numpy_descriptor)(shape, dtype)
        with self._core.lock:
            found = self._core.pool.get(ROOT, self._path(name), True)
            if found is None:
                return self._create(name, descriptor, itemsize, FILL_ZERO)
            if found.kind == ARRAY:
                there = self._core.describe(found)
                if (there.torch, there.dtype, there.shape) == (
                    descriptor.torch,
                    descriptor.dtype,
                    descriptor.shape,
                ):
                    return self._core.load(found, name)
                what = (
                    f"{'a tensor' if there.torch else 'an array'} of shape {there.shape}, dtype "
                    f"{there.dtype_name()}"
                )
            else:
                what = {GROUP: "a group", LIST: "a list"}.get(found.kind, "a plain value")
            raise NameExistsError(
                f"{self._core.path}: {name!r} is {what}; required was shape {descriptor.shape}, "
                f"dtype {descriptor.dtype_name()}: del it first, or use another name"
            )

    def group(self, name: str) -> Group:
        """The group of that name, opened or created.

        Raises: NameExistsError if the name is no group.
        """
        path, pool = self._group_path(name), self._core.pool
        with self._core.lock:
            found = pool.find(ROOT, path)
            if found is not None and found.kind != GROUP:
                raise NameExistsError(
                    f"{self._core.path}: {split_name(name)[-1].decode()!r} is no group, so nothing "
                    "can be stored under it: choose another name, or del it first"
                )
            if found is not None and found.meta and not pool.info.read_only:
                raise self._told_more(f"{name}/0", NameExistsError())
            if found is not None:
                return Group(self._core, self._full(name))
            try:
                if pool.group(ROOT, path, create=not pool.info.read_only) is None:
                    raise KeyError(name)
            except NameExistsError as error:
                raise self._told_more(name, error) from None
        return Group(self._core, self._full(name))

    def list(self, name: str) -> List:
        """The persistent list of that name, opened or created.

        Raises: NameExistsError if the name is no list.
        """
        path, pool = self._path(name), self._core.pool
        with self._core.lock:
            found = pool.find(ROOT, path)
            if found is not None and found.kind != LIST:
                raise NameExistsError(
                    f"{self._core.path}: {name!r} is no list: del it first, or use another name"
                )
            try:
                if pool.open_list(ROOT, path, create=not pool.info.read_only) is None:
                    raise KeyError(name)
            except NameExistsError as error:
                raise self._told_more(name, error) from None
        return List(self._core, self._full(name))

    def slots(self, name: str, shape: Any = None, dtype: Any = None) -> Slots:
        """The slots of that name: opened, or made with both versions zero. See
        `pmstore.objects.slots.Slots`.

        shape, dtype: of numpy or torch (then the versions are tensors), as for `zeros` and
            `tensor`; dtype None is float64. They may be left out to open what is there.

        Raises: NameExistsError if the name is something else, or has another shape or dtype;
            KeyError if it is not there and no shape was given; StoreFullError (nothing changed).
        """
        made = Slots(self._core, self._full(name))
        is_torch = dtypes.is_torch_dtype(dtype)
        given: tuple[Descriptor, int] | None = None
        if shape is not None:
            describe: Any = _torch_descriptor if is_torch else _numpy_descriptor
            given = describe(shape, np.float64 if dtype is None else dtype)
        with self._core.lock:
            found = self._core.pool.find(ROOT, self._group_path(name))
            if found is None:
                if given is None:
                    raise KeyError(name)
                self._make_slots(name, *given)
            elif found.kind != GROUP or not found.meta:
                raise NameExistsError(
                    f"{self._core.path}: {name!r} is no pair of slots: del it first, or use "
                    "another name"
                )
            elif given is not None:
                there, wanted = made._description(), given[0]
                if (there.torch, there.dtype, there.shape) != (
                    wanted.torch,
                    wanted.dtype,
                    wanted.shape,
                ):
                    raise NameExistsError(
                        f"{self._core.path}: the slots {name!r} have shape {there.shape}, dtype "
                        f"{there.dtype_name()}; asked for was shape {wanted.shape}, dtype "
                        f"{wanted.dtype_name()}: del them first, or use another name"
                    )
        return made

    def _make_slots(self, name: str, descriptor: Descriptor, itemsize: int) -> None:
        """REQUIRES: the lock; nothing has the name."""
        data_bytes = array.bytes_of(descriptor.shape, itemsize)
        if data_bytes > array.LARGEST_BYTES:
            raise ValueError(f"an array of shape {descriptor.shape} is larger than any memory")
        try:
            self._core.pool.make_slots(
                ROOT, self._path(name), pack_slots(0), descriptor.pack(), data_bytes
            )
        except NameExistsError as error:
            raise self._told_more(name, error) from None
        self._core.turns.pop(self._full(name), None)

    # ---- looking at it ----

    def entries(self) -> builtins.list[Entry]:
        """What is in this group, in order of insertion, without touching the data.

        Raises: CorruptStoreError.
        """
        with self._core.lock:
            found = self._core.pool.entries(self._directory())
            return [self._told(name.decode(), thing) for name, thing in found]

    def _told(self, name: str, found: Found) -> Entry:
        """REQUIRES: the lock."""
        if found.kind == GROUP and found.meta:
            version = self._core.pool.find(found.data, b"0")  # both are of one description
            if version is None:
                raise damaged(self._core.path, f"the slots {name!r} lack an array", found.node)
            return replace(_entry(self._core, name, version), kind="slots")
        return _entry(self._core, name, found)

    def __repr__(self) -> str:
        return represent(self._core, "Group", self.name, lambda: counted(len(self), "name"))

    def _repr_html_(self) -> str:
        try:
            entries = self.entries()
        except (KeyError, PmstoreError):  # removed, closed, of the parent process: the line says so
            return notebook.table(repr(self), [], [], 0)
        rows = (
            (e.name, e.kind, e.dtype or "", "" if e.shape is None else e.shape, f"{e.nbytes:,}")
            for e in entries
        )
        head = ("name", "kind", "dtype", "shape", "bytes")
        return notebook.table(repr(self), head, islice(rows, notebook.SHOWN), len(entries))


def tree(group: Group) -> builtins.list[Entry]:
    """What is in a group and in all below, each with its path from there, a group before what is in
    it; slots are one thing.

    Raises: CorruptStoreError, also if groups contain each other.
    """
    told, slots = [], b"\0"
    with group._core.lock:
        for path, found in group._core.pool.tree(group._directory()):
            if not path.startswith(slots):
                told.append(group._told(path.decode(), found))
                slots = path + b"/" if told[-1].kind == "slots" else slots
    return told


def _entry(core: Core, name: str, found: Found) -> Entry:
    if found.kind in (GROUP, LIST):
        return Entry(name, "group" if found.kind == GROUP else "list", None, None, 0)
    if found.kind == VALUE:
        return Entry(name, "value", None, None, len(found.meta))
    descriptor = core.describe(found)
    kind: Literal["tensor", "array"] = "tensor" if descriptor.torch else "array"
    return Entry(name, kind, descriptor.dtype_name(), descriptor.shape, found.data_bytes)


def _numpy_descriptor(shape: Any, dtype: Any) -> tuple[Descriptor, int]:
    if dtypes.is_torch_dtype(dtype):
        raise TypeError(
            f"{dtype} is a torch dtype: make tensors with store.tensor(name, shape, dtype)"
        )
    element = np.dtype(dtype)
    if element.char in "SUV" and element.itemsize == 0:
        element = np.empty(0, element).dtype  # numpy makes 'U' a string of one character here
    lengths = array.normal_shape(shape)
    # elements that are arrays lengthen the shape, as everywhere in numpy
    while element.subdtype is not None:
        element, inner = element.subdtype
        lengths += inner
    return Descriptor(False, dtypes.encode_numpy(element), lengths), element.itemsize


def _torch_descriptor(shape: Any, dtype: torch.dtype) -> tuple[Descriptor, int]:
    return Descriptor(True, dtypes.encode_torch(dtype), array.normal_shape(shape)), dtype.itemsize
