"""Stress test: programs that do everything at once to a store, killed again and again, and an
oracle beside it.

    python -m crashtests.stress --seconds 60
    python -m crashtests.stress --kills 10000 --seconds 3600
    python -m crashtests.stress --only counters --domain file --seed 7
    python -m crashtests --kind stress --seed 7      one store

It ends when the time is over and there were so many kills and rounds, or at --failures failures.
What goes on depends on the seed as far as threads and times do. Exit code 1 if anything failed, 130
if it was interrupted. Stores of failures are kept in build/stress/failures, with what was expected
and found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from crashtests import cases
from crashtests.stress import lane, scenarios
from crashtests.stress.lane import Count, Failure, Lane, Place
from crashtests.stress.life import adopt, end_with_parent
from crashtests.stress.unit import TORCH

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "stress"
INTERRUPTED = 130
SAY_SECONDS = 10.0
ENDING = {signal.SIGINT, signal.SIGTERM}


def begin_lane(
    number: int, a: argparse.Namespace, place: Place, end: float, pipes: dict[int, int]
) -> None:
    """Forks a lane. pipes: gets a pipe of lines, counts and failures, and the lane's pid.

    An interrupt comes before or after: what Python calls at a fork would swallow it. A lane ends
    at SIGTERM, and its lives with it.
    """
    reading, writing = os.pipe()
    parent, pid = os.getpid(), -1
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        pid = os.fork()
        if pid:
            pipes[reading] = pid
    finally:
        if pid:
            os.close(writing)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    if pid:
        return
    kills = failures = 0

    def tell(count: Count, failure: Failure | None) -> bool:
        nonlocal kills, failures
        kills += count.kills
        failures += failure is not None
        line = json.dumps([asdict(count), asdict(failure) if failure else None]) + "\n"
        os.write(writing, line.encode())
        return bool(failures >= a.failures)

    def until() -> bool:
        return bool(time.monotonic() >= end and kills >= a.kills / a.lanes)

    code = 1
    try:
        end_with_parent(parent)
        os.close(reading)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        seed = f"{a.seed}/{number}"
        chosen = scenarios.named(a.only)
        hot = [True, False] if a.hot is None else [a.hot]
        every = lane.tracks(chosen, a.domain, hot, random.Random(f"{seed}/tracks"))
        if a.case is not None:
            every = iter([lane.drawn(a.case)[1]])
        Lane(place, a.lives, tell).run(every, a.rounds * len(chosen), until)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        lane.leave(code)


def gather(
    pipes: dict[int, int], began: float, failures: int, total: Count, found: list[Failure]
) -> None:
    """Reads what the lanes tell until all have ended, into `total` and `found`, and says how it
    goes."""
    partial = dict.fromkeys(pipes, b"")
    said = began
    while partial:
        for pipe in select.select(list(partial), [], [], 1.0)[0]:
            data = os.read(pipe, 1 << 20)
            if not data:
                del partial[pipe]
                continue
            *lines, partial[pipe] = (partial[pipe] + data).split(b"\n")
            for line in lines:
                count, failure = json.loads(line)
                total.add(Count(**count))
                if failure:
                    found.append(Failure(**failure))
                    print(
                        f"FAILED after {time.monotonic() - began:.1f} s, {total.kills} kills: "
                        f"{short(found[-1])}",
                        flush=True,
                    )
        if len(found) >= failures:
            for pid in pipes.values():
                os.kill(pid, signal.SIGTERM)
        if time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            print(f"{said - began:.0f} s: {words(total)}", flush=True)
        reap(set(pipes.values()))


def reap(lanes: set[int]) -> None:
    """Lets go of what lives have left, and keeps the lanes for `ended`."""
    while True:
        try:
            gone = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if gone is None or gone.si_pid in lanes:
            return
        os.waitpid(gone.si_pid, 0)


def ended(lanes: set[int]) -> list[int]:
    """Waits for the lanes, and for lives that they left. Returns the exit codes of the lanes."""
    codes = []
    with suppress(ChildProcessError):
        while True:
            pid, status = os.wait()
            if pid in lanes:
                codes.append(os.waitstatus_to_exitcode(status))
    return codes


def short(failure: Failure) -> str:
    return f"{failure.track}, life {failure.life}: {failure.text.splitlines()[0][:400]}"


def words(count: Count) -> str:
    return (
        f"{count.kills:,} kills ({count.at_primitives:,} at primitives, {count.power_failures:,} "
        f"with power), {count.commits:,} commits acknowledged, {count.reads:,} reads and "
        f"{count.opens:,} opens checked, {count.failures} failures"
    )


def run(a: argparse.Namespace) -> int:
    BUILD.mkdir(parents=True, exist_ok=True)
    kept = BUILD / "failures" / f"{time.strftime('%m%d-%H%M%S')}-{os.getpid()}"
    began = time.monotonic()
    print(
        f"seed {a.seed}, Python {sys.version.split()[0]}, {'with' if TORCH else 'no'} torch",
        flush=True,
    )
    interrupted = False
    adopt()
    with (
        tempfile.TemporaryDirectory(prefix="pmstore-stress-", dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(prefix="stores-", dir=BUILD) as disk,
    ):
        place = Place(Path(memory), Path(disk), kept)
        pipes: dict[int, int] = {}
        total, found = Count(), list[Failure]()
        try:
            for number in range(a.lanes):
                begin_lane(number, a, place, began + a.seconds, pipes)
            gather(pipes, began, a.failures, total, found)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            for pid in pipes.values():
                os.kill(pid, signal.SIGTERM)
            if not interrupted:
                raise
        finally:
            codes = ended(set(pipes.values()))
    seconds = time.monotonic() - began
    report = {
        "seed": a.seed,
        "seconds": round(seconds, 1),
        **asdict(total),
        "found": [asdict(f) for f in found],
    }
    (BUILD / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{seconds:.0f} s: {words(total)}")
    for scenario, kills in sorted(total.by_scenario.items()):
        print(f"  {scenario}: {kills:,} kills")
    for failure in found:
        print(
            f"FAILED: {failure.track}, life {failure.life}, kept in {failure.kept}\n"
            f"{failure.text[:3000]}\nagain: {cases.command('stress', failure.case, a.lives)}\n"
        )
    if interrupted:
        return INTERRUPTED
    return 1 if found or (any(codes) and not found) else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m crashtests.stress",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=0, help="at least so many")
    parser.add_argument(
        "--rounds",
        type=int,
        default=0,
        help="each lane goes at least so many times through all scenarios",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="this one alone: see `python -m crashtests`")
    parser.add_argument("--only", action="append", default=[], help="a scenario; default: all")
    parser.add_argument("--domain", action="append", default=[], choices=scenarios.DOMAINS)
    parser.add_argument(
        "--hot", action=argparse.BooleanOptionalAction, default=None, help="default: both"
    )
    parser.add_argument(
        "--lanes", type=int, default=os.cpu_count() or 1, help="processes that fork and kill"
    )
    parser.add_argument(
        "--lives", type=int, default=12, help="of one store, before the next one is made"
    )
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    a = parser.parse_args()
    try:
        scenarios.named(a.only)
    except ValueError as error:
        parser.error(str(error))
    if a.case is not None:
        a.lanes = 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run(a)


if __name__ == "__main__":
    sys.exit(main())
