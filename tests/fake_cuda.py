"""A GPU that is host memory: streams that do what they are given later and in order, events, pinned
pages. So the code for CUDA runs where there is none.

Tensors stay on the CPU. What is given to the default stream is done at once; other streams do
copies and `fill_` when it is their turn, or at once too: a thread of Python stands for the device,
and a program that waits in a page fault keeps the interpreter's lock, which no device needs.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

import pmstore.mirror.copier
from pmstore.mirror.copier import CudaCopier

LAG = 0.002  # seconds by which a stream is behind

_late = True
_lags: Iterator[float] = itertools.repeat(LAG)


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.given: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._late = _late
        self._lag = next(_lags)
        if _late:
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            work = self.given.get()
            time.sleep(self._lag)
            work()

    def do(self, work: Callable[[], object]) -> None:
        if self._late:
            self.given.put(work)
        else:
            work()

    def wait_stream(self, other: Any) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: Event) -> None:
        self.do(event.synchronize)

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.synchronize()


class _Host(Stream):
    """The default stream."""

    def __init__(self) -> None:
        self._late = False


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._reached = threading.Event()
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._reached.clear()
        (stream or current_stream()).do(self._reach)

    def _reach(self) -> None:
        self._at = time.perf_counter()
        self._reached.set()

    def query(self) -> bool:
        if _runtime is not None:
            _runtime.asked("cudaEventQuery")
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._at - self._at)


_here = threading.local()
_host = _Host()


def current_stream(device: object = None) -> Any:
    return getattr(_here, "stream", _host)


@contextmanager
def stream(chosen: Any) -> Iterator[None]:
    before = current_stream()
    _here.stream = chosen
    try:
        yield
    finally:
        _here.stream = before


@contextmanager
def device(chosen: Any) -> Iterator[None]:
    before = getattr(_here, "device", None)
    _here.device = chosen
    try:
        yield
    finally:
        _here.device = before


def current_device() -> Any:
    """The device that this thread's calls of CUDA are for; None: none was chosen, which is device
    0."""
    return getattr(_here, "device", None)


def _writable(address: int, nbytes: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, rights = line.split()[:2]
            first, end = (int(one, 16) for one in span.split("-"))
            if first < address + nbytes and address < end and rights[1] != "w":
                return False
    return True


class Runtime:
    """cudart, as far as it is used."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.refuses = 0
        """The error with which pages are refused; 0: they are not."""
        self.error = 0
        """The last one, which the next kernel raises."""
        self.capturing = False
        """Whether the program captures a graph."""
        self.calls: list[tuple[str, Any]] = []
        """Calls that make a context where none is, and the device that they made it on."""

    def asked(self, what: str) -> None:
        self.calls.append((what, current_device()))

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.asked("cudaHostRegister")
        status = self.refuses or (0 if _writable(address, nbytes) else 1)
        if any(address < at + size and at < address + nbytes for at, size in self.pinned.items()):
            status = 712
        if status == 0:
            self.pinned[address] = nbytes
        else:
            self.error = status
        return status

    def launch(self) -> None:
        """A kernel is started."""
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(f"CUDA error: {error}")

    def cudaHostUnregister(self, address: int) -> int:
        self.asked("cudaHostUnregister")
        del self.pinned[address]
        return 0


_runtime: Runtime | None = None


def install(
    put: Callable[[object, str, object], None] = setattr,
    *,
    late: bool = True,
    lags: Iterable[float] = itertools.repeat(LAG),
) -> Runtime:
    """Mirrors take host memory for a GPU from now on. put: monkeypatch.setattr, say. late: streams
    are behind the program. lags: by how much, in the order in which they are made."""
    global _late, _lags, _runtime
    _late, _lags = late, iter(lags)
    runtime = _runtime = Runtime()
    copy, fill, empty, empty_like, cat = (
        torch.Tensor.copy_,
        torch.Tensor.fill_,
        torch.empty,
        torch.empty_like,
        torch.cat,
    )

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        def work() -> None:
            with torch.no_grad():
                copy(self, source)

        if torch.is_grad_enabled() and source.requires_grad:
            return copy(self, source)  # part of a graph: no mirror's
        current_stream().do(work)
        if not non_blocking:
            current_stream().synchronize()
        return self

    def fill_(self: torch.Tensor, value: Any) -> torch.Tensor:
        runtime.launch()
        current_stream().do(lambda: fill(self, value))
        return self

    def cat_(tensors: Any, *args: Any, **options: Any) -> torch.Tensor:
        stream = current_stream()
        if stream is _host:
            return cat(tensors, *args, **options)
        made = empty(sum(map(len, tensors)), dtype=tensors[0].dtype)
        stream.do(lambda: cat(tensors, out=made))
        return made

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return make(*args, **options)

        return made

    put(torch.Tensor, "copy_", copy_)
    put(torch.Tensor, "fill_", fill_)
    put(torch.Tensor, "record_stream", lambda self, stream: None)
    put(torch, "cat", cat_)
    put(torch, "empty", unpinned(empty))
    put(torch, "empty_like", unpinned(empty_like))
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "device": device,
        "is_current_stream_capturing": lambda: runtime.capturing,
        "current_stream": current_stream,
        "synchronize": lambda device=None: current_stream().synchronize(),
        "cudart": lambda: runtime,
        "_sleep": lambda cycles: current_stream().do(lambda: time.sleep(cycles / 1e9)),
        "set_sync_debug_mode": lambda mode: None,
        "get_device_properties": lambda device: SimpleNamespace(name="host", total_memory=1 << 30),
    }.items():
        put(torch.cuda, name, value)
    put(pmstore.mirror.copier, "copier_for", CudaCopier)
    return runtime
