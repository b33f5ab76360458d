"""What a program logs of its steps: numbers by name, kept in the store, and told to loggers."""

from __future__ import annotations

import math
import struct
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from pmstore import Store
from pmstore.course.logged import Logged
from pmstore.errors import NoSuchNameError

# ---- numbers that a program logs


def number(name: str, value: object) -> Any:
    """A float; or a tensor of one element on an accelerator, which is not waited for.

    Raises: TypeError: it is no real number; ValueError: it is several, or too large.
    """
    if value.__class__ is float:
        return value
    if isinstance(value, torch.Tensor):
        count, real = value.numel(), not value.is_complex()
    else:
        # a str can be made a float too, but has no such method
        kind = type(value)
        real = hasattr(kind, "__float__") or hasattr(kind, "__index__")
        if isinstance(value, np.ndarray | np.generic):
            real = value.dtype.kind in "biuf" or _is_small_float(value.dtype)
        shape = getattr(value, "shape", ())  # other libraries' arrays have one too
        count = math.prod(shape) if isinstance(shape, tuple) else 1
        if isinstance(value, np.ndarray) and value.ndim:
            count = -1  # one of one element is no number to numpy
    if not real:
        raise TypeError(
            f"run.log({name}=...): a number, or a tensor of one element, not {_told(value)}"
        )
    if count != 1:
        raise ValueError(
            f"run.log({name}=...): one number, and this is {_told(value)}: write "
            f"run.log({name}={name}.mean())"
        )
    if isinstance(value, torch.Tensor):
        return float(value.item()) if value.is_cpu else value.detach()
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError(f"run.log({name}=...): it is larger than a float can be") from None


def _is_small_float(dtype: np.dtype[Any]) -> bool:
    """bfloat16 and others that numpy has not, as JAX's arrays give them."""
    return dtype.kind == "V" and dtype.type is not np.void and hasattr(dtype.type, "__float__")


def _told(value: object) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"of shape {tuple(value.shape)}, dtype {value.dtype}"
    return repr(value)[:80]


# ---- the log


_ROWS = 1024
"""Of one array. A row is a step, the number of a name, from 1, and a value."""
_STEP, _NAME, _VALUE = range(3)
_ROW = struct.Struct("=3d")
_LOGGERS = 16

Values: TypeAlias = dict[str, float]
Finished: TypeAlias = tuple[int, dict[str, Any]]
"""A step, and what it logged."""


class ScalarWriter(Protocol):
    """A writer such as `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class LogFunction(Protocol):
    """A function such as `wandb.log` and `mlflow.log_metrics`."""

    def __call__(self, values: Values, /, *, step: int) -> Any: ...


class _OnDevice:
    """A number on an accelerator, which is copied on the stream's own time."""

    __slots__ = ("_buffer", "_event")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        self._buffer = tensor.detach().reshape(())
        if tensor.is_cuda:
            number = torch.empty((), dtype=torch.float64, pin_memory=True)
            self._buffer = number.copy_(self._buffer, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def arrived(self) -> bool:
        return self._event is None or bool(self._event.query())

    def __float__(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._buffer)


class _Logger:
    """A logger, and the row behind the last one that it was told of."""

    def __init__(self, name: str, write: Callable[[Values, int], object], row: int) -> None:
        self.name = name
        self.write = write
        self.row = row
        self.failed = False


class Log:
    """The log of one run: `<run>/log/names`, and arrays `<run>/log/0`, `/1`, ... of rows in the
    order of the steps.

    Rows of finished steps wait in memory and go into the store with the next commit. Rows behind a
    number that has not arrived from an accelerator wait for it.

    Attributes:
        waiting: finished steps whose rows are not in the store, with what each logged.
        loggers: that are told of committed rows.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._path = f"{run}/log"
        self.waiting: deque[Finished] = deque()
        self._names: list[str] | None = None  # None: not looked up since the last roll back
        self._places: dict[str, int] = {}
        self._arrays: list[Any] = []
        self._raw: Any = None  # the memory of the last one
        self._used = _ROWS  # rows of it
        self._late = False  # a number on an accelerator waits
        self.loggers: list[_Logger] = []
        self._told: Any = None

    # ---- what a run calls

    def add(self, step: int, values: dict[str, Any]) -> None:
        """A step is finished."""
        for name in values:
            if values[name].__class__ is not float:
                values[name] = _OnDevice(values[name])
                self._late = True
        self.waiting.append((step, values))

    def capture(self, *, wait: bool = False) -> None:
        """Writes the rows of finished steps; pending until the next commit. wait: for numbers of an
        accelerator too."""
        waiting, places = self.waiting, self._places
        if self._names is None:
            self._open()
        while waiting:
            step, values = waiting[0]
            if self._late and not (wait or self._arrived(values)):
                break
            for name, value in values.items():
                place = places.get(name) or self._name(name)
                if self._used == _ROWS:
                    self._add_array()
                _ROW.pack_into(self._raw, _ROW.size * self._used, step, place, value)
                self._used += 1
            waiting.popleft()
        self._late = self._late and bool(waiting)
        for place, logger in enumerate(self.loggers):
            if self._told[place] != logger.row:
                self._told[place] = logger.row

    @staticmethod
    def _arrived(values: dict[str, Any]) -> bool:
        for value in values.values():
            if value.__class__ is _OnDevice and not value.arrived:
                return False
        return True

    def _name(self, name: str) -> int:
        """The number of a name that was not logged before."""
        names = self._open()
        names.append(name)
        self._store[f"{self._path}/names"] = names
        number = self._places[name] = len(names)
        return number

    def _add_array(self) -> None:
        path = f"{self._path}/{len(self._arrays)}"
        self._use(self._store.zeros(path, (_ROWS, 3)))
        self._used = 0

    def _use(self, array: Any) -> None:
        """The array becomes the last one."""
        self._arrays.append(array)
        self._raw = array.data.cast("B")  # a row is packed in one go

    @property
    def _end(self) -> int:
        return len(self._arrays) * _ROWS - (_ROWS - self._used)

    def _open(self) -> list[str]:
        """Looks up what is stored. Returns the names."""
        if self._names is None:
            stored: Any = self._store.get(f"{self._path}/names", [])
            self._names = list(stored)
            self._places.clear()
            self._places.update((name, place) for place, name in enumerate(self._names, 1))
            self._arrays, self._used = [], _ROWS
            while (path := f"{self._path}/{len(self._arrays)}") in self._store:
                self._use(self._store[path])
            if self._arrays:
                self._used = int(np.count_nonzero(self._arrays[-1][:, _NAME]))
            if self.loggers:
                self._told = self._store[f"{self._path}/told"]
        return self._names

    def rolled_back(self) -> None:
        self.waiting.clear()
        self._names = None

    # ---- reading

    def history(self, name: str, ended: Sequence[Finished] = ()) -> tuple[Any, Any]:
        """Steps and values of a name, of all finished steps. ended: finished ones that were not
        added yet. Raises: KeyError: there are none."""
        self._open()
        place = self._places.get(name)
        parts = []
        for number, array in enumerate(self._arrays):
            rows = array if number + 1 < len(self._arrays) else array[: self._used]
            parts.append(rows[rows[:, _NAME] == place] if place is not None else rows[:0])
        waiting = [*self.waiting, *ended]
        late = [(step, 0.0, float(given[name])) for step, given in waiting if name in given]
        rows = np.concatenate([np.zeros((0, 3)), *parts, np.array(late).reshape(-1, 3)])
        if not len(rows):
            known = ", ".join(map(repr, self.names(ended))) or "nothing"
            raise NoSuchNameError(f"the run has logged no {name!r}; it has logged {known}")
        newest = np.append(rows[1:, _STEP] != rows[:-1, _STEP], True)  # of each step
        rows = rows[newest]
        return rows[:, _STEP].astype(np.int64), rows[:, _VALUE].copy()

    def table(self, ended: Sequence[Finished] = ()) -> Logged:
        """All that was logged in finished steps. ended: see `history`."""
        waiting = [*self.waiting, *ended]
        names = self.names(ended)
        places = {name: place for place, name in enumerate(names, 1)}
        late = [
            (step, places[name], float(value))
            for step, given in waiting
            for name, value in given.items()
        ]
        return Logged(names, [*self._arrays, np.array(late).reshape(-1, 3)])

    def names(self, ended: Sequence[Finished] = ()) -> list[str]:
        """Names that were logged, in the order of first use. ended: see `history`."""
        late = [name for _, given in (*self.waiting, *ended) for name in given]
        return list(dict.fromkeys([*self._open(), *late]))

    # ---- loggers

    def log_to(self, writer: ScalarWriter | LogFunction, name: str) -> None:
        """See `Run.log_to`."""
        path = f"{self._path}/loggers"
        stored: Any = self._store.get(path, [])
        known = list(stored)
        number = len(self.loggers)
        if number == _LOGGERS:
            raise ValueError(f"a run tells at most {_LOGGERS} loggers")
        self._open()
        self._told = self._store.require(f"{self._path}/told", (_LOGGERS,), "int64")
        if number < len(known) and known[number] != name:
            raise ValueError(
                f"the logger of that place was {known[number]!r}, and is {name!r} now: give the "
                "loggers of a run in the same order at each start, or name= as it was"
            )
        if number == len(known):
            self._store[path] = [*known, name]
        self.loggers.append(_Logger(name, _function_of(writer), int(self._told[number])))

    @property
    def untold(self) -> bool:
        """Whether there are rows that a logger was not told of."""
        return any(logger.row < self._end for logger in self.loggers)

    def tell(self) -> None:
        """All rows that were written are committed: loggers are told of those that are new."""
        for logger in self.loggers:
            if logger.row < self._end:
                self._tell(logger)

    def _tell(self, logger: _Logger) -> None:
        names = self._open()
        row, end = logger.row, self._end
        try:
            while row < end:
                step, values = 0, dict[str, float]()
                while row < end:
                    number, place = divmod(row, _ROWS)
                    of, name, value = self._arrays[number][place].tolist()
                    if values and of != step:
                        break
                    step, values[names[int(name) - 1]] = int(of), value
                    row += 1
                logger.write(values, step)
                logger.row = row
            logger.failed = False
        except Exception as error:  # somebody else's logger is no reason to stop training
            if not logger.failed:
                logger.failed = True
                warnings.warn(
                    f"the logger {logger.name!r} failed, and is told again of the same steps after "
                    f"the next commit: {error!r}",
                    RuntimeWarning,
                    stacklevel=8,
                )


def _function_of(writer: Any) -> Callable[[Values, int], object]:
    """Raises: TypeError: it is no logger."""
    if callable(getattr(writer, "add_scalar", None)):

        def add(values: Values, step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return add
    if callable(writer):
        return lambda values, step: writer(values, step=step)
    raise TypeError(
        f"{writer!r} is no logger: give a function that takes (values, step=...), such as "
        "wandb.log or mlflow.log_metrics, or what has add_scalar(tag, value, step), such as a "
        "SummaryWriter of torch.utils.tensorboard"
    )
