"""`python -m tests.programs`: all programs, with progress, and a table at the end."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace

from pmstore.testing import ForkServer
from tests import parallel

from . import harness, registry


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    asked.add_argument("words", nargs="*", help="only programs whose names contain one of them")
    asked.add_argument("--quick", action="store_true", help="the short choice of `make test`")
    asked.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    asked.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked.add_argument("--stops", nargs="*", default=registry.STOPS, help="only these kinds")
    given = asked.parse_args()
    chosen = [
        one
        for one in registry.load().values()
        if (one.quick or not given.quick)
        and (not given.words or any(word in one.name for word in given.words))
    ]
    began = time.monotonic()

    def examine(program: registry.Program, server: ForkServer) -> harness.Report:
        stops = tuple(one for one in program.stops if one in given.stops)
        report = harness.examine(replace(program, stops=stops), server, given.seed)
        print(_line(report), flush=True)
        return report

    reports = list(parallel.reports(examine, chosen, harness.server, given.jobs))
    wrong = [report for report in reports if report.problems]
    kinds = {one.kind for one in chosen}
    print(
        f"{len(reports)} programs of {len(kinds)} kinds in {time.monotonic() - began:.0f} s: "
        f"{sum(report.kills for report in reports)} kills, "
        f"{sum(report.in_step for report in reports)} kills and stops known to be within a step, "
        f"{sum(report.resumed for report in reports)} resumed lives; {len(wrong)} are wrong"
    )
    for report in wrong:
        for problem in report.problems:
            print(f"{report.name}: {problem}")
    return bool(wrong)


def _line(report: harness.Report) -> str:
    verdict = "WRONG" if report.problems else "same bits"
    return (
        f"{report.name:<28} {report.domain:<9} {report.lives:>3} lives {report.kills:>3} kills "
        f"{report.seconds:>6.1f} s  {verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
