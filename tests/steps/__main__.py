"""`python -m tests.steps`: many programs, with progress, and a table at the end."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from jobs.server import JobServer

from tests import parallel

from . import harness
from .drawing import draw


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.steps", description=__doc__)
    asked.add_argument("--programs", type=int, default=400, help="how many (default 400)")
    asked.add_argument("--seed", type=int, default=0, help="of the first one (default 0)")
    asked.add_argument("--kills", type=int, default=6, help="and ends of each (default 6)")
    asked.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    asked.add_argument("--seconds", type=float, default=None, help="then no further one begins")
    given = asked.parse_args()
    began = time.monotonic()

    def examine(seed: int, server: JobServer) -> harness.Report | None:
        if given.seconds is not None and time.monotonic() - began > given.seconds:
            return None
        report = harness.examine(draw(seed), server, given.kills)
        verdict = "WRONG" if report.problems else "same bits"
        ends = report.ends.total()
        counted = f"{report.lives} lives, {ends} ends, {report.seconds:.1f} s"
        print(f"{report.program}: {counted}  {verdict}", *report.problems, sep="\n    ", flush=True)
        return report

    seeds = range(given.seed, given.seed + given.programs)
    examined = parallel.reports(examine, seeds, harness.server, given.jobs)
    reports = [one for one in examined if one is not None]
    ends = sum((report.ends for report in reports), Counter[str]())
    wrong = [report.program.seed for report in reports if report.problems]
    print(
        f"{len(reports)} programs in {time.monotonic() - began:.0f} s, "
        f"{sum(report.lives for report in reports)} lives, {ends.total()} ends: "
        f"{', '.join(f'{count} {kind}' for kind, count in sorted(ends.items()))}; "
        f"{len(wrong)} are wrong {wrong or ''}"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
