"""What each test costs: seconds, processor seconds of it and of the processes that it starts, and
how many these are, by a fork server, too.

`make nightly WHAT=durations` measures, and writes durations.json: what is not quick, that is.
conftest.py marks all other tests `quick`, new ones, too. A file with null has not been measured,
and is left out."""

from __future__ import annotations

import functools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pmstore.testing import ForkServer

FILE = Path(__file__).with_suffix(".json")
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
ALWAYS_QUICK = ("tests/house/test_style.py", "tests/house/test_calls.py")
QUICK_SECONDS, QUICK_PROCESSOR_SECONDS = 0.5, 0.1
"""The first is generous: it is measured beside other tests."""
AIM_SECONDS = 120

_starts = 0


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    global _starts
    _starts += event in STARTS


def _counted(starts: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(starts)
    def call(*given: Any, **named: Any) -> Any:
        global _starts
        _starts += 1
        return starts(*given, **named)

    return call


def _spent() -> tuple[float, float, int]:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ended = sum(one.ru_utime + one.ru_stime for one in used)
    return time.perf_counter(), ended + sum(map(_of, _children("self"))), _starts


def _children(process: str) -> list[str]:
    found: list[str] = []
    for thread in Path("/proc", process, "task").glob("*/children"):
        with suppress(OSError):  # it has ended, or this kernel has no such files
            found += thread.read_text().split()
    return found


def _of(process: str) -> float:
    """Processor seconds of one that has not ended, such as a fork server, and of its children."""
    try:
        told = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    own = sum(map(int, told[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(_of, _children(process)))


def is_quick(seconds: float, processor_seconds: float, processes: int) -> bool:
    fast = seconds < QUICK_SECONDS and processor_seconds < QUICK_PROCESSOR_SECONDS
    return fast and not processes


def mark(items: Iterable[pytest.Item]) -> None:
    slow = json.loads(FILE.read_text()) if FILE.exists() else {}
    for item in items:
        if not {
            item.nodeid,
            item.nodeid.partition("::")[0],
        } & slow.keys() or item.nodeid.startswith(ALWAYS_QUICK):
            item.add_marker("quick")


class Measure:
    """A plug-in, in each process that runs tests, and in the one that gathers their reports."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, list[float]] = {}
        self._before: tuple[float, float, int] = (0.0, 0.0, 0)
        sys.addaudithook(_heard)
        for name in ("start", "run"):
            setattr(ForkServer, name, _counted(getattr(ForkServer, name)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._before = _spent()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
        report = yield
        if call.when == "teardown":
            cost = [round(now - then, 2) for then, now in zip(self._before, _spent(), strict=True)]
            report.user_properties = [("cost", cost)]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._found[report.nodeid] = dict(report.user_properties)["cost"]

    def pytest_sessionfinish(self) -> None:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            slow = {name: cost for name, cost in self._found.items() if not is_quick(*cost)}
            lines = [
                f"{json.dumps(name)}: {json.dumps(cost)}" for name, cost in sorted(slow.items())
            ]
            self._file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
