"""Runs questions one after the other, each in a process of its own: no failure of one stops the
others, none runs for ever, and nothing is left on tmpfs or disk, whatever was killed.

A question that ends badly leaves its JSON too, with the words it ended with; RESULTS.md says so.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import ROOT, RUN_VARIABLE, SCRATCH_PREFIX

ALL_SECONDS, QUICK_SECONDS = 32 * 60, 242
"""What the shares of all questions are at most. What one goes on after its share the later ones
give."""

OVER_SECONDS = 40.0
"""So much later than that a full run has ended, but for a report of REPORT_SECONDS: the limits of
questions say so."""
LEFT_TO_LATER = 0.8
"""Of their shares, whatever the ones before do."""

SLACK_SECONDS = 20.0
REPORT_SECONDS = 60.0
"""Of a question that was told to end. One that does not has failed."""


@dataclass(frozen=True, slots=True)
class Question:
    """seconds, quick_seconds: its share of a run. It makes as many rounds as fit in it. rooms: of
    pmstore, whose speed it is about, beside the engine's; spaces between them."""

    name: str
    seconds: float
    quick_seconds: float
    rooms: str

    @property
    def about(self) -> list[str]:
        """Files and folders: when they change, figures are stale."""
        rooms = [f"pmstore/{room}" for room in self.rooms.split()]
        return ["native", *rooms, f"benchmarks/{self.name}.py"]

    def share(self, quick: bool) -> float:
        return self.quick_seconds if quick else self.seconds


_SHARES = {
    "iterations": (200, 8, "objects"),
    "kills": (110, 10, "objects"),
    "engine": (40, 18, ""),
    "training": (135, 8, "torch"),
    "small_steps": (50, 10, "torch"),
    "slots": (48, 6, "objects torch"),
    "restart": (222, 14, "torch"),
    "growth": (78, 6, "objects"),
    "scale": (60, 20, "objects tiers"),
    "key_value": (8, 5, "objects"),
    "containers": (28, 4, "objects"),
    "instructions": (10, 10, ""),
    "scheduler": (170, 8, "scheduler"),
    "scheduler_kills": (110, 10, "scheduler torch"),
    "tiers": (106, 8, "tiers"),
    "beside": (60, 10, "objects"),
    "job_commits": (60, 12, "job torch"),
    "job_restart": (120, 25, "job torch"),
    "frameworks": (120, 30, "integrations torch"),
    "checkpoints": (150, 20, "dcp"),
}
QUESTIONS = {name: Question(name, *seconds) for name, seconds in _SHARES.items()}


class Ended(Enum):
    ANSWERED = "answered"
    OUT_OF_TIME = "out of time, with the rounds that it had"
    FAILED = "failed"


def run(names: Sequence[str], quick: bool, seconds: float | None = None) -> dict[str, Ended]:
    """Runs them, with so many seconds each, or their shares: how each ended. One's limit is half as
    much again as its share, and what a start takes on a busy machine; in a full run less, if the
    later ones would lose more than a fifth of theirs."""
    ends = time.monotonic() + (QUICK_SECONDS if quick else ALL_SECONDS)
    found = {}
    with _reaper() as tell:
        for i, name in enumerate(names):
            share, limit = _share_and_limit(names[i:], ends - time.monotonic(), quick)
            if seconds is not None:
                share, limit = seconds, 1.5 * seconds + SLACK_SECONDS
            found[name] = _run_one(QUESTIONS[name], quick, share, limit, tell)
    return found


def _share_and_limit(names: Sequence[str], left: float, quick: bool) -> tuple[float, float]:
    """Seconds of the first of the questions that are waiting."""
    first, *later = (QUESTIONS[name].share(quick) for name in names)
    scale = min(1.0, max(left, 0.0) / (first + sum(later)))
    if quick:
        return scale * first, 1.5 * scale * first + SLACK_SECONDS
    limit = min(1.5 * first + SLACK_SECONDS, left + OVER_SECONDS - LEFT_TO_LATER * sum(later))
    return scale * first, limit


def sweep(run_name: str) -> None:
    """Removes what a run that is dead has left on tmpfs and in the temporary directory."""
    for base in ("/dev/shm", tempfile.gettempdir()):
        for path in Path(base).glob(f"{SCRATCH_PREFIX}{run_name}-*"):
            shutil.rmtree(path, ignore_errors=True)


def _run_one(question: Question, quick: bool, share: float, limit: float, tell: Tell) -> Ended:
    """share, limit: seconds. At its limit it is told to end, and later ended by force."""
    for kind in ("json", "png"):
        (harness.OUT / f"{question.name}.{kind}").unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--here",
        f"--seconds={share}",
        *(["--quick"] if quick else []),
        question.name,
    ]
    start, busy = time.monotonic(), _cpu_seconds()
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {RUN_VARIABLE: str(os.getpid())},
            stderr=words,
            start_new_session=True,
        )
        tell.running(process.pid)
        told = False
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            told = True
            process.terminate()  # it reports what it has
            with suppress(subprocess.TimeoutExpired):
                process.wait(REPORT_SECONDS)
            status = process.poll()
        finally:
            kill_group(process.pid)  # also what it started and left
            process.wait()
            tell.running(0)
            sweep(str(os.getpid()))
        words.seek(0)
        said = words.read()
    # One that has written its results has answered, even if something that it started did not let
    # it end.
    if status == 0 or (harness.OUT / f"{question.name}.json").exists():
        seconds, busy = time.monotonic() - start, _cpu_seconds() - busy
        print(
            f"  ({question.name}: {seconds:.0f} s of {share:.0f} s, {busy:.0f} s of processor "
            f"time{', out of time' if told else ''})",
            flush=True,
        )
        return Ended.OUT_OF_TIME if told else Ended.ANSWERED
    print("".join(said.splitlines(keepends=True)[-30:]), file=sys.stderr, flush=True)
    last = said.strip().splitlines()[-1:] or ["no words"]
    ended = Ended.FAILED
    why = f"ended with status {status}: {last[0]}"
    if told and status == -signal.SIGTERM:  # before it had begun
        ended, why = (
            Ended.OUT_OF_TIME,
            f"its limit of {limit:.3g} s was over before its first round",
        )
    elif told:
        why = f"did not end within {REPORT_SECONDS:.0f} s after its limit of {limit:.3g} s"
    print(f"\n== {question.name}: NOT ANSWERED: {why}", flush=True)
    harness.write_json(question.name, question.name, failure=why, quick=quick)
    return ended


def _cpu_seconds() -> float:
    """Of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def kill_group(group: int) -> None:
    """SIGKILL to the processes of a group, if any are left."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


# ---- what outlives a kill of the runner ----


class Tell:
    """Says to the reaper which group of processes is running."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def running(self, group: int) -> None:
        os.write(self._pipe, f"{group}\n".encode())


@contextmanager
def _reaper() -> Iterator[Tell]:
    """A process that waits for the end of this one, by whatever cause, and then ends and removes
    what it left."""
    command = [sys.executable, "-m", "benchmarks.runner", str(os.getpid())]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    try:
        yield Tell(process.stdin.fileno())
    finally:
        process.stdin.close()
        process.wait()


def _reap(run_name: str) -> None:
    group = 0
    for line in sys.stdin:  # ends when the runner has ended: the pipe's other end is its alone
        group = int(line)
    if group:
        kill_group(group)
    sweep(run_name)


if __name__ == "__main__":
    _reap(sys.argv[1])
