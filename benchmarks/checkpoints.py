"""Checkpoints of torch.distributed.checkpoint (DCP): pmstore as its storage, beside torch's own.

A state of DTensors, dealt to ranks by rows. All ways take turns, in one process a rank, between
barriers; a time is that of the slowest rank. The same durability: `sync_files=True` beside domain
`file` on the disk; on tmpfs, where a sync does nothing, domain `process`. Both write to one folder
again and again, and read what the page cache has.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.tiers import aligned_block, direct, drop

TENSORS = 12
OURS, TORCH, THREADS = "pmstore", "FileSystemWriter", "FileSystemWriter, 2 threads"
READER, COLD_READER = "FileSystemReader", "FileSystemReader, from the disk"
PEER, PEERS_MODULE = "torch-checkpointing", "torch_checkpointing"
ORBAX, ORBAX_MODULE = "orbax-checkpoint, of numpy arrays", "orbax"
NUMBER = "async_save of a number, FileSystemWriter"
BARE, MEMCPY = "bare disk: O_DIRECT writing", "memcpy of the state, all cores"
ATTACHED, CACHED = "pmstore, attached run", "FileSystemWriter, stager kept"
OF_RUN = "pmstore, stores of a run"
ALONE = "steps alone"
DOMAINS = {"disk": "file", "memory": "process"}
STEPS = 40
RATE = (
    "the disk is others', too, and its rate changes from one write to the next: by the least "
    "times of the run the share is {:.3g}. Beside its bytes a save waits for the syncs of two "
    "commits, and of the index, which is opened and closed"
)
TORCHS = (
    "beside torch's own part, a thread that is started for each save and its log: an async_save of "
    "one number blocks for {:.3g} ms (p95), this one for {:.3g} ms"
)
LOADS = (
    "both wait for the disk; pmstore checks each byte against its checksum besides, which reads it "
    "a second time"
)
COPIES = (
    "it is one copy of the state by threads that share the cores with the load; a page of the "
    "staging memory that the system has taken back is made anew"
)
BESIDE = (
    "four threads write, where a step of one thread leaves one core of two; torch's writer is one. "
    "All in all it takes more processor time than they do (450 MB: 550 to 660 ms, and 350 to 400). "
    "What a lower priority or fewer threads change is in EXPERIMENTS, a step beside a flush"
)
BLOCK = 8 << 20

Found = dict[str, dict[str, list[float]]]
"""Seconds, by case and method."""


# ---- in a rank ----


def _state(size: int, dealt: bool = True) -> dict[str, Any]:
    """Float32 of so many bytes over all ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    rows = max(size // TENSORS // 4096, 1) // 12 * 12  # 12: by 1, 2 and 3 ranks
    local = [torch.rand(rows // world, 1024) for _ in range(TENSORS)]
    if not dealt:
        return {f"layer{i}": tensor for i, tensor in enumerate(local)}
    return {f"layer{i}": DTensor.from_local(t, mesh, [Shard(0)]) for i, t in enumerate(local)}


class Rank:
    """What a rank measures, and how long it may."""

    def __init__(self, folder: Path, number: int, size: int, seconds: float, rounds: int) -> None:
        self.folder, self.number, self.size = folder, number, size
        self.seconds, self.rounds = seconds, rounds
        self.found: Found = {}

    def turns(self, most: int, warm_up: int = 2) -> Iterator[int]:
        """Rounds until the time is over, by all ranks alike."""
        import torch
        import torch.distributed as dist

        ends = time.monotonic() + self.seconds
        for i in range(-warm_up, most):
            late = torch.tensor([int(time.monotonic() > ends and i >= 2)])
            dist.all_reduce(late)
            if late:
                return
            yield i

    def note(self, case: str, method: str, seconds: float) -> None:
        self.found.setdefault(case, {}).setdefault(method, []).append(seconds)

    def timed(self, i: int, case: str, method: str, run: Callable[[], object]) -> None:
        import torch.distributed as dist

        dist.barrier()
        start = time.perf_counter()
        run()
        if i >= 0:
            self.note(case, method, time.perf_counter() - start)


def _peer(
    folder: Path, state: dict[str, Any], synced: bool
) -> tuple[Callable[[], None], Callable[[], object]]:
    """What saves and loads by torch-checkpointing. It syncs nothing, so its files are synced here
    where others' are; and it writes to a new folder each time. The one before goes when the new one
    is there, which is in no time. Its O_DIRECT is off: it ends with EINVAL where a file is no
    multiple of the disk's blocks."""
    from torch_checkpointing import CheckpointManager, SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config(
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    manager, made = CheckpointManager(config), [folder / "0"]
    folder.mkdir()

    def save() -> None:
        made.append(folder / str(int(made[-1].name) + 1))
        manager.save(str(made[-1]), {"state": state})
        for path in [*made[-1].iterdir(), made[-1], folder] if synced else []:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def load() -> object:
        shutil.rmtree(made[-2], ignore_errors=True)
        return manager.load(str(made[-1]), into={"state": state})

    return save, load


def _orbax(folder: Path, state: dict[str, Any]) -> tuple[Callable[[], None], Callable[[], object]]:
    """What saves and loads by Orbax: the same bytes as arrays of numpy, to a new folder each time.
    It compresses by default, which takes five times as long: it is off."""
    from orbax.checkpoint import Checkpointer, PyTreeCheckpointHandler

    arrays = {name: tensor.to_local().numpy() for name, tensor in state.items()}
    checkpointer = Checkpointer(PyTreeCheckpointHandler(use_compression=False))
    made = [folder / "0"]

    def save() -> None:
        made.append(folder / str(int(made[-1].name) + 1))
        checkpointer.save(made[-1], arrays)

    def load() -> object:
        shutil.rmtree(made[-2], ignore_errors=True)
        return checkpointer.restore(made[-1])

    return save, load


def save_and_load(rank: Rank, where: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from pmstore.dcp import StoreReader, StoreWriter

    state = _state(rank.size)
    ours, theirs = rank.folder / "ours", rank.folder / "theirs"
    writer = StoreWriter(ours, domain=DOMAINS[where])  # type: ignore[arg-type]
    share = -(-rank.size // dist.get_world_size() // BLOCK) * BLOCK
    block = aligned_block(BLOCK)
    block[:] = np.random.default_rng(0).integers(0, 256, BLOCK, np.uint8)

    def plain() -> None:
        """Its share of the bytes, in whole blocks."""
        direct(rank.folder / f"plain-{rank.number}", block, share)

    def save_torch(threads: int) -> None:
        made = dcp.FileSystemWriter(theirs, sync_files=where == "disk", thread_count=threads)
        dcp.save(state, storage_writer=made)

    ways: dict[str, Callable[[], object]] = {
        OURS: lambda: dcp.save(state, checkpoint_id=ours, storage_writer=writer),
        TORCH: lambda: save_torch(1),
        THREADS: lambda: save_torch(2),
    }
    if where == "disk":
        ways[BARE] = plain
    reads: dict[str, Callable[[], object]] = {
        OURS: lambda: dcp.load(state, storage_reader=StoreReader(ours)),
        READER: lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(theirs)),
    }
    if where == "disk":
        reads[COLD_READER] = reads[READER]
    if dist.get_world_size() == 1 and not harness.absent(PEERS_MODULE):
        ways[PEER], reads[PEER] = _peer(rank.folder / "peer", state, where == "disk")
    if dist.get_world_size() == 1 and not harness.absent(ORBAX_MODULE):
        ways[ORBAX], reads[ORBAX] = _orbax(rank.folder / "orbax", state)
    for i in rank.turns(rank.rounds, warm_up=6):  # saves: with keep=2 the files grow no more
        for name in _turned(list(ways), i):
            rank.timed(i, "save", name, ways[name])
        for name in _turned(list(reads), i):
            if name == COLD_READER:
                drop(theirs)
            rank.timed(i, "load", name, reads[name])


def _turned(names: list[str], i: int) -> list[str]:
    i %= len(names)
    return names[i:] + names[:i]


# ---- async_save, in one rank ----


def _all_cores(pairs: list[tuple[Any, Any]]) -> Callable[[], None]:
    """Copies arrays by all cores, in slices."""
    from concurrent.futures import ThreadPoolExecutor

    slices = [
        (target[at : at + BLOCK], source[at : at + BLOCK])
        for source, target in pairs
        for at in range(0, source.nbytes, BLOCK)
    ]
    cores = len(os.sched_getaffinity(0))

    def copy() -> None:
        with ThreadPoolExecutor(cores) as pool:
            for _ in pool.map(lambda both: np.copyto(*both), slices):
                pass

    return copy


@contextmanager
def _load(busy: bool) -> Iterator[None]:
    """busy: a process for every core computes beside."""
    count = (os.cpu_count() or 1) if busy else 0
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def blocking(rank: Rank, where: str) -> None:
    """What `async_save` makes the program wait for."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    import pmstore.torch
    from pmstore.dcp import StoreWriter

    off = StagingOptions(False, False, False, False)
    state = _state(rank.size, dealt=False)
    sources = [tensor.numpy().reshape(-1).view(np.uint8) for tensor in state.values()]
    copy = _all_cores([(source, np.ones_like(source)) for source in sources])
    module = torch.nn.Module()
    for name, tensor in _state(rank.size, dealt=False).items():
        module.register_parameter(name, torch.nn.Parameter(tensor))
    folders = {
        name: rank.folder / str(i) for i, name in enumerate((OURS, ATTACHED, CACHED, NUMBER))
    }
    ours, attached = (
        StoreWriter(folders[name], domain=DOMAINS[where])  # type: ignore[arg-type]
        for name in (OURS, ATTACHED)
    )
    kept, number = DefaultStager(off), DefaultStager(off)

    def theirs() -> Any:
        return dcp.FileSystemWriter(folders[CACHED], sync_files=where == "disk")

    size = 2 * rank.size + (64 << 20)
    with pmstore.open(rank.folder / "run.pm", size=size, domain=DOMAINS[where]) as store:  # type: ignore[arg-type]
        pmstore.torch.attach(store, model=module)
        weights = module.state_dict()
        ways: dict[str, Callable[[], Any]] = {
            OURS: lambda: dcp.async_save(state, checkpoint_id=folders[OURS], storage_writer=ours),
            ATTACHED: lambda: dcp.async_save(
                weights, checkpoint_id=folders[ATTACHED], storage_writer=attached
            ),
            CACHED: lambda: dcp.async_save(state, storage_writer=theirs(), async_stager=kept),
            NUMBER: lambda: dcp.async_save(
                {"step": 1},
                storage_writer=dcp.FileSystemWriter(folders[NUMBER]),
                async_stager=number,
            ),
            MEMCPY: copy,
        }
        seconds, rank.seconds = rank.seconds, rank.seconds / 2
        for busy in (False, True):
            case = "async_save blocks" + (", under load" if busy else "")
            with _load(busy):
                for i in rank.turns(rank.rounds * 4, warm_up=6):
                    for name in _turned(list(ways), i):
                        start = time.perf_counter()
                        future = ways[name]()
                        if i >= 0:
                            rank.note(case, name, time.perf_counter() - start)
                        if future is not None:
                            future.result()
        rank.seconds = seconds


def beside(rank: Rank, where: str) -> None:
    """Steps of a training while a save goes on: what it adds to their time, all in all."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    from pmstore.dcp import StoreWriter

    state = _state(rank.size, dealt=False)
    ours, theirs = rank.folder / "ours", rank.folder / "theirs"
    writer = StoreWriter(ours, domain=DOMAINS[where])  # type: ignore[arg-type]
    kept = DefaultStager(StagingOptions(False, False, False, False))
    left, right = torch.rand(512, 512), torch.rand(512, 512)
    ways: dict[str, Callable[[], Any]] = {
        ALONE: lambda: None,
        OURS: lambda: dcp.async_save(state, checkpoint_id=ours, storage_writer=writer),
        TORCH: lambda: dcp.async_save(
            state, storage_writer=dcp.FileSystemWriter(theirs), async_stager=kept
        ),
    }
    for i in rank.turns(rank.rounds, warm_up=6):
        for name in _turned(list(ways), i):
            future = ways[name]()
            times = []
            while len(times) < STEPS or (future is not None and not future.done()):
                start = time.perf_counter()
                for _ in range(4):
                    torch.mm(left, right)
                times.append(time.perf_counter() - start)
            if future is not None:
                future.result()
            if i >= 0:
                rank.note("step", name, statistics.mean(times))
                rank.note("steps", name, len(times))


# ---- from 2 ranks to 3 ----


def write_for_others(rank: Rank, where: str) -> None:
    """Three checkpoints of the same: ours, torch's, and the stores of a run."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import pmstore.torch
    from pmstore.dcp import StoreWriter

    state = _state(rank.size)
    module = torch.nn.Module()
    for name, tensor in state.items():
        module.register_parameter(name, torch.nn.Parameter(tensor))
    weights = {"model": module.state_dict()}
    writer = StoreWriter(rank.folder / "ours", domain=DOMAINS[where])  # type: ignore[arg-type]
    dcp.save(weights, storage_writer=writer)
    dcp.save(weights, storage_writer=dcp.FileSystemWriter(rank.folder / "theirs"))
    path = rank.folder / f"run-{rank.number}.pm"
    size = 2 * rank.size + (64 << 20)
    with pmstore.open(path, size=size, domain=DOMAINS[where]) as store:  # type: ignore[arg-type]
        pmstore.torch.attach(store, model=module, job=pmstore.torch.Job(timeout=60))
        dist.barrier()


def read_of_others(rank: Rank, where: str) -> None:
    import torch.distributed.checkpoint as dcp

    from pmstore.dcp import StoreReader

    state = {"model": _state(rank.size)}
    stores = str(rank.folder / "run-*.pm")
    ways: dict[str, Callable[[], Any]] = {
        OURS: lambda: StoreReader(rank.folder / "ours"),
        OF_RUN: lambda: StoreReader.of_run(stores),
        READER: lambda: dcp.FileSystemReader(rank.folder / "theirs"),
    }
    for i in rank.turns(rank.rounds):
        for name in _turned(list(ways), i):
            rank.timed(
                i,
                "2 ranks' read by 3",
                name,
                lambda make=ways[name]: dcp.load(state, storage_reader=make()),
            )  # type: ignore[misc]


def rank_main(
    program: str,
    number: int,
    world: int,
    folder: str,
    where: str,
    size: int,
    seconds: float,
    rounds: int,
) -> None:
    """One rank; leaves what it measured."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Detected an existing checkpoint", UserWarning)
    place = f"file://{folder}/meet-{program}"
    dist.init_process_group("gloo", init_method=place, rank=number, world_size=world)
    rank = Rank(Path(folder), number, size, seconds, rounds)
    globals()[program](rank, where)
    Path(folder, f"{program}-{number}.json").write_text(json.dumps(rank.found))
    dist.barrier()
    dist.destroy_process_group()


# ---- in the parent ----


def _launch(
    program: Callable[..., None],
    world: int,
    folder: Path,
    where: str,
    size: int,
    seconds: float,
    rounds: int,
) -> Found:
    """What the slowest rank of each round measured. Raises: RuntimeError."""
    name = program.__name__
    rest = f"{world}, {str(folder)!r}, {where!r}, {size}, {seconds}, {rounds}"
    main = "from benchmarks.checkpoints import rank_main; rank_main"
    codes = [f"{main}({name!r}, {number}, {rest})" for number in range(world)]
    harness.run_ranks(codes, 4 * seconds + 120)
    ranks = [json.loads((folder / f"{name}-{n}.json").read_text()) for n in range(world)]
    return {
        case: {
            way: [max(times) for times in zip(*(r[case][way] for r in ranks), strict=True)]
            for way in ways
        }
        for case, ways in ranks[0].items()
    }


def _durability(method: str, where: str) -> str:
    if method in (BARE, MEMCPY, ALONE, READER, COLD_READER):
        return harness.NONE
    if method == PEER and where == "memory":
        return harness.KILL
    if method in (TORCH, THREADS, CACHED, NUMBER):
        return harness.TORN  # it removes the old metadata before it renames the new
    return harness.POWER if where == "disk" else harness.KILL


def _p95(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.95 * len(times)))]


def _rows(found: Found, words: str, where: str, size: int, yardstick: str) -> list[harness.Row]:
    rows = []
    for case, ways in found.items():
        for method, times in ways.items():
            us = [1e6 * one for one in times]
            extra = {"p95 ms": 1e3 * _p95(times)}
            if not case.startswith("step"):
                extra["MB/s"] = size / 1e6 / statistics.median(times)
            text = f"{case}, {words}"
            rows.append(harness.summarize(method, text, _durability(method, where), us, **extra))
    return harness.with_ratios(harness.with_ratios(rows, yardstick), READER)


def _ratios(found: Found, case: str, over: str, under: str) -> float:
    """The median of the rounds' ratios."""
    pairs = zip(found[case][over], found[case][under], strict=True)
    return statistics.median(a / b for a, b in pairs)


def _saving_targets(found: Found, words: str) -> list[harness.Target]:
    faster = _ratios(found, "save", TORCH, OURS)
    made = [harness.Target(f"save, {words}: times faster than {TORCH}", faster, 2, at_least=True)]
    if BARE in found["save"]:
        rate = _ratios(found, "save", BARE, OURS)
        text = f"save, {words}: share of the bare disk's rate (or the one above)"
        why = RATE.format(min(found["save"][BARE]) / min(found["save"][OURS]))
        made.append(harness.Target(text, rate, 0.95, at_least=True, reason=why))
    # a save to a disk leaves nothing in memory: what is compared reads the disk, too
    reader = COLD_READER if COLD_READER in found["load"] else READER
    slower = _ratios(found, "load", OURS, reader)
    text = f"load, {words}: over {reader}"
    made.append(harness.Target(text, slower, 1.0, reason=LOADS if reader is COLD_READER else ""))
    return made


def _blocking_targets(found: Found) -> list[harness.Target]:
    made = []
    for case, ways in found.items():
        copied, bare = _p95(ways[OURS]), _p95(ways[MEMCPY])
        number, attached = 1e3 * _p95(ways[NUMBER]), 1e3 * _p95(ways[ATTACHED])
        why = TORCHS.format(number, attached)
        made += [
            harness.Target(f"{case}, p95, over memcpy's", copied / bare, 1.3, reason=COPIES),
            harness.Target(
                f"{case}, p95, an attached run, ms more than a number",
                attached - number,
                1.0,
                reason=why,
            ),
        ]
    return made


def _beside(found: Found, words: str) -> tuple[list[harness.Row], harness.Target]:
    """What steps beside a save take longer, all in all."""
    rows, added = [], {}
    alone = statistics.median(found["step"][ALONE])
    for method in (OURS, TORCH):
        pairs = zip(found["step"][method], found["steps"][method], strict=True)
        times = [max(mean - alone, 0.0) * count for mean, count in pairs]
        added[method] = statistics.median(times)
        us = [1e6 * one for one in times]
        rows.append(
            harness.summarize(
                method,
                f"added to steps beside a save, {words}",
                _durability(method, "disk"),
                us,
                **{"step ms": 1e3 * statistics.median(found["step"][method])},
                **{"step alone ms": 1e3 * alone},
            )
        )
    share = added[OURS] / added[TORCH] if added[TORCH] else float(added[OURS] > 0)
    text = f"added to steps beside a save, {words}: over {TORCH}'s"
    return harness.with_ratios(rows, TORCH), harness.Target(text, share, 0.5, reason=BESIDE)


def main(quick: bool, budget: harness.Budget) -> None:
    size = 24_000_000 if quick else 450_000_000
    rounds = 3 if quick else 12
    rows = harness.kept()
    targets: list[harness.Target] = []
    cases: list[tuple[tuple[Any, ...], float]] = [
        ((save_and_load, 1, "disk"), 4),
        ((save_and_load, 2, "disk"), 4),
        ((save_and_load, 1, "memory"), 2),
        ((save_and_load, 2, "memory"), 2),
        ((blocking, 1, "memory"), 3),
        ((beside, 1, "disk"), 3),
        ((read_of_others, 3, "memory"), 2),
    ]
    for (program, world, where), part in budget.deal(cases):
        ranks = "1 rank" if world == 1 else f"{world} ranks"
        words = f"{harness.size_text(size)}, {ranks}, {where}"
        asked = (where, size, 0.6 * part.left, rounds)
        if size * 8 > harness.room_bytes(where, 0.8):
            rows.append(harness.missing(OURS, words, harness.NONE, harness.NO_MEMORY))
            continue
        try:
            with harness.scratch(where) as folder:
                if program is read_of_others:
                    words = f"{harness.size_text(size)}, {where}"
                    _launch(write_for_others, 2, folder, *asked)
                found = _launch(program, world, folder, *asked)
        except RuntimeError as error:
            why = f"failed: {harness.words_of(error)}"
            rows.append(harness.missing(OURS, f"{program.__name__}, {words}", harness.NONE, why))
            continue
        if program is beside:
            made, target = _beside(found, words)
            rows += made
            targets.append(target)
            continue
        for peer, module in ((PEER, PEERS_MODULE), (ORBAX, ORBAX_MODULE)):
            if program is save_and_load and world == 1 and (why := harness.absent(module)):
                rows.append(harness.missing(peer, f"save, {words}", harness.KILL, why))
        yardstick = MEMCPY if program is blocking else TORCH
        rows += _rows(found, words, where, size, yardstick)
        if program is save_and_load:
            targets += _saving_targets(found, words)
        elif program is blocking:
            targets += _blocking_targets(found)
        else:
            (case,) = found
            for method in (OURS, OF_RUN):
                ratio = _ratios(found, case, method, READER)
                targets.append(harness.Target(f"{case}, {method}: over {READER}", ratio, 1.0))
    harness.report(
        "checkpoints",
        "torch.distributed.checkpoint with pmstore as its storage",
        rows,
        ratio_text="time over FileSystemWriter's, FileSystemReader's, or memcpy's",
        targets=targets,
        notes=[f"one thread of torch a rank, {os.cpu_count()} cores"],
        quick=quick,
    )
