"""Where a training run is: in this process, and by the store's last commit."""

from __future__ import annotations

import struct
import warnings
from typing import Any, NamedTuple

import numpy as np

from pmstore import Store
from pmstore.objects.structure import COLLECTIONS
from pmstore.torch._data.position import Place, Position
from pmstore.torch.kept_structure import Structure, become, objects_in

# Places in the stored array.
_STEP, _DATA_EPOCH, _BATCH, _MIDSTEP = range(4)
_FOUR, _ONE = struct.Struct("=4q"), struct.Struct("=q")


BY_HAND = "by hand"


class LoopRecord(NamedTuple):
    """A loop that the run has begun, in the order of the first beginnings.

    Attributes:
        kind: "epochs", "batches", "steps" or "by hand".
        name: that the program gave it, or "".
        n: how far it goes: epochs or steps, as asked for last; None: no end.
        base: data epochs that were over when it began, if it has a name: it counts for itself.
        over: a later one has begun, so that it hands out nothing unless it is asked for more.
    """

    kind: str
    name: str
    n: int | None
    base: int
    over: bool = False

    @property
    def called(self) -> str:
        """The call that begins it, for messages."""
        if self.kind == BY_HAND:
            return "run.next_step()"
        what = "n" if self.kind == "steps" else "epochs"
        given = (
            "" if self.n is None else str(self.n) if self.kind != "batches" else f"{what}={self.n}"
        )
        name = f"name={self.name!r}" if self.name else ""
        return f"run.{self.kind}({', '.join(filter(None, (given, name)))})"


class Progress:
    """Where a run is. The store holds

    `<name>/progress`   finished steps, data epoch, batch, whether an update is under way
    `<name>/scopes`     epochs that are over, the epoch whose head is over plus one, steps of the
                        present `run.steps` loop, whether the run was stopped. A run of an earlier
                        version has none: a data epoch that has begun had its head
    `<name>/loops`      the loops that were begun, in order, and the counts of those of `run.steps`
                        that are not the present one

    Attributes:
        finished: steps that are finished, committed or not.
        place: in the data.
        over: epochs of `run.epochs` that are over, with their tails.
        head: the newest epoch whose head is over, plus one.
        count: steps of the present `run.steps` loop, or of the one before.
        stopped: `run.stop()` has ended the run, until it is asked for more.
        loops: that were begun, in any life.
        bases: `LoopRecord.base` of named loops that were forgotten, by kind and name.
        agreed: the store's `rollbacks` that Python has followed; -1: it has to follow first.
        restored: how often Python followed the store; a loop over the data sees by it.
    """

    def __init__(
        self, store: Store, name: str, numbers: np.ndarray[Any, np.dtype[np.int64]]
    ) -> None:
        self.finished: int = 0
        self.place: Place = Place()
        self.over: int = 0
        self.head: int = 0
        self.count: int = 0
        self.stopped: bool = False
        self.loops: list[LoopRecord] = []
        self.restored: int = 0
        self._counts: dict[str, int] = {}  # of loops of run.steps, by name
        self.bases: dict[str, int] = {}
        self._counter: str = ""  # the name that `count` is of
        self._store = store
        self._name = name
        self._numbers = numbers
        self._raw = numbers.data.cast("B")  # of it: packed in one go
        self._scopes: Any = None  # as it is stored; None: not yet
        self._written: tuple[int, ...] | None = None  # what it holds, if known
        self._handle = store._core.pool.handle
        self._committed = 0
        self._seen_epoch = store.epoch  # the store's, when _committed was last brought up to date
        self.agreed: int = store.rollbacks

    @classmethod
    def create(cls, store: Store, name: str) -> Progress:
        """Makes the progress of a new run, which is pending until the next commit."""
        return cls(store, name, store.zeros(f"{name}/progress", (4,), "int64"))

    @classmethod
    def open(cls, store: Store, name: str) -> Progress:
        """Opens the progress of a stored run; `restore` reads it.

        Raises: KeyError, ValueError: it is not as a run was stored.
        """
        numbers = store[f"{name}/progress"]
        if not isinstance(numbers, np.ndarray) or (numbers.shape, numbers.dtype) != (
            (4,),
            np.dtype(np.int64),
        ):
            raise ValueError(f"{name}/progress is not four numbers")
        return cls(store, name, numbers)

    @property
    def torn(self) -> bool:
        """Whether the store says that a step is under way."""
        return bool(self._numbers[_MIDSTEP])

    @property
    def committed(self) -> int:
        """Steps that the store's last commit holds."""
        self.settle()
        return self._committed

    def settle(self) -> None:
        """Notices a commit, whoever made it and whatever interrupted what followed: the store says
        what it holds."""
        if self._handle.closed:
            return
        epoch = self._handle.epoch()
        if epoch != self._seen_epoch:
            (self._committed,) = _ONE.unpack_from(self._raw, _ONE.size * _STEP)
            self._seen_epoch = epoch

    def begin_update(self, writes: list[Any]) -> None:
        """Says in the store that a step is under way, and declares what it writes: captured in one
        go, without a fault for each piece."""
        self._handle.will_write((self._raw, *writes))
        _ONE.pack_into(self._raw, _ONE.size * _MIDSTEP, 1)

    def capture(self, finished: int) -> None:
        """Pending until the next commit."""
        if self._handle.epoch() != self._seen_epoch:
            self.settle()  # now: afterwards the store's memory has more than its last commit
        done = self.place.done
        _FOUR.pack_into(self._raw, 0, finished, done.data_epoch, done.batch, 0)
        scopes = self.over, self.head, self.count, self.stopped
        if scopes != self._written:
            if self._scopes is None:
                self._scopes = self._store.require(f"{self._name}/scopes", (4,), "int64")
            self._scopes[:] = scopes
            self._written = scopes

    # ---- loops

    def begin_loop(self, index: int, record: LoopRecord) -> None:
        """The loop of that number begins, or begins again, and those before it are over; pending
        until the next commit. Where it is the next number, it is a new one."""
        earlier = (one._replace(over=True) for one in self.loops[:index])
        self.loops = [*earlier, record, *self.loops[index + 1 :]]
        if record.kind == "steps" and record.name != self._counter:
            self._counts[self._counter] = self.count
            self._counter, self.count = record.name, self._counts.pop(record.name, 0)
        self._write_loops()

    def drop_loop(self) -> None:
        """The newest one did not begin; pending until the next commit."""
        self.loops = self.loops[:-1]
        self._write_loops()

    def _write_loops(self) -> None:
        self._store[f"{self._name}/loops"] = {
            "loops": [list(one) for one in self.loops],
            "counter": self._counter,
            "counts": self._counts,
            "bases": self.bases,
        }

    @staticmethod
    def forget_loops(store: Store, name: str) -> None:
        """The loops of a program that was edited begin anew, but for what they have counted;
        pending until the next commit."""
        stored: Any = store.get(f"{name}/loops")
        if stored is not None:
            loops = [LoopRecord(*one) for one in stored["loops"]]
            bases = {
                f"{one.kind} {one.name}": one.base
                for one in loops
                if one.name and one.kind != "steps"
            }
            known = stored.get("bases", {})
            store.pop(f"{name}/heads", None)
            store[f"{name}/loops"] = {**stored, "loops": [], "bases": {**bases, **known}}

    # ---- going back

    def touch(self) -> None:
        """Something is pending, whatever was: for a roll back that counts."""
        self._numbers[_MIDSTEP] ^= 1

    def restore(self) -> None:
        """Is where the store's last commit was.

        Raises: KeyError, TypeError, ValueError: it is not as a run was stored.
        """
        step, data_epoch, batch, _ = self._numbers.tolist()
        self._written, self._scopes = None, self._store.get(f"{self._name}/scopes")
        if self._scopes is None:
            over, head, count, stopped = data_epoch, data_epoch + (batch > 0), 0, 0
        else:
            over, head, count, stopped = self._written = tuple(self._scopes.tolist())
        stored: Any = self._store.get(f"{self._name}/loops")
        if stored is None:
            stored = {"loops": [], "counter": "", "counts": {}}
        self.loops = [LoopRecord(*one) for one in stored["loops"]]
        self._counter, self._counts = stored["counter"], dict(stored["counts"])
        self.bases = dict(stored.get("bases", {}))
        self.over, self.head, self.count, self.stopped = over, head, count, bool(stopped)
        self.place.restore(Position(data_epoch, batch))
        self.finished = self._committed = step
        self._seen_epoch = self._store.epoch
        self.restored += 1


# ---- plain values of the program


class RunState:
    """The values of one run, which lie under `<run>/state`.

    Attributes:
        values: as the program has them: the same dict for as long as the run lives.
        stored: the store has some.
    """

    def __init__(self, store: Store, run: str) -> None:
        self.values: dict[str, Any] = {}
        self._part = Structure(store, f"{run}/state")
        self._written: dict[int, Any] = {}  # lists, dicts and arrays that it was written from
        self.stored: bool = False
        self._told = False  # that values are shared

    def capture(self) -> None:
        """Writes what changed; pending until the next commit.

        Raises: TypeError: a value is not plain data, or would come back as another one.
        """
        try:
            found = list(objects_in(self.values, "run.state"))
            self._part.write(self.values, exact=True)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"run.state: {error}") from None
        except RecursionError:
            raise ValueError("run.state: a value contains itself") from None
        written = {id(one): one for _, one in found}
        if len(written) != len(found) and not self._told:
            self._tell_shared(found)
        self._written = written
        self.stored = True

    def _tell_shared(self, found: list[tuple[str, Any]]) -> None:
        """Warns, once, of a collection in two places. (An array is rarely changed in place.)"""
        first: dict[int, str] = {}
        for place, one in found:
            if first.setdefault(id(one), place) != place and type(one) in COLLECTIONS:
                self._told = True
                warnings.warn(
                    f"{first[id(one)]} and {place} hold the same {type(one).__name__}. After a "
                    "restart each has its own: what changes in one is not seen in the other",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return

    def restore(self) -> None:
        """The values become those of the last commit."""
        self._part.forget()
        self.stored = self._part.stored
        ours = {**self._written, id(self.values): self.values}
        become(self.values, self._part.read() if self.stored else {}, ours)
        self._written = {}
        for _, one in objects_in(self.values, ""):
            self._written[id(one)] = one
