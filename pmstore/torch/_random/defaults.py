"""The process's random number generators as data."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import numpy as np
import torch

from pmstore import Store
from pmstore._engine._binding import Watch, same_bytes
from pmstore.objects.structure import encode
from pmstore.objects.tensor import introduce
from pmstore.torch._random.search import Found, lower_python, put_python
from pmstore.torch.changes import SAME, Question, asking, still
from pmstore.torch.kept_structure import Structure, raw_bytes

# ---- where the states of the default generators lie, for comparing
#
# `random.getstate` makes 625 ints, `numpy.random.get_state` copies as many one by one: 30 us and 90
# us, at every step, for generators that most steps do not use. To see where they lie that the bytes
# are those that were written last takes a fraction of one. Where they lie is no part of either's
# interface: it is looked for in generators made for that, at import, and compared with what the
# interface says. Where that fails (another interpreter, another numpy), there is nothing to see,
# and the caller asks the interface. torch's interface is quick enough.


Bits = torch.Tensor | tuple[memoryview | bytes, ...]
"""A copy, or, one behind the other, where the bits of a state lie, as they are at any time.
`copied` copies them, `same_bytes` compares them with a copy."""


def copied(bits: Bits) -> bytes:
    if isinstance(bits, torch.Tensor):
        return bits.numpy().tobytes()
    return b"".join(bits)


_WORDS = 624  # of a Mersenne twister: both keep these and an index
_STATE_BYTES = 4 * _WORDS + 4


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


# ---- Python: struct { PyObject_HEAD; int index; uint32_t state[624]; }, and the attribute
# gauss_next


def _python_memory(generator: random.Random) -> memoryview:
    return _memory(id(generator) + object.__basicsize__, _STATE_BYTES)


def _python_known() -> bool:
    if (
        sys.implementation.name != "cpython"
        or random.Random.__basicsize__ < object.__basicsize__ + _STATE_BYTES
    ):
        return False
    generator = random.Random(12345)
    for _ in range(3):
        generator.gauss(0, 1)
        _, words, gauss = generator.getstate()
        if bytes(_python_memory(generator)) != struct.pack(f"i{_WORDS}I", words[-1], *words[:-1]):
            return False
        if getattr(generator, "gauss_next", generator) is not gauss:
            return False
    return True


def _python_look() -> Callable[[], Bits | None]:
    inst: Any = getattr(random, "_inst", None)
    if type(inst) is not random.Random or not _python_known():
        return lambda: None
    generator: random.Random = inst
    alone: Bits = (_python_memory(generator),)

    def look() -> Bits | None:
        if getattr(random, "_inst", None) is not generator:  # the module was loaded again
            return None
        gauss = generator.gauss_next
        return alone if gauss is None else (*alone, struct.pack("d", gauss))

    return look


# ---- numpy: struct { uint32_t key[624]; int pos; } at an address that it tells, and somewhere in
# the RandomState struct { ...; int has_gauss; double gauss; }


def _numpy_memory(generator: np.random.RandomState) -> memoryview:
    bits: Any = generator._bit_generator
    return _memory(bits.ctypes.state_address, _STATE_BYTES)


def _gauss_offset() -> int | None:
    """Returns the offset of `gauss` in a RandomState; `has_gauss` is 8 bytes before it."""
    generator = np.random.RandomState(12345)
    size = type(generator).__basicsize__
    offset = -1
    for _ in range(3):
        generator.standard_normal()  # every other one leaves a number for the next
        state: Any = generator.get_state(legacy=False)
        held = ctypes.string_at(id(generator), size)
        if offset < 0:
            offset = held.find(struct.pack("d", state["gauss"]))
        if offset < object.__basicsize__ + 8 or held[offset : offset + 8] != struct.pack(
            "d", state["gauss"]
        ):
            return None
        if held[offset - 8 : offset - 4] != struct.pack("i", state["has_gauss"]):
            return None
        key = state["state"]["key"].tobytes() + struct.pack("i", state["state"]["pos"])
        if bytes(_numpy_memory(generator)) != key:
            return None
    return offset


def _numpy_look() -> Callable[[], Bits | None]:
    try:
        generator: Any = np.random.mtrand._rand
        offset = _gauss_offset()
        bits = generator._bit_generator
        if (
            sys.implementation.name != "cpython"
            or offset is None
            or type(bits) is not np.random.MT19937
        ):
            return lambda: None
        both: Bits = _numpy_memory(generator), _memory(id(generator) + offset - 8, 16)
    except (AttributeError, KeyError, TypeError):
        return lambda: None

    def look() -> Bits | None:
        if generator._bit_generator is not bits:  # numpy.random.set_bit_generator
            return None
        return both

    return look


python_state: Callable[[], Bits | None] = _python_look()
"""The bits of `random.getstate()`: equal means the same state. None: ask there."""
numpy_state: Callable[[], Bits | None] = _numpy_look()
"""The bits of `numpy.random.get_state()`: equal means the same state. None: ask there."""


def _torch_look() -> Callable[[], Bits]:
    introduce()
    generator = torch.default_generator
    if same_bytes(generator.get_state(), generator.get_state()) is None:  # not known to C code
        return lambda: (memoryview(generator.get_state().numpy()),)  # type: ignore[arg-type]
    return generator.get_state


torch_state: Callable[[], Bits] = _torch_look()
"""The bits of `torch.get_rng_state()`: a copy, which torch makes in 2 us."""


# ---- the states as data


_GENERATORS: dict[str, tuple[Callable[[], Bits | None], Callable[[], Any]]] = {
    "python": (python_state, lambda: lower_python(random.getstate())),
    "numpy": (numpy_state, lambda: np.random.get_state(legacy=False)),
    "torch": (torch_state, torch.get_rng_state),
}
"""Where bits lie that are other ones when the state is (None: nobody knows), and the state."""
_SETTERS: dict[str, Callable[[Any], None]] = {
    "python": put_python,
    "numpy": np.random.set_state,
    "torch": torch.set_rng_state,
}


def _held() -> dict[str, list[Question]]:
    """Whether the bits still lie where they do; nothing for those that are a copy."""
    python: Any = getattr(random, "_inst", None)
    numpy: Any = getattr(np.random.mtrand, "_rand", None)
    gauss, bits = getattr(python, "gauss_next", None), getattr(numpy, "_bit_generator", None)
    return {
        "python": [still(random, "_inst", python), still(python, "gauss_next", gauss)],
        "numpy": [still(numpy, "_bit_generator", bits)],
        "torch": [],
    }


_NO_BITS = b""


class RngParts:
    """Python's, numpy's, torch's and (if it is used) CUDA's default generators, each a part of its
    own: most steps use only one."""

    def __init__(self, store: Store, path: str) -> None:
        self._parts = {name: Structure(store, f"{path}/{name}") for name in (*_GENERATORS, "cuda")}
        self._written: dict[str, bytes] = {}
        self.watch: Watch | None = None  # see `Part`

    def capture(self) -> None:
        """Writes what changed; pending until the next commit."""
        for name, (look, state) in _GENERATORS.items():
            bits = look()
            if bits is None or not same_bytes(bits, self._written.get(name, _NO_BITS)):
                now = _NO_BITS if bits is None else copied(bits)  # before the state is read
                self._parts[name].write(state())
                # after the write: an interrupt between the two only costs a second write
                self._written[name] = now
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._parts["cuda"].write(torch.cuda.get_rng_state_all())

    @property
    def stored(self) -> bool:
        return self._parts["python"].stored

    def forget(self) -> None:
        """What is stored is not known."""
        self.watch = None
        self._written.clear()
        for part in self._parts.values():
            part.forget()

    def restore(self) -> None:
        """Sets the generators to the last commit's states."""
        self.forget()
        for name, put in _SETTERS.items():
            put(self._parts[name].read())
        if torch.cuda.is_available() and self._parts["cuda"].stored:
            states = self._parts["cuda"].read()
            torch.cuda.set_rng_state_all(states[: torch.cuda.device_count()])


class RngPart(RngParts):
    """The default generators' states, stored as they are with each commit."""

    def capture(self) -> None:
        self.watch = None
        super().capture()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        questions: list[Question] = [(torch.cuda.is_initialized, (), False)]
        held = _held()
        for name, (look, _) in _GENERATORS.items():
            known, bits = self._written[name], look()
            if known == _NO_BITS:
                return
            same = (same_bytes, (bits, known), True) if held[name] else (look, (), known)
            questions += [*held[name], same]
        self.watch = asking(questions)


class HeadDraws:
    """The default generators as they are where a head begins: one that is done again draws what it
    drew before. `<path>/<number>` is of the head before the loop of that number, `<path>/epoch` of
    the newest epoch's."""

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        self._epoch: RngParts | None = None  # with what was written last, if it is known

    def _of(self, number: int | Literal["epoch"]) -> RngParts:
        return RngParts(self._store, f"{self._path}/{number}")

    def knows(self, number: int) -> bool:
        return self._of(number).stored

    def forget(self, number: int) -> None:
        """What was drawn there will be another; pending until the next commit."""
        self._store.pop(f"{self._path}/{number}", None)

    def begin(self, number: int) -> None:
        """The head before that loop begins, for the first time; pending until the next commit."""
        self._of(number).capture()

    def begin_again(self, number: int) -> None:
        """It is done again."""
        _restore(self._of(number))

    def begin_epoch(self, *, again: bool) -> None:
        """An epoch's head begins."""
        if self._epoch is None:
            self._epoch = self._of("epoch")
        if again:
            _restore(self._epoch)
        else:
            self._epoch.capture()

    def rolled_back(self) -> None:
        """What was written last may be stored no more."""
        self._epoch = None


def _restore(parts: RngParts) -> None:
    if parts.stored:  # else the run is of an earlier version
        parts.restore()


def capture(generators: Sequence[Found] = ()) -> dict[str, Any]:
    """The states of the default generators, and of the given ones by their places, as a structure
    that a `Structure` can hold."""
    return {
        "python": lower_python(random.getstate()),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "generators": states_of(generators),
    }


def restore(state: dict[str, Any], generators: Sequence[Found] = ()) -> None:
    """Sets them to the states of `capture`; those of which it has none stay as they are."""
    for name, put in _SETTERS.items():
        put(state[name])
    set_states(state["generators"], generators)


def states_of(generators: Sequence[Found]) -> dict[str, Any]:
    return {one.place: one.get_state() for one in generators}


def set_states(states: dict[str, Any], generators: Sequence[Found]) -> None:
    for one in generators:
        if one.place in states:
            one.set_state(states[one.place])


@contextmanager
def unchanged(generators: Sequence[Found] = ()) -> Iterator[None]:
    """All of them come out as they went in."""
    now = capture(generators)
    try:
        yield
    finally:
        restore(now, generators)


class Holder(Protocol):
    """What has generators, which may become more."""

    generators: list[Found]


_NONE: dict[str, Any] = {}


class Watched:
    """The default generators and a holder's, read again only where their bits have changed."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._bits: dict[str, bytes] = {}
        self._states: dict[str, Any] = {}
        self._watch: Watch | None = None  # of the holder's; None: they do not tell

    def capture(self) -> dict[str, Any]:
        """Captures as the function `capture` does. What has not changed since the last call is the
        same object."""
        for name, (look, state) in _GENERATORS.items():
            bits = look()
            if bits is None or not same_bytes(bits, self._bits.get(name, _NO_BITS)):
                now = _NO_BITS if bits is None else copied(bits)  # before the state is read
                self._states[name], self._bits[name] = state(), now
        if self._watch is None or self._watch.look() != SAME:
            self._capture_generators()
        return dict(self._states)

    def _capture_generators(self) -> None:
        self._watch = None
        found = self._holder.generators
        states = states_of(found)
        if not states or bits_of(states) != bits_of(self._states.get("generators", {})):
            self._states["generators"] = states or _NONE
        questions = [still(self._holder, "generators", found)]
        for one in found:
            asked = one.asked(states[one.place])
            if asked is None:
                return
            questions += asked
        self._watch = asking(questions)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether nothing was drawn between two captures of one `Watched`."""
    return all(one[name] is other[name] for name in one)


def bits_of(state: Any) -> bytes:
    """Bytes that are other ones when the state is."""
    encoded, arrays = encode(state)
    return encoded + b"".join(raw_bytes(array).tobytes() for array in arrays)


def check(state: dict[str, Any], generators: Sequence[Found] = ()) -> None:
    """Raises, as `restore` would, if it is no state of these; nothing has happened afterwards."""
    with unchanged(generators):
        restore(state, generators)


class Stream:
    """Default generators apart from the program's, which go on from where those are when it is
    made. Inside of `with` they are the default ones; outside, nothing has happened."""

    def __init__(self) -> None:
        self.generators: list[Found] = []  # no others
        self._watched = Watched(self)
        self._own = self._outside = self._watched.capture()

    def __enter__(self) -> None:
        self._outside = self._watched.capture()
        _exchange(self._outside, self._own)

    def __exit__(self, *_: object) -> None:
        self._own = self._watched.capture()
        _exchange(self._own, self._outside)


def _exchange(here: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Sets the default generators that are in another state; both were captured by one `Watched`.
    (Python's and numpy's take 100 us to set, and few loaders draw from them.)"""
    for name, put in _SETTERS.items():
        if wanted[name] is not here[name]:
            put(wanted[name])
