"""The process's random number generators as data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from pmstore import Store
from pmstore.engine._binding import same_bytes
from pmstore.objects.structure import encode
from pmstore.torch._random.memory import Bits, copied, numpy_state, python_state, torch_state
from pmstore.torch._random.search import Found, lower_python, raise_python
from pmstore.torch._state.part import Part, raw_bytes

_GENERATORS: dict[str, tuple[Callable[[], Bits | None], Callable[[], Any]]] = {
    "python": (python_state, lambda: lower_python(random.getstate())),
    "numpy": (numpy_state, lambda: np.random.get_state(legacy=False)),
    "torch": (torch_state, torch.get_rng_state),
}
"""Where bits lie that are other ones when the state is (None: nobody knows), and the state."""
_NO_BITS = b""


class RngParts:
    """Python's, numpy's, torch's and (if it is used) CUDA's default generators, each a part of its
    own: most steps use only one."""

    def __init__(self, store: Store, path: str) -> None:
        self._parts = {name: Part(store, f"{path}/{name}") for name in (*_GENERATORS, "cuda")}
        self._written: dict[str, bytes] = {}

    def write(self) -> None:
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

    def restore(self) -> None:
        """Sets the generators to the last commit's states."""
        self._written.clear()
        for part in self._parts.values():
            part.forget()
        random.setstate(raise_python(self._parts["python"].read()))
        np.random.set_state(self._parts["numpy"].read())
        torch.set_rng_state(self._parts["torch"].read())
        if torch.cuda.is_available() and self._parts["cuda"].stored:
            states = self._parts["cuda"].read()
            torch.cuda.set_rng_state_all(states[: torch.cuda.device_count()])


def capture(generators: Sequence[Found] = ()) -> dict[str, Any]:
    """The states of the default generators, and of the given ones by their places, as a structure
    that a `Part` can hold."""
    return {
        "python": lower_python(random.getstate()),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "generators": states_of(generators),
    }


def restore(state: dict[str, Any], generators: Sequence[Found] = ()) -> None:
    """Sets them to the states of `capture`; those of which it has none stay as they are."""
    random.setstate(raise_python(state["python"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
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

    def capture(self) -> dict[str, Any]:
        """As the function `capture`. What has not changed since the last call is the same
        object."""
        for name, (look, state) in _GENERATORS.items():
            bits = look()
            if bits is None or not same_bytes(bits, self._bits.get(name, _NO_BITS)):
                now = _NO_BITS if bits is None else copied(bits)  # before the state is read
                self._states[name], self._bits[name] = state(), now
        states = states_of(self._holder.generators)
        if not states or bits_of(states) != bits_of(self._states.get("generators", {})):
            self._states["generators"] = states or _NONE
        return dict(self._states)


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


@contextmanager
def isolated(stream: dict[str, Any]) -> Iterator[None]:
    """Inside, the default generators are the stream's, which goes on where it was; outside, nothing
    has happened."""
    outside = capture()
    restore(stream)
    try:
        yield
    finally:
        stream.update(capture())
        restore(outside)
