"""What else happens beside a save: handlers, forks, tasks, ends of stores and programs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_common import QUIET, equal, load, save, state
from ranks import launch
from torch.distributed.checkpoint.api import CheckpointException

import pmstore
from pmstore.dcp import StoreWriter
from pmstore.dcp._format import folder_layout
from pmstore.dcp._write import staging
from pmstore.dcp._write.committed_tensors import Pin
from pmstore.dcp._write.rank_store import RankStore

pytestmark = pytest.mark.filterwarnings(QUIET)


def begin(folder: Path, content: dict[str, Any], writer: StoreWriter) -> Any:
    return dcp.async_save(content, checkpoint_id=folder, storage_writer=writer)


@pytest.mark.parametrize("whose", ["same writer", "another"])
@pytest.mark.parametrize("called", ["save", "async_save"])
def test_a_signal_handler_saves_in_the_middle_of_staging(
    shm: Path, monkeypatch: pytest.MonkeyPatch, whose: str, called: str
) -> None:
    """The writer that stages refuses to stage another state: it has one memory. All else is saved,
    and is no part of what is being staged."""
    writer = StoreWriter(shm)
    save(shm, state(1), writer)
    other = writer if whose == "same writer" else StoreWriter(shm)
    pin, told = staging.pin, []

    def interrupted(pairs: Any) -> Any:
        monkeypatch.setattr(staging, "pin", pin)
        if called == "save":
            save(shm, state(5), other)
        elif other is not writer:
            begin(shm, state(5), other).result()
        else:
            with pytest.raises(pmstore.TransactionError, match="note there"):
                begin(shm, state(5), other)
        if called == "save" or other is not writer:
            assert equal(load(shm, state(5)), state(5))
        told.append(whose)
        return pin(pairs)

    monkeypatch.setattr(staging, "pin", interrupted)
    begin(shm, state(2), writer).result()
    assert told
    assert equal(load(shm, state(2)), state(2))
    save(shm, state(3), writer)
    assert equal(load(shm, state(3)), state(3))


@pytest.mark.parametrize("called", ["save", "async_save"])
def test_what_is_staged_takes_its_memory_once(tmp_path: Path, called: str) -> None:
    """It was in the heap once, as often as the file had room for parts. Nor does the disk reserve
    log for what is written once."""
    program = """
import re, sys, torch, torch.distributed.checkpoint as dcp
from pathlib import Path
from pmstore.dcp import StoreWriter

def memory():
    return int(re.search(r"Anonymous:\\s+(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1])

folder, called = sys.argv[1:]
STATE = 64 << 10
state = {str(number): torch.rand(STATE // 16, 1024) for number in range(4)}
writer = StoreWriter(folder, domain="file")
dcp.save(state, checkpoint_id=folder, storage_writer=writer)
before, sizes = memory(), []
for number in range(6):
    future = getattr(dcp, called)(state, checkpoint_id=folder, storage_writer=writer)
    if future is not None and called == "async_save":
        future.result()
    sizes.append(sum(path.stat().st_size for path in Path(folder).iterdir()))
assert sizes[1] == sizes[-1], sizes
taken = sum(path.stat().st_blocks for path in Path(folder).iterdir()) / 2
print((memory() - before) / STATE, taken / STATE)
"""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, tmp_path / "c", called],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    grown, taken = map(float, told.split())
    assert grown < (1.5 if called == "async_save" else 0.5)
    assert 3 < taken < 4.5


@pytest.mark.parametrize("domain", ["process", "file"])
def test_a_store_that_is_closed_waits_for_what_is_copied_from_it(
    shm: Path, monkeypatch: pytest.MonkeyPatch, domain: Any
) -> None:
    writer, copy = StoreWriter(shm / "c"), Pin.copy
    copying, leaving = threading.Event(), threading.Event()

    def slow(pin: Pin) -> None:
        copying.set()
        leaving.wait(0.3)
        copy(pin)

    monkeypatch.setattr(Pin, "copy", slow)
    with pmstore.open(shm / "s.pm", domain=domain) as store:
        store["x"] = torch.full((50_000,), 3.0)
        store.commit()
        future = begin(shm / "c", {"x": store["x"]}, writer)
        store["x"].fill_(4)
        copying.wait()
    future.result()
    expected = {"x": torch.full((50_000,), 3.0)}
    assert equal(load(shm / "c", expected), expected)


def test_a_program_that_ends_does_not_lose_its_last_save(shm: Path) -> None:
    """Nobody waits for the future: torch's own thread goes on while the interpreter ends, when no
    thread can be begun any more."""
    program = """
import concurrent.futures.thread, sys, time, torch, torch.distributed.checkpoint as dcp
from pmstore.dcp import StoreWriter
from pmstore.dcp._write.rank_store import RankStore

def late(self, *arguments, write=RankStore.write):
    while not concurrent.futures.thread._shutdown:
        time.sleep(0.001)
    return write(self, *arguments)

RankStore.write = late
x = torch.arange(3_000_000.0)
dcp.async_save({"x": x}, checkpoint_id=sys.argv[1], storage_writer=StoreWriter(sys.argv[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, shm / "c"], check=True)
    expected = {"x": torch.arange(3_000_000.0)}
    assert equal(load(shm / "c", expected), expected)


def test_two_threads_stage_with_one_writer(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have one memory, in turns."""
    writer, pin, begun = StoreWriter(shm), staging.pin, threading.Event()

    def slow(pairs: Any) -> Any:
        if not begun.is_set():
            begun.set()
            other.join(0.3)
        return pin(pairs)

    def second() -> None:
        begun.wait()
        begin(shm, state(2), writer).result()

    other = threading.Thread(target=second)
    monkeypatch.setattr(staging, "pin", slow)
    other.start()
    begin(shm, state(1), writer).result()
    other.join()
    assert equal(load(shm, state(1), number=1), state(1))
    assert equal(load(shm, state(2), number=2), state(2))


@pytest.mark.parametrize("look", [lambda staged: staged["step"], dict])
def test_what_the_program_looked_into_is_not_overwritten(shm: Path, look: Any) -> None:
    """Nobody knows which thread saves it, and when that is over."""
    writer = StoreWriter(shm)
    staged = writer.stage(state(1))
    held = look(staged)
    content = staged if held == 1 else held
    del staged
    begin(shm / "other", state(2), writer).result()
    save(shm, content, writer)
    assert equal(load(shm, state(1)), state(1))


def test_writers_that_change_folders_do_not_wait_for_each_other(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, both = StoreWriter(shm / "a"), StoreWriter(shm / "b"), threading.Event()
    really = StoreWriter.set_up_storage_writer

    def late(self: StoreWriter, *args: Any, **kwargs: Any) -> None:
        both.wait()
        really(self, *args, **kwargs)

    monkeypatch.setattr(StoreWriter, "set_up_storage_writer", late)
    one, other = begin(shm / "b", state(1), first), begin(shm / "a", state(2), second)
    both.set()
    one.result(300)
    other.result(300)
    assert equal(load(shm / "b", state(1)), state(1))
    assert equal(load(shm / "a", state(2)), state(2))


def test_a_part_that_is_published_while_another_save_sweeps_stays(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = StoreWriter(shm, keep=3), StoreWriter(shm, keep=3)
    named, finish = folder_layout.named_parts, StoreWriter.finish
    written, read = threading.Event(), threading.Event()
    save(shm, state(1), second)
    thread = threading.Thread(target=save, args=(shm, state(2), first))

    def slow(folder: str) -> Any:
        found = named(folder)
        if threading.current_thread() is not thread:
            read.set()
            thread.join()
        return found

    def waits(self: StoreWriter, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is thread:
            written.set()
            read.wait()
        finish(self, *args, **kwargs)

    monkeypatch.setattr(StoreWriter, "finish", waits)
    thread.start()
    written.wait()
    monkeypatch.setattr(folder_layout, "named_parts", slow)
    save(shm, state(3), second)
    for number in (1, 2, 3):
        assert equal(load(shm, state(number), number=number), state(number))


def test_a_child_that_is_forked_meanwhile(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a loader's workers are. It ends as any other, and the save goes on."""
    writer, really, forked = StoreWriter(shm), RankStore.write, threading.Event()

    def write(self: RankStore, *arguments: Any) -> Any:
        with self.lock:
            forked.wait()
        return really(self, *arguments)

    monkeypatch.setattr(RankStore, "write", write)
    future = begin(shm, state(1), writer)
    child = os.fork()
    if child == 0:
        os._exit(7)
    forked.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    future.result()
    assert equal(load(shm, state(1)), state(1))


@pytest.mark.parametrize("held", ["stages", "opens"])
def test_a_child_saves_that_is_forked_while_a_thread_has_locks(
    shm: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """By its parent's writer, where nobody else writes. The parent's folder is refused to it."""
    writer, inside, forked = StoreWriter(shm / "c"), threading.Event(), threading.Event()
    save(shm / "c", state(1), writer)
    where, name = (staging, "pin") if held == "stages" else (RankStore, "__init__")
    really = getattr(where, name)

    def stop(*arguments: Any) -> Any:
        if threading.current_thread() is thread:
            inside.set()
            forked.wait()
        return really(*arguments)

    monkeypatch.setattr(where, name, stop)
    ended: list[Any] = []
    folder = shm / ("c" if held == "stages" else "of the thread")
    thread = threading.Thread(target=lambda: ended.append(begin(folder, state(2), writer).result()))
    if held == "opens":
        thread = threading.Thread(target=lambda: ended.append(save(folder, state(2), writer)))
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(100)  # it ends a child that hangs
        status = 1
        try:
            save(shm / "own", state(3), writer)
            begin(shm / "own", state(4), writer).result()
            monkeypatch.setattr(folder_layout, "LOCK_SECONDS", 0)
            with pytest.raises(CheckpointException, match=f"process {os.getppid()}"):
                save(shm / "c", state(5), writer)
            status = 7
        finally:
            os._exit(status)
    ends = os.waitpid(child, 0)[1]
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(ends) == 7
    assert len(ended) == 1
    assert equal(load(folder, state(2)), state(2))
    assert equal(load(shm / "own", state(4)), state(4))
    save(shm / "c", state(6), writer)
    assert equal(load(shm / "c", state(6)), state(6))


def test_tasks_save(shm: Path) -> None:
    writer = StoreWriter(shm / "c")

    async def main() -> None:
        with pmstore.open(shm / "s.pm") as store:
            store["x"] = torch.ones(50_000)
            store.commit()
            future = begin(shm / "c", {"x": store["x"]}, writer)
            async with store.transaction():
                store["x"].fill_(2)
                await asyncio.wrap_future(future)

    asyncio.run(main())
    expected = {"x": torch.ones(50_000)}
    assert equal(load(shm / "c", expected), expected)


# ---- ranks


def fails_at_one(folder: Path, rank: int, found: dict[str, Any]) -> None:
    """Rank 1 has no room for what is copied in the background: before torch's first message."""
    writer = StoreWriter(folder / "c")
    copy: Callable[[Pin], None] = Pin.copy

    def fail(pin: Pin) -> None:
        raise OSError(28, "No space left on device")

    with pmstore.open(folder / f"{rank}.pm", domain="process") as store:
        store["x"] = torch.full((1000,), float(rank))
        store.commit()
        content = {f"x{rank}": store["x"]}
        begin(folder / "c", content, writer).result()
        if rank == 1:
            Pin.copy = fail  # type: ignore[method-assign]
        try:
            begin(folder / "c", content, writer).result()
        except CheckpointException as error:
            found["said"] = str(error)
        Pin.copy = copy  # type: ignore[method-assign]
        dist.barrier()
        begin(folder / "c", content, writer).result()
        dist.barrier()
        found["right"] = equal(load(folder / "c", content), content)


def test_an_error_in_the_background_of_one_rank_is_one_of_all(tmp_path: Path) -> None:
    found = launch([fails_at_one], tmp_path, 2)["fails_at_one"]
    for one in found:
        assert "No space left on device" in one["said"]
        assert one["right"]
    # fewer ranks than before: parts of the others go as soon as no checkpoint names them
    folder = tmp_path / "fails_at_one" / "c"
    shutil.copytree(folder, tmp_path / "copy")
    for number in range(2):
        assert (folder / "rank-00001.pm").exists()
        save(folder, state(number))
    assert not (folder / "rank-00001.pm").exists()
    assert equal(load(folder, state(1)), state(1))
    with pmstore.open(tmp_path / "copy/rank-00001.pm"):  # in use: left alone
        for number in range(2):
            save(tmp_path / "copy", state(number))
    assert (tmp_path / "copy/rank-00001.pm").exists()
