"""Python calls of the package, the files they are in, and calls of the engine: counted, so the same
on a busy machine as on an idle one.

    python -m benchmarks.calls            prints them, beside benchmarks/calls.json
    python -m benchmarks.calls --json     prints them for a program
    python -m benchmarks.calls --write    writes benchmarks/calls.json, after a change that is meant

A call is a Python frame of a file of `pmstore` that begins or goes on (a generator); a call of the
engine is one of a function of its C extension. What torch and numpy do is not counted. The figures
hold for one version of Python, which is stored with them: others call otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pmstore
from benchmarks.harness import scratch

STORED = Path(__file__).with_name("calls.json")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_PACKAGE = str(Path(pmstore.__file__).parent)
_EXTENSIONS = ("_binding", "_native")
WARM = 40
"""Steps before one is counted: two epochs."""
EPOCH = 20
UPDATE, END = "optimizer.step", "run.log and next(batch)"
"""What a step of the loop does. The next batch ends it."""


@dataclass
class Counted:
    """Of one operation."""

    calls: int = 0
    files: int = 0
    engine: int = 0

    def __add__(self, other: Counted) -> Counted:
        return Counted(
            self.calls + other.calls, max(self.files, other.files), self.engine + other.engine
        )


@dataclass
class Counter:
    """Counts what the block does in this thread, without garbage collection."""

    counted: Counted = field(default_factory=Counted)
    _files: set[str] = field(default_factory=set)

    def _event(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            if file.startswith(_PACKAGE):
                self.counted.calls += 1
                self._files.add(file)
        elif event == "c_call" and _of_engine(argument):
            self.counted.engine += 1

    def __enter__(self) -> Counter:
        gc.disable()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()
        self.counted.files = len(self._files)


def _of_engine(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    modules = str(getattr(function, "__module__", "")), type(owner).__module__
    return any(
        one.startswith("pmstore.") and one.rpartition(".")[2] in _EXTENSIONS for one in modules
    )


def count(operation: Callable[[], object]) -> Counted:
    """One operation. What it returns is dropped after the count."""
    with Counter() as counter:
        result = operation()
    del result
    return counter.counted


# ---- a store


def of_a_store(folder: Path) -> dict[str, Counted]:
    """Arrays, without torch."""

    def block() -> None:
        with store.transaction():
            array[0] += 1

    with pmstore.open(folder / "store.pm") as store:
        store.zeros("first", (4, 4), "float32")  # what the first one alone does
        array = store["first"]
        block()
        found = {"zeros": count(lambda: store.zeros("second", (4, 4), "float32"))}
        store.commit()
        found["look-up, the first"] = count(lambda: store["second"])
        found["look-up"] = count(lambda: store["first"])
        array[0] += 1
        found["commit"] = count(store.commit)
        found["transaction block"] = count(block)
    return found


# ---- README's loop


class Loop:
    """README's loop, a step at a time."""

    def __init__(self, store: pmstore.Store, **options: Any) -> None:
        import torch

        torch.manual_seed(0)
        nn = torch.nn
        self.model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        x = torch.randn(1000, 20)
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        self._loader = torch.utils.data.DataLoader(data, batch_size=50, shuffle=True)
        self._store, self._options = store, options
        self.run: Any = None

    def attach(self) -> None:
        import pmstore.torch

        self.run = pmstore.torch.attach(
            self._store,
            model=self.model,
            optimizer=self.optimizer,
            loader=self._loader,
            **self._options,
        )

    def begin(self) -> None:
        self._batches: Iterator[Any] = self.run.batches(epochs=1000)
        self._batch = next(self._batches)

    def step(self) -> dict[str, Counted]:
        """What each part of a step does."""
        from torch.nn.functional import mse_loss

        inputs, targets = self._batch
        loss = mse_loss(self.model(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        updated = count(self.optimizer.step)
        with Counter() as ended:
            self.run.log(loss=loss)
            self._batch = next(self._batches)
        return {UPDATE: updated, END: ended.counted}

    def whole_step(self) -> Counted:
        return sum(self.step().values(), Counted())


@contextmanager
def _loop(path: Path, **options: Any) -> Iterator[Loop]:
    """In the midst of training."""
    with pmstore.open(path) as store:
        loop = Loop(store, **options)
        loop.attach()
        loop.begin()
        for _ in range(WARM):
            loop.step()
        yield loop
        loop.run.commit()  # the loop is left in mid-epoch


def of_a_run(folder: Path) -> dict[str, Counted]:
    """README's loop; every step is committed."""
    with _loop(folder / "run.pm", policy=None) as loop:
        loop.step()  # an epoch's first is another
        found = loop.step()
    for name, path in (("attach", "new.pm"), ("resume", "run.pm")):
        with pmstore.open(folder / path) as store:
            loop = Loop(store, policy=None)
            gc.collect()  # attach looks at all objects of the process, those before it too
            found[name] = count(loop.attach)
    return found


def of_a_job(folder: Path) -> dict[str, Counted]:
    """A job of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        with _loop(folder / "job.pm", policy=None, process_group="world") as loop:
            loop.step()
            return {f"{END}, in a job": loop.step()[END]}
    finally:
        dist.destroy_process_group()


def of_a_checkpoint(folder: Path) -> dict[str, Counted]:
    """README's model and its optimizer, saved a third time."""
    import torch
    from torch.distributed import checkpoint as dcp

    from pmstore.dcp import StoreWriter

    with pmstore.open(folder / "saved.pm") as store:
        loop = Loop(store)
        for parameter in loop.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        loop.optimizer.step()
    state = {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}
    saves = folder / "saves"

    def save() -> None:
        writer = StoreWriter(saves, keep=1)
        dcp.save(state, checkpoint_id=saves, storage_writer=writer, no_dist=True)

    save()
    save()
    return {"dcp.save": count(save)}


def of_steps(memory: Path, disk: Path) -> dict[str, Counted]:
    """A whole step of README's loop: the median of an epoch's."""
    from pmstore.scheduler import Auto, EveryN

    found = {}
    with _loop(memory / "steps.pm") as loop:
        found["step in memory, with its commit"] = _median(loop, commits=True)
    with _loop(memory / "few.pm", policy=EveryN(10**6)) as loop:
        found["step in memory, without a commit"] = _median(loop, commits=False)
    with _loop(disk / "steps.pm", policy=Auto(max_loss=0)) as loop:
        found["step on a disk, with its commit"] = _median(loop, commits=True)
    with _loop(disk / "few.pm") as loop:
        found["step on a disk, without a commit"] = _median(loop, commits=False)
    return found


def _median(loop: Loop, *, commits: bool) -> Counted:
    """Of the steps that end with a commit, or without one."""
    steps = []
    for _ in range(EPOCH):
        before = loop.run.stats().commits
        step = loop.whole_step()
        if (loop.run.stats().commits > before) == commits:
            steps.append(step)
    return Counted(
        *(
            int(statistics.median_high([getattr(step, what) for step in steps]))
            for what in ("calls", "files", "engine")
        )
    )


def measure() -> dict[str, dict[str, int]]:
    """All operations, by name."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, Counted] = {}
    for warm in (True, False):  # the first time, modules are imported and caches are filled
        with scratch("memory") as memory, scratch("disk") as disk:
            for part in (of_a_store, of_a_run, of_a_job, of_a_checkpoint):
                found |= part(memory)
            if not warm:
                found |= of_steps(memory, disk)
    return {name: asdict(counted) for name, counted in found.items()}


def stored() -> dict[str, Any]:
    """The table: bounds that may fall, and never rise."""
    table: dict[str, Any] = json.loads(STORED.read_text())
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the counts alone")
    parser.add_argument("--write", action="store_true", help="write them as the new bounds")
    arguments = parser.parse_args()
    found = measure()
    if arguments.json:
        print(json.dumps(found))
        return
    table = stored()["operations"] if STORED.exists() else {}
    print(f"{'':34}{'calls':>14}{'files':>14}{'engine':>14}   (stored)")
    for name, counted in found.items():
        before = table.get(name, {})
        cells = [f"{n:6} ({before.get(what, '-')!s:>5})" for what, n in counted.items()]
        print(f"{name:34}" + "".join(f"{cell:>14}" for cell in cells))
    if arguments.write:
        text = json.dumps({"python": VERSION, "operations": found}, indent=1)
        STORED.write_text(text + "\n")


if __name__ == "__main__":
    main()
