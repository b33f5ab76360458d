"""Stands for `pmstore` where a program is run on plain torch: keeps nothing, commits nothing, takes
nothing back. It says in few lines what a run hands out, and when a step ends."""

from __future__ import annotations

import builtins
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch as _torch

import pmstore.scheduler as scheduler  # programs name policies by it
import pmstore.torch as _pmstore_torch
from pmstore.torch._step.log import number

__all__ = ["open", "scheduler", "torch"]


class Slots:
    """Two arrays that take turns."""

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.current, self.next = np.zeros(shape, dtype), np.zeros(shape, dtype)

    def flip(self) -> None:
        self.current, self.next = self.next, self.current


class Store(dict[str, Any]):
    """A dict that has what programs use of a store."""

    epoch = 0

    def group(self, name: str) -> Store:
        return self.setdefault(name, Store())

    def list(self, name: str) -> builtins.list[Any]:
        return self.setdefault(name, [])

    def zeros(self, name: str, shape: Any, dtype: Any = np.float64) -> Any:
        if isinstance(dtype, _torch.dtype):
            return self.setdefault(name, _torch.zeros(shape, dtype=dtype))
        return self.setdefault(name, np.zeros(shape, dtype))

    require = zeros

    def slots(self, name: str, shape: Any, dtype: Any) -> Slots:
        return self.setdefault(name, Slots(shape, dtype))

    def tensor(self, name: str, shape: Any, dtype: _torch.dtype | None = None) -> Any:
        return self.setdefault(name, _torch.zeros(shape, dtype=dtype))

    def transaction(self, **_: Any) -> Any:
        return contextlib.nullcontext()

    def commit(self) -> None: ...

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None: ...


class Epoch(int):
    """A number that is iterated for its batches."""

    batches: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


class _Given(NamedTuple):
    """A batch, and where it is in the data: its epoch, and how many of it come before it."""

    epoch: int
    index: int
    batch: Any


class _Loop(NamedTuple):
    kind: str
    name: str
    n: int | None
    base: int
    """Data epochs that were over when it began, if it has a name."""
    over: bool = False
    """A later one has begun."""


class Run:
    """Counts steps, and goes through the loader.

    A loop of the program that was begun before is known by its place in their order: `again` says
    that the program starts again.
    """

    resumed = False

    def __init__(self, loader: Iterable[Any] = ()) -> None:
        self._finished = 0
        self._within = False  # the block of a step by hand
        self.state: dict[str, Any] = {}
        self.last_in_step = True
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._cursor = (0, 0)  # of the loader: epoch, and batches of it
        self._given = _Given(0, -1, None)
        self._done = (0, 0)  # behind the batches that were trained on
        self._held: deque[_Given] = deque()  # handed out or fetched, and not trained on
        self._holds = False  # the program holds them, and not the loop
        self._again: deque[_Given] = deque()  # of loops that were left
        self._end: tuple[int, int] | None = None  # of the data of a loop that has no more batches
        self._over = 0  # epochs, with their tails
        self._counts: dict[str, int] = {}  # of run.steps, by name
        self._logged: dict[str, dict[int, float]] = {}
        self._loops: list[_Loop] = []
        self._next = 0  # the number of the loop that comes next
        self._open = ""  # what the open step is of
        self._marked = self._ended = self._stops = self._stopped = False

    # ---- loops

    def again(self) -> None:
        """The program starts again, from its first loop."""
        self._ask()
        self._next = 0

    def epochs(self, n: int | None, *, name: str = "", **options: Any) -> Iterator[Epoch]:
        base, passed = self._begin("epochs", name, n)
        while True:
            self._end_epoch()
            epoch = self._over
            begun = self._done[0] > epoch
            if passed or (n is not None and epoch >= base + n) or (self._stopped and not begun):
                return
            self._open = "head"
            one = Epoch(epoch - base)
            one.batches = lambda epoch=epoch: self._iterate(epoch, **options)
            yield one

    def _end_epoch(self) -> None:
        if self._open:
            self._skip_to(self._over + 1)  # it may have been left
            self._over += 1
        self._ask()

    def _iterate(self, epoch: int, batches: int | None = None, **options: Any) -> Iterator[Any]:
        if self._stops:
            self._skip_to(epoch + 1)
        yield from self._hand_out(epoch + 1, limit=batches, **options)
        if self._stopped:
            self._skip_to(epoch + 1)
        if not self._open:
            self._open = "tail"

    def batches(self, epochs: int | None = 1, *, name: str = "", **options: Any) -> Iterator[Any]:
        base, passed = self._begin("batches", name, epochs)
        if not passed:
            yield from self._hand_out(None if epochs is None else base + epochs, **options)

    def steps(self, n: int, *, name: str = "") -> Iterator[int]:
        _, passed = self._begin("steps", name, n)
        while True:
            self._ask()
            number = self._counts.get(name, 0)
            if passed or self._stopped or number >= n:
                return
            self._counts[name] = number + 1
            self._open = "number"
            yield number

    @contextlib.contextmanager
    def next_step(self) -> Iterator[None]:
        if self._holds and self._held:
            one = self._held.popleft()
            self._done = (one.epoch, one.index + 1)
            self._done = self._end if self._end is not None and not self._held else self._done
        elif not self._next or self._loops[self._next - 1].kind != "hand":
            self._begin("hand", "", None)
        self._ask()
        self._open, self._within = "hand", True
        try:
            yield
        finally:
            self._within = False
        self._marked = True

    def _begin(self, kind: str, name: str, n: int | None) -> tuple[int, bool]:
        """Returns the data epochs that the loop begins behind, and whether it has nothing to give,
        as a later one has begun."""
        self._ask()
        self._again.extendleft(reversed(self._held))
        self._held.clear()
        self._holds = False
        loops = self._loops
        while self._next < len(loops) and kind != "hand" and loops[self._next].kind == "hand":
            self._next += 1
        number, self._next = self._next, self._next + 1
        loops[:number] = [one._replace(over=True) for one in loops[:number]]
        if number == len(loops):
            loops.append(_Loop(kind, name, n, self._done[0] if name else 0))
            if kind == "epochs":
                self._over = max(self._over, self._done[0])
            return loops[number].base, False
        known = loops[number]
        assert known[:2] == (kind, name)
        more = known.n is not None and (n is None or n > known.n)
        self._stopped = self._stopped and not more
        loops[number] = known._replace(n=n, over=known.over and not more)
        return known.base, loops[number].over

    # ---- batches

    @property
    def data_epoch(self) -> int:
        return self._given.epoch

    @property
    def batch(self) -> int:
        return self._given.index

    def _hand_out(
        self,
        until: int | None,
        *,
        every: int = 1,
        ahead: int | None = None,
        device: Any = None,
        limit: int | None = None,
    ) -> Iterator[Any]:
        asked, length = False, self._length(limit)
        self.last_in_step = True
        self._end, self._holds = None, bool(ahead)
        self._again.extendleft(reversed(self._held))
        self._held.clear()
        while True:
            goes_on = bool(ahead) or not (self.last_in_step or self._marked)
            if not asked or self._stops or not goes_on:
                self._ask()
            asked = True
            if self._stopped:
                return
            one = self._held.popleft() if self._held and not ahead else self._load(until, limit)
            if one is None:
                assert until is not None
                self._end = max((until, 0), self._done)
                self._done = self._done if self._held else self._end
                return
            self._given = one
            if ahead:
                self._held.append(one)
            else:
                self._done = (one.epoch, one.index + 1)
            last = one.index + 1 == length
            if device is not None and not last:
                following = self._load(one.epoch + 1, limit)
                self._held.extend([following] if following is not None else [])
            self.last_in_step = last or (one.index + 1) % every == 0
            if not ahead:
                self._open = self._open or "batch"
            yield one.batch

    def _length(self, limit: int | None) -> int | None:
        """Batches of an epoch, if that is known."""
        ends = [] if limit is None else [limit]
        with contextlib.suppress(TypeError):  # it has none
            ends.append(len(self._loader))  # type: ignore[arg-type]
        return min(ends, default=None)

    def _load(self, until: int | None, limit: int | None) -> _Given | None:
        """The next batch, those of loops that were left first; None: there are no more."""
        while self._again:
            one = self._again[0]
            if until is not None and one.epoch >= until:
                return None
            self._again.popleft()
            if limit is None or one.index < limit:
                return one
        while until is None or self._cursor[0] < until:
            epoch, index = self._cursor
            if limit is None or index < limit:
                if self._batches is None:
                    self._batches = iter(self._loader)
                for batch in self._batches:
                    self._cursor = (epoch, index + 1)
                    return _Given(epoch, index, batch)
            self._cursor, self._batches = (epoch + 1, 0), None
        return None

    def _skip_to(self, epoch: int) -> None:
        """What is left of the epochs before is not trained on."""
        self._again.extendleft(reversed(self._held))
        self._held.clear()
        while self._again and self._again[0].epoch < epoch:
            self._again.popleft()
        if self._cursor[0] < epoch:
            self._cursor, self._batches = (epoch, 0), None
        self._done = max(self._done, (epoch, 0))

    # ---- a step

    def _ask(self) -> None:
        """The open step ends."""
        if self._open not in ("", "head", "tail") and not self._ended:
            self._finished += 1
        self._stopped = self._stopped or self._stops
        self._open, self._marked, self._ended, self._stops = "", False, False, False

    @property
    def step(self) -> int:
        left = self._open == "hand" and self._marked and not (self._ended or self._within)
        return self._finished + left

    @property
    def stopping(self) -> bool:
        return self._stops or self._stopped

    def end_step(self) -> None:
        self._marked = True

    def stop(self) -> None:
        self._marked = self._stops = True

    def commit(self, *, agree: bool = False) -> None:
        if self._open and not self._ended:
            self._finished += self._open != "tail"
            self._marked = self._ended = True

    def log(self, **values: Any) -> None:
        counted = self._open not in ("", "head", "tail") and not self._ended
        for name, value in values.items():
            self._logged.setdefault(name, {})[self._finished + counted] = number(name, value)

    def history(self, name: str) -> tuple[Any, Any]:
        ended = {step: one for step, one in self._logged[name].items() if step <= self._finished}
        if not ended:
            raise KeyError(name)
        return np.array(list(ended), np.int64), np.array(list(ended.values()), np.float64)

    def log_to(self, writer: Any, *, name: str | None = None) -> None:
        """It tells nobody."""

    def rollback(self) -> None:
        """What is done again would be the same: nothing is taken back here."""

    def keep(self, *_: Any, **__: Any) -> None:
        """There is nothing to go back to."""

    def rewind(self, steps: int) -> None:
        """Here the step is not done again: it would be the same."""

    def detach(self) -> None: ...


def open(path: str, **_: Any) -> Store:
    return Store()


def _attach(store: Store, *, loader: Iterable[Any] = (), **_: Any) -> Run:
    return Run(loader)


torch = SimpleNamespace(
    attach=_attach,
    optim=_torch.optim,
    **{
        name: getattr(_pmstore_torch, name)
        for name in ("Job", "Resume", "LookaheadError", "RolledBackError", "UnfinishedStepError")
    },
)
