"""Runs the crash tests.

    python -m crashtests                           images, kills, faults of all workloads
    python -m crashtests --only write_small --model ii
    python -m crashtests --seed 123                one case of any crash test: the number draws it
    python -m crashtests --kind steps --seed 116   one case of that kind
    python -m crashtests --kind steps              as many as a run has

Exit code 1 if anything failed, 130 if it was interrupted. The report is written either way.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from rich.console import Console

from crashtests import built, campaign, cases, jobs
from crashtests.report import Report, commit_id

INTERRUPTED = 130


def say(report: Report, models: tuple[str, ...]) -> None:
    """What came of it, on standard output."""
    path = report.write()
    data = report.as_dict()
    for model, m in data["models"].items():
        if model in models:
            print(f"model ({model}): {m['distinct']:,} distinct images, {m['failures']} failures")
    print(f"kills: {data['kills']['trials']:,}, {data['kills']['failures']} failures")
    print(f"faults: {data['faults']['trials']:,}, {data['faults']['failures']} failures")
    if report.detector:
        print(
            f"stores of the engine: {report.detector['stores']:,}, {report.detector['failures']} "
            "past the seam"
        )
    print(f"{report.seconds:.0f} s{', interrupted' if report.interrupted else ''}; report: {path}")
    if report.failures:
        print(f"FAILED: {report.failures} failures; commit {commit_id()}; images in {jobs.KEPT}")


def main() -> int:
    usual = campaign.Settings()
    parser = argparse.ArgumentParser(
        prog="python -m crashtests",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--kind", choices=cases.KINDS)
    parser.add_argument("--seed", type=int, help="of a case")
    parser.add_argument("--cases", type=int, help="from that seed on; default: one")
    parser.add_argument("--size", type=int, help="of a case")
    parser.add_argument("--seconds", type=float, help="then no further case begins")
    parser.add_argument(
        "--images", type=int, default=usual.images, help="distinct images to check per model"
    )
    parser.add_argument("--model", action="append", choices=campaign.MODELS, help="default: all")
    parser.add_argument("--only", action="append", default=[], help="workload; words of a case")
    parser.add_argument(
        "--kill-step", type=int, default=usual.kill_step, help="kill at every nth primitive"
    )
    parser.add_argument(
        "--fault-step", type=int, default=usual.fault_step, help="fail every nth system call"
    )
    parser.add_argument(
        "--stop-after", type=int, default=usual.stop_after, help="failures of one job"
    )
    parser.add_argument("--cores", type=int, default=usual.cores, help="0: all")
    a = parser.parse_args()
    built.extension()
    if a.kind or a.seed is not None:
        count = a.cases or (None if a.seed is None else 1)
        workers = a.cores or os.cpu_count() or 1
        return cases.run(
            cases.Settings(a.kind, a.seed or 0, count, a.size, a.seconds, tuple(a.only), workers)
        )
    models = tuple(a.model or usual.models)
    settings = campaign.Settings(
        models,
        a.images,
        usual.seed,
        tuple(a.only),
        a.kill_step,
        a.fault_step,
        a.stop_after,
        a.cores,
    )
    # also where a shell's background job would ignore the first
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        report = campaign.run(settings, Console(stderr=True))
    except ValueError as error:
        parser.error(str(error))
    say(report, models)
    return 1 if report.failures else INTERRUPTED if report.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
