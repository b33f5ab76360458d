"""Groups within groups: as many as a store may have, one more, and files with far more of them."""

import io
from pathlib import Path

import pytest

import pmstore
from pmstore import exchange, portable
from pmstore._engine.constants import GROUPS_MAX, ROOT
from pmstore.objects.containers import tree

FULL = "/".join(["g"] * GROUPS_MAX)
TOO_DEEP = "more than 99 others"


def test_as_deep_as_a_store_may_be(shm: Path) -> None:
    with pmstore.open(shm / "deep.pm", "x") as store:
        store[f"{FULL}/x"] = 1
        store.list(f"{FULL}/l").append(2)
        store.commit()
        assert store.check().problems == ()
        assert store[f"{FULL}/x"] == 1
        walked = store
        for _ in range(GROUPS_MAX):
            walked = walked["g"]
        assert list(walked) == ["x", "l"]
        assert len(tree(store)) == GROUPS_MAX + 2
        dump = io.BytesIO()
        portable.dump(store, dump)
        exchange.export_npz(store, shm / "deep.npz")
        dump.seek(0)
        portable.load(dump, shm / "other.pm")
        with pmstore.open(shm / "other.pm") as other:
            assert other[f"{FULL}/x"] == 1
        del store["g"]
        store.commit()
        assert len(store) == 0
        assert store.check().problems == ()


def test_one_more_is_refused_and_nothing_is_made(shm: Path) -> None:
    with pmstore.open(shm / "deep.pm", "x") as store:
        for make in (
            lambda: store.group(f"{FULL}/g"),
            lambda: store.list(f"{FULL}/g/l"),
            lambda: store.zeros(f"{FULL}/g/x", 3),
            lambda: store.slots(f"{FULL}/s", 3),
            lambda: store.__setitem__(f"{FULL}/g/x", 1),
        ):
            with pytest.raises(ValueError, match="at most 100 groups"):
                make()
            assert list(store) == []
        group = store.group(FULL)
        with pytest.raises(ValueError, match="at most 100 groups within each other"):
            group["g/x"] = 1
        with pytest.raises(ValueError, match="at most 100 groups within each other"):
            group.group("g")
        with pytest.raises(ValueError, match="at most 100 groups within each other"):
            group.slots("s", 3)
        assert list(group) == []
        with pytest.raises(ValueError, match="in at most 100 groups"):
            store["a/" * 100_000 + "x"]
        assert store.check().problems == ()


@pytest.mark.parametrize("depth", [GROUPS_MAX + 2, 100_000])
def test_a_file_with_more_is_corrupt(shm: Path, depth: int) -> None:
    with pmstore.open(shm / "deep.pm", "x", size="400MB") as store:
        at: int | None = ROOT
        for _ in range(depth):  # the engine does not know how deep a directory lies
            assert at is not None
            at = store._core.pool.group(at, b"g", create=True)
        store.commit()
        (problem,) = store.check().problems
        assert TOO_DEEP in problem
        with pytest.raises(pmstore.CorruptStoreError, match=TOO_DEEP), store.transaction():
            del store["g"]
        assert list(store) == ["g"]
        with pytest.raises(pmstore.CorruptStoreError, match=TOO_DEEP):
            tree(store)
        with pytest.raises(pmstore.CorruptStoreError, match=TOO_DEEP):
            portable.dump(store, io.BytesIO())
        with pytest.raises(pmstore.CorruptStoreError, match=TOO_DEEP):
            exchange.export_npz(store, shm / "deep.npz")
        walked = store
        with pytest.raises(pmstore.CorruptStoreError, match=TOO_DEEP):
            while True:
                walked = walked["g"]
