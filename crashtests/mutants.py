"""Engines broken on purpose: the crash tests must notice each of them.

    python -m crashtests.mutants [NAME ...]
    python -m crashtests.mutants --drawn COUNT SEED

A mutant is one edit of a copy of `native/`. It is killed when a crash workload fails on it. Those
that nothing can tell from the engine are listed as equivalent, with the reason. Exit code 1 if any
other survives.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from crashtests import built, jobs
from crashtests.mutant_list import MUTANTS, Mutant
from crashtests.report import commit_id

MUTANTS_BUILD = jobs.BUILD.parent / "mutants"
NATIVE = jobs.ROOT / "native"
SOURCE = MUTANTS_BUILD / "source"  # as it was when the run began

# Cheap and telling first. A mutant that survives runs through all of them.
IMAGES = 1500
QUICK = (
    "groups",
    "hot",
    "write_all",
    "roll_back",
    "long_log",
    "replace",
    "born_beside",
    "values",
    "many_commits",
    "grow",
)
REST = (
    "hot_and_back",
    "scattered",
    "allocate",
    "release",
    "declared",
    "threads",
    "born_and_gone",
    "flush",
    "slots_flush",
    "slots",
    "mirrors",
    "list_edits",
    "grow_beside",
    "grow_between",
    "mixture_1",
    "mixture_2",
)
MODEL_OF = {"emulated": "ii", "file": "iii", "process": "iii"}


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    killed_by: str
    """The job and what it said; empty: it survived."""


def pattern(mutant: Mutant) -> re.Pattern[str]:
    """The text to change, however it is laid out: between its words and signs any white space, and
    a comment's next line."""
    return re.compile(
        r"(?:\s|\n\s*\*\s)*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", mutant.old)))
    )


def broken(mutant: Mutant, text: str) -> str:
    return pattern(mutant).sub(lambda found: mutant.new, text)


def stale(mutant: Mutant, folder: Path = NATIVE) -> str:
    """What to say if the text to change is not there exactly once: the engine has changed, and the
    list has to follow."""
    count = len(pattern(mutant).findall((folder / mutant.file).read_text()))
    return (
        "" if count == 1 else f"{mutant.name}: found {count} times in {mutant.file}: {mutant.old!r}"
    )


def apply(mutant: Mutant, target: Path) -> None:
    for path in built.engine_sources(SOURCE):
        link = target / path.relative_to(SOURCE)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    (target / mutant.file).unlink()
    (target / mutant.file).write_text(broken(mutant, (SOURCE / mutant.file).read_text()))


def plan(mutant: Mutant) -> list[jobs.Job]:
    """Of one that is argued to be equivalent only so much that the argument is put to the test."""
    planned = []
    for names in (mutant.first, QUICK[:5]) if mutant.equivalent else (mutant.first, QUICK, REST):
        for domain in mutant.domains:
            for name in names:
                budget = IMAGES // 5 if mutant.equivalent else IMAGES
                options = {"seed": 1, "budget": budget, "stop-after": 1, "nested-every": 40}
                planned.append(jobs.Job("images", name, domain, MODEL_OF[domain], options))
                if names is not REST:
                    planned.append(jobs.Job("images", name, domain, "i", options | {"budget": 300}))
    planned += [
        jobs.Job("kill", name, domain, "", {"step": 5, "stop-after": 1})
        for domain in mutant.domains
        for name in QUICK[:4]
    ]
    return planned


def native_test(name: str, program: Path) -> str:
    """Runs a test of native/tests over the mutant's objects. What it said when it failed; empty: it
    passed."""
    test = program.parent / name
    objects = [str(path) for path in (program.parent / "engine").glob("*/*.o")]
    source = NATIVE / "tests" / f"{name}.c"
    flags = ["-std=gnu11", "-D_GNU_SOURCE=", "-pthread", "-O1", f"-I{NATIVE}"]
    subprocess.run(
        ["cc", *flags, "-o", str(test), str(source), *objects, "-lm"],
        check=True,
        capture_output=True,
        text=True,
    )
    # the stories of the held version leave out most crash points by themselves
    env = {"PMS_CRASH_STEP": "17", **os.environ} if "test_hold" in test.name else None
    run = subprocess.run(
        [str(test)], capture_output=True, text=True, timeout=600, cwd=program.parent, env=env
    )
    return (
        ((run.stderr or run.stdout).strip().splitlines() or [f"status {run.returncode}"])[-1]
        if run.returncode
        else ""
    )


def try_mutant(mutant: Mutant) -> Verdict:
    folder = MUTANTS_BUILD / mutant.name
    try:
        apply(mutant, folder / "src")
        # Nothing of the unchanged engine is compiled again.
        base = MUTANTS_BUILD / "base"
        shutil.copytree(base, folder / "build", dirs_exist_ok=True, copy_function=shutil.copy2)
        (folder / "build" / "engine" / mutant.file.replace(".c", ".o")).unlink(missing_ok=True)
        (folder / "build" / "crash").unlink(missing_ok=True)
        program = jobs.build(folder / "src", folder / "build")
        for name in mutant.native:
            if said := native_test(name, program):
                return Verdict(mutant, f"native/tests/{name}.c: {said}")
        with jobs.Runner(program, cores=1, room=1 << 19) as runner:
            for job in plan(mutant):
                failures = runner.run(job).failures
                if failures:
                    where = f"({job.model or job.mode}) {job.workload} {job.domain}"
                    return Verdict(mutant, f"{where}: {failures[0].get('message', '')}")
        return Verdict(mutant, "")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write(verdicts: list[Verdict], folder: Path = jobs.BUILD) -> None:
    survivors = [v for v in verdicts if not v.killed_by]
    data = {
        "commit": commit_id(),
        "total": len(verdicts),
        "killed": len(verdicts) - len(survivors),
        "equivalent": sum(bool(v.mutant.equivalent) for v in survivors),
        "mutants": [
            {"name": v.mutant.name,
             "file": v.mutant.file, "breaks": v.mutant.breaks, "killed_by": v.killed_by,
             "equivalent": v.mutant.equivalent}
            for v in verdicts
        ],
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mutants.json").write_text(json.dumps(data, indent=1) + "\n")
    lines = [
        "# Mutants",
        "",
        f"{data['total']} mutants, {data['killed']} killed, {data['equivalent']} equivalent.",
        "",
    ]
    lines += [f"At commit {data['commit']}.", ""]
    lines += ["| mutant | what is broken | killed by |", "|---|---|---|"]
    for v in verdicts:
        outcome = v.killed_by or (
            f"equivalent: {v.mutant.equivalent}" if v.mutant.equivalent else "**survived**"
        )
        lines.append(f"| {v.mutant.name} | {v.mutant.breaks} | {outcome.replace('|', '/')} |")
    (folder / "mutants.md").write_text("\n".join(lines) + "\n")


def chosen(words: list[str]) -> list[Mutant]:
    """By name; or `--drawn COUNT SEED`. No word: all."""
    if words[:1] == ["--drawn"]:
        count, seed = map(int, words[1:])
        return random.Random(seed).sample(MUTANTS, count)
    if unknown := set(words) - {m.name for m in MUTANTS}:
        raise SystemExit(f"no such mutant: {', '.join(sorted(unknown))}")
    return [m for m in MUTANTS if not words or m.name in words]


def _object(source: Path) -> Path:
    return (jobs.BUILD / "engine" / source.relative_to(SOURCE)).with_suffix(".o")


def main() -> int:
    console = Console(stderr=True)
    wanted = chosen(sys.argv[1:])
    if problems := [said for m in wanted if (said := stale(m))]:
        raise SystemExit("\n".join(problems))
    shutil.rmtree(MUTANTS_BUILD, ignore_errors=True)
    for path in built.engine_sources(NATIVE):
        copy = SOURCE / path.relative_to(NATIVE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    jobs.build()  # what other crash tests have built already is not compiled again
    base = MUTANTS_BUILD / "base"
    for path in [*jobs.BUILD.glob("*.o"), *map(_object, SOURCE.glob("*/*.c"))]:
        copy = base / path.relative_to(jobs.BUILD)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    jobs.build(SOURCE, base)
    verdicts = []
    with (
        Progress(console=console, disable=not console.is_terminal) as bar,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        task = bar.add_task("mutants", total=len(wanted))
        futures = [pool.submit(try_mutant, m) for m in wanted]
        try:
            for future in concurrent.futures.as_completed(futures):
                verdict = future.result()
                verdicts.append(verdict)
                bar.advance(task)
                said = verdict.killed_by or (
                    "EQUIVALENT" if verdict.mutant.equivalent else "SURVIVED"
                )
                console.print(
                    f"{verdict.mutant.name}: {said}", markup=False, highlight=False, soft_wrap=True
                )
        except BaseException as error:  # those that have not begun do not begin
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, subprocess.CalledProcessError):
                console.print(error.stderr, markup=False)
            raise
    order = {m.name: i for i, m in enumerate(MUTANTS)}
    verdicts.sort(key=lambda v: order[v.mutant.name])
    if len(wanted) == len(MUTANTS):
        write(verdicts)
    survivors = [v for v in verdicts if not v.killed_by and not v.mutant.equivalent]
    print(
        f"{len(verdicts)} mutants, {sum(bool(v.killed_by) for v in verdicts)} killed, "
        f"{len(survivors)} survived"
    )
    for v in survivors:
        print(f"SURVIVED {v.mutant.name}: {v.mutant.breaks}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
