"""The states of Python's, numpy's and torch's default generators, for comparing.

`random.getstate` makes 625 ints, `numpy.random.get_state` copies as many one by one: 30 us and 90
us, at every step, for generators that most steps do not use. To see where they lie that the bytes
are those that were written last takes a fraction of one. Where they lie is no part of either's
interface: it is looked for in generators made for that, at import, and compared with what the
interface says. Where that fails (another interpreter, another numpy), there is nothing to see, and
the caller asks the interface. torch's interface is quick enough.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pmstore.engine._binding import same_bytes
from pmstore.objects.tensor import introduce

Bits = tuple[memoryview | bytes | torch.Tensor, ...]
"""One behind the other: where the bits of a state lie, as they are at any time. `copied` copies
them, `same_bytes` compares them with a copy."""


def copied(bits: Bits) -> bytes:
    return b"".join(one.numpy().tobytes() if isinstance(one, torch.Tensor) else one for one in bits)


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
    """Of `gauss` in a RandomState; `has_gauss` is 8 bytes before it."""
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
    return lambda: (generator.get_state(),)


torch_state: Callable[[], Bits] = _torch_look()
"""The bits of `torch.get_rng_state()`: a copy, which torch makes in 2 us."""
