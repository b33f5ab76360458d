"""Runs the questions named, or all: `python -m benchmarks [--quick] [question ...]`."""

from __future__ import annotations

import argparse
import importlib
import os
import time

QUESTIONS = (
    "iterations",
    "kills",
    "engine",
    "training",
    "restart",
    "growth",
    "key_value",
    "containers",
    "instructions",
    "scheduler",
    "scheduler_kills",
    "tiers",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest case of every question")
    parser.add_argument("--results", action="store_true", help="write benchmarks/RESULTS.md from build/bench/ afterwards")
    parser.add_argument("question", nargs="*", help=f"of {', '.join(QUESTIONS)}; default all")
    args = parser.parse_args()
    start = time.monotonic()
    for name in args.question or QUESTIONS:
        if name not in QUESTIONS:
            parser.error(f"no question {name!r}: choose from {', '.join(QUESTIONS)}")
        before = time.monotonic()
        importlib.import_module(f"benchmarks.{name}").main(quick=args.quick)
        print(f"  ({name}: {time.monotonic() - before:.0f} s)", flush=True)
    print(f"\n{time.monotonic() - start:.0f} s; load {os.getloadavg()[0]:.1f}")
    if args.results:
        from benchmarks.results import write

        print(f"wrote {write()}")


if __name__ == "__main__":
    main()
