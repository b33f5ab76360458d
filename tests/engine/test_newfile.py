"""Files that come into being whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pmstore._base.newfile import new_file, write_over

TURNS = 300


def race(*ways: Callable[[], None]) -> list[bool]:
    """Which of them, begun at one moment, did it; the others found a file there."""
    done = [False] * len(ways)
    begin = threading.Barrier(len(ways))

    def run(i: int) -> None:
        begin.wait()
        try:
            ways[i]()
            done[i] = True
        except FileExistsError:
            pass

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(ways))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


def test_one_of_several_publishes(tmp_path: Path) -> None:
    """The others are told, and nothing of theirs is left."""

    def write(target: Path, content: bytes) -> Callable[[], None]:
        def run() -> None:
            with new_file(target) as file:
                file.write(content)

        return run

    for turn in range(TURNS):
        target = tmp_path / str(turn)
        done = race(*(write(target, bytes([i])) for i in range(4)))
        assert done.count(True) == 1
        assert target.read_bytes() == bytes([done.index(True)])
    assert len(list(tmp_path.iterdir())) == TURNS


@pytest.mark.parametrize("umask", [0, 0o777])
def test_permissions_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with new_file(tmp_path / "new", 0o640) as file:
            file.write(b"x")
            assert [one.stat().st_mode & 0o777 for one in tmp_path.iterdir()] == [0o600]
        write_over(tmp_path / "over", b"x")
    finally:
        os.umask(before)
    assert {one.name: one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {
        "new": 0o640,
        "over": 0o600,
    }
