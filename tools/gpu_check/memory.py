"""Copies from the device into arrays of the store: declared, pinned, and as a program writes them
that has not read about either."""

from __future__ import annotations

import torch

import pmstore
from pmstore.mirror.pinned_memory import forget_error
from tools.gpu_check.device import Settings
from tools.gpu_check.outcome import Outcome, require

_COUNT = 1 << 20  # float32: pages of its own


def check(settings: Settings, outcome: Outcome) -> None:
    with pmstore.open(settings.folder / "memory.pm") as store:
        tensor: torch.Tensor = store.tensor("x", _COUNT, torch.float32)
        store.commit()
        for step in range(1, settings.rounds + 1):
            source = torch.full((_COUNT,), float(step), device=settings.device)
            _copies(settings, outcome, store, tensor, source, declared=step % 2 == 0)
        if not settings.cuda:
            outcome.left_out.append("pinned memory of a store: cudaHostRegister needs CUDA")
        elif _pin(settings, store, tensor, outcome):
            try:
                for step in range(1, settings.rounds + 1):
                    source = torch.full((_COUNT,), 100.0 + step, device=settings.device)
                    _copies(settings, outcome, store, tensor, source, declared=True)
            finally:
                torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]


def _copies(
    settings: Settings,
    outcome: Outcome,
    store: pmstore.Store,
    tensor: torch.Tensor,
    source: torch.Tensor,
    *,
    declared: bool,
) -> None:
    """One copy that is rolled back, and the same that is committed."""
    before = tensor.clone()
    for kept in (False, True):
        if declared:
            store.will_write(tensor)
        try:
            tensor.copy_(source, non_blocking=declared)
            settings.synchronize()
        except RuntimeError as error:
            # a driver that lets the kernel copy gets no page fault: told, and never silent
            require(not declared, f"a declared copy into the store failed: {error}")
            outcome.figures["a copy that was not declared"] = f"refused: {error}"[:200]
            return
        require(torch.equal(tensor, source.cpu()), "a copy into the store is not what was copied")
        if kept:
            store.commit()
        else:
            store.rollback()
            require(
                torch.equal(tensor, before),
                "a roll back did not take back a copy from the device "
                f"({'declared' if declared else 'not declared'})",
            )
    require(torch.equal(tensor, source.cpu()), "a commit lost a copy from the device")


def _pin(settings: Settings, store: pmstore.Store, tensor: torch.Tensor, outcome: Outcome) -> bool:
    store.will_write(tensor)  # CUDA pins no page that may not be written
    nbytes = tensor.numel() * tensor.element_size()
    status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0)  # type: ignore[no-untyped-call]
    if int(status) == 0:
        return True
    forget_error(settings.device)
    outcome.left_out.append(f"an array of a store could not be pinned: CUDA's error {int(status)}")
    return False
