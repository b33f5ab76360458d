"""Groups: mappings of names to values, arrays, tensors, lists and further groups. The store itself
is the outermost one."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, MutableMapping
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from pmstore._base import notebook
from pmstore._base.text import counted
from pmstore._engine.constants import (
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
from pmstore._engine.pool import MISSING, Found
from pmstore.errors import CorruptStoreError, NameExistsError, NoSuchNameError, PmstoreError
from pmstore.extras import optional
from pmstore.objects import array, dtypes, tensor
from pmstore.objects.array import Array, Descriptor, Shape
from pmstore.objects.core import Core, payload, represent
from pmstore.objects.entries import Entry, tell
from pmstore.objects.lists import List, open_list
from pmstore.objects.names import in_the_way, split_name
from pmstore.objects.new_array import NewArray
from pmstore.objects.slots import Slots, describe_new, open_slots

if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike

_PLAIN = frozenset((type(None), bool, int, float, str, bytes, list, tuple, dict))
_BATCH = 1000  # names that an iteration reads at a time


class Group(MutableMapping[str, Any]):
    """A mapping in the store, named by its path. `"a/b"` is the name `b` of the group `a`; missing
    groups are created on assignment. Iteration is in order of insertion; what it has passed may be
    removed. It streams: of more than 1,000 names it holds no more at a time, and a RuntimeError
    says that it cannot go on because the name that is next was removed.

    `group[name]` is an array or tensor **over the heap**, whose writes are part of the next commit,
    and which is the same object as long as it lives; or a copy of a plain value. A list or dict is
    read only then, as a change of the copy would be lost: assign it again, or keep a `list`;
    `copy.deepcopy` gives a plain one.

    A group is the path, not the object: if it is removed and made again, this is the new one.

    An array or tensor that is altered in place (`x.shape = ...`) is the program's: the store gives
    out a new one, over the same memory. A tensor that was told to use other memory (`x.data = ...`)
    is copied back into the store's, and lies there again, by the next look-up or commit; one that
    cannot be (another shape or dtype, shared memory) raises MovedError there.

    Raises (all methods): ClosedStoreError; TypeError or ValueError for a name that is no name;
    CorruptStoreError; and for changes ReadOnlyStoreError, StoreFullError (nothing changed),
    ForkedStoreError in a fork child, TransactionError while another thread or task is in a
    transaction block (see `Store.transaction`).
    """

    __slots__ = ("_core", "_parts", "_prefix")

    def __init__(self, core: Core, parts: tuple[bytes, ...]) -> None:
        self._core = core
        self._parts = parts
        self._prefix = b"".join(part + b"\0" for part in parts)  # of paths in the engine

    # ---- finding ----

    def _path(self, name: Any) -> bytes:
        """Returns the path from the root on, as the engine takes it. Raises: TypeError,
        ValueError."""
        if type(name) is str and name.isidentifier() and len(name) < 1000:
            return self._prefix + name.encode()  # the usual case
        parts = split_name(name)
        if len(self._parts) + len(parts) > GROUPS_MAX + 1:
            raise self._too_deep()
        return self._prefix + b"\0".join(parts)

    def _group_path(self, name: Any) -> bytes:
        """Returns the path of a name that is to be a group itself. Raises: as `_path`; ValueError:
        the group would lie too deep."""
        path = self._path(name)
        if path.count(b"\0") >= GROUPS_MAX:
            raise self._too_deep()
        return path

    def _too_deep(self) -> ValueError:
        return ValueError(
            f"{self._core.path}: a store has at most {GROUPS_MAX} groups within each other: use "
            "longer names, or lists"
        )

    def _full(self, name: Any) -> tuple[bytes, ...]:
        parts = (*self._parts, *split_name(name))
        if len(parts) > GROUPS_MAX + 1:
            raise self._too_deep()
        return parts

    def _directory(self) -> int:
        """Returns the group's directory in the engine. It holds until the next change."""
        if not self._parts:
            return ROOT
        found = self._core.pool.find(ROOT, self._prefix[:-1])
        if found is None or found.kind != GROUP:
            raise NoSuchNameError(f"the group {self.name!r} is not in the store any more")
        return found.data

    def _load(self, name: str, found: Any) -> Any:
        """Returns what a look-up gives for what `Pool.get` found: also groups, lists and slots,
        which `Core.load` does not know. REQUIRES: the lock."""
        if type(found) is Found:
            if found.kind == GROUP:
                # so a program that walks down by such handles comes to an end
                if len(self._parts) + name.count("/") >= GROUPS_MAX:
                    raise CorruptStoreError(
                        f"{self._core.path}: a group is in more than {GROUPS_MAX - 1} others"
                    )
                return (Slots if found.meta else Group)(self._core, self._full(name))
            if found.kind == LIST:
                return List(self._core, self._full(name))
        return self._core.load(found, name)

    def _told_more(self, name: str, error: NameExistsError) -> NameExistsError:
        return in_the_way(self._core.pool, self._full(name), error)

    # ---- the mapping ----

    @property
    def name(self) -> str:
        """The group's path; "" for the store."""
        return b"/".join(self._parts).decode()

    def __getitem__(self, name: str) -> Any:
        """Returns the array, tensor, group, list or slots of that name, or a copy of the value.
        Raises: KeyError."""
        core = self._core
        with core.lock:
            found = core.pool.look_up(self._prefix, name, self._path)
            if type(found) is not Found:
                if found is MISSING:
                    raise KeyError(name)
                return found  # a plain value, or the array or tensor that is alive
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
        if type(value) in _PLAIN:
            core = self._core
            try:
                with core.lock:
                    if core.pool.put_plain(self._prefix, name, self._path, value):
                        return
            except NameExistsError as error:
                raise self._told_more(name, error) from None
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
        """Returns `self[name]`; if nothing has the name, the default is stored there first. What is
        returned is the stored one."""
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
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    # ---- making arrays ----

    def _create(
        self, name: str, descriptor: Descriptor, itemsize: int, fill: int, pattern: bytes = b""
    ) -> Any:
        new, parts = NewArray(descriptor, itemsize, fill, pattern), self._full(name)
        with self._core.lock:
            return self._load(name, new.put(self._core, parts, name))

    def empty(self, name: str, shape: Shape, dtype: DTypeLike = np.float64) -> Array:
        """Makes a new array over the heap, with unspecified content. shape: an int or a sequence;
        dtype: of numpy, no objects.

        The array is 64-byte aligned and stays where it is; it is in the store after the next
        commit.

        Raises: NameExistsError, StoreFullError, TypeError (dtype).
        """
        descriptor, itemsize = array.describe_new(shape, dtype)
        result: Array = self._create(name, descriptor, itemsize, FILL_NONE)
        return result

    def zeros(self, name: str, shape: Shape, dtype: DTypeLike = np.float64) -> Array:
        """Makes a new array as `empty` does, filled with zeros."""
        descriptor, itemsize = array.describe_new(shape, dtype)
        result: Array = self._create(name, descriptor, itemsize, FILL_ZERO)
        return result

    def full(
        self, name: str, shape: Shape, fill_value: Any, dtype: DTypeLike | None = None
    ) -> Array:
        """Makes a new array as `empty` does, filled with the value. dtype: None = that of the
        value."""
        element = np.asarray(fill_value, dtype=dtype)
        descriptor, itemsize = array.describe_new(shape, element.dtype)
        if element.ndim == 0 and itemsize:
            result: Array = self._create(
                name, descriptor, itemsize, FILL_PATTERN, element.tobytes()
            )
            return result
        np.broadcast_to(element, descriptor.shape)  # raises before anything is made
        result = self._create(name, descriptor, itemsize, FILL_NONE)
        result[...] = element
        return result

    def tensor(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Makes a new torch tensor over the heap, filled with zeros. dtype: None = torch's default.

        Raises: as `empty`; ModuleNotFoundError without torch.
        """
        with optional:
            import torch

        given = torch.get_default_dtype() if dtype is None else dtype
        descriptor, itemsize = tensor.describe_new(shape, given)
        result: torch.Tensor = self._create(name, descriptor, itemsize, FILL_ZERO)
        return result

    @overload
    def require(self, name: str, shape: Shape, dtype: DTypeLike = ...) -> Array: ...
    @overload
    def require(self, name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor: ...
    def require(self, name: str, shape: Shape, dtype: Any = np.float64) -> Any:
        """Returns the array of that name, shape and dtype (a tensor if it is a torch dtype). If
        nothing has the name, it is made, filled with zeros.

        Raises: NameExistsError if something else has the name; the message says what.
        """
        is_torch = dtypes.is_torch_dtype(dtype)
        descriptor, itemsize = (tensor if is_torch else array).describe_new(shape, dtype)
        with self._core.lock:
            found = self._core.pool.get(ROOT, self._path(name), True)
            if found is None:
                return self._create(name, descriptor, itemsize, FILL_ZERO)
            if found.kind == ARRAY:
                there = self._core.describe(found)
                if there.same_kind(descriptor):
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
        """Returns the group of that name, and creates it if it is not there.

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
        """Returns the persistent list of that name, and creates it if it is not there.

        Raises: NameExistsError if the name is no list.
        """
        return open_list(self._core, self._full(name), name)

    @overload
    def slots(self, name: str) -> Slots[Any]: ...
    @overload
    def slots(
        self, name: str, shape: Shape, dtype: DTypeLike | None = ..., *, in_place: bool = ...
    ) -> Slots[Array]: ...
    @overload
    def slots(
        self, name: str, shape: Shape, dtype: torch.dtype, *, in_place: bool = ...
    ) -> Slots[torch.Tensor]: ...
    def slots(
        self, name: str, shape: Shape | None = None, dtype: Any = None, *, in_place: bool = False
    ) -> Slots[Any]:
        """Returns the slots (`pmstore.objects.slots`) of that name. If they are not there, they are
        made, with both versions zero.

        shape, dtype: of numpy or torch (then the versions are tensors), as for `zeros` and
            `tensor`; dtype None is float64. They may be left out to open what is there.
        in_place: `current` is written to as well, with log set aside for it (docs/SLOTS.md).

        Raises: NameExistsError if the name is something else, or was made otherwise; KeyError if it
            is not there and no shape was given; StoreFullError (nothing changed).
        """
        self._group_path(name)  # raises if it would lie too deep
        return open_slots(self._core, self._full(name), describe_new(shape, dtype), name, in_place)

    # ---- looking at it ----

    def entries(self) -> builtins.list[Entry]:
        """Tells what is in this group, in order of insertion, without touching the data.

        Raises: CorruptStoreError.
        """
        with self._core.lock:
            found = self._core.pool.entries(self._directory())
            return [tell(self._core, name.decode(), thing) for name, thing in found]

    def __repr__(self) -> str:
        return represent(self._core, "Group", self.name, lambda: counted(len(self), "name"))

    def _repr_html_(self) -> str:
        try:
            entries = self.entries()
        except (KeyError, PmstoreError):  # removed, closed, of the parent process: the line says so
            return notebook.table(repr(self), [], [], 0)
        most = max((e.nbytes for e in entries), default=0)
        rows = (
            (
                *(e.name, e.kind, e.dtype or "", "" if e.shape is None else e.shape),
                e.extent(),
                notebook.share(e.nbytes, most) if e.items is None else "",
            )
            for e in entries
        )
        head = ("name", "kind", "dtype", "shape", "bytes, or how many", "")
        return notebook.table(repr(self), head, islice(rows, notebook.SHOWN), len(entries))


def tree(group: Group) -> builtins.list[Entry]:
    """Tells what is in a group and in all groups below it. Each entry has its path from this group
    on, and a group comes before what is in it. Slots are one entry.

    Raises: CorruptStoreError, also if groups contain each other.
    """
    told, slots = [], b"\0"
    with group._core.lock:
        for path, found in group._core.pool.tree(group._directory()):
            if not path.startswith(slots):
                told.append(tell(group._core, path.decode(), found))
                slots = path + b"/" if told[-1].kind == "slots" else slots
    return told
