"""Telling others of a run while it trains: a TensorBoard writer, an endpoint. Off unless asked
for."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pmstore.torch._step.steps import Steps
from pmstore.torch.metrics import metrics
from pmstore.torch.openmetrics import Endpoint, openmetrics

_ENDPOINT_SECONDS = 0.5


class ScalarWriter(Protocol):
    """As `torch.utils.tensorboard.SummaryWriter` is, and those of the same shape."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


@dataclass
class _Listener:
    tell: Callable[[dict[str, float]], object]
    every: float
    what: str
    next: float = 0.0


class Telling:
    """Of one run: listeners are told in the training thread, as rows of the course go into the
    store: a run that nobody listens to pays nothing."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._listeners: list[_Listener] = []
        self._endpoints: list[Endpoint] = []

    def write_to(self, writer: ScalarWriter, every: float, prefix: str) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(
                f"writer={writer!r} has no add_scalar(tag, value, step), as a SummaryWriter of "
                "torch.utils.tensorboard has. For other loggers: log(run.metrics())"
            )

        def tell(found: dict[str, float]) -> None:
            step = int(found["step"])
            for name, value in found.items():
                writer.add_scalar(f"{prefix}{name}", value, step)

        self._add(_Listener(tell, every, type(writer).__qualname__))

    def serve(self, port: int) -> Endpoint:
        endpoint = Endpoint(port)
        labels = {"run": self._steps.name, "store": self._steps.store.path}

        def tell(found: dict[str, float]) -> None:
            endpoint.text = openmetrics(found, labels)

        tell(metrics(self._steps))
        self._endpoints.append(endpoint)
        self._add(_Listener(tell, _ENDPOINT_SECONDS, "the endpoint"))
        return endpoint

    def close(self) -> None:
        self._listeners.clear()
        self._steps.course.listener = None
        while self._endpoints:
            self._endpoints.pop().close()

    def _add(self, listener: _Listener) -> None:
        if not self._listeners:
            self._steps.ends.append(self.close)
        self._listeners.append(listener)
        self._steps.course.listener = self._tell

    def _tell(self) -> None:
        now = time.monotonic()
        due = [one for one in self._listeners if now >= one.next]
        found = metrics(self._steps) if due else {}
        for one in due:
            one.next = now + one.every
            try:
                one.tell(found)
            except Exception as error:  # somebody else's logger is no reason to stop training
                self._listeners.remove(one)
                warnings.warn(
                    f"{one.what} failed and gets no more metrics: {error!r}",
                    RuntimeWarning,
                    stacklevel=7,
                )
