"""Runs the crash tests.

    python -m crashtests                     quick: what `make crashtest` runs
    python -m crashtests --images 1000000    per model: `make crashtest-long`
    python -m crashtests --only write_small --model ii --seed 7

Exit code 1 if anything failed. The report is written either way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crashtests import jobs, training
from crashtests.report import Report, commit_id

# In which domains a model means something. Prefixes cover every domain: a process may die in each of them.
MODEL_DOMAINS = {"i": ("process", "emulated", "file"), "ii": ("emulated",), "iii": ("file",), "iv": ("emulated", "file")}

KILLS = 60
"""Of a workload, about and at most, unless it is killed at every primitive."""


def plan(
    names: list[str], trained: list[str], models: list[str], images: int, seed: int, kill_step: int, fault_step: int, stop: int
) -> list[jobs.Chain]:
    """Longest first, so that no core waits for a straggler. The workloads with the most images are the last in the table:
    they get what the others have not."""
    chains = []
    common = {"seed": seed, "stop-after": stop}
    for model in sorted((m for m in models if m in MODEL_DOMAINS), key=lambda m: len(MODEL_DOMAINS[m])):
        for domain in MODEL_DOMAINS[model]:
            options = common | {"nested-every": 40}
            of = [jobs.Job("images", name, domain, model, options) for name in names]
            of[-3:-3] = [training.job(name, domain, model, options) for name in trained]  # the mixtures are last
            chains.append(jobs.Chain(tuple(of), -(-images // len(MODEL_DOMAINS[model]))))
    for mode, step in (("kill", kill_step), ("fault", fault_step)):
        if mode in models and step:
            options = common | {"step": step} | ({"most": KILLS} if mode == "kill" and step > 1 else {})
            chains += [jobs.Chain((jobs.Job(mode, n, d, "", options),)) for d in jobs.DOMAINS for n in reversed(names)]
    return chains


def run(arguments: argparse.Namespace, console: Console) -> Report:
    report = Report(arguments.seed)
    start = time.monotonic()
    program = jobs.build()
    trained = [f"train_{name}" for name in training.PROGRAMS] if training.available() else []
    every = [*jobs.workloads(program), *trained]
    names = [n for n in every if not arguments.only or n in arguments.only]
    if not names:
        raise SystemExit(f"no such workload; there are: {' '.join(every)}")
    trained = [n.removeprefix("train_") for n in names if n in trained and MODEL_DOMAINS.keys() & set(arguments.model)]
    if trained:
        training.record()
        training.verify(program)
    planned = plan(
        [n for n in names if not n.startswith("train_")],
        trained,
        arguments.model,
        arguments.images,
        arguments.seed,
        arguments.kill_step,
        arguments.fault_step,
        arguments.stop_after,
    )
    jobs.KEPT.mkdir(parents=True, exist_ok=True)
    for old in jobs.KEPT.glob("*.pm"):
        old.unlink()
    expected: dict[str, int] = defaultdict(int)
    for chain in planned:
        expected[chain.jobs[0].model or chain.jobs[0].mode] += chain.images
    columns = (TextColumn("{task.description:>6}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    room = 1 << max(20, (arguments.images * 5).bit_length())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar, jobs.Runner(program, room=room) as runner:
        tasks = {name: bar.add_task(name, total=total or None) for name, total in expected.items()}

        def progress(job: jobs.Job, n: int) -> None:
            bar.advance(tasks[job.model or job.mode], n)

        def done(outcome: jobs.Outcome) -> None:
            for failure in outcome.failures:
                say = f"FAILED ({outcome.job.model or outcome.job.mode}) {outcome.job.workload} {outcome.job.domain}"
                console.print(f"{say}: {json.dumps(failure)}", soft_wrap=True, markup=False, highlight=False)

        report.outcomes = runner.run_all(planned, progress, done)
    if "detect" in arguments.model:
        outcomes = jobs.detect()
        report.detector = {
            "stores": sum(o.result.get("stores", 0) for o in outcomes),
            "failures": sum(len(o.failures) for o in outcomes),
        }
        for failure in (failure for o in outcomes for failure in o.failures):
            console.print(f"FAILED (detector): {json.dumps(failure)}", soft_wrap=True, markup=False, highlight=False)
    report.seconds = time.monotonic() - start
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m crashtests", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    every = [*MODEL_DOMAINS, "kill", "fault", "detect"]
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--images", type=int, default=50_500, help="distinct images to check per model")
    parser.add_argument("--model", action="append", choices=every, help="default: all")
    parser.add_argument("--only", action="append", help="workload")
    parser.add_argument("--kill-step", type=int, default=7, help="kill at every nth primitive")
    parser.add_argument("--fault-step", type=int, default=2, help="fail every nth system call")
    parser.add_argument("--stop-after", type=int, default=5, help="failures of one job")
    arguments = parser.parse_args()
    arguments.model = arguments.model or every
    console = Console(stderr=True)
    report = run(arguments, console)
    path = report.write()
    data = report.as_dict()
    for model, m in data["models"].items():
        if model in arguments.model:
            print(f"model ({model}): {m['distinct']:,} distinct images, {m['failures']} failures")
    print(f"kills: {data['kills']['trials']:,}, {data['kills']['failures']} failures")
    print(f"faults: {data['faults']['trials']:,}, {data['faults']['failures']} failures")
    if report.detector:
        print(f"stores of the engine: {report.detector['stores']:,}, {report.detector['failures']} past the seam")
    print(f"{report.seconds:.0f} s; report: {path}")
    if report.failures:
        print(f"FAILED: {report.failures} failures; seed {report.seed}, commit {commit_id()}; images in {jobs.KEPT}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
