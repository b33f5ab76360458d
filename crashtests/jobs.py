"""The native program `crash`: building it, and running its jobs in parallel."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
    """One run of the program: one workload, in one domain, under one model (or killed, or with failing system calls)."""

    mode: str
    """images, kill or fault"""
    workload: str
    domain: str
    model: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def command(self, program: Path, scratch: Path, seen: Path | None) -> list[str]:
        words = [str(program), self.mode, "--workload", self.workload, "--domain", str(DOMAINS[self.domain])]
        if self.model:
            words += ["--model", str(MODELS[self.model]), "--seen", str(seen), "--keep", str(KEPT)]
        for key, value in self.options.items():
            words += [f"--{key}", str(value)]
        return [*words, "--scratch", str(scratch)]


@dataclass
class Outcome:
    job: Job
    result: dict[str, int]
    failures: list[dict[str, Any]]


def build(
    source: Path | None = None, target: Path = BUILD, *, flags: str = "-O2 -g", detector: bool = False, coverage: bool = False
) -> Path:
    """Compiles the program over the engine in `source`. Raises CalledProcessError with the compiler's words."""
    command = [
        "make",
        "-s",
        f"-j{os.cpu_count()}",
        "-C",
        str(ROOT / "crashtests" / "native"),
        f"BUILD={target}",
        f"CFLAGS={flags}",
    ]
    if source is not None:
        command.append(f"SRC={source}")
    if detector:
        command.append("DETECT=1")
    if coverage:
        command.append("COVERAGE=1")
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target / "crash"


def detect(source: Path | None = None, target: Path = BUILD / "detector", only: str = "") -> list[Outcome]:
    """Runs every workload once on an engine whose stores are all seen: those into the pool have to go through the seam."""
    program = build(source, target, flags="-O1 -g", detector=True)
    with Runner(program) as runner:
        planned = [Job("detect", name, "emulated") for name in workloads(program) if only in ("", name)]
        return runner.run_all(planned, lambda job, n: None)


def workloads(program: Path) -> list[str]:
    return subprocess.run([program, "list"], check=True, capture_output=True, text=True).stdout.split()


def symbolise(program: Path, failure: dict[str, Any]) -> None:
    """Addresses of the last primitive before the crash become functions and lines."""
    sites = [site for site in failure.get("sites", []) if site != "(nil)"]
    if not sites or not shutil.which("addr2line"):
        return
    out = subprocess.run(["addr2line", "-s", "-f", "-p", "-e", str(program), *sites], capture_output=True, text=True).stdout
    failure["sites"] = out.splitlines()


class Runner:
    """Runs jobs, as many at a time as there are cores. Each model has one table of the images seen, shared by its jobs."""

    def __init__(self, program: Path, *, cores: int | None = None, room: int = 1 << 20) -> None:
        self.program = program
        self.cores = cores or os.cpu_count() or 1
        self._room_bytes = room * 16
        self._folder = Path(tempfile.mkdtemp(prefix="pmstore-crash-", dir=MEMORY))
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[str]] = set()
        self._stopping = False

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            for child in self._children:
                child.kill()

    def _seen(self, model: str) -> Path:
        path = self._folder / f"seen-{model}"
        with self._lock:
            if not path.exists():
                with path.open("wb") as file:
                    file.truncate(self._room_bytes)
        return path

    def run(self, job: Job, progress: Callable[[int], None] = lambda _: None) -> Outcome:
        seen = self._seen(job.model) if job.model else None
        scratch = Path(tempfile.mkdtemp(dir=self._folder)) / "x"
        outcome = Outcome(job, {}, [])
        with self._lock:
            if self._stopping:
                return outcome
            child = subprocess.Popen(job.command(self.program, scratch, seen), stdout=subprocess.PIPE, text=True)
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
        finished = outcome.result.get("images", outcome.result.get("trials", done))
        progress(finished - done)
        if not self._stopping and (code not in (0, 1) or not outcome.result) and not outcome.failures:
            outcome.failures.append(
                {"how": "harness", "message": f"the program ended with status {code}", "workload": job.workload}
            )
        return outcome

    def run_all(
        self, jobs: Iterable[Job], progress: Callable[[Job, int], None], done: Callable[[Outcome], bool] = lambda _: True
    ) -> list[Outcome]:
        """done: called after each job; False ends the run early."""
        outcomes = []
        with concurrent.futures.ThreadPoolExecutor(self.cores) as pool:
            futures = [pool.submit(self.run, job, lambda n, job=job: progress(job, n)) for job in jobs]  # type: ignore[misc]
            try:
                for future in concurrent.futures.as_completed(futures):
                    outcomes.append(future.result())
                    if not done(outcomes[-1]):
                        break
            finally:
                for future in futures:
                    future.cancel()
                if len(outcomes) < len(futures):
                    self.stop()
        return outcomes
