"""The native program `crash`: building it, and running its jobs in parallel."""

from __future__ import annotations

import concurrent.futures
import fcntl
import functools
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "crashtest"
KEPT = BUILD / "failures"
MEMORY = Path("/dev/shm")

DOMAINS = {"file": 2, "process": 3, "emulated": 4}
MODELS = {"i": 1, "ii": 2, "iii": 3, "iv": 4}


@dataclass(frozen=True)
class Job:
    """One run of the program: one workload, in one domain, under one model (or killed, or with
    failing system calls)."""

    mode: str
    """images, kill or fault"""
    workload: str
    domain: str
    model: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def key(self) -> tuple[str, ...]:
        """Which one of a campaign it is."""
        return self.mode, self.workload, self.domain, self.model

    def command(self, program: Path) -> list[str]:
        """What the job does follows from these words alone; where it may write, and what others
        have seen, changes nothing."""
        words = [
            str(program),
            self.mode,
            "--workload",
            self.workload,
            "--domain",
            str(DOMAINS[self.domain]),
        ]
        if self.model:
            words += ["--model", str(MODELS[self.model])]
        for key, value in self.options.items():
            words += [f"--{key}", str(value)]
        return words


@dataclass(frozen=True)
class Chain:
    """Jobs one after another that share out a number of distinct images: what one has not, those
    after it may make."""

    jobs: tuple[Job, ...]
    images: int = 0
    """0: the jobs' own budgets hold."""


@dataclass
class Outcome:
    job: Job
    result: dict[str, int]
    failures: list[dict[str, Any]]


def build(
    source: Path | None = None,
    target: Path = BUILD,
    *,
    flags: str = "-O2 -g",
    detector: bool = False,
    coverage: bool = False,
    goal: str = "crash",
    variables: dict[str, str] | None = None,
) -> Path:
    """Compiles the program over the engine in `source`. Raises CalledProcessError with the
    compiler's words."""
    command = [
        "make",
        "-s",
        f"-j{os.cpu_count()}",
        "-C",
        str(ROOT / "crashtests" / "native"),
        str(target / goal),
        f"BUILD={target}",
        f"CFLAGS={flags}",
    ]
    command += [f"{name}={value}" for name, value in (variables or {}).items()]
    if source is not None:
        command.append(f"SRC={source}")
    if detector:
        command.append("DETECT=1")
    if coverage:
        command.append("COVERAGE=1")
    target.mkdir(parents=True, exist_ok=True)
    with (target / "lock").open("w") as lock:  # tests run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, check=True, capture_output=True, text=True)
    return target / goal


def detect(
    source: Path | None = None, target: Path = BUILD / "detector", only: str = ""
) -> list[Outcome]:
    """Runs every workload once on an engine whose stores are all seen: those into the pool have to
    go through the seam."""
    program = build(source, target, flags="-O1 -g", detector=True)
    with Runner(program) as runner:
        planned = [
            Job("detect", name, "emulated") for name in workloads(program) if only in ("", name)
        ]
        return runner.run_all(planned, lambda job, n: None)


def workloads(program: Path) -> list[str]:
    return subprocess.run(
        [program, "list"], check=True, capture_output=True, text=True
    ).stdout.split()


def symbolise(program: Path, failure: dict[str, Any]) -> None:
    """Addresses of the last primitive before the crash become functions and lines."""
    sites = [site for site in failure.get("sites", []) if site != "(nil)"]
    if not sites or not shutil.which("addr2line"):
        return
    out = subprocess.run(
        ["addr2line", "-s", "-f", "-p", "-e", str(program), *sites], capture_output=True, text=True
    ).stdout
    failure["sites"] = out.splitlines()


class Runner:
    """Runs jobs, as many at a time as there are cores. A model's jobs in one domain have a table of
    the images seen.

    seen: the folder of these tables, if they are to be kept."""

    def __init__(
        self,
        program: Path,
        *,
        cores: int | None = None,
        room: int = 1 << 20,
        seen: Path | None = None,
    ) -> None:
        self.program = program
        self.cores = cores or os.cpu_count() or 1
        self._room_bytes = room * 16
        self._folder = Path(tempfile.mkdtemp(prefix="pmstore-crash-", dir=MEMORY))
        self._seen_folder = seen or self._folder
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[str]] = set()
        self._stopping = False

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """Jobs end early, and say what they did."""
        with self._lock:
            self._stopping = True
            for child in self._children:
                child.terminate()

    def _seen(self, job: Job) -> Path:
        path = self._seen_folder / f"seen-{job.model}-{job.domain}"
        with self._lock:
            if not path.exists():
                with path.open("wb") as file:
                    file.truncate(self._room_bytes)
        return path

    def run(self, job: Job, progress: Callable[[int], None] = lambda _: None) -> Outcome:
        scratch = Path(tempfile.mkdtemp(dir=self._folder)) / "x"
        command = [*job.command(self.program), "--scratch", str(scratch), "--keep", str(KEPT)]
        if job.model:
            command += ["--seen", str(self._seen(job))]
        outcome = Outcome(job, {}, [])
        with self._lock:
            if self._stopping:
                return outcome
            # Not in our group: a terminal's interrupt is for us, and we tell our jobs.
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            self._children.add(child)
        assert child.stdout is not None
        done = 0
        for line in child.stdout:
            said = json.loads(line)
            if "progress" in said:
                progress(said["progress"] - done)
                done = said["progress"]
            elif "failure" in said:
                symbolise(self.program, said["failure"])
                outcome.failures.append(said["failure"])
            else:
                outcome.result = said["result"]
        child.stdout.close()
        code = child.wait()
        with self._lock:
            self._children.discard(child)
        shutil.rmtree(scratch.parent, ignore_errors=True)
        finished = outcome.result.get("distinct", outcome.result.get("trials", done))
        progress(finished - done)
        if (
            not self._stopping
            and (code not in (0, 1) or not outcome.result)
            and not outcome.failures
        ):
            outcome.failures.append(
                {
                    "how": "harness",
                    "message": f"the program ended with status {code}",
                    "workload": job.workload,
                }
            )
        return outcome

    def run_chain(
        self,
        chain: Chain,
        progress: Callable[[Job, int], None],
        done: Callable[[Outcome], None] = lambda _: None,
    ) -> list[Outcome]:
        """done: called after each job."""
        outcomes: list[Outcome] = []
        wanted = chain.images
        for i, job in enumerate(chain.jobs):
            if self._stopping:
                break
            if chain.images:
                share = max(20, wanted // (len(chain.jobs) - i))
                job = replace(job, options=job.options | {"budget": share})
            outcomes.append(self.run(job, functools.partial(progress, job)))
            wanted -= outcomes[-1].result.get("distinct", 0)
            done(outcomes[-1])
        return outcomes

    def run_all(
        self,
        work: Iterable[Job | Chain],
        progress: Callable[[Job, int], None],
        done: Callable[[Outcome], None] = lambda _: None,
    ) -> list[Outcome]:
        """done: called after each job. An exception here, as an interrupt, ends the jobs that run;
        they are done too."""
        outcomes: list[Outcome] = []
        chains = [w if isinstance(w, Chain) else Chain((w,)) for w in work]
        with concurrent.futures.ThreadPoolExecutor(self.cores) as pool:
            futures = [pool.submit(self.run_chain, chain, progress, done) for chain in chains]
            try:
                for future in concurrent.futures.as_completed(futures):
                    outcomes += future.result()
            finally:
                for future in futures:
                    future.cancel()
                if not all(future.done() for future in futures):
                    self.stop()
        return outcomes
