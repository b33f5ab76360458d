"""What a commit on every step adds to the step of a training framework, and what a kill loses there
beside the framework's own checkpoint every hundred steps.

Each way trains in a process of its own; they take turns, a block of steps each. Then each is killed
with SIGKILL and started again by the same command: what is lost are the steps that it does again.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from benchmarks import harness

MB = 1_000_000
STATE_BYTES = 50 * MB
EVERY = 100
"""Steps from one of the framework's own checkpoints to the next."""
BLOCK = 8
WITHOUT, COMMITS, OWN = "without", "commits", "its own checkpoint"
FRAMEWORKS = {"torch": "no framework", "lightning": "Lightning", "trainer": "Trainer"}
"""Module, and what a table calls it."""


# ---- in a process of its own ---------------------------------------------------------------------


class Turns:
    """Steps are made when the parent asks for so many: `begin` before each, `end` when the step is
    done with all that belongs to it."""

    def __init__(self) -> None:
        self._left = 0
        self._began = 0.0
        self.steps = 0

    def begin(self) -> None:
        if self._left == 0:
            if self.steps:
                print("did", self.steps, time.perf_counter() - self._began, flush=True)
            else:
                print("ready", flush=True)
            self._left = int(sys.stdin.readline())
            self._began = time.perf_counter()
        self._left -= 1
        self.steps += 1


def _torch(way: str, folder: Path, turns: Turns) -> None:
    """What a commit costs whatever the framework: its own checkpoint is torch.save here."""
    import torch

    import pmstore.torch
    from benchmarks.models import initialize, mlp

    model, batch = mlp(STATE_BYTES)
    initialize(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    last, new = folder / "last.pt", folder / "new.pt"
    step, run = 0, None
    if way == COMMITS:
        store = pmstore.open(folder / "run.pm", size=3 * STATE_BYTES)
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
        step = run.step
    elif way == OWN and last.exists():
        saved = torch.load(last)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    print("at", step, flush=True)
    while True:
        turns.begin()
        with run.next_step() if run is not None else nullcontext():
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        step += 1
        if way == OWN and step % EVERY == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "step": step}, new)
            new.replace(last)


def _lightning(way: str, folder: Path, turns: Turns) -> None:
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from benchmarks.models import initialize, mlp
    from pmstore.integrations.lightning import PmstoreCallback

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.batch = mlp(STATE_BYTES)
            initialize(self.net)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(self.batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-5)

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            turns.steps = 0
            print("at", trainer.global_step, flush=True)

        def on_train_batch_start(self, *_: Any) -> None:
            turns.begin()

    callbacks: list[L.Callback] = [Watch()]
    if way == COMMITS:
        callbacks.append(PmstoreCallback(folder / "run.pm", opening={"size": 3 * STATE_BYTES}))
    elif way == OWN:
        callbacks.append(ModelCheckpoint(folder, "last", every_n_train_steps=EVERY))
    trainer = L.Trainer(
        max_epochs=-1,
        max_steps=1_000_000,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=way == OWN,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = folder / "last.ckpt"
    data = DataLoader(TensorDataset(torch.zeros(1_000_000, 1)), batch_size=1)
    trainer.fit(Module(), data, ckpt_path=last if way == OWN and last.exists() else None)


def _trainer(way: str, folder: Path, turns: Turns) -> None:
    import torch
    from torch import nn
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from benchmarks.models import initialize, mlp
    from pmstore.integrations.transformers import PmstoreTrainerCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.batch = mlp(STATE_BYTES)
            initialize(self.net)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(self.batch).square().mean()}

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            turns.steps = 0
            print("at", state.global_step, flush=True)

        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            turns.begin()

    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> Any:
            return {"x": torch.zeros(1)}

    kept = PmstoreTrainerCallback(folder / "run.pm", opening={"size": 3 * STATE_BYTES})
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=1_000_000,
        per_device_train_batch_size=1,
        optim="adamw_torch",
        learning_rate=1e-5,
        save_strategy="steps" if way == OWN else "no",
        save_steps=EVERY,
        save_total_limit=1,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    # the callback before: a step is over once it is committed
    callbacks = [kept, Watch()] if way == COMMITS else [Watch()]
    trainer = Trainer(Model(), args, train_dataset=Data(), callbacks=callbacks)
    before = kept.folder() if way == COMMITS else get_last_checkpoint(str(folder))
    trainer.train(resume_from_checkpoint=before if way != WITHOUT else None)


TRAINS: dict[str, Callable[[str, Path, Turns], None]] = {
    "torch": _torch,
    "lightning": _lightning,
    "trainer": _trainer,
}


# ---- the parent ----------------------------------------------------------------------------------


class Child:
    """A way under way. at: the step that it goes on from."""

    def __init__(self, framework: str, way: str, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.frameworks", framework, way, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.at = int(self._answer("at")[0])
        self._answer("ready")

    def _answer(self, kind: str) -> list[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            first, *rest = line.split() or [""]
            if first == kind:
                return rest
        raise RuntimeError(f"it ended with status {self._process.wait()}")

    def steps(self, count: int) -> float:
        """Makes so many; seconds of one, with all that came before the next."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        return float(self._answer("did")[1]) / count

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def _framework(framework: str, quick: bool, budget: harness.Budget) -> Iterator[harness.Row]:
    named = FRAMEWORKS[framework]
    case = f"{named}, a step"
    times: dict[str, list[float]] = {WITHOUT: [], COMMITS: [], OWN: []}
    with harness.scratch("memory") as folder, ExitStack() as stack:
        children = {way: Child(framework, way, folder / way.replace(" ", "-")) for way in times}
        for child in children.values():
            stack.callback(child.kill)
        done = dict.fromkeys(times, 0)
        for i in harness.Budget(budget.left / 2).rounds(6 if quick else 30, least=4, warm_up=1):
            for way, child in children.items():
                seconds = child.steps(BLOCK)
                done[way] += BLOCK
                if i >= 0:
                    times[way].append(seconds * 1e6)
        yield harness.summarize(WITHOUT, case, harness.NONE, times[WITHOUT])
        for way in (COMMITS, OWN):
            pairs = list(zip(times[WITHOUT], times[way], strict=True))
            yield harness.summarize(
                way,
                case,
                harness.KILL,
                times[way],
                paired=statistics.median(own / without for without, own in pairs),
                added=statistics.median(own - without for without, own in pairs),
            )
        children.pop(WITHOUT).kill()
        step = statistics.median(times[WITHOUT])
        chance = random.Random(harness.SEED)
        lost: dict[str, list[int]] = {COMMITS: [], OWN: []}
        for _ in budget.rounds(1 if quick else 4, least=1):
            for way in lost:
                child = children[way]
                more = EVERY + chance.randrange(EVERY) - done[way] % EVERY
                child.steps(more)
                reached = child.at + done[way] + more
                child.kill()
                children[way] = Child(framework, way, folder / way.replace(" ", "-"))
                stack.callback(children[way].kill)
                lost[way].append(reached - children[way].at)
                done[way] = 0
        for way, steps in lost.items():
            yield harness.summarize(
                way,
                f"{named}, steps lost at a kill, as time",
                harness.KILL,
                [count * step for count in steps],
                steps=statistics.mean(steps),
            )


def main(quick: bool = False, budget: harness.Budget | None = None) -> None:
    budget = budget or harness.Budget()
    rows = harness.kept()
    for framework, part in budget.deal((one, 1.0) for one in FRAMEWORKS):
        rows += harness.with_ratios(list(_framework(framework, quick, part)), WITHOUT)
    steps = [row for row in rows if row.method == COMMITS and "paired" in row.extra]
    bare = next((row.extra["added"] for row in steps), 0.0)
    targets = [
        harness.Target(
            f"step with a commit / without, {row.case.removesuffix(', a step')}",
            row.extra["paired"],
            1.1,
            reason=f"{row.extra['added']:,.0f} us more; {bare:,.0f} us of a loop without a "
            "framework, most of them copies of what the optimizer is about to write. A framework "
            "is asked for the rest object by object: counters of loops, schedules, callbacks",
        )
        for row in steps
    ]
    harness.report(
        "frameworks",
        "frameworks: plain AdamW, 50 MB of state",
        rows,
        ratio_text=f"step over that of {WITHOUT!r}",
        targets=targets,
        notes=[f"its own checkpoint: every {EVERY} steps"],
        quick=quick,
    )


if __name__ == "__main__":
    if len(sys.argv) > 3:
        TRAINS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]), Turns())
    else:
        main()
