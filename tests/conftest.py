"""What the tests share: folders on memory and on disk, and a watch on what a test leaves behind."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import left_behind
import pairwise
import pytest
from hypothesis import settings

import pmstore

pytest_plugins = ["pytester"]

# No deadline: a busy machine is no failure. The same examples each time: a change is judged by
# itself, not by the day's luck. PMSTORE_PROFILE=search looks where nobody has looked yet.
settings.register_profile("repeatable", settings(deadline=None, derandomize=True))
settings.register_profile("search", settings(deadline=None, max_examples=5000, print_blob=True))
settings.load_profile(os.environ.get("PMSTORE_PROFILE", "repeatable"))

spec = importlib.util.find_spec("torch")
if spec is not None and spec.origin is None:
    sys.modules["torch"] = None  # type: ignore[assignment] # torch is not installed: what was found is the folder tests/torch

MEMORY = Path("/dev/shm")
OURS = f"pmstore-test-{os.getpid()}-"  # other runs may be under way

for size in ("COLUMNS", "LINES"):  # of the terminal: pytest-xdist tells its workers of one
    os.environ.pop(size, None)

_state = tempfile.TemporaryDirectory(prefix="pmstore-test-state-")
# a key of the tests' own; processes that they start have it too
os.environ["XDG_STATE_HOME"] = _state.name

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and children would inherit it: tests that send Control-C
    # would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Nothing but tests is imported here, although doctests are looked for in every module: the
    others are programs that tests start, and some change the process that imports them."""
    program = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if program else None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"pairwise: {pairwise.__doc__}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("PMSTORE_TESTS") == "all":
        return
    left_out = pairwise.left_out(items)
    items[:] = [item for item in items if item not in left_out]
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))


def pytest_collection_finish() -> None:
    """What was imported stays. Tests collect garbage a thousand times: without this each time looks
    at all of torch, and takes a tenth of a second."""
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
