"""What the tests share: folders on memory and on disk, and a watch on what a test leaves behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import durations
import left_behind
import pairwise
import pytest
import pythons
import turns
from hypothesis import settings

import pmstore.opening

pytest_plugins = ["pytester"]

# No deadline: a busy machine is no failure. The same examples each time: a change is judged by
# itself, not by the day's luck. PMSTORE_PROFILE=search looks where nobody has looked yet.
settings.register_profile("repeatable", settings(deadline=None, derandomize=True))
settings.register_profile("search", settings(deadline=None, max_examples=5000, print_blob=True))
settings.load_profile(os.environ.get("PMSTORE_PROFILE", "repeatable"))

MEMORY = Path("/dev/shm")
OURS = f"pmstore-test-{os.getpid()}-"  # other runs may be under way
BEGAN = pytest.StashKey[float]()

for size in ("COLUMNS", "LINES"):  # of the terminal: pytest-xdist tells its workers of one
    os.environ.pop(size, None)

# Thousands of stores are made, and a disk takes a tenth of a second to write the 64 MiB of one.
pmstore.opening.DEFAULT_SIZE = "4MiB"

_state = tempfile.TemporaryDirectory(prefix="pmstore-test-state-")
# a key of the tests' own; processes that they start have it too
os.environ["XDG_STATE_HOME"] = _state.name
pythons.environment = dict(os.environ)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and children would inherit it: tests that send Control-C
    # would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Nothing but tests is imported here, although doctests are looked for in every module: the
    others are programs that tests start, and some change the process that imports them."""
    program = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if program else None


MARKERS = {
    "pairwise": pairwise.__doc__,
    "nightly": "`make test` has another sample of it; `make nightly WHAT=test-long` has all",
    "quick": durations.__doc__,
    "alone": turns.__doc__,
}
_turns: turns.Turns | None = None


def pytest_configure(config: pytest.Config) -> None:
    global _turns
    for name, means in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {means}")
    if hasattr(config, "workerinput"):
        _turns = turns.Turns(config.workerinput["testrunuid"])
    if file := os.environ.get("PMSTORE_DURATIONS"):
        config.pluginmanager.register(durations.Measure(config.rootpath / file))


def pytest_unconfigure() -> None:
    pythons.close()
    if _turns is not None:
        _turns.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if _turns is None:
        return (yield)
    with _turns.taken(item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if addresses := [item.nodeid for item in items if re.search("0x[0-9a-f]{6}", item.nodeid)]:
        raise pytest.UsageError(
            f"names of tests with addresses, which are never twice the same: {addresses}"
        )
    durations.mark(items)
    # Frameworks come last: a process that has imported them takes a gigabyte, and forks slowly.
    items.sort(key=lambda item: item.nodeid.startswith("tests/plugins/"))
    if pairwise.ALL:
        return
    left_out = pairwise.left_out(items)
    if not any("::" in word for word in config.args):  # one that is asked for runs
        left_out |= {item for item in items if item.get_closest_marker("nightly")}
    items[:] = [item for item in items if item not in left_out]
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[BEGAN] = time.monotonic()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    took = time.monotonic() - terminalreporter._session.stash[BEGAN]
    if config.option.markexpr == "quick" and took > durations.AIM_SECONDS:
        terminalreporter.write_line(
            f"These took {took:.0f} s, and {durations.AIM_SECONDS} s are aimed at, on two cores "
            "with nothing beside. `make nightly WHAT=durations` measures what is quick.",
            yellow=True,
        )


def pytest_collection_finish() -> None:
    """What was imported stays. Tests collect garbage a thousand times: without this each time looks
    at all of torch, and takes a tenth of a second. So does the first step of each run, which looks
    for schedulers."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """An interrupt that a test sends would be lost in a callback of the garbage collector.
    Hypothesis leaves one, which measures."""
    left = [one for one in gc.callbacks if "hypothesis" not in (one.__module__ or "")]
    gc.callbacks[:] = left


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Tests import, too."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on tmpfs (domain "process" by default)."""
    with tempfile.TemporaryDirectory(prefix=OURS, dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on a disk (domain "file" by default)."""
    return tmp_path


@pytest.fixture(params=["process", "emulated", "file"])
def domain(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(shm: Path) -> Path:
    """Where a store may be made."""
    return shm / "store.pm"


@pytest.fixture
def store(path: Path) -> Iterator[pmstore.Store]:
    """An open store on tmpfs."""
    opened = pmstore.open(path, size="8MiB")
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """What a test, or a library that it calls, puts into the environment is gone after it: a RANK
    that was left would make one rank of the next test's job. Anything else that a later test could
    notice fails the test that leaves it."""
    yield from left_behind.watch()


@pytest.fixture(autouse=True, scope="session")
def _leaves_nothing_behind() -> Iterator[None]:
    before = set(os.listdir(MEMORY))
    yield
    gc.collect()
    left = {name for name in set(os.listdir(MEMORY)) - before if name.startswith(OURS)}
    assert not left, f"left in {MEMORY}: {left}"
