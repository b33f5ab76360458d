"""A tier in a local directory: flush, restore, keep, and what damage does."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tier_helpers import CHUNK, newest_file, restored, wait_until

import pmstore
from pmstore.errors import TierError
from pmstore.tiers._epochs.manifest import BadManifestError, Manifest, ManifestName
from pmstore.tiers._places.local import LocalPlace
from pmstore.tiers._places.url import open_place

Step = Callable[[float], int]


@pytest.mark.parametrize("domain", ["process", "emulated", "file"])
def test_what_was_committed_comes_back(path: Path, url: str, domain: str) -> None:
    with pmstore.open(path, domain=domain, size="4MiB") as store:  # type: ignore[arg-type]
        store["a"] = np.arange(300_000.0)  # grows
        store["g/list"] = [1, 2]
        store.add_tier("t", url)
        store.commit()
        store["a"][:] = -1  # not committed
        store["late"] = 1
        handle = store.flush("t")
        store.commit()
        assert handle.wait(60).done
        assert handle.progress == 1.0
        assert handle.epoch == store.epoch - 1
        uuid = store.info().uuid
    report = pmstore.restore(path.with_name("b.pm"), url)
    assert (report.epoch, report.skipped, report.run) == (handle.epoch, (), uuid)
    with pmstore.open(path.with_name("b.pm")) as store:
        assert store["a"].tolist() == list(range(300_000))
        assert store["g/list"] == [1, 2]
        assert "late" not in store
        assert store.info().uuid != uuid
        assert store.check().problems == ()
        store["a"] += 1  # and it goes on
        store.commit()
        with pytest.warns(UserWarning, match="did not have it added here"):
            assert store.flush("t", wait=True).epoch == handle.epoch + 1


def test_a_flush_shows_one_commit_whatever_is_written_meanwhile(
    filled: pmstore.Store, path: Path, url: str
) -> None:
    rng = random.Random(1)
    a = filled["a"]
    for i in range(8):
        a[:] = i
        filled.commit()
        handle = filled.flush("t")
        while not handle.done:
            a[rng.randrange(len(a)) :] = -rng.random()
            filled["other"] = np.full(rng.randrange(1, 30_000), i)
            rng.choice([filled.commit, filled.rollback])()
        handle.wait()
        found = restored(path, url)
        assert found["epoch"] == handle.epoch
        assert set(found["a"].tolist()) == {float(i)}
        filled.rollback()


def test_only_what_changed_is_written(filled: pmstore.Store, path: Path, url: str) -> None:
    a = filled["a"]
    assert filled.flush("t", wait=True).stats.full  # type: ignore[union-attr]
    a[77_777] = 5
    filled.commit()
    stats = filled.flush("t", wait=True).stats
    assert stats is not None
    assert not stats.full
    assert 0 < stats.written_bytes <= 4 * CHUNK
    assert stats.state_bytes > 1_000_000
    assert filled.flush("t", wait=True).stats.written_bytes == 0  # type: ignore[union-attr] # the same commit
    assert filled.flush("t", wait=True, full=True).stats.written_bytes == stats.state_bytes  # type: ignore[union-attr]
    assert restored(path, url)["a"].tolist() == [*range(77_777), 5, *range(77_778, 131_072)]


def test_a_file_that_goes_while_a_tier_is_listed(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an epoch does that was published again: it is not told as gone, and what followed it is
    told."""
    for name in "abc":
        (shm / name).write_text(name)
    real = os.scandir

    @contextmanager
    def scan(path: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with real(path) as entries:
            listed = list(entries)
        (shm / "d").write_text("new")
        (shm / "b").unlink(missing_ok=True)
        yield iter(listed)

    monkeypatch.setattr("pmstore.tiers._places.local.os.scandir", scan)
    assert open_place(shm).names() == {"a": 1, "c": 1, "d": 3}


def test_a_restore_reads_at_most_twice_the_state(
    filled: pmstore.Store, path: Path, url: str
) -> None:
    rng = random.Random(3)
    a = filled["a"]
    for i in range(30):
        for _ in range(rng.choice([1, 5, 40])):
            a[rng.randrange(len(a))] = i
        filled.commit()
        filled.flush("t", wait=True)
        newest = pmstore.epochs(url)[0]
        assert newest.file_bytes <= 2 * newest.state_bytes
    assert restored(path, url)["a"].tolist() == a.tolist()


def test_the_first_flush_of_a_process_is_full(filled: pmstore.Store, path: Path, url: str) -> None:
    filled.flush("t", wait=True)
    filled.close()
    with pmstore.open(path) as store:
        assert store.tiers["t"].chunk_bytes == CHUNK
        store["a"][0] = 3
        store.commit()
        assert store.flush("t", wait=True).stats.full  # type: ignore[union-attr]


def test_keep(filled: pmstore.Store, step: Step, path: Path, url: str) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, keep=2, chunk_bytes=CHUNK))
    made = [step(i) for i in range(6)]
    filled.drain()  # old ones go when the new one counts
    assert [one.epoch for one in pmstore.epochs(url)] == made[:-3:-1]
    named = set()
    for manifest in Path(url).glob("*.manifest"):
        named.update(name for name, _ in Manifest.unpack(manifest.read_bytes()).files)
    assert {one.name for one in Path(url).glob("*.chunks")} == named
    assert restored(path, url, made[-2])["a"][0] == 4


def test_keep_goes_on_after_reopening_and_counts_all_of_the_run(
    filled: pmstore.Store, step: Step, path: Path, url: str
) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, keep=2, chunk_bytes=CHUNK))
    step(1)
    step(2)
    filled.close()
    with pmstore.open(path) as store:
        store["a"][:] = 3
        store.commit()
        newest = store.flush("t", wait=True).epoch
    assert [one.epoch for one in pmstore.epochs(url)] == [newest, newest - 1]


def test_keep_takes_no_epoch_for_one_whose_files_went(
    filled: pmstore.Store, step: Step, path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, keep=1, chunk_bytes=CHUNK))
    whole = step(1)
    filled.drain()
    publish = LocalPlace.publish

    def lose(place: LocalPlace, name: str, data: bytes) -> None:
        publish(place, name, data)
        os.unlink(place.path / Manifest.unpack(data).files[-1][0])

    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "publish", lose)
        with pytest.raises(TierError, match="disappeared"):
            step(2)
        filled.drain()
    found = restored(path, url)
    assert (found["epoch"], found["a"][0]) == (whole, 1)
    assert found["report"].skipped[0][1].startswith("missing")
    assert restored(path, url, step(3))["a"][0] == 3


def test_a_commit_flushed_again_is_never_missing(
    filled: pmstore.Store, path: Path, url: str
) -> None:
    """A later process flushes the same commit: the old manifest goes when the new one is there."""
    first = filled.flush("t", wait=True).epoch
    filled.close()
    with pmstore.open(path) as store:
        store.add_tier("t", pmstore.TierConfig(url, max_rate="2MB", chunk_bytes=CHUNK))
        handle = store.flush("t")
        while not handle.done:
            assert [(one.epoch, one.problem) for one in pmstore.epochs(url)] == [(first, None)]
            time.sleep(0.02)
        store.drain()
        assert [(one.epoch, one.generation, one.problem) for one in pmstore.epochs(url)] == [
            (first, 2, None)
        ]
        assert len(list(Path(url).glob("*.chunks"))) == 1


def test_a_half_written_manifest_is_deleted_by_the_next_writer(
    filled: pmstore.Store, path: Path, url: str
) -> None:
    filled.flush("t", wait=True)
    filled.close()
    whole = newest_file(url, ".manifest")
    left = whole.with_name(f".{whole.name}.deadbeef.new")
    others = whole.with_name(f".{ManifestName(1, 1, 'other', 0, 1)}.deadbeef.new")
    for file in (left, others):
        file.write_bytes(b"half")
    with pmstore.open(path) as store:
        store.flush("t", wait=True)
    assert (left.exists(), others.exists()) == (False, True)


def test_a_failure_that_nobody_was_told_of_is_a_warning_at_close(
    filled: pmstore.Store, url: str
) -> None:
    Path(url).write_text("not a directory")
    filled.flush("t")
    with pytest.warns(UserWarning, match="failed"):
        filled.close()


# ---- damage --------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda url: flip(newest_file(url, ".chunks"), 100_000), "corrupt"),
        (lambda url: os.truncate(newest_file(url, ".chunks"), 50_000), "corrupt"),
        (lambda url: newest_file(url, ".chunks").unlink(), "missing"),
        (lambda url: flip(newest_file(url, ".manifest"), 300), "corrupt"),
        (lambda url: os.truncate(newest_file(url, ".manifest"), 100), "corrupt"),
        (lambda url: os.truncate(newest_file(url, ".manifest"), 0), "corrupt"),
    ],
)
def test_a_damaged_epoch_is_passed_over_and_told(
    step: Step, path: Path, url: str, damage: Callable[[str], None], kind: str
) -> None:
    older, newer = step(1), step(2)
    damage(url)
    found = restored(path, url)
    assert found["epoch"] == older
    assert set(found["a"].tolist()) == {1.0}
    ((epoch, why),) = found["report"].skipped
    assert epoch == newer
    assert why.startswith(f"{kind}: ")
    with pytest.raises(TierError, match=kind):  # what was asked for is not replaced
        pmstore.restore(path.with_name("no.pm"), url, newer)
    assert not list(path.parent.glob("*no.pm*"))


def test_every_flipped_byte_of_a_manifest_is_noticed(step: Step, url: str) -> None:
    step(1)
    data = newest_file(url, ".manifest").read_bytes()
    rng = random.Random(5)
    for at in [*range(40), *(rng.randrange(len(data)) for _ in range(200))]:
        bad = bytearray(data)
        bad[at] ^= 1 << rng.randrange(8)
        with pytest.raises(BadManifestError):
            Manifest.unpack(bytes(bad))
    for end in range(0, len(data), 97):
        with pytest.raises(BadManifestError):
            Manifest.unpack(data[:end])


def test_nothing_there(path: Path, url: str) -> None:
    assert pmstore.epochs(url) == []
    with pytest.raises(TierError, match="no epoch here"):
        pmstore.restore(path, url)
    assert not path.exists()


def test_a_restore_does_not_replace_a_file(step: Step, path: Path, url: str) -> None:
    step(1)
    with pytest.raises(FileExistsError):
        pmstore.restore(path, url)


def test_a_restore_replaces_a_store_to_which_nothing_was_committed(
    filled: pmstore.Store, step: Step, path: Path, url: str
) -> None:
    """A start that found no store leaves one, and is told to restore the one that is lost."""
    epoch = step(1)
    filled.close()
    path.unlink()
    with pmstore.open(path) as left:
        left["config"] = 1
        with pytest.raises(FileExistsError):  # somebody has it open
            pmstore.restore(path, url)
        left.rollback()
    assert pmstore.restore(path, url).epoch == epoch
    with pmstore.open(path) as store:
        assert store["a"][0] == 1
    with pytest.raises(FileExistsError, match="remove it first"):
        pmstore.restore(path, url)


# ---- other ways in and out -----------------------------------------------------------------------


def test_flushed_by_itself_every_so_many_commits(
    filled: pmstore.Store, path: Path, url: str
) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, every=3, chunk_bytes=CHUNK))
    for i in range(9):
        filled["a"][:] = i
        filled.commit()
    wait_until(lambda: any(one.epoch >= filled.epoch - 3 for one in pmstore.epochs(url)))
    filled.drain(60)
    found = restored(path, url)
    assert found["epoch"] >= filled.epoch - 3


def test_a_reopened_store_goes_on_flushing_by_itself(
    filled: pmstore.Store, path: Path, url: str
) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, every=2, chunk_bytes=CHUNK))
    filled.commit()
    filled.close()
    with pmstore.open(path) as store:
        for i in range(4):
            store["a"][:] = i
            store.commit()
        wait_until(lambda: bool(pmstore.epochs(url)))
    assert pmstore.epochs(url)[0].problem is None


def test_flushes_in_a_loop_do_not_pile_up(filled: pmstore.Store, path: Path, url: str) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, max_rate="40MB", chunk_bytes=CHUNK))
    handles = []
    for i in range(30):
        filled["a"][:1000] = i
        filled.commit()
        handles.append(filled.flush("t"))
        assert sum(not one.done for one in handles) <= 8
    handles[-1].wait()
    assert [one.epoch for one in pmstore.epochs(url)] == [one.epoch for one in reversed(handles)]


def test_a_fork_child_is_ended_by_sigterm_at_once(filled: pmstore.Store, url: str) -> None:
    """It has inherited the handler, not the threads."""
    filled.add_tier("t", pmstore.TierConfig(url, max_rate=1, chunk_bytes=CHUNK))
    handle = filled.flush("t")  # for hours
    child = os.fork()
    if child == 0:
        filled.drain()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)  # a handler runs between two bytecodes
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status)
    assert not handle.done
    handle.cancel()


def test_a_store_open_for_reading_is_flushed(filled: pmstore.Store, path: Path, url: str) -> None:
    filled.close()
    with pmstore.open(path, "r") as reader:
        with pytest.raises(pmstore.TransactionError, match="lock=True"):
            reader.flush("t", wait=True)  # it has what was looked up alone
    with pmstore.open(path, "r", lock=True) as store:
        store.flush("t", wait=True)
    assert restored(path, url)["a"][3] == 3


def test_closing_waits_for_the_flush(filled: pmstore.Store, path: Path, url: str) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, max_rate="5MB", chunk_bytes=CHUNK))
    handle = filled.flush("t")
    filled.close()
    assert handle.done
    assert handle.error is None
    assert restored(path, url)["a"][3] == 3


def test_sigterm_finishes_the_flush(shm: Path) -> None:
    script = f"""
import pmstore, os, signal, numpy as np
store = pmstore.open({str(shm / "s.pm")!r}, size="4MiB")
store["a"] = np.ones(100_000)
store.add_tier("t", pmstore.TierConfig({str(shm / "tier")!r}, max_rate="2MB"))
store.commit()
handle = store.flush("t")
os.kill(os.getpid(), signal.SIGTERM)
print("not reached")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -15, done.stderr
    assert done.stdout == ""
    assert [one.problem for one in pmstore.epochs(str(shm / "tier"))] == [None]


def test_what_is_no_tier(filled: pmstore.Store, url: str) -> None:
    for bad in (
        {"keep": 0},
        {"every": -1},
        {"chunk_bytes": 5000},
        {"rank": 2, "world_size": 2},
        {"world_size": 2},
        {"run": "a/b"},
    ):
        with pytest.raises(ValueError):
            filled.add_tier("x", pmstore.TierConfig(url, **bad))  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        filled.add_tier("x/y", url)
    with pytest.raises(TierError):
        filled.add_tier("x", "nosuchprotocol://a/b")
    assert list(filled.tiers) == ["t"]
    filled.remove_tier("t")
    assert list(filled.tiers) == []
    with pytest.raises(TierError):
        filled.remove_tier("t")


def test_a_tier_has_a_name_and_a_place(store: pmstore.Store) -> None:
    for wrong in (("d", None), ("d", 7), (pmstore.TierConfig("/tmp/x"), "d")):
        with pytest.raises(TypeError, match=r"add_tier\(name, tier\): a str, and a URL"):
            store.add_tier(*wrong)  # type: ignore[arg-type]
    secret = pmstore.TierConfig("s3://bucket/run", storage_options={"secret": "hush"})
    assert "hush" not in repr(secret)


def test_a_child_forked_while_a_lock_is_closed_leaves_other_files_open(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = open_place(url).lock("run.", "session")
    other, there = os.pipe()
    close, statuses = os.close, list[int]()

    def close_and_fork(fd: int) -> None:
        monkeypatch.undo()
        close(fd)
        os.dup2(other, fd)  # another thread opens something
        child = os.fork()
        if not child:
            try:
                os.fstat(fd)
            except OSError:
                os._exit(1)
            os._exit(0)
        statuses.append(os.waitpid(child, 0)[1])
        close(fd)

    monkeypatch.setattr(os, "close", close_and_fork)
    lock.release()
    os.close(other)
    os.close(there)
    assert statuses == [0]
