"""`pmstore crashtest`: kills a training program and says what became of its state."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import typer

from pmstore._base.text import counted, printable
from pmstore.commands.app import Json, app
from pmstore.commands.common import console, ending, fail, say
from pmstore.show.terminal import Column, Terminal
from pmstore.testing.outcomes import CrashTestResult, Outcome, Trial
from pmstore.testing.runner import Program
from pmstore.testing.trials import crash_test, job_test

_STYLES = {
    Outcome.CLEAN: "green",
    Outcome.MANUAL: "yellow",
    Outcome.DIFFERENT: "red",
    Outcome.LOST: "red",
}


class Model(str, Enum):
    KILL = "kill"
    POWER = "power"
    TERM = "term"


def _function(spec: str) -> Callable[[Any], object]:
    module, _, name = spec.partition(":")
    if not module or not name:
        raise fail(f"--verify {spec}: a module and a function of it are needed, as checks:sound", 2)
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # the user's module, in any way
        raise fail(f"--verify {spec}: {type(error).__name__}: {error}", 2) from None
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise fail(f"--verify {spec} is no function", 2)
    return found  # type: ignore[no-any-return]


def _row(trial: Trial) -> dict[str, object]:
    return {**dataclasses.asdict(trial), "outcome": trial.outcome.value}


def _points(at: str | None, job: bool) -> list[Any]:
    """Parses --at: persistence points, or for a job pairs of a rank and a point. Ends the command
    if they are no numbers."""
    try:
        if not job:
            return [int(point) for point in at.split(",")] if at else []
        pairs = [pair.split(":") for pair in at.split(",")] if at else []
        return [(int(rank), int(point)) for rank, point in pairs]
    except ValueError:
        told = (
            "ranks and persistence points are numbers, as 1:120,0:45"
            if job
            else "persistence points are numbers, as 120,45"
        )
        raise fail(f"--at {at}: {told}", 2) from None


def _again(trial: Trial, stores: Sequence[str]) -> str:
    """Returns the --at that repeats the trial. It is empty if some of its kills came at times, or
    to all ranks."""
    if not all(kill.primitive and not kill.whole for kill in trial.kills):
        return ""
    ranks = [f"{stores.index(kill.victim)}:" if kill.victim else "" for kill in trial.kills]
    return ",".join(
        f"{rank}{kill.primitive}" for rank, kill in zip(ranks, trial.kills, strict=True)
    )


def _table(trials: Sequence[Trial], job: bool) -> list[str]:
    titles = ("newest of a rank", "of all") if job else ("commits returned", "found")
    columns = [
        *(Column("trial", right=True), Column("killed at", fold=True)),
        *(Column(title, right=True) for title in (*titles, "at the end")),
        *(Column("outcome"), Column("detail", path=True)),
    ]
    rows, styles = [], []
    for trial in trials:
        returned = ", ".join(str(kill.acknowledged) for kill in trial.kills)
        found = ", ".join("-" if kill.found is None else str(kill.found) for kill in trial.kills)
        end = "-" if trial.commits is None else str(trial.commits)
        kills = ", ".join(map(str, trial.kills))
        detail = printable(" ".join(trial.detail.split()))
        rows.append((str(trial.number), kills, returned, found, end, trial.outcome.value, detail))
        styles.append(("", "", "", "", "", _STYLES[trial.outcome], ""))
    return Terminal().table(columns, rows, styles)


def _markdown(result: CrashTestResult) -> str:
    clean, count = result.count(Outcome.CLEAN), len(result.trials)
    lines = [f"### Crash test: {clean} of {count} trials resumed cleanly", ""]
    lines += ["| trial | killed at | outcome | detail |", "|---|---|---|---|"]
    for trial in result.trials:
        detail = trial.detail.replace("|", "/").replace("\n", " ")
        lines.append(
            f"| {trial.number} | {', '.join(map(str, trial.kills))} | {trial.outcome.value} | "
            f"{detail} |"
        )
    return "\n".join(lines) + "\n"


def _junit(result: CrashTestResult) -> str:
    bad = len(result.trials) - result.count(Outcome.CLEAN)
    suite = ElementTree.Element(
        "testsuite", name="pmstore crashtest", tests=str(len(result.trials)), failures=str(bad)
    )
    for trial in result.trials:
        name = f"trial {trial.number}, killed at {', '.join(map(str, trial.kills))}"
        case = ElementTree.SubElement(suite, "testcase", classname="pmstore.crashtest", name=name)
        if trial.outcome is not Outcome.CLEAN:
            ElementTree.SubElement(
                case, "failure", type=trial.outcome.value, message=_in_xml(trial.detail)
            )
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _in_xml(text: str) -> str:
    """Returns what a program said, without what XML cannot hold."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def crashtest(
    command: Annotated[
        list[str], typer.Argument(help="The program, after --.", metavar="-- COMMAND...")
    ],
    trials: Annotated[int, typer.Option(help="How often it is killed, and resumed.", min=1)] = 20,
    job: Annotated[
        bool, typer.Option("--job", help="The program starts ranks: each with a store of its own.")
    ] = False,
    model: Annotated[
        Model, typer.Option(help="SIGKILL, a simulated power failure, or SIGTERM first.")
    ] = Model.KILL,
    verify: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Gets the store after each kill; False is bad."
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option(help="The final state has to be that of a run that nobody killed.")
    ] = True,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND", help="Goes on after a kill; in quotes. [default: the program again]"
        ),
    ] = None,
    results: Annotated[
        list[str] | None,
        typer.Option(
            "--result",
            metavar="FILE",
            help="That the program leaves: compared as the store is. May be repeated.",
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Run where the program has ended; in quotes."),
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds from SIGTERM to SIGKILL.", min=0.0)] = 5.0,
    seed: Annotated[int, typer.Option(help="Draws the points of the kills.")] = 1,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="POINT,POINT", help="One trial, killed at these points; of a job RANK:POINT."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Trials at a time.", min=1)] = 1,
    keep: Annotated[
        Path | None, typer.Option(help="Gets the folders of trials that failed.")
    ] = None,
    summary: Annotated[
        Path | None, typer.Option(help="Appends a Markdown table to this file.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(help="Gets the trials as JUnit's XML, for CI.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one run may take.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Kills a training program, resumes it, and says what was lost.

    It does so again and again, in copies of the working directory. Exit code 1 if any trial was not
    a clean resume.

    Example: pmstore crashtest --trials 50 -- python train.py --steps 200

    Example: pmstore crashtest --model power --verify checks:sound -- python train.py

    Example: pmstore crashtest --model term --resume "python train.py --resume" --result final.pt --
        python train.py

    Example: pmstore crashtest --job -- torchrun --standalone --nproc-per-node=2 train.py
    """
    beside = console(stderr=True)
    verifies = _function(verify) if verify else None
    points = _points(at, job)
    if job and model is not Model.KILL:
        raise fail(f"--model {model.value}: a job is killed with SIGKILL: leave out either", 2)
    asked = 1 if points else trials
    if not as_json:
        first = "two runs that nobody kills" if compare else "a run that nobody kills"
        each = "two kills" if job else "three runs"
        beside.print(f"{first}, then {counted(asked, 'trial')} of {each} each", highlight=False)

    def on_trial(trial: Trial) -> None:
        if not as_json:
            beside.print(
                f"trial {trial.number} of {asked}: "
                f"[{_STYLES[trial.outcome]}]{trial.outcome.value}[/]"
            )

    program = Program(
        command,
        resume=shlex.split(resume or ""),
        results=results or (),
        check=shlex.split(check or ""),
        timeout_seconds=timeout,
        grace_seconds=grace,
    )
    options: dict[str, Any] = {
        "trials": trials,
        "verify": verifies,
        "compare": compare,
        "seed": seed,
        "at": points,
        "jobs": jobs,
        "keep": keep,
        "on_trial": on_trial,
    }
    with ending():
        if job:
            result = job_test(program, **options)
        else:
            result = crash_test(program, model=model.value, **options)
    if as_json:
        counts = {outcome.value: result.count(outcome) for outcome in Outcome}
        answer = {
            **dataclasses.asdict(result),
            "outcomes": counts,
            "trials": [_row(trial) for trial in result.trials],
        }
        say(json.dumps(answer))
    else:
        say(*_table(result.trials, job))
        clean = result.count(Outcome.CLEAN)
        say(
            f"{clean} of {len(result.trials)} resumed cleanly; {result.primitives} persistence "
            f"points, seed {seed}"
        )
        if not result.deterministic:
            names = ", ".join(result.not_compared[:4]) + (
                ", ..." if len(result.not_compared) > 4 else ""
            )
            say(
                "not compared at the end, because two runs that nobody killed differ there: "
                f"{names}"
            )
        bad = next((trial for trial in result.trials if trial.outcome is not Outcome.CLEAN), None)
        if bad and (again := _again(bad, result.stores)):
            say(f"one of them again: add --at {again}")
    with ending():
        if summary:
            with summary.open("a") as file:
                file.write(_markdown(result))
        if junit:
            junit.write_text(_junit(result))
    if not result.ok:
        raise SystemExit(1)
