"""Locks of tiers and of restored stores beside children that were forked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import pmstore
from pmstore.tiers._places.local import Access, LocalPlace


def test_a_fork_child_does_not_keep_the_tier(filled: pmstore.Store, path: Path, url: str) -> None:
    filled.flush("t", wait=True)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent lets it go
        os._exit(0)
    filled.close()
    with pmstore.open(path) as store:
        store["a"][0] = 5
        store.commit()
        store.flush("t", wait=True)
    os.close(write)
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0


def test_a_lock_is_given_up_though_a_child_has_not_run_yet(tmp_path: Path) -> None:
    """It shares the open file until its own hooks close it."""
    place = LocalPlace(tmp_path / "tier", Access())
    lock = place.lock("run.", "session")
    in_child = os.dup(lock.fd)
    lock.release()
    again = place.lock("run.", "another")
    os.close(in_child)
    with pytest.raises(pmstore.TierError, match="another store or process"):
        place.lock("run.", "third")
    again.release()


def test_a_restored_store_opens_though_a_child_was_forked_meanwhile(
    filled: pmstore.Store, url: str, tmp_path: Path
) -> None:
    filled.flush("t", wait=True)
    read, write = os.pipe()
    children: list[int] = []

    def fork(done: int, total: int) -> None:
        if not children:
            children.append(os.fork())
            if not children[0]:
                os.close(write)
                os.read(read, 1)
                os._exit(0)

    pmstore.restore(tmp_path / "again.pm", url, progress=fork)
    with pmstore.open(tmp_path / "again.pm") as store:
        assert not store.check().problems
    os.close(write)
    os.close(read)
    assert os.waitpid(children[0], 0)[1] == 0
