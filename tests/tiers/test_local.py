"""A tier in a local directory: flush, restore, keep, and what damage does."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tier_helpers import CHUNK, restored

import pmstore
from pmstore.base.workers import Worker
from pmstore.errors import TierError
from pmstore.tiers import export_safetensors
from pmstore.tiers.config import TierConfig
from pmstore.tiers.flusher import Flusher
from pmstore.tiers.forgetting import Retention
from pmstore.tiers.local import Access, LocalBackend
from pmstore.tiers.manifest import CHUNKS_SUFFIX, BadManifestError, Manifest, ManifestName
from pmstore.tiers.places import open_backend

Step = Callable[[float], int]


class HeldLock:
    def __init__(self, lost: bool = False) -> None:
        self.lost = lost

    def check(self) -> None:
        if self.lost:
            raise TierError("the lock is lost")

    def release(self) -> None: ...


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
    for name in "abc":
        (shm / name).write_text(name)
    real = os.scandir

    @contextmanager
    def scan(path: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with real(path) as entries:
            listed = list(entries)
        (shm / "b").unlink()
        yield iter(listed)

    monkeypatch.setattr("pmstore.tiers.local.os.scandir", scan)
    assert open_backend(shm).names() == {"a": 1, "c": 1}


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
    publish = LocalBackend.publish

    def lose(backend: LocalBackend, name: str, data: bytes) -> None:
        publish(backend, name, data)
        os.unlink(backend.path / Manifest.unpack(data).files[-1][0])

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "publish", lose)
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


def newest_file(url: str, suffix: str) -> Path:
    files = sorted(Path(url).glob(f"*{suffix}"), key=lambda one: one.stat().st_mtime_ns)
    return files[-1]


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


# ---- runs and writers ----------------------------------------------------------------------------


def test_a_branch_is_a_run_of_its_own(
    step: Step, filled: pmstore.Store, path: Path, url: str
) -> None:
    first, second = step(1), step(2)
    branch = path.with_name("branch.pm")
    pmstore.restore(branch, url, first)
    with pmstore.open(branch) as store:
        store["a"][:] = 20
        store.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK))
        store.commit()
        assert store.flush("t", wait=True).epoch == second
        new = store.info().uuid
    assert {(one.epoch, one.run == new) for one in pmstore.epochs(url)} == {
        (first, False),
        (second, False),
        (second, True),
    }
    with pytest.raises(TierError, match="several runs"):
        pmstore.restore(path.with_name("c.pm"), url, second)
    assert restored(path, url, second, run=new[:8])["a"][0] == 20
    assert restored(path, url, second, run=filled.info().uuid)["a"][0] == 2
    assert restored(path, url)["a"][0] == 20  # what was flushed last
    step(3)
    assert restored(path, url)["a"][0] == 3


def test_two_writers_of_one_run(filled: pmstore.Store, path: Path, url: str) -> None:
    filled.close()
    shutil.copy(path, path.with_name("copy.pm"))
    with pmstore.open(path) as store, pmstore.open(path.with_name("copy.pm")) as copy:
        store.flush("t", wait=True)
        copy["x"] = 1
        copy.commit()
        with (
            pytest.warns(UserWarning, match="did not have it added here"),
            pytest.raises(TierError, match="another store or process"),
        ):
            copy.flush("t", wait=True)
        store.remove_tier("t")
        copy.flush("t", wait=True)


def test_a_run_is_of_one_store(filled: pmstore.Store, path: Path, url: str, shm: Path) -> None:
    """A restored store that was trained on cannot put its epochs beside those of the way it left,
    whatever name it gives."""
    filled.add_tier("t", pmstore.TierConfig(url, run="job", chunk_bytes=CHUNK))
    filled["a"][:] = 1
    filled.commit()
    filled.flush("t", wait=True)
    filled.close()
    pmstore.restore(path.with_name("branch.pm"), url)
    with pmstore.open(path.with_name("branch.pm")) as branch:
        branch.add_tier("t", pmstore.TierConfig(url, run="job", chunk_bytes=CHUNK))
        branch["a"][:] = 2
        branch.commit()
        with pytest.raises(TierError, match="another store"):
            branch.flush("t", wait=True)
        branch.add_tier("t", pmstore.TierConfig(url, run="job-2", chunk_bytes=CHUNK))
        branch.flush("t", wait=True)
    assert restored(path, url, run="job-2")["a"][0] == 2
    with pmstore.open(path) as store:  # the first store goes on as before
        store["a"][:] = 3
        store.commit()
        store.flush("t", wait=True)
    assert len({(one.run, one.epoch) for one in pmstore.epochs(url)}) == 3
    assert restored(path, url)["a"][0] == 3


def test_files_that_somebody_took_away_are_written_anew(
    filled: pmstore.Store, step: Step, path: Path, url: str
) -> None:
    step(1)
    for file in Path(url).glob("*.chunks"):
        file.unlink()
    filled["a"][5] = 7
    filled.commit()
    assert filled.flush("t", wait=True).stats.full  # type: ignore[union-attr]
    assert restored(path, url)["a"][:6].tolist() == [1, 1, 1, 1, 1, 7]
    shutil.rmtree(url)
    with pytest.raises(TierError, match="removed"):
        filled.flush("t", wait=True)
    filled.remove_tier("t")
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK))
    filled.flush("t", wait=True)
    assert restored(path, url)["a"][5] == 7


def test_a_tier_that_somebody_emptied_gets_the_same_commit_again(
    filled: pmstore.Store, path: Path, url: str
) -> None:
    """Under a name of its own: what is known of the manifest that was there before says nothing of
    it."""
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, keep=2))
    names: set[str] = set()
    for _ in range(3):
        filled.flush("t", wait=True)
        filled.drain()
        found = {file.name for file in Path(url).glob("*.manifest")}
        assert not found & names
        names |= found
        assert restored(path, url)["a"][5] == 5
        for file in Path(url).glob("*"):
            if not file.name.endswith("lock"):
                file.unlink()


def test_what_a_name_stood_for_before_is_forgotten(step: Step, url: str) -> None:
    """A manifest that is written again under the name of one that was read."""
    step(1)
    place = LocalBackend(Path(url), Access())
    name = newest_file(url, ".manifest").name
    own = ManifestName.parse(name)
    assert own is not None
    retention = Retention(place, TierConfig(url), own)
    held = HeldLock()
    retention.forget(held, name)  # reads it
    manifest = Manifest.unpack(place.read(name))
    ((old, size),) = manifest.files
    new = f"{own.data_prefix}deadbeef.000009{CHUNKS_SUFFIX}"
    os.rename(Path(url) / old, Path(url) / new)
    again = replace(manifest, files=((new, size),))
    retention.published(name, again)
    place.publish(name, again.pack())
    retention.forget(held, name)
    assert (Path(url) / new).exists()


def test_nothing_is_deleted_by_a_writer_that_lost_its_lock(step: Step, url: str) -> None:
    step(1)
    name = newest_file(url, ".manifest").name
    own = ManifestName.parse(name)
    assert own is not None
    lost = HeldLock(lost=True)
    again = own._replace(generation=own.generation + 1)
    os.link(Path(url) / name, Path(url) / str(again))
    before = sorted(os.listdir(url))
    with pytest.raises(TierError, match="lost"):
        Retention(LocalBackend(Path(url), Access()), TierConfig(url), own).forget(lost, name)
    assert sorted(os.listdir(url)) == before


def test_a_clock_that_goes_back_decides_nothing(
    step: Step, path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(1)
    monkeypatch.setattr("time.time", lambda: 5.0)
    step(2)
    assert restored(path, url)["a"][0] == 2


def test_errors_are_told_at_the_handle_and_once_at_the_next_flush(
    filled: pmstore.Store, url: str
) -> None:
    Path(url).write_text("not a directory")
    handle = filled.flush("t")
    with pytest.raises(OSError):
        handle.wait()
    with pytest.raises(OSError):
        handle.wait()
    Path(url).unlink()
    filled.flush("t", wait=True)
    filled.drain()
    os.rename(url, url + ".moved")
    Path(url).write_text("not a directory")
    filled["a"][0] = 9
    filled.commit()
    failed = filled.flush("t")
    failed._done.wait()
    with pytest.raises(OSError):
        filled.flush("t")
    Path(url).unlink()
    os.rename(url + ".moved", url)
    filled.flush("t", wait=True)
    with pytest.raises(TierError, match="no tier 'u'"):
        filled.flush("u")


def test_a_failure_may_be_a_warning_at_the_next_flush(
    filled: pmstore.Store, path: Path, url: str
) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, on_error="warn"))
    Path(url).write_text("not a directory")
    failed = filled.flush("t")
    assert failed.wait_over(60)
    Path(url).unlink()
    with pytest.warns(UserWarning, match=rf"the flush of epoch {failed.epoch} to 't' failed"):
        handle = filled.flush("t")
    handle.wait(60)
    filled.flush("t", wait=True)  # told once
    assert restored(path, url)["a"][5] == 5


def test_two_tiers_at_once(filled: pmstore.Store, path: Path, url: str) -> None:
    """Each has its own epoch, whatever is committed meanwhile."""
    handles = {}
    for i, name in enumerate(("u", "v", "t")):
        filled.add_tier(name, pmstore.TierConfig(url + name, chunk_bytes=CHUNK, max_rate="20MB"))
        filled["a"][:] = i
        filled.commit()
        handles[name] = filled.flush(name)
    filled["a"][:] = -1
    filled.commit()
    assert len({handle.wait(60).epoch for handle in handles.values()}) == 3
    for i, (name, handle) in enumerate(handles.items()):
        found = restored(path, url + name)
        assert (found["epoch"], set(found["a"].tolist())) == (handle.epoch, {float(i)})


def test_callbacks(filled: pmstore.Store, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress comes in order and ends at all of it; a callback that raises is told, and harms no
    flush."""
    told: list[tuple[int, int]] = []
    raised: list[type[BaseException]] = []
    ended: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_type))
    handle = filled.flush("t", progress=lambda done, total: told.append((done, total)))
    handle.add_done_callback(lambda handle: ended.append(1 / 0))
    handle.add_done_callback(ended.append)
    handle.wait(60)
    filled.drain(60)
    assert ended == [handle]
    assert told == sorted(told)
    assert told[-1] == (handle.stats.written_bytes, handle.total_bytes)  # type: ignore[union-attr]
    assert told[-1][0] == told[-1][1] > 1 << 20
    filled["a"][0] = 1
    filled.commit()
    filled.flush("t", progress=lambda done, total: ended.append(1 / 0)).wait(60)
    assert raised == [ZeroDivisionError] * 2


@pytest.mark.parametrize("ending", ["drain", "close"])
def test_a_callback_drains_or_closes_the_store(
    filled: pmstore.Store, url: str, ending: str
) -> None:
    """Also with flushes after its own that have yet to run, and their callbacks."""
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, keep=1))
    begun, ended = threading.Event(), threading.Event()
    called: list[int] = []

    def end(handle: pmstore.tiers.Flush) -> None:
        assert begun.wait(60)
        if ending == "drain":
            filled.drain(60)
        else:
            filled.close()
        called.append(handle.epoch)
        ended.set()

    handles = [filled.flush("t")]
    handles[0].add_done_callback(end)
    for i in range(3):
        filled["a"][:] = i
        filled.commit()
        handles.append(filled.flush("t"))
        handles[-1].add_done_callback(lambda handle: called.append(handle.epoch))
    begun.set()
    assert ended.wait(60)
    assert all(handle.over for handle in handles)
    if ending == "drain":
        filled.drain(60)
    else:
        assert filled.closed
        assert handles[-1].wait_called(60)
    assert called == [handle.epoch for handle in handles]


@pytest.mark.parametrize("ending", ["wait", "drain", "flush", "close", "close elsewhere"])
def test_a_progress_callback_waits_for_its_flush(filled: pmstore.Store, ending: str) -> None:
    """Which must not wait for the callback then."""
    handles: list[pmstore.tiers.Flush] = []
    known, closing = threading.Event(), threading.Event()
    ended: list[str] = []
    errors: list[BaseException] = []

    def close() -> None:
        closing.set()
        filled.close()
        ended.append("closed")

    closer = threading.Thread(target=close, daemon=True)

    def tell(done: int, total: int) -> None:
        if ended or errors:
            return
        try:
            assert known.wait(60)
            if ending == "wait":
                handles[0].wait(60)
            elif ending == "drain":
                filled.drain(60)
            elif ending == "flush":
                filled.flush("t").wait(60)
            elif ending == "close":
                filled.close()
            else:
                closer.start()
                assert closing.wait(60)
                with pytest.raises((TierError, pmstore.ClosedStoreError)):
                    while True:
                        filled.flush("t").wait(60)
            ended.append(ending)
        except BaseException as error:
            errors.append(error)

    handles.append(filled.flush("t", progress=tell))
    known.set()
    assert handles[0].wait_over(60)
    assert handles[0].wait_called(60)
    assert not errors
    assert ending in ended
    if ending == "close elsewhere":
        closer.join(60)
        assert not closer.is_alive()
    if "close" in ending:
        assert filled.closed


@pytest.mark.parametrize("refused", [1, 2])
def test_threads_that_cannot_be_started(
    filled: pmstore.Store, path: Path, url: str, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """The flush says so, at once, and the next one tries again."""
    start = Worker.start
    names: list[str] = []

    def refuse(thread: Worker) -> None:
        names.append(thread.name)
        if len(names) == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Worker, "start", refuse)
    with pytest.raises(TierError, match="no thread could be started") as caught:
        filled.flush("t")
    assert "can't start new thread" in str(caught.value)
    handle = filled.flush("t", progress=lambda done, total: None)
    handle.wait(60)
    filled.drain(60)
    assert len(names) == len(set(names)) + 1  # those that are there are not started twice
    assert restored(path, url)["epoch"] == handle.epoch


def test_a_thread_that_tells_progress_cannot_be_started(
    filled: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.flush("t", wait=True)
    start = Worker.start

    def refuse(thread: Worker) -> None:
        if thread.name == "pmstore progress":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Worker, "start", refuse)
    filled["a"] += 1
    filled.commit()
    failed = filled.flush("t", progress=lambda done, total: None)
    with pytest.raises(TierError, match="can't start new thread"):
        failed.wait(60)
    assert failed.wait_called(60)
    filled.flush("t").wait(60)


def test_a_store_whose_regular_flushing_cannot_be_started(
    path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: Worker) -> None:
        raise RuntimeError("can't start new thread")

    with pmstore.open(path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "start", refuse)
            with pytest.raises(TierError, match="no thread could be started"):
                store.add_tier("t", pmstore.TierConfig(url, every=1))
        store.add_tier("t", pmstore.TierConfig(url, every=1))
        store["a"] = 1
        store.commit()
        for _ in range(3000):
            if pmstore.tiers.epochs(url):
                break
            time.sleep(0.01)
    assert pmstore.tiers.epochs(url)


def test_a_callback_flushes_while_the_store_is_closed(
    filled: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException | None] = []
    closing, called = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))
    close = Flusher.close
    monkeypatch.setattr(Flusher, "close", lambda flusher: (close(flusher), closing.set()))

    def again(handle: pmstore.tiers.Flush) -> None:
        assert closing.wait(60)
        called.set()
        filled.flush("t")

    filled.flush("t").add_done_callback(again)
    closer = threading.Thread(target=filled.close, daemon=True)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()
    assert called.is_set()
    assert [str(one) for one in raised] == ["tier 't' is being closed"]


def test_a_flush_is_cancelled(filled: pmstore.Store, path: Path, url: str) -> None:
    filled.flush("t", wait=True)
    filled["a"] += 1
    filled.commit()
    filled.add_tier("t", pmstore.TierConfig(url, max_rate="1MB", chunk_bytes=CHUNK))
    handle = filled.flush("t", full=True)
    handle.cancel()
    with pytest.raises(TierError, match="cancelled"):
        handle.wait(30)
    assert len(pmstore.epochs(url)) == 1
    assert len(list(Path(url).glob("*.chunks"))) == 1


def test_memory_is_bounded_and_a_commit_waits(filled: pmstore.Store, path: Path, url: str) -> None:
    filled.add_tier(
        "t", pmstore.TierConfig(url, memory="128KiB", max_rate="500KB", chunk_bytes=CHUNK)
    )
    handle = filled.flush("t")
    filled["a"][:] = -1
    filled.commit()
    stats = handle.wait(60).stats
    assert stats is not None
    assert stats.commit_waits >= 1
    assert stats.commit_wait_seconds > 0
    assert stats.peak_kept_bytes <= 128 << 10
    assert restored(path, url)["a"][5] == 5


def test_a_flush_that_keeps_commits_waiting_too_long_fails_and_they_go_on(
    filled: pmstore.Store, url: str
) -> None:
    filled.add_tier(
        "t",
        pmstore.TierConfig(
            url, memory="64KiB", max_rate="500KB", max_wait_seconds=0.05, chunk_bytes=CHUNK
        ),
    )
    handle = filled.flush("t")
    filled["a"][:] = -1
    filled.commit()
    with pytest.raises(TierError, match="flush less often"):
        handle.wait(60)
    filled["a"][:] = -2
    filled.commit()


@pytest.mark.parametrize("mib", [1, 20])
def test_a_disk_that_is_full(shm: Path, mib: int) -> None:
    """mib: of state; from 16 on room is set aside before anything is written."""
    script = f"""
import pmstore, resource, signal, numpy as np
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = pmstore.open({str(shm / "s.pm")!r}, size="{4 * mib}MiB")
store["a"] = np.ones({mib << 17})
store.add_tier("t", {str(shm / "tier")!r})
store.commit()
store.flush("t", wait=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, {resource.RLIM_INFINITY}))
store["a"] += 1
store.commit()
try:
    store.flush("t", wait=True)
except OSError as error:
    print(type(error).__name__, error)
resource.setrlimit(resource.RLIMIT_FSIZE, ({resource.RLIM_INFINITY}, {resource.RLIM_INFINITY}))
print(len(pmstore.epochs({str(shm / "tier")!r})))
store.flush("t", wait=True)
print([one.problem for one in pmstore.epochs({str(shm / "tier")!r})])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("TierError")
    assert rest == ["1", "[None, None]"]


# ---- other ways in and out -----------------------------------------------------------------------


def test_flushed_by_itself_every_so_many_commits(
    filled: pmstore.Store, path: Path, url: str
) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, every=3, chunk_bytes=CHUNK))
    for i in range(9):
        filled["a"][:] = i
        filled.commit()
    for _ in range(500):
        if pmstore.epochs(url) and pmstore.epochs(url)[0].epoch >= filled.epoch - 3:
            break
        os.sched_yield()
        filled.drain(60)
        time.sleep(0.02)
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
        for _ in range(500):
            if pmstore.epochs(url):
                break
            time.sleep(0.02)
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
    filled.add_tier("t", pmstore.TierConfig(url, max_rate="200KB", chunk_bytes=CHUNK))
    handle = filled.flush("t")
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
    with pmstore.open(path, "r") as store:
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


def test_safetensors_without_a_store(filled: pmstore.Store, path: Path, url: str) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    filled["deep/f"] = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    filled["deep/empty"] = np.zeros((0, 3), "int16")
    filled.commit()
    epoch = filled.flush("t", wait=True).epoch
    target = path.with_name("x.safetensors")
    assert export_safetensors(target, url) == (epoch, ["a", "deep/empty", "deep/er/b", "deep/f"])
    found = safetensors.load_file(target)
    for name in ("a", "deep/er/b", "deep/f", "deep/empty"):
        np.testing.assert_array_equal(found[name], filled[name])
    assert export_safetensors(path.with_name("y.safetensors"), url, group="deep")[1] == [
        "empty",
        "er/b",
        "f",
    ]
    with pytest.raises(TierError, match="no arrays under 'nope'"):
        export_safetensors(path.with_name("z.safetensors"), url, group="nope")
    with pytest.raises(FileExistsError):
        export_safetensors(target, url)


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
    with pytest.raises(KeyError):
        filled.remove_tier("t")


def test_a_tier_has_a_name_and_a_place(store: pmstore.Store) -> None:
    for wrong in (("d", None), ("d", 7), (pmstore.TierConfig("/tmp/x"), "d")):
        with pytest.raises(TypeError, match=r"add_tier\(name, tier\): a str, and a URL"):
            store.add_tier(*wrong)  # type: ignore[arg-type]
    secret = pmstore.TierConfig("s3://bucket/run", storage_options={"secret": "hush"})
    assert "hush" not in repr(secret)
