"""Flushing ~450 MB of AdamW training to a disk while it goes on: how long a flush blocks, how much
it slows the steps beside it, what it writes, against DCP's async_save and torch.save in a thread;
and against plain writing and reading.

Every round trains a few steps alone, then starts the save and trains until it is over. pmstore
commits at every step, the others do not: each method's slowdown is over its own steps without a
save. Plain writing of as many bytes, which copies and checks nothing, shows what of it is the
disk's and the cores' share. With 50 MB a step is shorter than a flush: commits keep pre-images, and
wait at the bound.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import pmstore
import pmstore.torch
from benchmarks import harness
from benchmarks.models import Trainer, initialize, mlp, publish

MB = 1_000_000
HUGE = 2 << 20
CHUNK = 256 << 10  # of a TierConfig that says nothing
FLUSH = "pmstore flush"
PLAIN_BESIDE = "plain O_DIRECT writing (thread)"
PLAIN = "plain O_DIRECT writing"
FULL = "full flush"
FLUSHED_PART = "flush of 1 % of the chunks"
WRITTEN = "written / changed"
PLAIN_PART = "1 % written plainly, with the same four syncs"
INTO_NEW_MEMORY = "plain O_DIRECT reading into new memory"
DISK_ALONE = "plain O_DIRECT writing, {} at once"
ALONE_ON_DISK = DISK_ALONE.format(1)
RATE = (
    "the disk's rate changes within a run: as many bytes later, one rank's flush {:.0f} ms, plain "
    "writing {:.0f} ms"
)
MEMCPY = "memcpy of the state, one core"
PROCESSOR = "processor ms"
WARM_UP = 1  # rounds of the bandwidth, not counted
SLOWER = (
    "torch's two threads had both cores for themselves before; plain O_DIRECT writing of as many "
    "bytes beside the same steps, which copies and checks nothing: {:.3g}"
)
SYNCS = (
    "four syncs and a few milliseconds of writing; syncs do not shrink with the bytes. As many "
    "bytes with the same syncs, written plainly, take {:.3g} of a full flush"
)
RESTORED, LONGER = "restore into memory", "memory / state"
RESTORE = (
    "the restored store takes {:.3g} times the state in memory: making its pages on tmpfs, and the "
    "checks, take {:.3g} ms of processor time; the next figure has the making of memory on both "
    "sides"
)
ONE_MORE = "the store's first chunk, which has the number of commits, is written each time"
NEW_MEMORY = (
    "a restore makes memory for {:.3g} times the bytes, and checks each chunk: {:.3g} ms of "
    "processor time, where the reading takes {:.3g}"
)
ONE_DISK = (
    "one rank alone writes at the rate of the disk, which two share; the next figure compares with "
    "two plain writers"
)


class Saver:
    """start: begins to save and returns when training may go on. over: whether it has ended; ends
    what it must."""

    def __init__(self, size: int, folder: Path) -> None:
        self.trainer = Trainer(*mlp(size))
        initialize(self.trainer.model)
        self.folder = folder
        self.trainer.step()

    def step(self) -> None:
        self.trainer.step()

    def start(self) -> None: ...
    def over(self) -> bool: ...
    def extra(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


class Pmstore(Saver):
    def __init__(self, size: int, folder: Path) -> None:
        super().__init__(size, folder)
        state = self.trainer.bytes()
        self.memory = ExitStack()
        place = self.memory.enter_context(harness.scratch("memory"))
        self.store = pmstore.open(place / "run.pm", "w", size=3 * state, domain="process")
        self.run = pmstore.torch.attach(
            self.store, model=self.trainer.model, optimizer=self.trainer.optimizer
        )
        self.step()
        self.store.add_tier("disk", pmstore.TierConfig(folder / "tier", keep=1))
        self.store.flush("disk", wait=True)
        self.done: list[Any] = []

    def step(self) -> None:
        with self.run.next_step():
            self.trainer.step()
        self.run.commit()

    def start(self) -> None:
        self.handle = self.store.flush("disk", full=True)

    def over(self) -> bool:
        if self.handle.done:
            self.done.append(self.handle.wait().stats)
        return self.handle.done

    def extra(self) -> dict[str, float]:
        last = self.done
        return {
            "peak kept / state": max(s.peak_kept_bytes / s.state_bytes for s in last),
            "commit waits": sum(s.commit_waits for s in last) / len(last),
            "waited ms": 1e3 * sum(s.commit_wait_seconds for s in last) / len(last),
        }

    def close(self) -> None:
        self.store.close()
        self.memory.close()


class PmstoreRoomy(Pmstore):
    """With as much memory as the state: no commit waits."""

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__(size, folder)
        self.store.add_tier(
            "disk", pmstore.TierConfig(folder / "tier", keep=1, memory=2 * self.trainer.bytes())
        )


class Dcp(Saver):
    kind = "thread"

    def start(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.running = dcp.async_save(
                self.trainer.tensors(),
                storage_writer=dcp.FileSystemWriter(self.folder / "dcp", sync_files=True),
                async_checkpointer_type=AsyncCheckpointerType(self.kind),
                **({"no_dist": True} if self.kind == "thread" else {}),
            )

    def over(self) -> bool:
        if self.running.done():
            self.running.result()
        return self.running.done()


class DcpProcess(Dcp):
    kind = "process"

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__(size, folder)
        if not torch.distributed.is_initialized():
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
            torch.distributed.init_process_group("gloo", rank=0, world_size=1)

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class TorchSave(Saver):
    """A clone of the state, then torch.save, fsync and rename in a thread."""

    def start(self) -> None:
        state = {k: v.clone() for k, v in self.trainer.tensors().items()}

        def save() -> None:
            torch.save(state, self.folder / "t.new")
            publish(self.folder / "t.new", self.folder / "t.pt")

        self.thread = threading.Thread(target=save)
        self.thread.start()

    def over(self) -> bool:
        return not self.thread.is_alive()


class PlainWriting(Saver):
    """As many bytes, from a buffer that is there."""

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__(size, folder)
        self.block, self.total = _random(4 << 20), self.trainer.bytes()

    def start(self) -> None:
        self.thread = threading.Thread(
            target=direct, args=(self.folder / "plain", self.block, self.total)
        )
        self.thread.start()

    def over(self) -> bool:
        over = not self.thread.is_alive()
        if over:
            (self.folder / "plain").unlink()
        return over


SAVERS: dict[str, tuple[type[Saver], float]] = {
    FLUSH: (Pmstore, 3),
    PLAIN_BESIDE: (PlainWriting, 1),
    "DCP async_save (thread)": (Dcp, 1),
    "DCP async_save (process)": (DcpProcess, 1),
    "torch.save + fsync (thread)": (TorchSave, 1),
}
SAVERS_OF_A_SMALL_STATE: dict[str, tuple[type[Saver], float]] = {
    FLUSH: (Pmstore, 2),
    "pmstore flush, memory of the state": (PmstoreRoomy, 1),
    PLAIN_BESIDE: (PlainWriting, 1),
    "DCP async_save (thread)": (Dcp, 1),
    "torch.save + fsync (thread)": (TorchSave, 1),
}
"""And their shares of the time."""


def _case(size: int) -> str:
    return f"{size / MB:.0f} MB of state"


def _steps(step: Callable[[], None], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def _training(
    size: int, rounds: int, savers: dict[str, tuple[type[Saver], float]], budget: harness.Budget
) -> list[harness.Row]:
    case, failed = _case(size), []
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    times: dict[str, list[float]] = {MEMCPY: []}
    slow: dict[str, list[float]] = {}
    extra: dict[str, dict[str, float]] = {}
    for (name, kind), part in budget.deal(
        ((name, kind), weight) for name, (kind, weight) in savers.items()
    ):
        with harness.scratch("disk") as folder:
            try:
                saver = kind(size, folder)
                saver.start()
                while not saver.over():
                    saver.step()
                for _ in part.rounds(rounds, least=1):
                    start = time.perf_counter()
                    target[:] = source
                    times[MEMCPY].append(1e6 * (time.perf_counter() - start))
                    alone = _steps(saver.step, 6)[1:]
                    start = time.perf_counter()
                    saver.start()
                    times.setdefault(name, []).append(1e6 * (time.perf_counter() - start))
                    beside = _steps(saver.step, 2)
                    while not saver.over():
                        beside += _steps(saver.step, 1)
                    slow.setdefault(name, []).append(
                        statistics.mean(beside) / statistics.median(alone)
                    )
                extra[name] = saver.extra()
                saver.close()
            except (
                RuntimeError,
                ValueError,
                TypeError,
                OSError,
                dcp.api.CheckpointException,
            ) as error:
                failed.append(
                    harness.missing(name, case, harness.POWER, f"failed: {harness.words_of(error)}")
                )
                times.pop(name, None)
    rows = [harness.summarize(MEMCPY, case, harness.NONE, times.pop(MEMCPY))]
    for name, taken in times.items():
        more = {"step slowdown": statistics.median(slow[name])} if name in slow else {}
        rows.append(
            harness.summarize(name, case, harness.POWER, taken, **more, **extra.get(name, {}))
        )
    return harness.with_ratios([*rows, *failed], MEMCPY)


# ---- bandwidth, increments, ranks ----


def direct(path: Path, buffer: np.ndarray[Any, Any], total: int) -> float:
    """Seconds of writing a new file; deleting the one before is not counted."""
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    for at in range(0, total, buffer.nbytes):
        os.pwrite(fd, buffer.data, at)
    os.fdatasync(fd)
    os.close(fd)
    return time.perf_counter() - start


def aligned_block(count: int) -> np.ndarray[Any, Any]:
    """On huge pages, as a flush's own: the plain methods are as fast as they can be."""
    import mmap

    memory = mmap.mmap(-1, count + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    lead = -raw.ctypes.data % HUGE
    return raw[lead : lead + count]


def _random(count: int) -> np.ndarray[Any, Any]:
    block = aligned_block(count)
    block[:] = np.random.default_rng(0).integers(0, 256, count, np.uint8)
    return block


def drop(path: Path) -> None:
    """Of the page cache."""
    for file in [path] if path.is_file() else path.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _bandwidth(size: int, rounds: int, budget: harness.Budget) -> list[harness.Row]:
    block = _random(4 << 20)
    with (
        harness.scratch("disk") as disk,
        harness.scratch("memory") as memory,
        # what it would grow to
        pmstore.open(memory / "run.pm", "w", size=22 * size // 10, domain="process") as store,
    ):
        a = store.zeros("a", size, "uint8")
        a[:] = np.resize(block, size)
        store.commit()
        store.add_tier("disk", pmstore.TierConfig(disk / "tier", keep=1))
        chunks = size // CHUNK
        part = _random(-(-chunks // 100) * CHUNK)

        processor: dict[str, list[float]] = {}

        def timed(name: str, work: Callable[[], object]) -> float:
            """In seconds; the processor time of all threads, a flush's own among them, is kept
            beside."""
            start, before = time.perf_counter(), time.process_time()
            work()
            seconds = time.perf_counter() - start
            processor.setdefault(name, []).append(1e3 * (time.process_time() - before))
            return seconds

        def counted(
            name: str, run: Callable[[], float], durability: str = harness.POWER
        ) -> harness.Method:
            def extra() -> dict[str, float]:
                found = {PROCESSOR: statistics.median(processor[name][WARM_UP:])}
                more = {FLUSHED_PART: (WRITTEN, written), RESTORED: (LONGER, lengths)}.get(name)
                return found | ({more[0]: more[1][-1]} if more else {})

            return harness.Method(name, durability, run, extra)

        def plain() -> float:
            (disk / "plain").unlink(missing_ok=True)
            return timed(PLAIN, lambda: direct(disk / "plain", block, size))

        def flush(name: str, full: bool) -> float:
            """Until the epoch counts; deleting the one before is not counted."""
            seconds = timed(name, lambda: handles.append(store.flush("disk", wait=True, full=full)))
            store.drain()
            return seconds

        handles: list[Any] = []

        written: list[float] = []
        lengths: list[float] = []

        def incremental() -> float:
            """Chunks are what a flush writes: so a chunk has changed of which a byte has."""
            changed = range(0, chunks, 100)
            for i in changed:
                a[i * CHUNK] += 1
            store.commit()
            seconds = flush(FLUSHED_PART, False)
            written.append(handles[-1].stats.written_bytes / (len(changed) * CHUNK))
            return seconds

        def plain_part() -> None:
            """Chunks, then what says where they are: each synced, with its name."""
            direct(disk / "part", part, part.nbytes)
            fd = os.open(disk, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
            (disk / "part.new").write_bytes(bytes(24 * chunks))
            publish(disk / "part.new", disk / "part.manifest")

        def restore() -> float:
            target = memory / "restored.pm"
            drop(disk / "tier")
            seconds = timed(RESTORED, lambda: pmstore.restore(target, disk / "tier"))
            lengths.append(512 * target.stat().st_blocks / size)
            target.unlink()
            return seconds

        def reading() -> float:
            drop(disk / "plain")
            fd = os.open(disk / "plain", os.O_RDONLY | os.O_DIRECT)
            start = time.perf_counter()
            for at in range(0, size, block.nbytes):
                os.preadv(fd, [block.data], at)
            seconds = time.perf_counter() - start
            os.close(fd)
            return seconds

        def into_new_memory() -> float:
            """Every byte has a place of its own afterwards, as in a restored store."""
            drop(disk / "plain")
            fd = os.open(disk / "plain", os.O_RDONLY | os.O_DIRECT)

            def read() -> None:
                fresh = aligned_block(size + block.nbytes)
                for at in range(0, size, block.nbytes):
                    os.preadv(fd, [fresh[at : at + block.nbytes].data], at)

            seconds = timed(INTO_NEW_MEMORY, read)
            os.close(fd)
            return seconds

        methods = [
            counted(PLAIN, plain),
            counted(FULL, lambda: flush(FULL, True)),
            counted(FLUSHED_PART, incremental),
            counted(PLAIN_PART, lambda: timed(PLAIN_PART, plain_part)),
            harness.Method("plain O_DIRECT reading", harness.NONE, reading),
            counted(INTO_NEW_MEMORY, into_new_memory, harness.NONE),
            counted(RESTORED, restore),
        ]
        rows = harness.measure(f"{size / MB:.0f} MB", methods, rounds, WARM_UP, budget=budget)
        a = None
    return harness.with_ratios(rows, PLAIN)


RANK_RATE = 100 * MB
"""Of a place that a rank has for itself: so low that two of them are less than what the disk behind
both can do."""
RANK = """
import sys, time, numpy as np, pmstore
rank, world, size, rate = map(int, sys.argv[1:5])
path, url = sys.argv[5:]
with pmstore.open(path, "w", size=3 * size, domain="process") as store:
    for i in range(8):
        store[f"w{i}"] = np.random.default_rng(i).integers(0, 256, size // 8, np.uint8)
    store.commit()
    ranks = {"rank": rank, "world_size": world, "run": "bench", "replicated": ["w*"]}
    store.add_tier("t", pmstore.TierConfig(url, max_rate=rate or None, **ranks))
    print("ready", flush=True)
    sys.stdin.readline()
    stats = store.flush("t", wait=True).stats
    print(stats.seconds, stats.written_bytes, flush=True)
"""


def _disk_alone(case: str, size: int) -> list[harness.Row]:
    """What the disk says to one writer, and to two with half of it each: no flush of two ranks can
    gain more from it."""
    block = _random(4 << 20)
    times: dict[int, list[float]] = {1: [], 2: []}
    with harness.scratch("disk") as disk, ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            for writers, taken in times.items():
                jobs = [
                    pool.submit(direct, disk / f"{writers} {i}", block, size // writers)
                    for i in range(writers)
                ]
                taken.append(1e6 * max(job.result() for job in jobs))
    return [
        harness.summarize(DISK_ALONE.format(writers), case, harness.POWER, taken)
        for writers, taken in times.items()
    ]


def _ranks(size: int, rounds: int, rate: int, budget: harness.Budget) -> list[harness.Row]:
    """rate: bytes a second that each rank's place takes in; 0: one disk for all of them."""
    case = f"{size / MB:.0f} MB replicated, " + (
        f"{rate / MB:.0f} MB/s for each rank" if rate else "one disk"
    )
    rows = [] if rate else _disk_alone(case, size)
    for world, part in budget.deal(((1, 1), (2, 1))):
        times, written = [], 0.0
        for _ in part.rounds(rounds, least=1):
            with harness.scratch("memory") as memory, harness.scratch("disk") as disk:
                ranks = [
                    subprocess.Popen(
                        [
                            sys.executable,
                            "-c",
                            RANK,
                            *map(str, (r, world, size, rate, memory / f"{r}.pm", disk / "t")),
                        ],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                    for r in range(world)
                ]
                for rank in ranks:
                    assert rank.stdout is not None
                    rank.stdout.readline()
                for rank in ranks:
                    assert rank.stdin is not None
                    rank.stdin.write("go\n")
                    rank.stdin.flush()
                told = [rank.communicate(timeout=300)[0].split() for rank in ranks]
                times.append(1e6 * max(float(one[0]) for one in told))
                written = max(float(one[1]) for one in told)
        rows.append(
            harness.summarize(
                f"{world} rank{'s'[: world - 1]}",
                case,
                harness.POWER,
                times,
                **{"bytes per rank / state": written / size},
            )
        )
    return harness.with_ratios(rows, "1 rank")


def _targets(rows: list[harness.Row], size: int, small: int) -> list[harness.Target]:
    """Of what was measured. size, small: of the states that were trained."""
    plain, shared, apart = [
        case
        for case in dict.fromkeys(r.case for r in rows)
        if case not in (_case(size), _case(small))
    ]
    found = []
    if flush := harness.find(rows, _case(size), FLUSH):
        beside = harness.find(rows, _case(size), PLAIN_BESIDE)
        why = SLOWER.format(beside.extra["step slowdown"] if beside else math.nan)
        found += [
            harness.Target("blocking of a flush, ms", flush.median_us / 1e3, 1.0),
            harness.Target(
                "step slowdown while it runs", flush.extra["step slowdown"], 1.15, reason=why
            ),
        ]
    if flush := harness.find(rows, _case(small), FLUSH):
        found.append(
            harness.Target(
                f"peak memory kept / {_case(small)}", flush.extra["peak kept / state"], 0.25
            )
        )
    full, part, restored = (
        harness.find(rows, plain, name) for name in (FULL, FLUSHED_PART, RESTORED)
    )
    written, read = (harness.find(rows, plain, name) for name in (PLAIN, "plain O_DIRECT reading"))
    if full and written:
        ratio = written.median_us / full.median_us
        later = harness.find(rows, shared, "1 rank"), harness.find(rows, shared, ALONE_ON_DISK)
        why = RATE.format(*(row.median_us / 1e3 if row else math.nan for row in later))
        found.append(
            harness.Target("flush bandwidth / plain O_DIRECT writing", ratio, 0.95, True, why)
        )
    if restored and read:
        ratio = read.median_us / restored.median_us
        why = RESTORE.format(restored.extra[LONGER], restored.extra[PROCESSOR])
        found.append(
            harness.Target("restore bandwidth / plain O_DIRECT reading", ratio, 0.8, True, why)
        )
    if restored and (fresh := harness.find(rows, plain, INTO_NEW_MEMORY)):
        ratio = fresh.median_us / restored.median_us
        why = NEW_MEMORY.format(
            restored.extra[LONGER], restored.extra[PROCESSOR], fresh.extra[PROCESSOR]
        )
        found.append(
            harness.Target(
                "restore bandwidth / plain O_DIRECT reading into new memory", ratio, 0.8, True, why
            )
        )
    if full and part:
        same = harness.find(rows, plain, PLAIN_PART)
        why = SYNCS.format(same.median_us / full.median_us if same else math.nan)
        found.append(
            harness.Target(
                "1 % of the chunks: written / changed", part.extra[WRITTEN], 1.1, reason=ONE_MORE
            )
        )
        found.append(
            harness.Target(
                "1 % of the chunks / full flush", part.median_us / full.median_us, 0.03, reason=why
            )
        )
    for case, words, why in (
        (shared, "on one disk", ONE_DISK),
        (apart, "each with a rate of its own", ""),
    ):
        if (two := harness.find(rows, case, "2 ranks")) and two.ratio is not None:
            found.append(harness.Target(f"two ranks / one, {words}", two.ratio, 0.6, reason=why))
    one, two = (harness.find(rows, shared, DISK_ALONE.format(writers)) for writers in (1, 2))
    ranks = [harness.find(rows, shared, name) for name in ("1 rank", "2 ranks")]
    if one and two and ranks[0] and ranks[1]:
        gain = (ranks[1].median_us / ranks[0].median_us) / (two.median_us / one.median_us)
        found.append(
            harness.Target(
                "two ranks / one, over two plain writers / one on the same disk", gain, 1.1
            )
        )
    return found


def main(quick: bool, budget: harness.Budget) -> None:
    tried = {
        name: one
        for name, one in SAVERS_OF_A_SMALL_STATE.items()
        if not (quick and one[0] is PmstoreRoomy)
    }
    small, size, rounds = 50 * MB, 50 * MB if quick else 450 * MB, 1 if quick else 4
    parts: list[tuple[Callable[[harness.Budget], list[harness.Row]], float]] = [
        (lambda b: _training(small, 2 * rounds, tried, b), 1),
        (lambda b: _bandwidth(size, rounds, b), 2),
        (lambda b: _ranks(size, rounds, 0, b), 1),
        (lambda b: _ranks(size, 1, RANK_RATE, b), 1),
    ]
    if not quick:
        parts.insert(0, (lambda b: _training(size, 6, SAVERS, b), 4))
    rows = harness.kept()
    for run, part in budget.deal(parts):
        rows += run(part)
        print(f"  {rows[-1].case}: done ({budget.left:.0f} s left)", flush=True)
    harness.report(
        "tiers",
        "Flushing to a disk: blocking times, bandwidth, ranks",
        rows,
        ratio_text="time over memcpy, plain writing, or one rank",
        targets=_targets(rows, size, small),
        quick=quick,
    )
