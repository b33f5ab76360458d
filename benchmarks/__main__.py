"""Runs the questions named, or all: `python -m benchmarks [--quick] [question ...]`."""

from __future__ import annotations

import argparse
import importlib

QUESTIONS = ("engine", "block", "file_commit", "open_store", "adamw")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smallest case of every question")
    parser.add_argument("question", nargs="*", help=f"of {', '.join(QUESTIONS)}; default all")
    args = parser.parse_args()
    for name in args.question or QUESTIONS:
        if name not in QUESTIONS:
            parser.error(f"no question {name!r}: choose from {', '.join(QUESTIONS)}")
        importlib.import_module(f"benchmarks.{name}").main(quick=args.quick)


if __name__ == "__main__":
    main()
