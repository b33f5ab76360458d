"""Slots beside everything else a store does: flushes of the version that a step needs, growth,
forks, damage, other forms."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import pmstore
from pmstore.commands.application import app

LENGTH = 200_000  # float64: extents of their own


def _step(store: pmstore.Store, w: Any, value: float) -> None:
    with store.transaction():
        w.next[:] = value
        w.flip()
        store["version"] = value


def _is_whole(store: Any, at_least: float = 0) -> float:
    version = float(store["version"])
    assert (store["w"].current == version).all()
    assert store.check().problems == ()
    assert version >= at_least
    return version


@pytest.fixture
def made(path: Path, domain: str) -> Any:
    with pmstore.open(path, size="16MiB", domain=domain) as store:  # type: ignore[arg-type]
        _step(store, store.slots("w", LENGTH), 1)
        yield store


@pytest.mark.parametrize("memory", ["64KiB", "64MiB"])
def test_a_flush_keeps_the_version_that_steps_replace(
    made: pmstore.Store, tmp_path: Path, memory: str
) -> None:
    """Both slots are written again and again while a slow flush reads the version before: it is
    copied, or the step waits."""
    w = made["w"]
    made.add_tier(
        "tier", pmstore.TierConfig(f"file://{tmp_path}/tier", memory=memory, max_rate="20MB")
    )
    made.commit()
    for round_ in range(3):
        flush = made.flush("tier")
        expected, value = made.epoch, float(made["version"])
        for i in range(1, 6):
            _step(made, w, 100 * round_ + i)
        flush.wait()
        assert flush.epoch == expected
        copy = tmp_path / f"copy{round_}.pm"
        pmstore.restore(copy, f"file://{tmp_path}/tier", epoch=expected)
        with pmstore.open(copy) as restored:
            assert _is_whole(restored) == value
            _step(restored, restored["w"], 7)
            assert _is_whole(restored) == 7
    assert _is_whole(made) == 205


@pytest.mark.parametrize("end", ["commit", "roll back"])
def test_growth_between_writing_and_the_flip(made: pmstore.Store, end: str) -> None:
    w = made["w"]
    held = w.next
    held[:] = 2
    bytes_before = made.stats().file_bytes
    more = made.slots("more", 4 * LENGTH)
    more.next[:] = 5
    assert made.stats().file_bytes > bytes_before
    held[::2] = 3
    held[1::2] = 3
    w.flip()
    more.flip()
    made["version"] = 3.0
    w.current[: LENGTH // 2] = 3
    if end == "commit":
        made.commit()
        assert _is_whole(made) == 3
        assert (more.current == 5).all()
    else:
        made.rollback()
        assert _is_whole(made) == 1
        assert "more" not in made
    _step(made, w, 4)
    assert _is_whole(made) == 4


def test_a_fork_child_reads_and_can_write_nothing(made: pmstore.Store) -> None:
    """Also not the idle slot, which is writable in the parent."""
    w = made["w"]
    idle = w.next
    idle[:] = 2

    def child_dies(do: Callable[[], object]) -> int:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            try:
                do()
            except pmstore.PmstoreError:
                os._exit(3)
            except BaseException:
                os._exit(4)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def scribble(array: np.ndarray[Any, Any]) -> None:
        array[:] = 99

    current = w.current
    assert child_dies(lambda: scribble(idle)) != 0
    assert child_dies(lambda: scribble(current)) != 0
    assert child_dies(lambda: w.next) == 3
    assert child_dies(w.flip) == 3
    assert (idle == 2).all()
    w.flip()
    made["version"] = 2.0
    made.commit()
    assert _is_whole(made) == 2


def test_arrays_outlive_the_store(path: Path, domain: str) -> None:
    store = pmstore.open(path, size="16MiB", domain=domain)  # type: ignore[arg-type]
    w = store.slots("w", LENGTH)
    _step(store, w, 1)
    current, idle = w.current, w.next
    idle[:] = 5
    w.flip()
    store.close()  # rolls back
    assert (idle == 5).all()
    current[:] = idle[:] = 6
    with pmstore.open(path) as again:
        assert _is_whole(again) == 1
    assert (current == 6).all()


def test_a_thread_that_steps_while_others_read_and_flush(
    made: pmstore.Store, tmp_path: Path
) -> None:
    w = made["w"]
    made.add_tier("tier", f"file://{tmp_path}/tier")
    made.commit()
    end = threading.Event()
    failures: list[BaseException] = []

    def flush() -> None:
        try:
            while not end.is_set():
                made.flush("tier", wait=True)
        except BaseException as error:
            failures.append(error)

    other = threading.Thread(target=flush)
    other.start()
    for i in range(2, 40):
        _step(made, w, i)
    end.set()
    other.join()
    assert not failures
    made.flush("tier", wait=True)
    pmstore.restore(tmp_path / "copy.pm", f"file://{tmp_path}/tier")
    with pmstore.open(tmp_path / "copy.pm") as restored:
        assert _is_whole(restored) == 39


def test_repair_compaction_and_dumps_keep_the_current_version(path: Path, tmp_path: Path) -> None:
    with pmstore.open(path, size="16MiB") as store:
        w = store.slots("w", LENGTH)
        for i in range(1, 4):
            _step(store, w, i)
        w.next[:] = np.nan
    with open(path, "r+b") as file:  # a copy of the superblock
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    run = lambda *words: CliRunner().invoke(app, [str(word) for word in words])  # noqa: E731
    assert run("repair", path, "--yes").exit_code == 0
    pmstore.compact(path)
    dump, again = tmp_path / "dump", tmp_path / "again.pm"
    assert run("dump", path, dump).exit_code == 0
    assert run("load", dump, again).exit_code == 0
    for one in (path, again):
        for mode in ("r", "r+"):
            with pmstore.open(one, mode) as store:  # type: ignore[arg-type]
                assert _is_whole(store) == 3
        with pmstore.open(one) as store:
            _step(store, store["w"], 4)
            assert _is_whole(store) == 4


def test_a_store_of_another_domain_finds_the_version(path: Path) -> None:
    for i, domain in enumerate(("process", "file", "emulated", "file", "process"), 1):
        with pmstore.open(path, size="16MiB", domain=domain) as store:  # type: ignore[arg-type]
            w = store.slots("w", LENGTH)
            if i > 1:
                assert _is_whole(store) == i - 1
            _step(store, w, i)
            w.next[:] = np.nan


def test_names_below_slots_are_theirs(made: pmstore.Store) -> None:
    """Whoever replaced one of the two arrays would leave a pair that is none."""
    w = made["w"]
    for do in (
        lambda: made.__setitem__("w/0", np.zeros(3)),
        lambda: made.__setitem__("w/more", 1),
        lambda: made.__delitem__("w/1"),
        lambda: made.zeros("w/2", 3),
        lambda: made.group("w/group"),
    ):
        with pytest.raises(pmstore.NameExistsError, match="slots"):
            do()
    assert made.check().problems == ()
    _step(made, w, 2)
    assert _is_whole(made) == 2


def test_a_dropped_pair_gives_its_room_back(made: pmstore.Store) -> None:
    used = made.stats().used_bytes
    for _ in range(10):
        more = made.slots("more", 50_000)
        more.next[:] = 1
        more.flip()
        made.commit()
        more.next[:] = 2
        del made["more"]
        made.commit()
        del more
    assert made.stats().used_bytes <= used + 4096
    assert made.stats().file_bytes <= 64 << 20
