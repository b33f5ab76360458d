"""numpy arrays on a shelf: an `np.ndarray` whose own operations are transactions."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np

from pmstore._engine._binding import tell_of_exports
from pmstore.errors import PmstoreError
from pmstore.objects import array
from pmstore.pymm.shelf_memory import ShelvedMemory
from pmstore.pymm.shelf_names import Core, Shadow
from pmstore.store import Store

_METHODS_THAT_WRITE = frozenset(
    ("byteswap", "fill", "itemset", "partition", "put", "resize", "setfield", "sort")
)
_DESCRIBED = ("shape", "dtype", "strides")
_FUNCTIONS_THAT_WRITE = frozenset(
    ("copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask")
)


class ndarray(Shadow):
    """An array to be made on the shelf, filled with zeros:
    `shelf.x = pymm.ndarray((3, 4), dtype=np.uint8)`.

    shape: an int or a sequence. strides: None, or what order C or F give, in bytes. zero: for PyMM;
        it is always zeroed.
    """

    def __init__(
        self,
        shape: Any,
        dtype: Any = np.float64,
        strides: Any = None,
        order: str = "C",
        zero: bool = False,
    ) -> None:
        del zero
        self._shape = array.normal_shape(shape)
        self._dtype = np.dtype(dtype)
        self._order: Any = order
        if strides is not None:
            for self._order in "CF":
                # Of an array of the shape that has no memory: broadcast_to would have other
                # strides.
                if np.empty(self._shape, self._dtype, self._order).strides == tuple(strides):
                    break
            else:
                raise ValueError(
                    f"strides={strides!r} leave gaps: assign an array that has them, and it is "
                    "copied densely"
                )

    def store_in(self, store: Store, name: str) -> None:
        if self._order == "C":
            if name in store:
                del store[name]
            store.zeros(name, self._shape, self._dtype)
        else:
            store[name] = np.zeros(self._shape, self._dtype, self._order)


class dlpack_array(ndarray):
    """An array to be made as `ndarray` is: every array of a shelf can be given to other libraries,
    by `as_capsule` and by their from_dlpack."""

    def __init__(
        self, shape: Any, dtype: Any = np.float64, strides: Any = None, zero: bool = False
    ) -> None:
        super().__init__(shape, dtype, strides, zero=zero)


def _bounds(value: np.ndarray[Any, Any]) -> tuple[int, int]:
    [(low, length)] = array.span(value)
    return low, low + length


class shelved_ndarray(np.ndarray[Any, Any], ShelvedMemory):
    """An array whose bytes are in the store. So are its views (slices, `reshape`, `T`), which are
    of this type too.

    Writing through it (`x[i] = v`, `x += 1`, `out=x`, `x.fill(0)`, `np.copyto(x, y)`) is a
    transaction. What is computed from it is a plain array.
    """

    name: str | None
    """The attribute of the shelf that it is, or is a view of."""
    _core: Core | None
    _bounds: tuple[int, int]

    def __new__(cls, core: Core, name: str, plain: np.ndarray[Any, Any]) -> shelved_ndarray:
        self = plain.view(cls)
        self.__dict__.update(_core=core, name=name, _bounds=_bounds(plain))
        return self

    def __array_finalize__(self, template: Any) -> None:
        core, name, bounds = None, None, getattr(template, "_bounds", (0, 0))
        if isinstance(template, shelved_ndarray) and bounds[0] <= array.address(self) < bounds[1]:
            core, name = template._core, template.name
        self.__dict__.update(_core=core, name=name, _bounds=bounds)

    def __setattr__(self, name: str, value: Any) -> None:
        core, mine = self._core, self.name
        if (
            name in _DESCRIBED
            and core is not None
            and mine is not None
            and core.current().get(mine) is self
        ):
            raise RuntimeError(
                f"the {name} of a variable is stored with it: assign a new one to the shelf "
                f"(shelf.{mine} = ...), or change that of a view, shelf.{mine}[...]"
            )
        super().__setattr__(name, value)

    # ---- PyMM's own ----

    @property
    def addr(self) -> int:
        """The address of the first element. It does not change while the shelf is open."""
        return array.address(self)

    def asndarray(self) -> np.ndarray[Any, Any]:
        """Returns the same memory as a plain array. Writes through it are not transactions of their
        own."""
        return self.view(np.ndarray)

    def as_capsule(self) -> Any:
        """Gives the same memory to another library, once: as a capsule of DLPack. Writes through it
        are not transactions of their own."""
        return self.asndarray().__dlpack__()

    def dim(self) -> int:
        """Returns the number of axes."""
        return self.ndim

    def persist(self) -> None:
        """Commits what was written past the member. Between tx_begin and tx_end it does nothing:
        the end commits."""
        with self._writing():
            pass

    def persist_offset(self, offset: int, length: int) -> None:
        """Commits as `persist` does, for elements [offset, offset + length) in memory order.

        Raises: ValueError if they are not all in the array.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(
                f"elements [{offset}, {offset + length}) are not in an array of {self.size}"
            )
        self.persist()

    # ---- writing ----

    def _writing(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._core is None else self._core.writing()

    def _exported(self) -> None:
        """Declares the array written, before its memory is given out to calls that let the kernel
        store into it: `memoryview(x)`, `x.data`, `source.readinto(x)`. No page fault tells of such
        a store.

        Where it cannot be declared (beside another thread's transaction, in a fork child, without
        room for the log), it may be read all the same, and such a store is refused by the system.
        """
        core = self._core
        if core is not None and not core.store.closed:
            with suppress(PmstoreError):
                core.store.will_write(self.asndarray())

    def __setitem__(self, key: Any, value: Any) -> None:
        with self._writing():
            self.asndarray()[_plain(key)] = _plain(value)

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any
    ) -> Any:
        written = out if out is not None else inputs[:1] if method == "at" else ()
        with _writing(written):
            if out is not None:
                kwargs["out"] = _plain(out)
            result = getattr(ufunc, method)(*_plain(inputs), **_plain(kwargs))
        if out is None or result is NotImplemented:
            return result
        return out[0] if len(out) == 1 else out

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__
        out = kwargs.get("out")
        if out is None:
            if name in _FUNCTIONS_THAT_WRITE:
                given = {**dict(enumerate(args)), **kwargs}
                out = next((given[key] for key in (0, "dst", "a", "arr") if key in given), None)
            else:
                out = _positional_out(func, args)
        with _writing(out):
            result = func(*_plain(args), **_plain(kwargs))
        return (
            out
            if isinstance(out, shelved_ndarray)
            and isinstance(result, np.ndarray)
            and name != "copyto"
            else result
        )

    # ---- reading ----

    def __getitem__(self, key: Any) -> Any:
        return _volatile(super().__getitem__(_plain(key)))

    def __repr__(self) -> str:
        return repr(self.asndarray())

    def __str__(self) -> str:
        return str(self.asndarray())

    def __reduce__(self) -> Any:
        return self.asndarray().__reduce__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.asndarray().__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        return self.asndarray().copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.asndarray().copy()


def _writing(outputs: Any) -> AbstractContextManager[Any]:
    """Returns the transaction for a call that writes into these outputs."""
    for output in outputs if isinstance(outputs, tuple) else (outputs,):
        if isinstance(output, shelved_ndarray) and output._core is not None:
            return output._core.writing()
    return nullcontext()


def _positional_out(func: Any, args: Any) -> Any:
    try:
        return inspect.signature(func).bind_partial(*args).arguments.get("out")
    except (TypeError, ValueError):  # a built-in without a signature, or a call that will fail
        return None


def _plain(value: Any) -> Any:
    """Returns the same value without members in it: arrays as plain views of the same memory."""
    kind = type(value)
    if kind is shelved_ndarray:
        return value.view(np.ndarray)
    if kind is tuple or kind is list:
        return kind(map(_plain, value))
    if kind is dict:
        return {key: _plain(item) for key, item in value.items()}
    return value


def _volatile(result: Any) -> Any:
    """Returns a result of numpy with the right types: an array that has the subclass's type, but no
    memory on the shelf, becomes a plain array."""
    kind = type(result)
    if kind is shelved_ndarray:
        return result if result._core is not None else result.view(np.ndarray)
    return kind(map(_volatile, result)) if kind is tuple or kind is list else result


def _method(name: str) -> Any:
    inherited = getattr(np.ndarray, name)

    def method(self: shelved_ndarray, *args: Any, **kwargs: Any) -> Any:
        with self._writing() if name in _METHODS_THAT_WRITE else _writing(kwargs.get("out")):
            result = inherited(self, *_plain(args), **_plain(kwargs))
        out = kwargs.get("out")
        return out if isinstance(out, shelved_ndarray) else _volatile(result)

    method.__name__ = name
    method.__doc__ = inherited.__doc__
    return method


for _name in dir(np.ndarray):
    if (
        not _name.startswith("_")
        and inspect.isroutine(getattr(np.ndarray, _name))
        and _name != "view"
    ):
        setattr(shelved_ndarray, _name, _method(_name))

tell_of_exports(shelved_ndarray)

# PyMM programs compare str(type(x)) with this.
shelved_ndarray.__module__ = "pymm.ndarray"
