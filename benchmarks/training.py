"""A checkpoint on every training step: what the step then takes, and what each way survives.

Times are of one step with its checkpoint. File peers save one and the same training; each way of
pmstore has a training of its own, because what it costs is partly inside the step (capture). All
take turns.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import pmstore
import pmstore.torch
from benchmarks import harness
from benchmarks.models import MB, Trainer, initialize, mlp, publish, transformer

NO_CHECKPOINT = "no checkpoint"
DURABLE = "torch.save + fsync + rename"
DCP_PROCESS = "DCP async_save (process)"
MEMCPY = "memcpy of the state, one core"
SMALL = (
    "beside the copy of the pre-image there is what a step costs whatever its bytes: hooks of the "
    "optimizer, the comparison with the last commit, the calls: some 100 us of Python, from cold "
    "caches after forward, backward and update; 100 KB are copied in 5 to 15 us. Of megabytes, the "
    "protection of pages of 4 KiB is changed twice, which takes as long as the copy (perf)"
)
STEADY_STEPS = 6  # after so many pmstore knows what every step writes
HOT_MOST_BYTES = 112 << 10  # what pmstore captures ahead


class Saver:
    """A way of saving after the step. `save` blocks; `wait` waits for what goes on behind it."""

    durability = harness.POWER

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, trainer: Trainer) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        """Nothing goes on."""


class TorchSave(Saver):
    durability = harness.TORN

    def save(self, trainer: Trainer) -> None:
        torch.save(trainer.nested(), self.folder / "state.pt")


class TorchSaveDurable(Saver):
    def save(self, trainer: Trainer) -> None:
        torch.save(trainer.nested(), self.folder / "new.pt")
        publish(self.folder / "new.pt", self.folder / "state.pt")


class Safetensors(Saver):
    def save(self, trainer: Trainer) -> None:
        from safetensors.torch import save_file

        save_file(trainer.tensors(), self.folder / "new.safetensors")
        publish(self.folder / "new.safetensors", self.folder / "state.safetensors")


class Dcp(Saver):
    """A directory a checkpoint; its metadata file, written last, makes it one. Files are synced."""

    number = 0

    def path(self) -> Path:
        self.number += 1
        shutil.rmtree(self.folder / f"step{self.number - 2}", ignore_errors=True)
        return self.folder / f"step{self.number}"

    def save(self, trainer: Trainer) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(
                trainer.tensors(),
                storage_writer=dcp.FileSystemWriter(self.path(), sync_files=True),
                no_dist=True,
            )


class DcpAsync(Dcp):
    """A copy of the state, then a thread writes it while training goes on."""

    running: Any = None
    options: dict[str, Any] = {"no_dist": True}

    def save(self, trainer: Trainer) -> None:
        self.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.running = dcp.async_save(
                trainer.tensors(),
                storage_writer=dcp.FileSystemWriter(self.path(), sync_files=True),
                **self.options,
            )

    def wait(self) -> None:
        if self.running is not None:
            self.running.result()


class DcpAsyncProcess(DcpAsync):
    """The same with a process, which takes ten seconds to start (not timed) and the group of one
    rank that it asks for."""

    options = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{folder / 'group'}", rank=0, world_size=1
            )


SAVERS: dict[str, tuple[type[Saver], str, str]] = {
    "torch.save": (TorchSave, "disk", ""),
    "torch.save, tmpfs": (TorchSave, "memory", ""),
    DURABLE: (TorchSaveDurable, "disk", ""),
    "safetensors + fsync + rename": (Safetensors, "disk", "safetensors"),
    "DCP save": (Dcp, "disk", ""),
    "DCP async_save (thread)": (DcpAsync, "disk", ""),
    DCP_PROCESS: (DcpAsyncProcess, "disk", ""),
}
"""Name to maker, place, module it needs."""


class Attached:
    """`pmstore.torch.attach`: writes are declared before each optimizer step."""

    def __init__(self, folder: Path, trainer: Trainer, size: int, domain: Any) -> None:
        self.trainer = trainer
        self.store = pmstore.open(
            folder / "run.pm", size=int(2.3 * size) + (64 << 20), domain=domain
        )
        self.run = pmstore.torch.attach(
            self.store, model=trainer.model, optimizer=trainer.optimizer
        )
        for _ in range(STEADY_STEPS):
            self.step()

    def step(self) -> float:
        """Microseconds after the optimizer's step: what blocks, beside what capture adds to the
        step."""
        with self.run.next_step():
            self.trainer.step()
        return harness.microseconds(self.run.commit)


class Faulted:
    """The tensors put into the store by hand, and nothing declared: every write is noticed by page
    protection."""

    hot = False

    def __init__(self, folder: Path, trainer: Trainer, size: int, domain: Any) -> None:
        self.trainer = trainer
        self.store = pmstore.open(
            folder / "run.pm", size=int(2.3 * size) + (64 << 20), domain=domain, hot=self.hot
        )
        trainer.step()
        flat = {}
        for name, tensor in trainer.tensors().items():
            self.store[name] = tensor
            flat[name] = self.store[name]
        trainer.adopt(flat)
        for _ in range(STEADY_STEPS if self.hot else 1):
            self.step()

    def step(self) -> float:
        with self.store.transaction():
            self.trainer.step()
            start = time.perf_counter()
        return (time.perf_counter() - start) * 1e6


class Hot(Faulted):
    """What is written at every step is captured ahead, after a few steps: no page is protected any
    more."""

    hot = True


def _case(
    title: str,
    make: Callable[[], tuple[torch.nn.Module, torch.Tensor]],
    rounds: int,
    quick: bool,
    budget: harness.Budget,
) -> list[harness.Row]:
    def trainer() -> Trainer:
        module, batch = make()
        initialize(module)
        return Trainer(module, batch)

    plain = trainer()
    plain.step()
    size = plain.bytes()
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    ways: list[tuple[str, str, str, type[Attached] | type[Faulted]]] = [
        *(
            [("pmstore process, hot", harness.KILL, "process", Hot)]
            if size <= HOT_MOST_BYTES
            else []
        ),
        ("pmstore process, declared", harness.KILL, "process", Attached),
        ("pmstore process, faulted", harness.KILL, "process", Faulted),
        ("pmstore emulated, declared", harness.KILL, "emulated", Attached),
        ("pmstore emulated, faulted", harness.KILL, "emulated", Faulted),
        ("pmstore file, declared", harness.POWER, "file", Attached),
        ("pmstore file, faulted", harness.POWER, "file", Faulted),
    ]
    times: dict[str, list[float]] = {}
    # by pairs of steps one after the other: steps of a busy machine differ
    added: dict[str, list[float]] = {}
    blocking: dict[str, list[float]] = {}
    beside: dict[str, list[float]] = {}
    written: dict[str, float] = {}
    failed: dict[str, str] = {}
    durability = {MEMCPY: harness.NONE, NO_CHECKPOINT: harness.NONE}
    with ExitStack() as stack:
        savers = {
            name: make_saver(stack.enter_context(harness.scratch(where)))
            for name, (make_saver, where, needs) in SAVERS.items()
            if not harness.absent(needs) and not (quick and name == DCP_PROCESS)
        }
        ours: dict[str, Attached | Faulted] = {}
        for name, survives, domain, kind in ways:
            folder = stack.enter_context(harness.scratch("disk" if domain == "file" else "memory"))
            ours[name] = kind(folder, trainer(), size, domain)
            stack.callback(ours[name].store.close)
            durability[name] = survives
        for i in budget.rounds(rounds, warm_up=1):
            if i == 0:
                times, added, blocking, beside = {}, {}, {}, {}
            # the first brings source and target into the caches again, or what fits of them
            for _ in range(2):
                copied = harness.microseconds(lambda: np.copyto(target, source))
            times.setdefault(MEMCPY, []).append(copied)
            times.setdefault(NO_CHECKPOINT, []).append(harness.microseconds(plain.step))
            for name, saver in savers.items():
                if name in failed:
                    continue
                durability[name] = saver.durability
                step = harness.microseconds(plain.step)
                try:
                    saver.wait()
                    save = harness.microseconds(lambda saver=saver: saver.save(plain))  # type: ignore[misc]
                except Exception as error:  # whatever a peer raises
                    failed[name] = f"failed: {harness.words_of(error)}"
                    continue
                times.setdefault(name, []).append(step + save)
                blocking.setdefault(name, []).append(save)
                added.setdefault(name, []).append(save)
                beside.setdefault(name, []).append(harness.microseconds(plain.step))
                saver.wait()
                written[name] = sum(
                    f.stat().st_size for f in saver.folder.rglob("*") if f.is_file()
                )
            for name, one in ours.items():
                before = one.store.stats()
                base = harness.microseconds(plain.step)
                start = time.perf_counter()
                blocking.setdefault(name, []).append(one.step())
                times.setdefault(name, []).append((time.perf_counter() - start) * 1e6)
                added.setdefault(name, []).append(times[name][-1] - base)
                beside.setdefault(name, []).append(harness.microseconds(plain.step))
                after = one.store.stats()
                counted = after.captured_bytes - before.captured_bytes
                if one.store.domain == "file":
                    counted = (
                        after.journal_bytes
                        - before.journal_bytes
                        + after.home_bytes
                        - before.home_bytes
                    )
                written[name] = counted
        ours.clear()
    case = f"{title}, {harness.size_text(size)} of state"
    copy = statistics.median(times[MEMCPY])
    base = statistics.median(times[NO_CHECKPOINT])
    middle = {name: statistics.median(t) for name, t in added.items()}
    rows = []
    for name, t in times.items():
        row = harness.summarize(name, case, durability[name], t)
        extra = (
            {"added ms": middle[name] / 1e3, "added / memcpy": middle[name] / copy}
            if name in middle
            else {}
        )
        if name in blocking:
            extra["blocks ms"] = statistics.median(blocking[name]) / 1e3
            extra["next step / plain"] = statistics.median(beside[name]) / base
        if name in written:
            extra["MB written or captured"] = written[name] / MB
        rows.append(replace(row, ratio=row.median_us / base, extra=extra))
    rows = [r for r in rows if r.method not in failed]
    rows += [
        harness.missing(name, case, SAVERS[name][0].durability, why) for name, why in failed.items()
    ]
    rows += [
        harness.missing(name, case, harness.POWER, harness.absent(needs))
        for name, (_, _, needs) in SAVERS.items()
        if harness.absent(needs)
    ]
    return rows


def _targets(rows: list[harness.Row]) -> list[harness.Target]:
    found = []
    for case in dict.fromkeys(r.case for r in rows):
        ours, durable = (
            harness.find(rows, case, "pmstore process, declared"),
            harness.find(rows, case, DURABLE),
        )
        copy = harness.find(rows, case, MEMCPY)
        if ours is None or durable is None or copy is None:
            continue  # the table says why
        words = f"{case}: {ours.method}, added time a step in memcpys of the state"
        found.append(
            harness.Target(
                words,
                ours.extra["added / memcpy"],
                1.5,
                reason=SMALL if copy.median_us < 5000 else "",
            )
        )
        share = ours.extra["added ms"] / durable.extra["added ms"]
        found.append(
            harness.Target(f"{case}: {ours.method}, added time over that of {DURABLE}", share, 0.2)
        )
    return found


def main(quick: bool, budget: harness.Budget) -> None:
    cases: list[tuple[tuple[str, Any, int, int], float]] = [
        # DCP's process starts in it
        (("MLP", lambda: mlp(10 * MB), 10 * MB, 3 if quick else 15), 2)
    ]
    if not quick:
        cases += [
            (("MLP", lambda: mlp(MB // 10), MB // 10, 40), 1),
            (("transformer", transformer, 40 * MB, 10), 2),
            (("MLP", lambda: mlp(100 * MB), 100 * MB, 8), 3),
            (("MLP", lambda: mlp(450 * MB), 450 * MB, 5), 9),
        ]
    rows = harness.kept()
    threads = (
        1 if os.getloadavg()[0] > 1.5 else torch.get_num_threads()
    )  # two threads that wait for a core measure the others' load
    torch.set_num_threads(threads)
    notes = [f"torch computes with {threads} of {os.cpu_count()} cores"]
    notes += [
        (
            "hot: small states only, as pmstore captures no more than "
            f"{harness.size_text(HOT_MOST_BYTES)} ahead"
        ),
        (
            "blocks: of pmstore, the commit; what capture adds is inside the step. next step: a "
            "plain one right behind"
        ),
    ]
    notes += [
        (
            "bytes: file peers, of one checkpoint; domain file, journal and home; else captured "
            "pre-images (in memory)"
        )
    ]
    for (title, make, size, rounds), part in budget.deal(cases):
        why = (
            harness.OUT_OF_TIME
            if budget.spent
            else harness.NO_MEMORY
            if 24 * size > harness.room_bytes("memory", 0.9)
            else ""
        )
        if why:
            rows.append(
                harness.missing(
                    "all of them", f"{title}, {harness.size_text(size)} of state", harness.NONE, why
                )
            )
            continue
        rows += _case(title, make, rounds, quick, part)
        print(f"  {title}, {harness.size_text(size)}: done ({budget.left:.0f} s left)", flush=True)
    harness.report(
        "training",
        "A checkpoint on every training step (AdamW)",
        rows,
        ratio_text=f"step with checkpoint over {NO_CHECKPOINT}",
        targets=_targets(rows),
        notes=notes,
        quick=quick,
    )
