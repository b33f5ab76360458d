"""Reads losses, without waiting for a device that computes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

_FEWER = 256  # steps after which a second one is skipped, and so on
_FEWEST = 15  # steps that are skipped at most


class Losses:
    """Reads the numbers of what users give as losses.

    To read a tensor takes longer than all else in a step, and the loss curve is a mean of many: so
    fewer are read as there are more of them.

    Attributes:
        due: step from which on the next one is to be read.
    """

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self.due: int = 0
        self._warn = warn
        self._device: DeviceLoss | None = None

    def read(self, step: int, loss: Any) -> Iterator[tuple[int, float]]:
        """Yields the losses that are known now, as (step, value): of this step, or of an earlier
        one."""
        self.due = step + 1 + min(step // _FEWER, _FEWEST)
        if self._device is not None and (arrived := self._device.poll()) is not None:
            yield arrived
        if loss is None:
            return
        try:
            device = getattr(getattr(loss, "device", None), "type", "cpu")
            if device == "cpu":
                value = float(loss.item() if hasattr(loss, "item") else loss)
            elif device == "cuda":
                self._device = self._device or DeviceLoss()
                self._device.offer(step, loss)
                return
            else:
                self._warn(
                    "device",
                    f"a loss on {device} cannot be read without waiting for it: give step() a "
                    "float now and then",
                )
                return
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            self._warn("loss", f"a loss is a number, or a tensor with one element: {error}")
            return
        yield step, value


class DeviceLoss:
    """Copies a CUDA loss to pinned memory on the stream's own time, one at a time. It is read when
    the copy has arrived.

    So the training thread never waits for the device, and losses come a few steps late; those that
    fall into the time of a copy are left out.
    """

    __slots__ = ("_buffer", "_event", "_step")

    def __init__(self) -> None:
        self._buffer: Any = None
        self._event: Any = None
        self._step: int | None = None

    def offer(self, step: int, loss: Any) -> None:
        """Starts the copy of a one-element CUDA tensor, unless one is under way."""
        if self._step is not None:
            return
        torch = sys.modules["torch"]
        if self._buffer is None:
            self._buffer = torch.empty((), dtype=torch.float64, device="cpu", pin_memory=True)
            self._event = torch.cuda.Event()
        self._buffer.copy_(loss.detach().reshape(()), non_blocking=True)
        self._event.record(torch.cuda.current_stream(loss.device))
        self._step = step

    def poll(self) -> tuple[int, float] | None:
        """Returns the (step, loss) of a copy that has arrived; None: none has."""
        if self._step is None or not self._event.query():
            return None
        step, self._step = self._step, None
        return step, float(self._buffer.numpy())
