"""Saves under power failure: what `dcp.save` has said is there, whole, in each image that a power
failure may leave, and so is what it was about to say, or nothing of it.

    python -m crashtests --kind saves
    python -m crashtests --kind saves --seed 2 --size 3000

Tensors go straight to their blocks in the file, by several threads, past the system's memory
(native/flush/bring.h). The recorder of `crashtests.tiers` writes down what they, the journal and
the names of a folder get. Images are made of that at random points: of each sector any version
since the file's last sync, or noise; in some nearly everything came, in some hardly anything.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

import pmstore
from crashtests import cases, disk, tiers
from crashtests.jobs import BUILD, MEMORY
from crashtests.report import leave
from pmstore.dcp import StoreReader, StoreWriter
from pmstore.dcp._write import save_part

STORIES = ("saves", "async saves", "saves beside readers")
STEPS = 5
GROWS = 3
"""From this step on tensors are larger: the store grows, and several threads write."""
KEEP = 2
LARGE = 1 << 18
"""Bytes of a tensor that has a block of its own, which it goes to straight."""
DIRECT = os.O_RDWR | os.O_CREAT | os.O_DIRECT


def content(step: int) -> dict[str, Any]:
    """No sector is that of another step or place; sizes are no whole pages."""
    drawn = torch.Generator().manual_seed(step)
    sizes = {"large": 4_300_001 if step >= GROWS else 1_300_001, "medium": 300_003, "small": 999}
    state: dict[str, Any] = {
        name: torch.randint(256, (size,), dtype=torch.uint8, generator=drawn)
        for name, size in sizes.items()
    }
    return state | {"step": step}


# ---- what is recorded ----


READER = """
import sys, zlib
import pmstore

with pmstore.open(sys.argv[1], "r") as store:
    part = next(name for name in store if name.startswith("part-"))
    arrays = [array for name, array in store[part].items() if name != "table"]
    sums = [zlib.crc32(array.numpy()) for array in arrays]
    print("open", flush=True)
    sys.stdin.read()
    assert sums == [zlib.crc32(array.numpy()) for array in arrays]
    del arrays
"""


@contextmanager
def _reading(folder: Path, writer: StoreWriter) -> Iterator[None]:
    """Has a checkpoint read meanwhile: by a snapshot and by views in this process, and by another
    process. All of them read the same at the end."""
    assert writer._store is not None
    store = writer._store.store
    part = next(name for name in store if name.startswith("part-"))
    held = [array for name, array in store[part].items() if name != "table"]
    there = [array.clone() for array in held]
    snapshot = store._pin_committed()
    assert snapshot is not None
    with subprocess.Popen(
        [sys.executable, "-c", READER, store.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"open\n"
        yield
    assert reader.returncode == 0
    for array, was in zip(held, there, strict=True):
        found = torch.empty_like(was)
        snapshot.copy(array.data_ptr() - store._core.pool.info.base, found.numpy())
        assert torch.equal(found, was)
        assert torch.equal(array, was)
    snapshot.close()


def record_saves(recorder: ctypes.CDLL, folder: Path, target: Path, story: str) -> int:
    """Saves a step at a time. Returns how many tensors went straight home."""
    straight = 0
    bring_home = save_part.bring_home

    def counted(*given: Any) -> Any:
        nonlocal straight
        found = bring_home(*given)
        straight += sum(one is not None for one in found)
        return found

    save_part.bring_home = counted
    recorder.recorder_start(str(folder).encode(), str(target).encode())
    writer = StoreWriter(folder, keep=KEEP, domain="file")
    with ExitStack() as readers:
        for step in range(1, STEPS + 1):
            state = content(step)
            where: dict[str, Any] = {"checkpoint_id": folder, "storage_writer": writer}
            if story == "async saves" and step % 2 == 0:
                future = dcp.async_save(state, **where)
                state["large"].zero_()
                future.result()
            else:
                dcp.save(state, **where)
            recorder.recorder_mark(ctypes.c_uint64(step))
            if story == "saves beside readers" and step == GROWS - 1:
                readers.enter_context(_reading(folder, writer))
            elif step == STEPS - 1:
                readers.close()
    return straight


def main() -> None:
    """Under the recorder. RECORDER FOLDER TRACE STORY"""
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True)
    print(record_saves(ctypes.CDLL(sys.argv[1]), folder, Path(sys.argv[3]), sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)


# ---- images ----


def takes_direct(folder: Path) -> bool:
    """Returns whether files there can be written past the system's memory."""
    path = folder / f"direct-{os.getpid()}"
    try:
        os.close(os.open(path, DIRECT, 0o600))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def recorded(recorder: Path, scratch: Path, story: str) -> list[disk.Event]:
    """Raises: AssertionError: nothing went straight home."""
    trace = scratch / "record"
    words = [str(scratch / "saves"), str(trace), story]
    straight = tiers.drive(recorder, *words, program="tests.dcp.dcp_power")
    assert int(straight) > 2 * STEPS // 2, f"{straight} tensors went straight home"
    return list(disk.events(trace.read_bytes()))


class Folder:
    """Images are laid over the files that were recorded: a store knows the file that it is in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files = root.with_name(f"{root.name}-files")
        os.rename(root, self._files)

    def lay_out(self, image: disk.Image) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        for name, data in image.items():
            assert data is not None
            path = self.root / os.path.relpath(name, self.root)
            with suppress(FileNotFoundError):  # a name that a new store has for a moment
                os.link(self._files / path.name, path)
            path.write_bytes(data)


def _weights(record: list[disk.Event]) -> Iterator[int]:
    """Yields how often each point is to be drawn: often where a tensor is on its way."""
    weight = 1
    for event in record:
        if event.kind == disk.WRITE and len(event.rest) >= LARGE:
            weight = 10
        elif event.kind == disk.SYNC:
            weight = 1
        yield weight


def images(
    record: list[disk.Event], root: Path, count: int, rng: random.Random
) -> Iterator[tuple[int, int, disk.Image]]:
    """Yields so many (operations done, save acknowledged, image), at random points."""
    at = Counter(rng.choices(range(len(record)), list(_weights(record)), k=count))
    now, acknowledged = disk.Disk(str(root)), 0
    for done, event in enumerate(record):
        if event.kind == disk.MARK:
            acknowledged = event.offset
        else:
            now.apply(event)
        for _ in range(at[done]):
            how = rng.choice(("none", "all", "names", "some", "some", "some", "some"))
            yield done, acknowledged, now.after(how, rng)


def check_load(folder: Path, number: int) -> None:
    state: dict[str, Any] = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
        for key, value in content(number).items()
    }
    dcp.load(state, storage_reader=StoreReader(folder, number=number))
    for key, value in content(number).items():
        assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), (number, key)


def numbers(folder: Path) -> list[int]:
    try:
        return StoreReader.numbers(folder)
    except FileNotFoundError:
        return []


def verify(folder: Path, acknowledged: int, goes_on: bool) -> None:
    """Raises: AssertionError; what loading and saving raise."""
    there = numbers(folder)
    newest = there[-1] if there else 0
    assert newest in (acknowledged, acknowledged + 1), (acknowledged, there)
    assert there == [*range(max(1, newest - KEEP + 1), newest + 1)], (acknowledged, there)
    for number in there:
        check_load(folder, number)
    for path in folder.glob("[!.]*.pm"):
        with pmstore.open(path, "r") as store:
            problems = store.check().problems
            assert problems == (), problems
    if goes_on:
        writer = StoreWriter(folder, keep=KEEP, domain="file")
        dcp.save(content(newest + 1), storage_writer=writer)
        writer.close()
        check_load(folder, newest + 1)


def failures_of(
    record: list[disk.Event], folder: Folder, count: int, rng: random.Random
) -> Iterator[str]:
    """Looks at so many images, and yields what is wrong with one."""
    for done, acknowledged, image in images(record, folder.root, count, rng):
        try:
            folder.lay_out(image)
            verify(folder.root, acknowledged, rng.random() < 0.3)
        except (Exception, CheckpointException) as error:
            yield f"after operation {done} of {len(record)}: {error!r}"


def _examine(drawn: tuple[str, int], size: int, _: None) -> cases.Found:
    story, seed = drawn
    place = MEMORY if takes_direct(MEMORY) else BUILD
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="pmstore-saves-", dir=place) as scratch:
        record = recorded(tiers.build(), Path(scratch), story)
        folder = Folder(Path(scratch, "saves"))
        failures = list(failures_of(record, folder, size, random.Random(seed)))
    leave("saves", seed, images=size, failures=len(failures))
    return cases.Found(Counter(images=size), failures[:20])


def _draw(seed: int, _: int) -> tuple[str, tuple[str, int]]:
    story, number = cases.turn(STORIES, seed)
    return f"{story}, power failures {number}", (story, number)


CASES = cases.Kind(300, "images", lambda: len(STORIES), _draw, _examine)


if __name__ == "__main__":
    main()
