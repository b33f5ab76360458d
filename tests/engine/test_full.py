"""Full: StoreFullError before anything changes, all else goes on, deleting works, and what was
deleted is room again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import portable

SIZES = [1 << 20, 40_000, 700, 20, 1]  # bytes: when no more large blocks fit, smaller ones may


def contents(store: pmstore.Store) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in store["g"]:
        item = store["g"][name]
        found[name] = item.tobytes() if isinstance(item, np.ndarray) else item
    return found


def fill(store: pmstore.Store, kind: Callable[[int], Any]) -> int:
    """Stores items under g until nothing fits, and tells how many there are."""
    made = 0
    for size in SIZES:
        while True:
            try:
                store[f"g/{made}"] = kind(size)
            except pmstore.StoreFullError:
                break
            made += 1
            assert made < 100_000
    return made


@pytest.mark.parametrize(
    "kind", [lambda n: np.full(n, 7, "u1"), lambda n: b"v" * n], ids=["arrays", "values"]
)
def test_a_full_store_goes_on(path: Path, domain: Any, kind: Callable[[int], Any]) -> None:
    with pmstore.open(path, size="4MiB", max_size="4MiB", domain=domain) as store:
        w = store.zeros("w", 20_000)
        store["step"] = 0
        store.list("items").extend(range(10))
        store.commit()
        free = store.stats().free_bytes
        made = fill(store, kind)
        store.commit()
        before, blocks = contents(store), store.stats().blocks
        assert len(before) == made
        for more in (
            lambda: store.__setitem__("new", kind(1 << 20)),
            lambda: store.zeros("a/b/c/new", 1 << 20),
            lambda: store.require("new", 1 << 20),
            lambda: store.list("items").extend([kind(40_000)] * 100),
            lambda: store.slots("pair", 1 << 20),
            lambda: store.update({"g/0": kind(2 << 20)}),
        ):
            with pytest.raises(pmstore.StoreFullError, match="Nothing was changed"):
                more()
            with pytest.raises(pmstore.StoreFullError):
                with store.transaction():
                    w[:] = 99
                    more()
            assert (w == 0).all()
        store.rollback()
        assert contents(store) == before
        assert "new" not in store
        assert store.list("items")[:] == list(range(10))
        assert store.stats().blocks == blocks
        # what is there can be written, rolled back and committed: its log is reserved
        for step in range(1, 4):
            with store.transaction():
                w += 1
                store["step"] = step
            w += 1
            store.rollback()
        assert (w == 3).all()
        assert store.check().problems == ()
        for name in list(store["g"])[::2]:
            del store["g"][name]
        store.rollback()
        assert contents(store) == before
        del store["g"]
        store.commit()
        assert store.stats().free_bytes == free
        assert fill(store, kind) == made
    with pmstore.open(path, domain=domain) as store:
        assert len(store["g"]) == made
        assert (store["w"] == 3).all()
        assert store["step"] == 3
        assert store.check().problems == ()


# of a store on a disk that gets full after a slot was captured: nothing but slots may be refused
ON_A_FULL_DISK = """
import os, sys
import numpy as np
import pmstore
from pmstore import portable

path, domain = sys.argv[1:]
store = pmstore.open(path, size="24MiB", domain=domain)
w = store.slots("w", 2 << 20, "u1")
rest = store.zeros("rest", 3 << 20, "u1")
store.commit()
store.will_write(w.current[: 1 << 20])
w.current[: 1 << 20] = 1  # captured: its log is there now
with open(os.path.join(os.path.dirname(path), "fill"), "wb") as disk:
    try:
        for size in (1 << 20, 4096):
            while True:
                disk.write(b"x" * size)
                disk.flush()
                if os.statvfs(path).f_bavail * 4096 < size:
                    break
    except OSError:
        pass
assert os.statvfs(path).f_bavail == 0
rest[:] = 2
store.rollback()
assert (w.current == 0).all() and (rest == 0).all()
for n in (3, 4):
    rest[:] = n
    w.next[:] = n
    w.flip()
    store.commit()
try:
    store.will_write(w.current)
    assert domain == "file"  # where the journal's ring is backed as a whole
except pmstore.StoreFullError:
    pass
rest[:] = 5
w.current[: 1 << 20] = 5  # that much was captured before
store.commit()
store.close()
with pmstore.open(path, domain=domain) as store:
    assert (store["rest"] == 5).all()
    assert (store.slots("w").current[: 1 << 20] == 5).all()
    assert (store.slots("w").current[1 << 20 :] == 4).all()
    store["rest"][:] = 6
    store.commit()
    assert store.check().problems == ()
"""


def test_a_full_tmpfs_refuses_nothing_but_slots(tmp_path: Path, domain: Any) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", place]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    try:
        subprocess.run(
            [sys.executable, "-c", ON_A_FULL_DISK, str(place / "s.pm"), domain],
            check=True,
            timeout=120,
        )
    finally:
        subprocess.run(["umount", place], check=True)


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_slots_are_thin_wherever_they_come_from(shm: Path, domain: Any) -> None:
    """However a store got its slots, no log is on the disk for them; unless it was asked for."""
    made, loaded = shm / "made.pm", shm / "loaded.pm"
    size = 24 << 20
    with pmstore.open(made, size="128MiB", domain=domain) as store:
        w = store.slots("w", size, "u1")
        w.next[:] = 1
        w.flip()
        store.commit()
        with open(shm / "dump", "wb") as dump:
            portable.dump(store, dump)
    with open(shm / "dump", "rb") as dump:
        portable.load(dump, loaded, domain=domain)
    pmstore.compact(made)
    for path in (made, loaded):
        with pmstore.open(path) as store:
            w = store.slots("w")
            assert (w.current == 1).all()
            w.next[:] = 2
            w.flip()
            store.commit()
            assert (w.current == 2).all()
            assert store.check().problems == ()
    for path in (made, loaded):
        assert on_disk(path) < 3 * size  # domain file: 10 MiB of it for the journal's ring
    with pmstore.open(made) as store:
        w = store.slots("both", size, "u1", in_place=True)
        assert store.slots("both", size, "u1", in_place=True).current is w.current
        w.current[:] = 3
        store.commit()
        with pytest.raises(pmstore.NameExistsError, match=r"in_place=True.*a dump.*copy"):
            store.slots("w", size, "u1", in_place=True)
    pmstore.compact(made)
    with pmstore.open(made) as store:
        assert (store.slots("both", in_place=True, shape=size, dtype="u1").current == 3).all()
    assert on_disk(made) > 6 * size


def test_a_file_grows_for_slots_by_no_more_than_they_take(shm: Path, domain: Any) -> None:
    size = 36 << 20
    with pmstore.open(shm / "s.pm", size="16MiB", domain=domain) as store:
        before = on_disk(shm / "s.pm")
        w = store.slots("w", size, "u1")
        w.next[:] = 1
        w.flip()
        store.commit()
        assert on_disk(shm / "s.pm") < before + 2 * size + (3 << 20)
