"""`pmstore.compact`: everything stays, only the space is given back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore


def fill(store: pmstore.Store) -> None:
    store["step"] = 7
    store["g/deep/w"] = np.arange(5000, dtype=">f4").reshape(50, 100)
    store["g/fortran"] = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    store["empty"] = np.zeros((0, 3), "datetime64[ns]")
    store.list("g/items").extend([1, "é", np.ones(3), None] * 700)
    store.list("none")
    store.group("nothing")
    for i in range(300):
        store[f"many/{i}"] = (i, [i])


def content(group: Any) -> Any:
    if isinstance(group, pmstore.List):
        return [content(item) for item in group]
    if isinstance(group, pmstore.Group):
        return [(name, content(group[name])) for name in group]
    if isinstance(group, np.ndarray):
        return (group.dtype.str, group.shape, group.strides, group.tobytes())
    return (type(group).__name__, group)


def waste(store: pmstore.Store) -> None:
    for i in range(8):
        store[f"waste/{i}"] = np.zeros(1 << 20, np.uint8)
        store.commit()
    del store["waste"]


@pytest.mark.parametrize("domain", ["process", "file"])
def test_content_stays(path: Path, domain: Any) -> None:
    with pmstore.open(path, domain=domain, size="64MiB", max_size="1GiB") as store:
        fill(store)
        waste(store)
        before = content(store)
    os.chmod(path, 0o640)
    told: list[tuple[int, int]] = []
    done = pmstore.compact(path, progress=lambda now, total: told.append((now, total)))
    assert done.before_bytes > 60 << 20
    # the last page is not of the state
    assert done.after_bytes == path.stat().st_size - 4096 < 4 << 20
    assert "now" in str(done)
    assert told[-1][0] == told[-1][1] > 0
    assert path.stat().st_mode & 0o777 == 0o640
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with pmstore.open(path) as store:
        assert content(store) == before
        assert store.check().problems == ()
        assert store.domain == domain
        assert store._core.pool.info.max_bytes == 1 << 30
        assert store.recovery.clean
        waste(store)  # it grows again
    again = pmstore.compact(path)
    assert again.after_bytes < 1.1 * done.after_bytes
    assert "nothing to give back" in str(pmstore.compact(path))


def test_large_arrays(path: Path) -> None:
    """Aligned to 2 MiB: what that costs is not known beforehand."""
    with pmstore.open(path, size="400MiB") as store:
        for i in range(9):
            store[f"{i}"] = np.full((2 << 20) + 4096 * i, i, np.uint8)
    done = pmstore.compact(path)
    assert done.after_bytes < 100 << 20
    with pmstore.open(path, "r") as store:
        for i in range(9):
            assert (store[f"{i}"] == i).all()
        assert store.check().problems == ()


def test_an_open_store_is_refused(store: pmstore.Store) -> None:
    with pytest.raises(pmstore.StoreLockedError):
        pmstore.compact(store.path)


def test_through_a_symbolic_link(shm: Path) -> None:
    real, link = shm / "real.pm", shm / "link.pm"
    with pmstore.open(real) as store:
        store["a"] = 1
    link.symlink_to(real)
    assert pmstore.compact(link).after_bytes <= 1 << 20
    assert link.is_symlink()
    with pmstore.open(link) as store:
        assert store["a"] == 1


def test_a_damaged_store_is_left_alone(path: Path) -> None:
    with pmstore.open(path) as store:
        store["a"] = np.zeros(3)
        node = store._core.pool.find(0, b"a").node  # type: ignore[union-attr]
    data = bytearray(path.read_bytes())
    data[node + 64 + 1 + 1] ^= 0xFF  # the description of the array
    path.write_bytes(data)
    with pytest.raises(pmstore.CorruptStoreError, match="not compacted"):
        pmstore.compact(path)
    assert path.read_bytes()[node:][:100] == data[node:][:100]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_what_crashed_is_recovered_first(path: Path) -> None:
    with pmstore.open(path) as store:
        store["a"] = 1
    code = (
        f"import pmstore, os; s = pmstore.open({str(path)!r}); s['a'] = 2; s.commit(); s['a'] = 3; "
        "os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    pmstore.compact(path)
    with pmstore.open(path, "r") as store:
        assert store["a"] == 2


def test_killed_at_any_time(path: Path) -> None:
    """The path always names a whole store."""
    with pmstore.open(path, size="64MiB") as store:
        fill(store)
        for i in range(20):
            store[f"big/{i}"] = np.full(1 << 18, i)
        before = content(store)
    for i in range(6):
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import pmstore; print(1, flush=True); pmstore.compact({str(path)!r})",
            ],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.015 * i)
        process.kill()
        process.communicate()
        with pmstore.open(path, lock_timeout=10) as store:
            assert content(store) == before
    for left in path.parent.iterdir():
        assert left == path or left.name.endswith((".compact", ".new"))
