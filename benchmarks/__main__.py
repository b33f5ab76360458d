"""Runs the questions named, or all: `python -m benchmarks [--quick] [question ...]`."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time

from benchmarks.harness import Budget, TimeUp, report_kept
from benchmarks.runner import QUESTIONS, Ended, run

_AGAIN_SECONDS = 5


def _time_is_up(number: int, frame: object) -> None:
    signal.alarm(_AGAIN_SECONDS)  # a finalizer or a callback that was under way keeps it to itself
    raise TimeUp


def _answer(name: str, quick: bool, seconds: float) -> None:
    """In this process, until it is told to end."""
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _time_is_up)
    module = importlib.import_module(f"benchmarks.{name}")
    try:
        module.main(quick, Budget(seconds))
    except TimeUp:
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        report_kept(name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest case of every question")
    parser.add_argument(
        "--results", action="store_true", help="write results.json.gz and RESULTS.md afterwards"
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="run nothing: write RESULTS.md from results.json.gz, print all rows of the questions",
    )
    parser.add_argument(
        "--here", action="store_true", help="in this process, without an end by force"
    )
    parser.add_argument(
        "--seconds", type=float, help="for each question; default: its share of a run's time"
    )
    parser.add_argument("question", nargs="*", help=f"of {', '.join(QUESTIONS)}; default all")
    args = parser.parse_args()
    names = args.question or list(QUESTIONS)
    for name in names:
        if name not in QUESTIONS:
            parser.error(f"no question {name!r}: choose from {', '.join(QUESTIONS)}")
    if args.report:
        from benchmarks import results  # loads numpy, which not every question wants

        print(f"wrote {results.report()}")
        for name in args.question:
            print(results.all_rows(name))
        return 0
    if args.here:
        for name in names:
            _answer(name, args.quick, args.seconds or QUESTIONS[name].share(args.quick))
        return 0
    start = time.monotonic()
    ends = run(names, args.quick, args.seconds)
    print(f"\n{time.monotonic() - start:.0f} s; load {os.getloadavg()[0]:.1f}")
    if args.results:
        from benchmarks import results

        print(f"wrote {results.write()}")
    for ended in (Ended.OUT_OF_TIME, Ended.FAILED):
        if such := [name for name, how in ends.items() if how is ended]:
            print(f"{ended.value}: {', '.join(such)}")
    return 1 if Ended.FAILED in ends.values() else 0


if __name__ == "__main__":
    sys.exit(main())
