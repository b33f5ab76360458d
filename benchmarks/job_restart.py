"""A job of two ranks is killed, all at once, and started again: how long from the kill to the end
of its first new step, one that it had not finished before, and how many steps are lost?

DDP over gloo, AdamW, state on tmpfs: what is saved survives the death of the processes. torch.save
and DCP save into a folder of their own and then change a name, as careful programs do. Steps that
are trained again count: they are in the time. Ranks are forked from a process that has imported all
they need: Python's start and imports, the same for all, are a figure of their own. The second table
also leaves out the making of the process group, of the model and of DDP.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks import harness, kills

RANKS = 2
STATE_BYTES = 12_000_000
STEPS = (4, 14)
"""How many a life makes before it is killed: drawn between them, so that every tenth is met."""
WHOLE = "from the kill to the end of the first new step, but for Python's start"
READY = "the same from where process group, model and DDP are made"
START = "Python's start and imports, which each rank would need before"
IMPORTS = (
    "import torch, torch._dynamo, pmstore.torch, torch.distributed.checkpoint.state_dict, "
    "torch.distributed.checkpoint._fsspec_filesystem"
)
"""What DDP, optimizers and DCP import at their first use among them."""
LOST = "steps that had ended and were lost"
OURS = "pmstore, global commits"
NOTHING = "nothing: a file with the step's number"
DCP, DCP_TENTH = "DCP, every step", "DCP, every 10 steps"
SAVE, SAVE_TENTH = "torch.save, every step", "torch.save, every 10 steps"
NAMES = (OURS, DCP, DCP_TENTH, SAVE, SAVE_TENTH, NOTHING)
COMMON = (
    "the rendezvous of the processes, the making of the model and of DDP, and the first step are "
    "in both; at the end of its first step pmstore looks for schedulers that it was not given, "
    "among all objects of the process: some 60 ms"
)
PATIENCE_SECONDS = 120.0


# ---- in a rank: each returns the step that the run goes on from, what makes a step's block, and
# what saves it


Saver = Callable[[int], None]


def _pmstore(folder: Path, rank: int, model: Any, optimizer: Any, stack: ExitStack) -> Any:
    import pmstore
    import pmstore.torch

    path = folder / f"{rank}.pm"
    store = stack.enter_context(pmstore.open(path, size=6 * STATE_BYTES, domain="process"))
    run = pmstore.torch.attach(
        store, model=model, optimizer=optimizer, job=pmstore.torch.Job(timeout=60)
    )
    return run.step, run.next_step, lambda step: run.commit()


def _nothing(folder: Path, rank: int, model: Any, optimizer: Any, stack: ExitStack) -> Any:
    path = folder / f"step-{rank}"

    def save(step: int) -> None:
        new = path.with_suffix(".new")
        new.write_text(str(step))
        new.rename(path)

    return int(path.read_text()) if path.exists() else 0, nullcontext, save


def _publish(new: Path, step: int, rank: int, latest: Path) -> None:
    """All ranks have saved: the name is changed, and what it named is removed."""
    import torch.distributed as dist

    dist.barrier()
    if rank == 0:
        old = latest.resolve() if latest.is_symlink() else None
        link = latest.with_suffix(".new")
        link.unlink(missing_ok=True)
        link.symlink_to(new.name)
        link.rename(latest)
        if old is not None and old.is_dir():
            shutil.rmtree(old)


def _dcp(every: int) -> Any:
    def start(folder: Path, rank: int, model: Any, optimizer: Any, stack: ExitStack) -> Any:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        latest = folder / "latest"
        step = 0
        if latest.is_symlink():
            step = int(os.readlink(latest))
            states, moments = get_state_dict(model, optimizer)
            dcp.load({"model": states, "optimizer": moments}, checkpoint_id=latest.resolve())
            set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=moments)

        def save(step: int) -> None:
            if step % every:
                return
            states, moments = get_state_dict(model, optimizer)
            new = folder / str(step)
            dcp.save({"model": states, "optimizer": moments}, checkpoint_id=new)
            _publish(new, step, rank, latest)

        return step, nullcontext, save

    return start


def _torch_save(every: int) -> Any:
    def start(folder: Path, rank: int, model: Any, optimizer: Any, stack: ExitStack) -> Any:
        import torch

        path = folder / "state.pt"
        step = 0
        if path.exists():
            state = torch.load(path)
            step = state["step"]
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        def save(step: int) -> None:
            if step % every or rank:
                return
            new = path.with_suffix(".new")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, new)
            new.rename(path)

        return step, nullcontext, save

    return start


STARTS: dict[str, Any] = {
    OURS: _pmstore,
    NOTHING: _nothing,
    DCP: _dcp(1),
    DCP_TENTH: _dcp(10),
    SAVE: _torch_save(1),
    SAVE_TENTH: _torch_save(10),
}


def rank(number: int, folder: str, name: str, life: int) -> None:
    """Trains until it is killed, and notes when what ended: a line each, [what, step, time]."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.models import initialize, mlp

    warnings.simplefilter("ignore")
    notes = os.open(Path(folder, f"notes-{number}"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(what: str, step: int) -> None:
        os.write(notes, (json.dumps([what, step, time.monotonic()]) + "\n").encode())

    torch.set_num_threads(1)
    meet = f"file://{folder}/meet-{life}"
    dist.init_process_group("gloo", init_method=meet, rank=number, world_size=RANKS)
    module, batch = mlp(STATE_BYTES)
    initialize(module)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    note("ready", 0)
    with ExitStack() as stack:
        step, block, save = STARTS[name](Path(folder), number, model, optimizer, stack)
        note("resumed", step)
        while True:
            with block():
                optimizer.zero_grad(set_to_none=False)
                model(batch).square().mean().backward()
                optimizer.step()
            step += 1
            save(step)
            note("step", step)


# ---- in the parent


Note = tuple[str, int, float]


class Life:
    """The processes of one start of a job."""

    def __init__(self, name: str, folder: Path, life: int) -> None:
        self.name = name
        self._folder = folder
        for number in range(RANKS):
            (folder / f"notes-{number}").unlink(missing_ok=True)
        self._processes = [
            kills._fork(lambda number=number: rank(number, str(folder), name, life))  # type: ignore[misc]
            for number in range(RANKS)
        ]

    def notes(self) -> list[list[Note]]:
        """Of each rank, so far."""
        found = []
        for number in range(RANKS):
            path = self._folder / f"notes-{number}"
            lines = path.read_text().splitlines() if path.exists() else []
            found.append([tuple(json.loads(line)) for line in lines])
        return found  # type: ignore[return-value]

    def finished(self) -> int:
        """The newest step that has ended at all ranks; 0: none."""
        return min(
            max((s for w, s, _ in notes if w == "step"), default=0) for notes in self.notes()
        )

    def reach(self, step: int) -> None:
        """Raises: RuntimeError: it did not come to the end of that step."""
        end = time.monotonic() + PATIENCE_SECONDS
        while self.finished() < step:
            if any(self._ended(process) for process in self._processes):
                raise RuntimeError("a rank has ended, see above")
            if time.monotonic() > end:
                raise RuntimeError(f"step {step} has not come within {PATIENCE_SECONDS:.0f} s")
            time.sleep(0.002)

    @staticmethod
    def _ended(process: int) -> bool:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> float:
        """All at once. Returns: when."""
        when = time.monotonic()
        for process in self._processes:
            os.kill(process, signal.SIGKILL)
        for process in self._processes:
            os.waitpid(process, 0)
        self._processes = []
        return when


@contextmanager
def _life(name: str, folder: Path, life: int) -> Iterator[Life]:
    started = Life(name, folder, life)
    try:
        yield started
    finally:
        started.kill()


class Job:
    """One way to save, over its lives."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        folder.mkdir()
        self._lives = 0
        self._finished = 0
        self._killed = 0.0
        self.whole_us: list[float] = []
        self.ready_us: list[float] = []
        self.lost: list[int] = []

    def live(self, chance: random.Random) -> None:
        """Starts it, measures that, unless it is the first time, and kills it some steps later."""
        with _life(self.name, self._folder, self._lives) as life:
            life.reach(self._finished + 1)
            if self._lives:
                self._measure(life.notes())
            self._lives += 1
            life.reach(self._finished + chance.randint(*STEPS))
            time.sleep(chance.random() * 0.05)
            self._killed = life.kill()
            self._finished = life.finished()

    def _measure(self, notes: list[list[Note]]) -> None:
        new = self._finished + 1
        # a save may have ended of which nobody was told: then the first step is a later one
        first = max(
            min(when for what, step, when in one if what == "step" and step >= new) for one in notes
        )
        ready = max(when for one in notes for what, _, when in one if what == "ready")
        self.whole_us.append(1e6 * (first - self._killed))
        self.ready_us.append(1e6 * (first - ready))
        self.lost += [
            max(self._finished - step, 0) for what, step, _ in notes[0] if what == "resumed"
        ]


def main(quick: bool, budget: harness.Budget) -> None:
    names = (OURS, DCP) if quick else NAMES
    starts = []
    for _ in range(1 if quick else 3):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", IMPORTS], cwd=harness.ROOT, check=True)
        starts.append(1e6 * (time.perf_counter() - begun))
    exec(IMPORTS, {})  # no threads yet: ranks are forked
    rows = harness.kept()
    rows.append(harness.summarize("all of them", START, harness.KILL, starts))
    chance = random.Random(harness.SEED)
    failed: dict[str, str] = {}
    with harness.scratch("memory") as folder:
        jobs = {name: Job(name, folder / str(i)) for i, name in enumerate(names)}
        for _ in budget.rounds(1 if quick else 15, least=1, warm_up=1):
            for name in names:
                if name in failed:
                    continue
                try:
                    jobs[name].live(chance)
                except RuntimeError as error:
                    failed[name] = f"failed: {harness.words_of(error)}"
            print(f"  {budget.left:.0f} s left", flush=True)
        for case in (WHOLE, READY):
            for name, job in jobs.items():
                times = job.whole_us if case == WHOLE else job.ready_us
                if not times or name in failed:
                    why = failed.get(name, harness.OUT_OF_TIME)
                    rows.append(harness.missing(name, case, harness.KILL, why))
                    continue
                extra = {"most steps lost": float(max(job.lost))}
                extra["mean steps lost"] = statistics.mean(job.lost)
                rows.append(harness.summarize(name, case, harness.KILL, times, **extra))
    made = harness.with_ratios(rows, OURS)
    rows[:] = made
    targets = []
    ours = harness.find(rows, WHOLE, OURS)
    if ours is not None:
        targets.append(harness.Target(LOST, ours.extra["most steps lost"], 1))
        targets += [
            harness.Target(f"{case}: {name} / {OURS}", row.ratio or 0, 2, True, COMMON)
            for case in (WHOLE, READY)
            for name in (DCP, DCP_TENTH)
            if (row := harness.find(rows, case, name))
        ]
    harness.report(
        "job_restart",
        "A killed job of two ranks: to its first new step",
        rows,
        ratio_text=f"over {OURS}",
        targets=targets,
        quick=quick,
    )
