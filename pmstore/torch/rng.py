"""The process's random number generators as data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from pmstore import Store
from pmstore.torch.part import Part
from pmstore.torch.rng_memory import numpy_state, python_state


def torch_state() -> bytes:
    """The bits of `torch.get_rng_state()`."""
    return torch.default_generator.get_state().numpy().tobytes()


_GENERATORS: dict[str, tuple[Callable[[], bytes | None], Callable[[], Any]]] = {
    "python": (python_state, lambda: _lower_python(random.getstate())),
    "numpy": (numpy_state, lambda: np.random.get_state(legacy=False)),
    "torch": (torch_state, torch.get_rng_state),
}
"""Bits that are other ones when the state is (None: nobody knows), and the state."""


class RngParts:
    """Python's, numpy's, torch's and (if it is used) CUDA's default generators, each a part of its
    own: most steps use only one."""

    def __init__(self, store: Store, path: str) -> None:
        self._parts = {name: Part(store, f"{path}/{name}") for name in (*_GENERATORS, "cuda")}
        self._written: dict[str, bytes | None] = {}

    def write(self) -> None:
        """Writes what changed; pending until the next commit."""
        for name, (look, state) in _GENERATORS.items():
            bits = look()
            if bits is None or bits != self._written.get(name):
                self._parts[name].write(state())
                # after the write: an interrupt between the two only costs a second write
                self._written[name] = bits
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._parts["cuda"].write(torch.cuda.get_rng_state_all())

    def restore(self) -> None:
        """Sets the generators to the last commit's states."""
        self._written.clear()
        for part in self._parts.values():
            part.forget()
        random.setstate(_raise_python(self._parts["python"].read()))
        np.random.set_state(self._parts["numpy"].read())
        torch.set_rng_state(self._parts["torch"].read())
        if torch.cuda.is_available() and self._parts["cuda"].stored:
            states = self._parts["cuda"].read()
            torch.cuda.set_rng_state_all(states[: torch.cuda.device_count()])


def capture(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """The states of the default generators, and of the given ones, as a structure that a `Part` can
    hold."""
    return {
        "python": _lower_python(random.getstate()),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "generators": [generator.get_state() for generator in generators],
    }


def restore(state: dict[str, Any], generators: Sequence[torch.Generator] = ()) -> None:
    """Sets them to the states of `capture`."""
    random.setstate(_raise_python(state["python"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for generator, one in zip(generators, state["generators"], strict=True):
        generator.set_state(one)


def check(state: dict[str, Any], generators: Sequence[torch.Generator] = ()) -> None:
    """Raises, as `restore` would, if it is no state of these; nothing has happened afterwards."""
    outside = capture(generators)
    try:
        restore(state, generators)
    finally:
        restore(outside, generators)


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


def _lower_python(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}


def _raise_python(state: dict[str, Any]) -> tuple[Any, ...]:
    return state["version"], tuple(state["words"].tolist()), state["gauss"]
