"""Slots: an array with two blocks. The next version is written into the idle one, and a commit
names it the current one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import msgpack
import numpy as np

from pmstore._base import notebook
from pmstore._engine.constants import ARRAY, GROUP, ROOT, SLOT_CURRENT, SLOT_IDLE, SLOT_NEXT
from pmstore._engine.landing import LandFlip
from pmstore._engine.pool import Found, Pool
from pmstore.errors import (
    CorruptStoreError,
    NameExistsError,
    NoSuchNameError,
    PmstoreError,
    TransactionError,
)
from pmstore.objects import array, dtypes, tensor
from pmstore.objects.array import Descriptor, Shape
from pmstore.objects.core import Core, represent
from pmstore.objects.names import in_the_way

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    _A = TypeVar("_A", default=Any)
else:
    from typing import TypeVar

    _A = TypeVar("_A")

_NAMES = (b"0", b"1")  # of the two arrays, in the group that a Slots is in the store


class Turn:
    """Holds what this process knows about a pair of slots beyond what is stored. All objects of the
    name share it.

    flipped: when it was last, as the engine has it (struct pms_slot_turn): `Handle.flip` and
        `flipped` know.
    """

    __slots__ = ("flipped", "whole")

    def __init__(self) -> None:
        self.flipped: bytearray = bytearray(b"\xff" * 16)
        # roll backs when the idle slot was known to hold the version before; None: it does not
        self.whole: int | None = None


_LANDING = -1  # a value of Turn.whole: it is known when the commit is over


class LandingPlace(NamedTuple):
    """The place for the next version, when a commit lands it: see `Slots.begin_landing`."""

    blocks: set[int]
    """The blocks of both versions."""
    flip: LandFlip | None
    """The flip to the idle block; None: the versions have no bytes."""
    idle: Any
    """The array or tensor over that block, where it may be written in place, as a device does."""


def pack(current: int) -> bytes:
    """Returns the bytes that stand beside the group's name. Their number never changes, so that a
    flip stores one byte."""
    packed: bytes = msgpack.packb({"slots": current})
    return packed


def unpack(meta: bytes) -> int:
    """Returns which slot is current, 0 or 1. Raises: CorruptStoreError."""
    try:
        current = msgpack.unpackb(meta)["slots"]
    except dtypes.UNDECODABLE as error:
        raise CorruptStoreError(f"the description of slots does not decode: {error!r}") from error
    if current not in (0, 1):
        raise CorruptStoreError(f"slots are numbered 0 and 1, not {current!r}")
    if meta != pack(int(current)):  # the engine compares bytes
        raise CorruptStoreError("the description of slots is not written as slots write it")
    return int(current)


def check(pool: Pool, group: Found) -> None:
    """Checks that what is described as slots is a pair: two arrays of one description.

    Raises: CorruptStoreError.
    """
    unpack(group.meta)
    held = dict(pool.entries(group.data))
    if sorted(held) != list(_NAMES) or any(found.kind != ARRAY for found in held.values()):
        raise CorruptStoreError("slots hold two arrays, 0 and 1, and nothing else")
    first, second = (held[name] for name in _NAMES)
    if (first.meta, first.data_bytes) != (second.meta, second.data_bytes):
        raise CorruptStoreError("the two arrays of slots differ in dtype, shape or size")


class Slots(Generic[_A]):
    """An array or tensor with two blocks, made or opened by `store.slots(name, shape, dtype)`.

    `current` is the version that the last flip named. The next one is written into `next` and takes
    its place by `flip()`, which is part of the transaction: all flips of a transaction and all its
    other writes take effect together at the commit, or not at all. Neither costs a copy: blocks of
    more than 32 KiB are written in place, without a page fault or a pre-image, and the commit only
    writes them back. (Smaller ones are captured, as cheap.) A crash or a roll back finds `current`
    as the last commit left it.

        with store.transaction():
            np.multiply(means.current, 0.9, out=means.next)
            means.flip()

    The two versions lie at two fixed addresses that take turns: an array got from `current` or
    `next` keeps its address and becomes the other one by a flip. Writing into `current` works too,
    captured like any array.

    A Slots is its path, not the object. Source: shadow paging (Gray et al., 1981) of one object;
    double buffering.

    Raises (all methods): KeyError if it is not in the store any more; ClosedStoreError,
    ReadOnlyStoreError, ForkedStoreError, CorruptStoreError.

    >>> import numpy as np, pmstore, tempfile
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder,
    ...     pmstore.open(f"{folder}/run.pm", size="8MiB") as store,
    ... ):
    ...     w = store.slots("w", 3)
    ...     with store.transaction():
    ...         w.next[:] = w.current + 1
    ...         w.flip()
    ...     w.current.tolist(), w.previous.tolist()
    ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    """

    __slots__ = ("_core", "_parts", "_path")

    def __init__(self, core: Core, parts: tuple[bytes, ...]) -> None:
        self._core = core
        self._parts = parts
        self._path = b"\0".join(parts)

    # ---- finding ----

    def _gone(self) -> NoSuchNameError:
        return NoSuchNameError(f"the slots {self.name!r} are not in the store any more")

    def _directory(self) -> int | None:
        """Returns the directory that has the name, if it is there. It holds until the next change.
        REQUIRES: the lock."""
        if len(self._parts) == 1:
            return ROOT
        found = self._core.pool.find(ROOT, b"\0".join(self._parts[:-1]))
        return found.data if found is not None and found.kind == GROUP else None

    def _array(self, which: int) -> _A:
        """Returns one version. It is found, opened (SLOT_NEXT) and pinned in one step: a commit of
        another thread may flip slots that are a mirror, and a signal handler may remove them.
        REQUIRES: the lock."""
        found = self._core.pool.slot(ROOT, self._path, which)
        if found is None:
            raise self._gone()
        array: _A = self._core.load(found, self.name)
        return array

    def _turn(self) -> Turn:
        turn: Turn | None = self._core.turns.get(self._parts)
        if turn is None:
            turn = self._core.turns.setdefault(self._parts, Turn())
        return turn

    def _flipped(self, turn: Turn) -> bool:
        return self._core.pool.handle.flipped(turn.flipped)

    # ---- the versions ----

    @property
    def name(self) -> str:
        """The path of the slots."""
        return b"/".join(self._parts).decode()

    @property
    def current(self) -> _A:
        """The version that the last flip named, committed or not: the array or tensor over its
        block, zeros at first."""
        with self._core.lock:
            return self._array(SLOT_CURRENT)

    @property
    def next(self) -> _A:
        """The idle slot, which the next version is written into. Its content is undefined until it
        is written, and again after a roll back or a crash. Whoever asks for `next` gives up
        `previous`. `flip` makes all of it current: elements that were not written keep what was
        there. In this process that is the version before the current one.

        Raises: TransactionError after a flip that is not committed: the idle slot is then the
            committed version, which is not written to. Write into `current` (see `target`), or
            commit first. In a job of several ranks: PeerLostError, MixedStoresError.
        """
        if self._core.job is not None:
            self._core.job.settle()
        with self._core.lock:
            turn = self._turn()
            if self._flipped(turn):
                self._array(SLOT_CURRENT)  # KeyError, should it be gone
                raise TransactionError(
                    f"{self.name!r} was flipped in this transaction, so that its other slot holds "
                    "the committed version: write the next one into .current, in place (or "
                    ".target, which is always the right one), or commit first"
                )
            turn.whole = None
            return self._array(SLOT_NEXT)

    @property
    def target(self) -> _A:
        """The version that a step may write into if it needs only the elements that it replaces:
        `next`, or `current` itself if that was flipped in this transaction already (it is not the
        committed one then, and needs no second flip)."""
        with self._core.lock:
            return self.current if self.flipped else self.next

    @property
    def flipped(self) -> bool:
        """Whether `current` is a version that is not committed yet."""
        with self._core.lock:
            return self._flipped(self._turn())

    @property
    def previous(self) -> _A | None:
        """The version before `current`, read-only if it is a numpy array. It is None before the
        first flip in this process, once `next` was asked for, after a roll back, and in a store
        that is open for reading."""
        if self._core.pool.info.read_only:
            return None  # it is being written, by another process
        with self._core.lock:
            made = self._array(SLOT_IDLE)
            if self._turn().whole != self._core.pool.rollbacks():
                return None
            if not isinstance(made, np.ndarray):
                return made
            view: Any = made.view()
            view.flags.writeable = False
            seen: _A = view
            return seen

    def flip(self) -> None:
        """Makes `next` the current version, at the commit of this transaction. What was not written
        into it since the last flip is as it was: without any write in between this goes back to the
        version before.

        It may be called in a `with store.transaction()` block, or outside one: it is pending until
        the next commit then.

        Raises: TransactionError if it was flipped in this transaction already.
        """
        with self._core.lock:
            turn, handle = self._turn(), self._core.pool.handle
            if not handle.flip(ROOT, self._path, turn.flipped):
                raise self._gone()
            turn.whole = handle.rollbacks()  # the same as at the flip: a roll back takes the lock

    def forget_previous(self) -> None:
        """Notes that the idle slot does not hold the version before this one: `previous` is None
        from now on."""
        with self._core.lock:
            self._turn().whole = None

    # ---- for mirrors ----

    def begin_landing(self, settled: set[int], *, filled: bool) -> LandingPlace | None:
        """Prepares the slots for a commit that will fill the idle slot and flip. Returns where the
        next version goes; None if the slots are not in the store (any more). settled: blocks that
        may be written in place, as they are known to be committed. filled: whether there is
        anything to fill the idle slot with; if not, it keeps an older version, and is not flipped.
        REQUIRES: the lock.

        Raises: TransactionError if they were flipped in this transaction already.
        """
        pool, directory = self._core.pool, self._directory()
        pair = pool.slot_find(ROOT, self._path)
        if pair is None or directory is None:
            return None
        turn = self._turn()
        if self._flipped(turn):
            raise TransactionError(
                f"{self.name!r} is a mirror: its slots are flipped by commits alone"
            )
        number, idle = 1 - pair.current, None
        data = pair.data[number]
        if turn.whole == _LANDING:
            turn.whole = None  # a commit that failed had begun to fill them
        if not data or not filled:
            return LandingPlace(set(pair.data), None, None)
        turn.whole = _LANDING
        if data in settled:
            idle = self._array(SLOT_NEXT)
            data = array.span(idle)[0][0] - pool.info.base  # it may have been flipped meanwhile
            number = pair.data.index(data)
        return LandingPlace(
            set(pair.data), LandFlip(directory, data, self._parts[-1], pack(number)), idle
        )

    def end_landing(self) -> None:
        """Notes that the commit that `begin_landing` was for has happened: the idle slot holds the
        version before."""
        turn = self._turn()
        if turn.whole == _LANDING:  # otherwise the program used the slots meanwhile
            turn.whole = self._core.pool.rollbacks()

    # ---- looking at it ----

    def _description(self) -> Descriptor:
        with self._core.lock:
            # both are of one description
            found = self._core.pool.find(ROOT, self._path + b"\0" + _NAMES[0])
            if found is None or found.kind != ARRAY:
                self._core.pool.slot_find(ROOT, self._path)  # a pair that lacks it is damaged
                raise self._gone()
            return self._core.describe(found)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each of the two versions."""
        return self._description().shape

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Slots) and other._core is self._core and other._parts == self._parts
        )

    def __hash__(self) -> int:
        return hash((id(self._core), self._parts))

    def __repr__(self) -> str:
        def state() -> str:
            about = self._description()
            return f"shape {about.shape}, dtype {about.dtype_name()}"

        return represent(self._core, "Slots", self.name, state)

    def _repr_html_(self) -> str:
        try:
            about = self._description()
            with self._core.lock:
                pair = self._core.pool.slot_find(ROOT, self._path)
            if pair is None:
                raise self._gone()
        except (KeyError, PmstoreError):
            return notebook.table(repr(self), [], [], 0)
        kinds = ["current" if number == pair.current else "idle" for number in range(2)]
        rows = [
            (number, kind, about.dtype_name(), about.shape, f"{pair.bytes:,}")
            for number, kind in enumerate(kinds)
        ]
        return notebook.table(repr(self), ("slot", "", "dtype", "shape", "bytes"), rows, 2)


def describe_new(shape: Shape | None, dtype: Any) -> tuple[Descriptor, int] | None:
    """Returns the descriptor and the bytes of an element. Without a shape it returns None: what is
    there is opened."""
    if shape is None:
        return None
    kind = tensor if dtypes.is_torch_dtype(dtype) else array
    made: tuple[Descriptor, int] = kind.describe_new(shape, np.float64 if dtype is None else dtype)
    return made


def open_slots(
    core: Core,
    parts: tuple[bytes, ...],
    given: tuple[Descriptor, int] | None,
    name: str,
    in_place: bool,
) -> Slots:
    """Opens or makes slots: see `Group.slots`. given: what `describe_new` returned. name: for
    messages."""
    made = Slots(core, parts)
    with core.lock:
        found = core.pool.find(ROOT, b"\0".join(parts))
        if found is None:
            if given is None:
                raise KeyError(name)
            _make(core, parts, *given, in_place)
        elif found.kind != GROUP or not found.meta:
            raise NameExistsError(
                f"{core.path}: {name!r} is no pair of slots: del it first, or use another name"
            )
        elif given is not None:
            there, wanted = made._description(), given[0]
            if not there.same_kind(wanted):
                raise NameExistsError(
                    f"{core.path}: the slots {name!r} have shape {there.shape}, dtype "
                    f"{there.dtype_name()}; asked for was shape {wanted.shape}, dtype "
                    f"{wanted.dtype_name()}: del them first, or use another name"
                )
        if in_place:
            pair = core.pool.slot_find(ROOT, b"\0".join(parts))
            if pair is not None and not pair.in_place:
                raise NameExistsError(
                    f"{core.path}: the slots {name!r} were made without in_place=True, or come of "
                    f"a dump: declare what is written in place (store.will_write), or copy their "
                    f"current version, del them and make them anew"
                )
    return made


def _make(
    core: Core, parts: tuple[bytes, ...], descriptor: Descriptor, itemsize: int, in_place: bool
) -> None:
    """Makes the pair of slots, both versions zero. REQUIRES: the lock; nothing has the name."""
    data_bytes = array.bytes_of_new(descriptor, itemsize)
    about = descriptor.pack()
    try:
        core.pool.make_slots(ROOT, b"\0".join(parts), pack(0), about, data_bytes, in_place)
    except NameExistsError as error:
        raise in_the_way(core.pool, parts, error) from None
    core.turns.pop(parts, None)


def idle_blocks(core: Core) -> set[int]:
    """Returns the idle block of each pair of slots that this process has used."""
    with core.lock:
        pairs = [core.pool.slot_find(ROOT, b"\0".join(parts)) for parts in list(core.turns)]
    return {pair.data[1 - pair.current] for pair in pairs if pair is not None}
