"""`make nightly WHAT=crashtest-long`: rounds of the crash tests, each with a seed of its own, until
every model has had its images.

    python -m crashtests.long --images 1000000
    python -m crashtests.long --report         what was done so far

Images of earlier rounds count once. After each round, and when it is interrupted (Ctrl-C, SIGTERM),
it writes down what was done; started again, it goes on from there, unless engine or crash tests are
others now: then it begins anew. At the end each workload is killed at every primitive, and each of
its system calls fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from crashtests import built, campaign, jobs
from crashtests.__main__ import INTERRUPTED, say
from crashtests.report import Report

FOLDER = jobs.BUILD / "long"
STATE = FOLDER / "state.json"
IMAGES = tuple(campaign.MODEL_DOMAINS)
ROUND = 50_500


def sources() -> str:
    """A digest of what is tested, and of what tests it."""
    digest = hashlib.sha256()
    tests = [
        path
        for folder in ("crashtests/native", "crashtests")
        for path in sorted((jobs.ROOT / folder).glob("*.[chp]*"))
    ]
    for path in [*built.engine_sources(), *tests]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@dataclass
class Progress:
    sources: str
    rounds: int = 0
    seconds: float = 0.0
    finished: list[str] = field(default_factory=list)
    """kill, fault, detect"""
    detector: dict[str, int] | None = None
    outcomes: dict[str, jobs.Outcome] = field(default_factory=dict)
    """of each job, over all rounds"""

    def add(self, report: Report) -> None:
        self.seconds += report.seconds
        self.detector = report.detector or self.detector
        for new in report.outcomes:
            job = jobs.Job(*new.job.key())
            old = self.outcomes.setdefault(" ".join(job.key()), jobs.Outcome(job, {}, []))
            old.failures += new.failures
            for key, value in new.result.items():
                old.result[key] = old.result.get(key, 0) + value

    def report(self) -> Report:
        return Report(
            1, self.seconds, list(self.outcomes.values()), self.detector, rounds=self.rounds
        )

    def distinct(self, model: str) -> int:
        return sum(
            o.result.get("distinct", 0) for o in self.outcomes.values() if o.job.model == model
        )

    def save(self) -> None:
        said = {key: [vars(o.job), o.result, o.failures] for key, o in self.outcomes.items()}
        FOLDER.mkdir(parents=True, exist_ok=True)
        new = STATE.with_suffix(".new")
        new.write_text(json.dumps(vars(self) | {"outcomes": said}))
        new.replace(STATE)


def load() -> Progress | None:
    if not STATE.exists():
        return None
    said: dict[str, Any] = json.loads(STATE.read_text())
    said["outcomes"] = {
        key: jobs.Outcome(jobs.Job(**job), *rest) for key, (job, *rest) in said["outcomes"].items()
    }
    return Progress(**said)


def begin() -> Progress:
    now, old = sources(), load()
    if old and old.sources == now:
        print(f"going on after {old.rounds} rounds ({old.seconds:.0f} s)")
        return old
    if old:
        print("engine or crash tests are others than those of the last run: beginning anew")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    return Progress(now)


def run(wanted: int, cores: int, console: Console) -> tuple[Progress, bool]:
    """False: interrupted. Raises: RuntimeError: a round found no new images."""
    progress, recorded = begin(), False
    room = 1 << max(20, (wanted * 5).bit_length())
    while missing := [m for m in IMAGES if progress.distinct(m) < wanted]:
        before = sum(map(progress.distinct, IMAGES))
        number = progress.rounds + 1
        images = min(ROUND, max(wanted - progress.distinct(m) for m in missing))
        settings = campaign.Settings(
            tuple(missing), images, number, cores=cores, seen=FOLDER, room=room, record=not recorded
        )
        report = campaign.run(settings, console)
        recorded = True
        progress.rounds = number
        progress.add(report)
        progress.save()
        done = ", ".join(f"({m}) {progress.distinct(m):,}" for m in IMAGES)
        console.print(f"round {number}, {progress.seconds:.0f} s: {done}", highlight=False)
        if report.interrupted:
            return progress, False
        if sum(map(progress.distinct, IMAGES)) == before:
            raise RuntimeError("a round has found no image that was not there before")
    for part in ("kill", "fault", "detect"):
        if part in progress.finished:
            continue
        report = campaign.run(
            campaign.Settings((part,), kill_step=1, fault_step=1, cores=cores), console
        )
        if report.interrupted:
            return progress, False
        progress.add(report)
        progress.finished.append(part)
        progress.save()
    return progress, True


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m crashtests.long",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--images", type=int, default=1_000_000, help="distinct ones, of each model"
    )
    parser.add_argument("--cores", type=int, default=0, help="0: all")
    parser.add_argument("--report", action="store_true", help="only say what was done so far")
    arguments = parser.parse_args()
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # also where a shell's background job would ignore the first
        signal.signal(number, signal.default_int_handler)
    if arguments.report:
        progress, whole = load() or Progress(""), True
    else:
        progress, whole = run(arguments.images, arguments.cores, Console(stderr=True))
    report = progress.report()
    report.interrupted = not whole
    say(report, IMAGES)
    if not whole:
        print("started again, it goes on from here")
    return 1 if report.failures else 0 if whole else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
