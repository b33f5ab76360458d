"""One run of the crash tests: what is planned, progress, and what came of it."""

from __future__ import annotations

import functools
import json
import shlex
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crashtests import cases, jobs, training
from crashtests.report import Report

# In which domains a model means something. Prefixes cover every domain: a process may die in each
# of them. Of domain process the third is a machine's crash under a file on a disk: refused at the
# next open, or, with the clean mark, whole.
MODEL_DOMAINS = {
    "i": ("process", "emulated", "file"),
    "ii": ("emulated",),
    "iii": ("file", "process"),
    "iv": ("emulated", "file"),
}
MODELS = [*MODEL_DOMAINS, "kill", "fault", "detect"]

KILLS = 60
"""Of a workload, about and at most, unless it is killed at every primitive."""

SAY_SECONDS = 60
"""Where nobody watches a bar, a line so often."""


@dataclass(frozen=True)
class Settings:
    models: tuple[str, ...] = tuple(MODELS)
    images: int = 50_500
    """distinct ones, of each model"""
    seed: int = 1
    only: tuple[str, ...] = ()
    """workloads; empty: all"""
    kill_step: int = 31
    fault_step: int = 17
    stop_after: int = 5
    """failures of one job"""
    cores: int = 0
    """0: as many as there are"""
    seen: Path | None = None
    """A folder for the tables of images seen, which a later run goes on with; None: they are gone
    afterwards."""
    room: int = 0
    """of such a table; 0: what `images` needs"""
    record: bool = True
    """False: real training was recorded before, with these sources"""


def plan(s: Settings, names: list[str], trained: list[str]) -> list[jobs.Chain]:
    """Longest first, so that no core waits for a straggler. The workloads with the most images are
    the last in the table: they get what the others have not."""
    chains = []
    common = {"seed": s.seed, "stop-after": s.stop_after}
    for model in sorted(
        (m for m in s.models if m in MODEL_DOMAINS), key=lambda m: len(MODEL_DOMAINS[m])
    ):
        for domain in MODEL_DOMAINS[model]:
            options = common | {"nested-every": 40}
            of = [jobs.Job("images", name, domain, model, options) for name in names]
            # what closes and opens again is told there by the small ones
            if (model, domain) != ("iii", "process"):
                # the mixtures are last
                of[-3:-3] = [training.job(name, domain, model, options) for name in trained]
            if of:
                chains.append(jobs.Chain(tuple(of), -(-s.images // len(MODEL_DOMAINS[model]))))
    for mode, step in (("kill", s.kill_step), ("fault", s.fault_step)):
        if mode in s.models and step:
            options = (
                common | {"step": step} | ({"most": KILLS} if mode == "kill" and step > 1 else {})
            )
            chains += [
                jobs.Chain((jobs.Job(mode, n, d, "", options),))
                for d in jobs.DOMAINS
                for n in reversed(names)
            ]
    return chains


class Display:
    """A bar for each model on a terminal; elsewhere a line a minute. Failures as they come."""

    def __init__(self, console: Console, chains: list[jobs.Chain]) -> None:
        self.console = console
        self.done: dict[str, int] = defaultdict(int)
        self.expected: dict[str, int] = defaultdict(int)
        for chain in chains:
            self.expected[chain.jobs[0].model or chain.jobs[0].mode] += chain.images
        columns = (
            TextColumn("{task.description:>6}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.tasks = {
            name: self.bar.add_task(name, total=total or None)
            for name, total in self.expected.items()
        }
        self.start = self.said = time.monotonic()
        self.lock = threading.Lock()

    def progress(self, job: jobs.Job, n: int) -> None:
        name = job.model or job.mode
        self.bar.advance(self.tasks[name], n)
        with self.lock:
            self.done[name] += n
            if self.console.is_terminal or time.monotonic() < self.said + SAY_SECONDS:
                return
            self.said = time.monotonic()
            parts = [
                f"({k}) {v:,}" + (f" of {self.expected[k]:,}" if self.expected[k] else "")
                for k, v in self.done.items()
            ]
        self.say(f"{self.said - self.start:.0f} s: {', '.join(parts)}")

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def failed(self, outcome: jobs.Outcome) -> None:
        for failure in outcome.failures:
            where = (
                f"({outcome.job.model or outcome.job.mode}) {outcome.job.workload} "
                f"{outcome.job.domain}"
            )
            self.say(f"FAILED {where}: {json.dumps(failure)}\nagain: {failure['again']}")


def run(settings: Settings, console: Console) -> Report:
    """An interrupt (Ctrl-C, SIGTERM) ends it early: the report has what was done until then, and
    says so.

    Raises: ValueError: no such workload. CalledProcessError, RuntimeError: the programs cannot be
        built or recorded."""
    report = Report(settings.seed)
    start = time.monotonic()
    program = jobs.build()
    trained = [f"train_{name}" for name in training.PROGRAMS] if training.available() else []
    every = [*jobs.workloads(program), *trained]
    names = [n for n in every if not settings.only or n in settings.only]
    if not names:
        raise ValueError(f"no such workload; there are: {' '.join(every)}")
    trained = [
        n.removeprefix("train_")
        for n in names
        if n in trained and MODEL_DOMAINS.keys() & set(settings.models)
    ]
    try:
        if trained and settings.record:
            training.record()
            training.verify(program)
        chains = plan(settings, [n for n in names if not n.startswith("train_")], trained)
        _run_chains(settings, program, chains, Display(console, chains), report)
        if "detect" in settings.models:
            _detect(report, console)
    except KeyboardInterrupt:
        report.interrupted = True
    report.seconds = time.monotonic() - start
    return report


def _run_chains(
    s: Settings, program: Path, chains: list[jobs.Chain], display: Display, report: Report
) -> None:
    jobs.KEPT.mkdir(parents=True, exist_ok=True)
    for old in jobs.KEPT.glob("*.pm"):
        old.unlink()

    def done(outcome: jobs.Outcome) -> None:
        for failure in outcome.failures:
            failure["again"] = again(outcome.job)
        report.outcomes.append(outcome)
        display.failed(outcome)

    room = s.room or 1 << max(20, (s.images * 5).bit_length())
    with display.bar, jobs.Runner(program, cores=s.cores or None, room=room, seen=s.seen) as runner:
        runner.run_all(chains, display.progress, done)


def _detect(report: Report, console: Console) -> None:
    outcomes = jobs.detect()
    failures = [failure for o in outcomes for failure in o.failures]
    report.detector = {
        "stores": sum(o.result.get("stores", 0) for o in outcomes),
        "failures": len(failures),
    }
    for failure in failures:
        console.print(
            f"FAILED (detector): {json.dumps(failure)}",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )


# ---- a job of it as a case ----


def _jobs(kind: str, seed: int, size: int) -> list[jobs.Job]:
    """All that a campaign with that seed has of one kind, in the order of their cases."""
    models = tuple(MODEL_DOMAINS) if kind == "images" else (kind[:-1],)
    settings = Settings(models, seed=seed, kill_step=size, fault_step=size)
    chains = plan(settings, jobs.workloads(jobs.build()), list(training.PROGRAMS))
    found = [job for chain in chains for job in chain.jobs]
    if kind == "images":
        found = [replace(job, options=job.options | {"budget": size}) for job in found]
    return found


def again(job: jobs.Job) -> str:
    """The command that does it alone."""
    kind = job.mode if job.mode == "images" else f"{job.mode}s"
    size = job.options["budget" if job.mode == "images" else "step"]
    every = _jobs(kind, seed := job.options["seed"], size)
    (number,) = (i for i, one in enumerate(every) if one.key() == job.key())
    return cases.command(kind, seed * len(every) + number, size)


_lock = threading.Lock()


@functools.cache
def _record() -> None:
    if not training.available():
        raise ModuleNotFoundError("it needs torch and cffi")
    training.record()


def _kind(kind: str, size: int, of: str) -> cases.Kind:
    def draw(seed: int, size: int) -> tuple[str, jobs.Job]:
        every = _jobs(kind, 0, size)
        job = _jobs(kind, seed // len(every), size)[seed % len(every)]
        return shlex.join(job.command(Path("build/crashtest/crash"))), job

    def examine(job: jobs.Job, size: int, runner: jobs.Runner) -> cases.Found:
        if job.workload.startswith("train_"):
            with _lock:
                _record()
        outcome = runner.run(job)
        return cases.Found(Counter(outcome.result), list(map(json.dumps, outcome.failures)))

    return cases.Kind(
        size,
        of,
        lambda: len(_jobs(kind, 0, size)),
        draw,
        examine,
        lambda: jobs.Runner(jobs.build(), cores=1),
    )


IMAGES = _kind("images", 500, "images")
KILLED = _kind("kills", 31, "primitives from kill to kill")
FAULTS = _kind("faults", 17, "system calls from failure to failure")
