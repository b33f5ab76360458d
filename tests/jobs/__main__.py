"""`python -m tests.jobs`: all jobs, with progress, and a table at the end."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests import parallel

from . import harness, registry
from .server import JobServer

DOMAINS = ("process", "emulated", "file")


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.jobs", description=__doc__)
    asked.add_argument("words", nargs="*", help="only jobs whose names contain one of them")
    asked.add_argument("--kills", type=int, default=702, help="in all (default 702)")
    asked.add_argument("--seed", type=int, default=0, help="of the kills (default 0)")
    asked.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    asked.add_argument("--domains", nargs="*", default=DOMAINS)
    given = asked.parse_args()
    chosen = [
        (one, domain)
        for one in (registry.load() | registry.JOBS).values()
        if (any(word in one.name for word in given.words) if given.words else not one.faulty)
        for domain in given.domains
        if domain != "file" or not one.memory
    ]
    kills = -(-given.kills // max(1, len(chosen)))
    began = time.monotonic()

    def examine(what: tuple[registry.Job, str], server: JobServer) -> harness.Report:
        report = harness.examine(what[0], server, what[1], kills, given.seed)
        print(line(report), flush=True)
        return report

    reports = list(parallel.reports(examine, chosen, JobServer, given.jobs))
    wrong = [report for report in reports if report.problems]
    total = {
        name: sum(getattr(report, name) for report in reports)
        for name in ("kills", "all_at_once", "while_joining", "going_back", "apart")
    }
    print(
        f"{len(reports)} jobs in {time.monotonic() - began:.0f} s, "
        f"{sum(report.lives for report in reports)} lives: {total['kills']} kills "
        f"({total['all_at_once']} all at once, {total['while_joining']} while joining, "
        f"{total['going_back']} of them while going back); {total['apart']} left ranks apart; "
        f"{sum(report.joins for report in reports)} joins, at {sum(r.lost for r in reports)} a "
        f"generation was lost; {sum(r.raised for r in reports)} ranks raised; "
        f"{len(wrong)} are wrong"
    )
    for report in wrong:
        for problem in report.problems:
            print(f"{report.name} {report.domain}: {problem}")
    return bool(wrong)


def line(report: harness.Report) -> str:
    verdict = "WRONG" if report.problems else "same bits"
    return (
        f"{report.name:<26} {report.domain:<9} {report.lives:>3} lives {report.joins:>3} joins "
        f"{report.kills:>3} kills {report.apart:>3} apart {report.going_back:>2} back "
        f"{report.seconds:>6.1f} s  {verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
