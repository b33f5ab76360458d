"""The shelf: a store whose names are attributes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from pmstore.errors import TransactionError
from pmstore.objects.containers import Group
from pmstore.objects.lists import List
from pmstore.objects.tensor import is_tensor
from pmstore.pymm import checkpoint, shelf_file
from pmstore.pymm.arrays import shelved_ndarray
from pmstore.pymm.linked_list import shelved_linked_list
from pmstore.pymm.scalars import member_type, plain
from pmstore.pymm.shelf_memory import MemoryResource
from pmstore.pymm.shelf_names import HIDDEN, Core, Shadow, ShelvedCommon

Path = str | os.PathLike[str]
_NUMBERS = np.typecodes["AllInteger"] + "?efd"
"""The kinds of numpy's scalars that a number of Python's holds whole."""


class shelf:
    """A file of variables: `shelf.x = value` stores a copy, `shelf.x` is the stored one, `None` if
    there is none.

    name, pmem_path: the file is `pmem_path/name.pm`, or pmem_path itself if that is no folder.
    size_mb: what it is expected to hold. The file begins smaller, and grows as needed, beyond this
        too. Without names, folder and size are told by their types: PyMM's order was
        (name, size_mb, pmem_path) once.
    backend: "mapstore" is PyMM's name for memory: the shelf begins empty and ends with the process,
        and pmem_path is not used. Its other names ("hstore", "hstore-cc", ...) and None mean that
        the domain is chosen by where the file is; or a domain of `pmstore.open`.
    load_addr, mm_plugin: for PyMM; addresses are chosen by the system, the allocator is the
        store's.
    force_new: replaces what is there.

    `del shelf` closes the file, or the end of the program: operations that were done are committed
    already, a transaction that was not ended is rolled back. Arrays that are alive stay readable,
    as private memory.

    Raises: what `pmstore.open` raises.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> s = shelf("run", pmem_path=folder.name)
    >>> s.count = 1
    >>> s.count += 1
    >>> s.count, s.nothing, s.items
    (2, None, ['count'])
    >>> del s
    >>> folder.cleanup()
    """

    _core: Core

    @overload
    def __init__(
        self,
        name: str,
        pmem_path: Path = ...,
        size_mb: int = ...,
        load_addr: Any = ...,
        backend: str | None = ...,
        mm_plugin: Any = ...,
        force_new: bool = ...,
    ) -> None: ...

    @overload
    def __init__(
        self,
        name: str,
        size_mb: int,
        pmem_path: Path = ...,
        load_addr: Any = ...,
        backend: str | None = ...,
        mm_plugin: Any = ...,
        force_new: bool = ...,
    ) -> None: ...

    # mypy is not asked: pmem_path and size_mb, where they are not named, are _first and _second
    def __init__(  # type: ignore[misc]
        self,
        name: str,
        _first: Any = None,
        _second: Any = None,
        load_addr: Any = "0x900000000",
        backend: str | None = None,
        mm_plugin: Any = None,
        force_new: bool = False,
        *,
        pmem_path: Any = None,
        size_mb: Any = None,
    ) -> None:
        del load_addr, mm_plugin
        path, room_mb = shelf_file.told(_first, _second, pmem_path, size_mb)
        store = shelf_file.store_of(name, path, room_mb, backend, force_new)
        core = Core(store, _bind)
        object.__setattr__(self, "_core", core)
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_room_bytes", room_mb * shelf_file.MIB)
        object.__setattr__(self, "_close", weakref.finalize(self, core.close))

    # ---- attributes are variables ----

    def __getattr__(self, name: str) -> Any:
        # names of protocols, and any name of a shelf that did not open
        if name.startswith("__") or "_core" not in self.__dict__:
            raise AttributeError(name)
        return self._core.member(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Copies the value in. This is atomic: after a crash there is the old or the new one.

        A number of numpy's, `shelf.n = shelf.x.sum()`, becomes Python's.

        Raises: RuntimeError for a type that is none of `supported_types`, a tensor that is a view
            of the very variable, or an attribute that is the shelf's own; TypeError for a dtype or
            kind of array that cannot be stored.
        """
        if hasattr(type(self), name) or name in self.__dict__ or name == HIDDEN:
            raise RuntimeError(f"{name!r} is an attribute of the shelf itself: use another name")
        if "/" in name:
            raise RuntimeError(f"{name!r} would be a name in a group of the store: leave out the /")
        core = self._core
        old = core.member(name)
        if isinstance(value, ShelvedCommon) and value is old:
            return  # after `shelf.x += 1`, which is done already
        if value is None:
            if name in core.store:
                self.erase(name)
            return
        with core.writing():
            self._store(name, value, old)
            core.current().pop(name, None)
            if _has_graph(value):
                core.member(name).copy_(_plain_tensor(value))  # autograd sees this copy

    def _store(self, name: str, value: Any, old: Any) -> None:
        store = self._core.store
        value = plain(value)
        if isinstance(value, np.generic) and value.dtype.char in _NUMBERS:
            value = value.item()
        if isinstance(value, np.ndarray):
            stored: Any = value
        elif is_tensor(value):
            if is_tensor(old) and value.data_ptr() == old.data_ptr() and value.numel():
                raise RuntimeError(
                    f"the tensor is a view of {name!r} itself: assign a clone() of it"
                )
            stored = _plain_tensor(value)
            if _has_graph(value):
                stored = stored.detach()
        elif isinstance(value, Shadow) or type(value) in (str, bytes, bool, int, float):
            stored = value
        elif isinstance(value, (str, bytes, int, float)):  # it is of a subclass, such as np.float64
            bases: tuple[Any, ...] = (str, bytes, int, float)
            stored = next(base for base in bases if isinstance(value, base))(value)
        else:
            raise RuntimeError(
                f"a {type(value).__name__} cannot be put on the shelf (as {name!r}): "
                f"{', '.join(self.supported_types())} can; save(obj, name) stores lists, dicts, "
                "modules and optimizers of them"
            )
        if isinstance(old, (Group, shelved_linked_list)):
            del store[name]
        if isinstance(stored, Shadow):
            stored.store_in(store, name)
        else:
            store[name] = stored

    def __delattr__(self, name: str) -> None:
        self.erase(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.items]

    def __repr__(self) -> str:
        return f"<pymm.shelf {self._name!r} of {self._core.store!r}>"

    def _repr_html_(self) -> str:
        return self._core.store._repr_html_()

    # ---- PyMM's methods ----

    @property
    def name(self) -> str:
        return str(self.__dict__["_name"])

    @property
    def items(self) -> list[str]:
        """The names of all variables, in order of insertion."""
        return self.get_item_names()

    @property
    def used(self) -> float:
        """The room that is taken, in per cent; see `get_percent_used`."""
        return self.get_percent_used()

    @property
    def mr(self) -> MemoryResource:
        """The room of the shelf: how much of it is taken, and by which variables."""
        return MemoryResource(self._core, self.__dict__["_room_bytes"])

    def get_item_names(self, all: bool = False) -> list[str]:
        """Returns the names of all variables, in order of insertion. all: also those that the shelf
        keeps for itself."""
        return list(self._core.store) if all else self.mr.list_items()

    def get_percent_used(self) -> float:
        """Returns how much of the room is taken, in per cent of size_mb, or of what the file has
        grown to if that is more."""
        return self.mr.get_percent_used()

    def supported_types(self) -> list[str]:
        """Returns the names of the types that can be assigned, beside the plain types that they
        stand for."""
        kinds = (
            *("ndarray", "torch_tensor", "string", "float_number", "integer_number"),
            *("bytes", "linked_list"),
        )
        return [f"pymm.{kind}" for kind in kinds]

    def erase(self, name: Any) -> None:
        """Removes a variable, given by name or as the object. References to it stay valid as long
        as they live.

        Raises: RuntimeError if it is not on the shelf.
        """
        core = self._core
        known = name if isinstance(name, str) else _name_of(name)
        if not isinstance(known, str) or known not in core.store:
            raise RuntimeError(
                f"there is no {known or name!r} on the shelf to erase: it has "
                f"{', '.join(self.items) or 'nothing'}"
            )
        with core.writing():
            del core.store[known]
        core.current().pop(known, None)

    def persist(self) -> None:
        """Commits what was written past the members. Between tx_begin and tx_end it does nothing:
        the end commits."""
        with self._core.writing():
            pass

    def inspect(self, verbose: bool = False) -> None:
        """Prints what the variables are and where they lie. verbose: also prints what the shelf
        keeps for itself, and the store."""
        store = self._core.store
        entries = {entry.name: entry for entry in store.entries()}
        for name in self.get_item_names(all=verbose):
            entry, member = entries[name], self._core.member(name)
            what = (
                f"dtype={entry.dtype} shape={entry.shape} "
                if entry.shape is not None
                else f"type={type(member).__name__} "
            )
            address = (
                member.addr
                if isinstance(member, shelved_ndarray)
                else member.data_ptr()
                if is_tensor(member)
                else None
            )
            where = "" if address is None else f"addr={address:#x} "
            print(f"var {name}: {entry.kind} {what}{where}bytes={entry.nbytes}")
        if verbose:
            print(store.info())

    # ---- transactions ----

    def tx_begin(self, variables: Sequence[Any] | None = None) -> list[str]:
        """Begins a transaction of everything that is written to the shelf, new variables too, until
        `tx_end`.

        variables: members, or their names, that it will write. They are captured at once, which is
            faster; others may be written too.
        Returns: their names; without variables, the names of all.
        Raises: TransactionError if one is open; RuntimeError for what is not on the shelf.
        """
        core = self._core
        if core.block is not None:
            raise TransactionError("a transaction of the shelf is open: call tx_end() first")
        names, arrays = [], []
        for item in variables or ():
            member = core.member(item) if isinstance(item, str) else item
            if isinstance(member, bool):  # PyMM's is an int on the shelf; here it has no name
                continue
            if not isinstance(member, ShelvedCommon):
                raise RuntimeError(
                    f"{item!r} is not a variable of the shelf, which has "
                    f"{', '.join(self.items) or 'none'}"
                )
            names.append(str(_name_of(member)))
            if isinstance(member, shelved_ndarray) or is_tensor(member):
                arrays.append(member)
        block = core.store.transaction(arrays)
        block.__enter__()
        core.block = block
        return self.items if variables is None else names

    def tx_begin_all(self) -> list[str]:
        """Begins a transaction, as `tx_begin` does without a list."""
        return self.tx_begin()

    def tx_end(self) -> None:
        """Commits the transaction: all of it is durable on return, as far as the domain goes.

        Raises: TransactionError if none is open. If the commit fails (StoreFullError, OSError) it
            is rolled back.
        """
        core = self._core
        if core.block is None:
            raise TransactionError("no transaction of the shelf is open: call tx_begin() first")
        block, core.block = core.block, None
        block.__exit__(None, None, None)

    # ---- checkpoints ----

    def save(self, data: Any, shelf_var_name: str, is_inplace: bool = True) -> None:
        """Stores a value of any depth, lists, tuples, dicts, torch modules and optimizers among it,
        under names that begin with shelf_var_name, as PyMM makes them (`name__#int#`,
        `name__+dict_#str#_#key#__#ndarray#`, `name__+list_0__#Tensor#`, ...; a slash is `%2F`). It
        is one transaction.

        is_inplace: arrays and tensors that are there already, of the same shape and dtype, are
            written into.
        Raises: TypeError for what cannot be stored: nothing is pickled. ValueError if two parts, or
            a part and another variable, would have one name.
        """
        checkpoint.save(self._core, data, shelf_var_name, is_inplace)

    def load(self, shelf_var_name: str, target: Any = None) -> Any:
        """Returns what `save` stored under the name: the same structure, with copies of arrays and
        tensors. The variables themselves are attributes, without a copy.

        target: a torch module or optimizer to be loaded with it; it is returned.
        Raises: KeyError.
        """
        return checkpoint.load(self._core, shelf_var_name, target)


def _name_of(member: Any) -> Any:
    # a tensor has its own use for `name`
    return getattr(member, "name_on_shelf", None) or getattr(member, "name", None)


def _has_graph(value: Any) -> bool:
    """Returns whether autograd knows how the value was computed. A value without a graph, a leaf,
    becomes a leaf of the shelf."""
    return is_tensor(value) and value.grad_fn is not None


def _plain_tensor(value: Any) -> Any:
    return value.as_tensor() if hasattr(value, "name_on_shelf") else value


def _bind(core: Core, name: str, value: Any) -> Any:
    """Returns the member for what the store holds."""
    if type(value) is np.ndarray:
        return shelved_ndarray(core, name, value)
    if is_tensor(value):
        from pmstore.pymm.tensors import shelved_torch_tensor

        return shelved_torch_tensor(core, name, value)
    if isinstance(value, List):
        return shelved_linked_list(core, name, value)
    kind = member_type(value)
    return value if kind is None else kind(core, name, value)
