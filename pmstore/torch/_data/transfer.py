"""Copies of batches to a device, beside the training."""

from __future__ import annotations

from typing import Any

import torch


class Transfer:
    """Copies one batch to a device while another one is trained on. Tensors are copied, also those
    in lists, tuples and dicts; everything else is left as it is.

    The copies run beside the training only from pinned memory: DataLoader(pin_memory=True).
    """

    def __init__(self, device: Any) -> None:
        """Raises: RuntimeError: torch knows no such device."""
        self._device = torch.device(device)
        self._stream: Any = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def start(self, batch: Any) -> Any:
        """The copy of a batch, which is under way."""
        if self._stream is None:
            return _map(batch, lambda one: one.to(self._device))
        with torch.cuda.stream(self._stream):
            return _map(batch, lambda one: one.to(self._device, non_blocking=True))

    def finish(self, batch: Any) -> Any:
        """The same batch, which what is computed from now on waits for."""
        if self._stream is None:
            return batch
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)

        def used_here(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:
                tensor.record_stream(current)
            return tensor

        return _map(batch, used_here)


def _map(batch: Any, change: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(one, change) for one in batch))
    if type(batch) in (list, tuple):
        return type(batch)(_map(one, change) for one in batch)
    if isinstance(batch, dict):
        return {key: _map(one, change) for key, one in batch.items()}
    return batch
