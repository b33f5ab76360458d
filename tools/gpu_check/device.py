"""The device under test: a GPU, or host memory in its place."""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.gpu_check.outcome import NotCheckedError

_CYCLES = 1 << 26  # of the device's clock, to learn how long one takes


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one run of the checks."""

    device: torch.device
    folder: Path
    """Where stores are made. On tmpfs their pages can be pinned."""
    nbytes: int
    """Of the state whose copies are timed."""
    rounds: int
    kills: int
    seed: int
    jobs: int = 1
    """Trainings that are killed side by side."""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def needs(self, nbytes: int) -> None:
        """Raises: NotCheckedError: the folder has no room for as much."""
        there = shutil.disk_usage(self.folder).free
        if there < nbytes:
            raise NotCheckedError(
                f"{self.folder.parent} has room for {there / 1e9:.2g} GB, of {nbytes / 1e9:.2g} "
                "that the stores take: --folder for another place, --bytes for a smaller state"
            )

    def synchronize(self) -> None:
        """All that the device was given to do is done."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Until the device has done it, too."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Another stream than the default one is current."""
        if not self.cuda:
            yield
            return
        with torch.cuda.stream(torch.cuda.Stream(self.device)):  # type: ignore[no-untyped-call]
            yield

    def delay(self, seconds: float) -> None:
        """The current stream does nothing for that long. Host memory has no streams: nothing."""
        if self.cuda:
            torch.cuda._sleep(int(seconds / _second_per_cycle(self.device)))  # type: ignore[no-untyped-call]


_measured: dict[torch.device, float] = {}


def _second_per_cycle(device: torch.device) -> float:
    if device not in _measured:
        times = []
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / _CYCLES)
        _measured[device] = statistics.median(times)
    return _measured[device]


def chosen(name: str) -> torch.device:
    """Raises: SystemExit: there is no such device, and what to do."""
    if name == "cuda":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        raise SystemExit(
            f"no GPU: torch {torch.__version__} sees none. Give another Python, whose torch has "
            "CUDA: make nightly WHAT=gpu-check GPU_PYTHON=...; or try the steps in host memory: "
            f"{sys.executable} -m tools.gpu_check --device cpu"
        )
    return torch.device(name)
