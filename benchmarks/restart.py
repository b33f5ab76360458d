"""From a new process to the end of its first training step, with a state of 10 MB to 4 GB.

Each trial is a process of its own, which imports everything (the same for all, and a case of its
own), makes the model without values, gets the state, and trains one step. Cold: the file's pages
were dropped from the page cache (files on disk; tmpfs is memory, and always warm).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness

MB = 1_000_000
FIRST_STEP = (
    "the first step writes all of the state, and pmstore keeps every byte's pre-image before: one "
    "copy more than a peer that loads into memory of its own; in domain file the kernel also "
    "copies each page of the private mapping at its first write; of a small state, open and attach "
    "are the larger part; cold, a thread reads the data behind the program, and the step waits for "
    "what has not come yet, while torch.load and safetensors read their file from its first byte "
    "to its last"
)
FIRST_ATTACH = (
    "the first attach of a process, which binds the model, reads small values, and asks torch for "
    "its list of operators; cold, each page that is read here and there waits for the disk. The "
    "open alone takes less than 1 ms at 8 GB: see growth"
)
LARGE_SECONDS = 500
LARGE = (
    f"asks for {LARGE_SECONDS} s: python -m benchmarks --seconds {LARGE_SECONDS} --results restart"
)
PROCESSES = 13  # of one round: each way warm, those on a disk cold too, and two that make the files
STEPPED, HAVING, ATTACH = (
    "to the end of the first step",
    "to having the state",
    "open and attach alone",
)
IMPORTS = (
    "import numpy, torch, torch.distributed.checkpoint, safetensors.torch, pmstore, pmstore.torch"
)


# ---- in the child: state of `size` bytes from `folder`; returns when it is there ----


def _empty(size: int) -> Any:
    """A trainer whose tensors have memory but no values."""
    import torch

    from benchmarks.models import Trainer, mlp

    trainer = Trainer(*mlp(size))
    for p in trainer.model.parameters():
        trainer.optimizer.state[p] = {
            "step": torch.zeros(()),
            "exp_avg": torch.empty_like(p, requires_grad=False),
            "exp_avg_sq": torch.empty_like(p, requires_grad=False),
        }
    return trainer


def _bare(size: int) -> Any:
    from benchmarks.models import Trainer, mlp

    return Trainer(*mlp(size))


def _pmstore(folder: Path, size: int) -> Any:
    import pmstore
    import pmstore.torch

    trainer = _bare(size)
    start = time.perf_counter()
    trainer.store = pmstore.open(folder / "run.pm", "r+")
    trainer.run = pmstore.torch.attach(
        trainer.store, model=trainer.model, optimizer=trainer.optimizer
    )
    trainer.attached = time.perf_counter() - start
    return trainer


def _torch_load(folder: Path, size: int, **how: Any) -> Any:
    import torch

    trainer = _bare(size)
    state = torch.load(folder / "state.pt", weights_only=True, **how)
    trainer.model.load_state_dict(state["model"], assign=True)
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-5, foreach=True)
    trainer.optimizer.load_state_dict(state["optimizer"])
    return trainer


def _torch_load_mmap(folder: Path, size: int) -> Any:
    return _torch_load(folder, size, mmap=True)


def _safetensors(folder: Path, size: int) -> Any:
    from safetensors.torch import load_file

    trainer = _bare(size)
    trainer.adopt(load_file(folder / "state.safetensors"))
    return trainer


def _dcp(folder: Path, size: int) -> Any:
    import torch.distributed.checkpoint as dcp

    trainer = _empty(size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(
            trainer.tensors(), storage_reader=dcp.FileSystemReader(folder / "dcp"), no_dist=True
        )
    return trainer


LOADERS: dict[str, tuple[str, Callable[[Path, int], Any]]] = {
    "pmstore file": (harness.POWER, _pmstore),
    "pmstore process (tmpfs)": (harness.KILL, _pmstore),
    "torch.load": (harness.POWER, _torch_load),
    "torch.load(mmap=True)": (harness.POWER, _torch_load_mmap),
    "safetensors": (harness.POWER, _safetensors),
    "DCP load": (harness.POWER, _dcp),
}


QUICK = ["pmstore file", "pmstore process (tmpfs)", "torch.load", "safetensors"]


def _make(folder: Path, size: int, domain: str) -> None:
    """A store with a trained state; of domain "file", also every peer's form of it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    import pmstore
    import pmstore.torch
    from benchmarks.models import Trainer, initialize, mlp

    module, batch = mlp(size)
    initialize(module)
    trainer = Trainer(module, batch)
    trainer.step()
    if domain == "file":
        torch.save(trainer.nested(), folder / "state.pt")
        save_file(trainer.tensors(), folder / "state.safetensors")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(
                trainer.tensors(), storage_writer=dcp.FileSystemWriter(folder / "dcp"), no_dist=True
            )
    trainer.optimizer.zero_grad()  # else its gradients are state too
    file_bytes = int(2.1 * size) + (64 << 20)
    with pmstore.open(folder / "run.pm", size=file_bytes, domain=domain) as store:  # type: ignore[arg-type]
        run = pmstore.torch.attach(store, model=trainer.model, optimizer=trainer.optimizer)
        with run.next_step():  # what begins with the first step has begun
            pass
        run.commit()
        run.detach()
        del trainer, module
    os.sync()


def trial(name: str, folder: str, size: int, threads: int) -> None:
    """Prints, as JSON, seconds to the state, to the step's end, and of pmstore for open and attach
    alone."""
    exec(IMPORTS, {})
    import torch

    from benchmarks.models import Trainer, mlp

    torch.set_num_threads(threads)
    times: list[float] = []
    if name.startswith("make "):
        _make(Path(folder), size, name.removeprefix("make "))
    elif name != "start":
        first = Trainer(*mlp(10 * MB))  # what torch imports and makes at its first use
        first.model(first.batch)
        del first
        start = time.perf_counter()
        trainer = LOADERS[name][1](Path(folder), size)
        times.append(time.perf_counter() - start)
        with trainer.run.next_step() if hasattr(trainer, "run") else nullcontext():
            trainer.step()
        times.append(time.perf_counter() - start)
        if hasattr(trainer, "run"):
            times.append(trainer.attached)
            # left in order and as it was: what an open after a kill takes is in benchmarks.kills
            store = trainer.store
            trainer.run.detach()
            store.rollback()
            del trainer
            store.close()
    print(json.dumps(times), flush=True)
    os._exit(0)  # what else ends a process is not asked for


# ---- in the parent ----


def _ask(name: str, folder: Path, size: int, threads: int) -> list[float]:
    code = (
        f"from benchmarks.restart import trial; trial({name!r}, {str(folder)!r}, {size}, {threads})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=harness.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"restart: {name} failed, see above")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def _drop(folder: Path) -> None:
    """Of clean pages: everything was synced."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


FILES = {
    "pmstore file": "run.pm",
    "torch.load": "state.pt",
    "torch.load(mmap=True)": "state.pt",
    "safetensors": "state.safetensors",
    "DCP load": "dcp",
}


def _warm(path: Path) -> None:
    """Reads what has been written of it into the page cache."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        with open(file, "rb", buffering=0) as f:
            at, end = 0, file.stat().st_size
            while at < end:
                try:
                    at = os.lseek(f.fileno(), at, os.SEEK_DATA)
                except OSError:  # only holes are left
                    break
                hole = os.lseek(f.fileno(), at, os.SEEK_HOLE)
                os.lseek(f.fileno(), at, os.SEEK_SET)
                while at < hole and (read := len(f.read(min(8 << 20, hole - at)))):
                    at += read


def _warm_of(name: str, folder: Path) -> None:
    if name in FILES:
        _warm(folder / FILES[name])


@dataclass
class Trials:
    """All ways in turn, warm and cold, with a state of `size` bytes. Seconds by (warm or cold,
    case) and way."""

    size: int
    threads: int
    times: dict[tuple[str, str], dict[str, list[float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    least_seconds: float = 0.0
    """What making the files and one round of all took."""

    def run(self, most: int, quick: bool, budget: harness.Budget) -> None:
        """Where memory does not hold everything, the store on tmpfs comes before."""
        crowded = 9 * self.size > harness.room_bytes("memory", 0.9)
        wanted = QUICK if quick else list(LOADERS)
        groups = [wanted]
        if crowded:
            groups = [[n for n in wanted if "tmpfs" in n], [n for n in wanted if "tmpfs" not in n]]
        for names, part in budget.deal((group, len(group)) for group in groups):
            with ExitStack() as stack:
                disk, memory = (
                    stack.enter_context(harness.scratch(where)) for where in ("disk", "memory")
                )
                start = time.monotonic()
                if any("tmpfs" in name for name in names):
                    _ask("make process", memory, self.size, self.threads)
                if any(name in FILES for name in names):
                    _ask("make file", disk, self.size, self.threads)
                self.least_seconds += time.monotonic() - start
                for state, share in harness.Budget(part.left).deal((("warm", 1), ("cold", 1))):
                    here = [n for n in names if state == "warm" or (n in FILES and not quick)]
                    for name in here if state == "warm" else ():
                        _warm_of(name, disk)
                    for i in share.rounds(most, least=1) if here else ():
                        start = time.monotonic()
                        for name in here:
                            self._try(name, disk if name in FILES else memory, state, crowded)
                        self.least_seconds += time.monotonic() - start if i == 0 else 0.0

    def _try(self, name: str, folder: Path, state: str, crowded: bool) -> None:
        if name in self.failed:
            return
        if state == "cold":
            _drop(folder)
        elif crowded:
            _warm_of(name, folder)
        try:
            answer = _ask(name, folder, self.size, self.threads)
        except RuntimeError as error:
            self.failed[name] = f"failed: {harness.words_of(error)}"
            return
        for what, seconds in zip((HAVING, STEPPED, ATTACH), answer, strict=False):
            self.times.setdefault((state, what), {}).setdefault(name, []).append(seconds * 1e6)

    def rows(self) -> list[harness.Row]:
        rows = []
        for state in "warm", "cold":
            for what in STEPPED, HAVING, ATTACH:
                case = f"{harness.size_text(self.size)} of state, {state}, {what}"
                got = {
                    n: t
                    for n, t in self.times.get((state, what), {}).items()
                    if n not in self.failed
                }
                rows += [
                    harness.summarize(n, case, LOADERS[n][0], got[n]) for n in LOADERS if n in got
                ]
                if what == STEPPED:
                    rows += [
                        harness.missing(name, case, LOADERS[name][0], why)
                        for name, why in self.failed.items()
                    ]
        return rows


def _measure(rows: list[harness.Row], threads: int, quick: bool, budget: harness.Budget) -> None:
    """Adds rows, those of a size that has to end too early included."""
    starts: list[float] = []
    for _ in harness.Budget(0.06 * budget.seconds).rounds(1 if quick else 3, least=1):
        start = time.perf_counter()
        _ask("start", Path(), 0, threads)
        starts.append((time.perf_counter() - start) * 1e6)
    rows.append(
        harness.summarize(
            "all of them", f"exec of Python to the end of `{IMPORTS}`", harness.KILL, starts
        )
    )
    sizes = [(10 * MB, 2.0), (100 * MB, 2.0), (1000 * MB, 3.0), (4000 * MB, 8.0)]
    if budget.seconds < LARGE_SECONDS:
        rows.append(
            harness.missing(
                "all of them", f"{harness.size_text(sizes.pop()[0])} of state", harness.KILL, LARGE
            )
        )
    # seconds, as known from the size before
    a_process, a_byte = statistics.median(starts) / 1e6, 0.0
    for size, part in budget.deal(sizes[:1] if quick else sizes):
        short = 3.7 * size > harness.room_bytes("memory", 0.9) or 6 * size > harness.room_bytes(
            "disk", 0.8
        )
        why = (
            harness.OUT_OF_TIME
            if PROCESSES * a_process + a_byte * size > budget.left or budget.spent
            else f"{harness.NO_MEMORY}, or disk"
            if short
            else ""
        )
        trials = Trials(size, threads)
        try:
            if not why:
                trials.run(1 if quick else 7 if size <= 100 * MB else 3, quick, part)
        except RuntimeError as error:  # what the trials need could not be made
            why = f"failed: {harness.words_of(error)}"
        finally:
            rows += trials.rows()
        if why:
            rows.append(
                harness.missing(
                    "all of them", f"{harness.size_text(size)} of state", harness.KILL, why
                )
            )
        a_byte = max(0.0, trials.least_seconds - PROCESSES * a_process) / size
        print(
            f"  {harness.size_text(size)}: {why or 'done'} ({budget.left:.0f} s left)", flush=True
        )


def main(quick: bool, budget: harness.Budget) -> None:
    threads = 1 if os.getloadavg()[0] > 1.5 else os.cpu_count() or 1
    notes = [f"torch computes with {threads} of {os.cpu_count()} cores"]
    rows = harness.kept()
    try:
        _measure(rows, threads, quick, budget)
    except harness.TimeUp:
        rows.append(harness.missing("all of them", "the rest", harness.NONE, harness.LIMIT))
    rows = harness.with_ratios(rows, "torch.load")
    targets = []
    for case in dict.fromkeys(r.case for r in rows if STEPPED in r.case):
        ours = [
            r
            for r in (
                harness.find(rows, case, "pmstore file"),
                harness.find(rows, case, "pmstore process (tmpfs)"),
            )
            if r
        ]
        theirs = [r for r in rows if r.case == case and r not in ours and r.measured]
        if not (ours and theirs):
            continue  # the table says why
        best, peers = (min(rs, key=lambda r: r.median_us) for rs in (ours, theirs))
        words = f"{case}: {best.method} / {peers.method}"
        targets.append(
            harness.Target(words, best.median_us / peers.median_us, 1, reason=FIRST_STEP)
        )
    targets += [
        harness.Target(f"{r.case}: {r.method}, ms", r.median_us / 1e3, 20, reason=FIRST_ATTACH)
        for r in rows
        if ATTACH in r.case
    ]
    harness.report(
        "restart",
        "Restart: to the first training step",
        rows,
        ratio_text="time over torch.load's",
        targets=targets,
        notes=notes,
        quick=quick,
        plot={
            "cases": [
                c
                for c in dict.fromkeys(r.case for r in rows)
                if STEPPED in c and c.startswith(("10 MB", "4 GB"))
            ]
        },
    )
