"""Steps of optimizers (native/optim/optim.h), typed."""

from __future__ import annotations

from pmstore._engine._native import ffi as _ffi
from pmstore._engine._native import lib as _lib

OPTIM_ADAM, OPTIM_ADAMW, OPTIM_SGD = 1, 2, 3


def optim_step(table: int, count: int, hyper: dict[str, float]) -> None:
    """Does one step of an optimizer, by all cores, without the GIL. table: address of `count`
    structs as native/optim/optim.h says."""
    _lib.pms_optim_step(
        _ffi.cast("struct pms_optim_tensor *", table),
        count,
        _ffi.new("struct pms_optim_hyper *", hyper),
    )


def optim_limit(instruction_set: int) -> None:
    """Sets the widest instruction set that `optim_step` uses from now on: 0 portable, 1 AVX2, 2
    AVX-512 (the default). For tests."""
    _lib.pms_optim_limit(instruction_set)
