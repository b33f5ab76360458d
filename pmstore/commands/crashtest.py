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
from rich.markup import escape
from rich.table import Table

from pmstore.base.words import counted
from pmstore.commands.app import Json, app, console, ending, fail
from pmstore.testing.outcomes import CrashTestResult, Outcome, Trial
from pmstore.testing.runner import Program
from pmstore.testing.trials import crash_test

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


def _table(trials: Sequence[Trial]) -> Table:
    table = Table(
        "trial", "killed at", "commits returned", "found", "at the end", "outcome", "detail"
    )
    for trial in trials:
        returned = ", ".join(str(kill.acknowledged) for kill in trial.kills)
        found = ", ".join("-" if kill.found is None else str(kill.found) for kill in trial.kills)
        end = "-" if trial.commits is None else str(trial.commits)
        outcome = f"[{_STYLES[trial.outcome]}]{trial.outcome.value}[/]"
        table.add_row(
            str(trial.number),
            ", ".join(map(str, trial.kills)),
            returned,
            found,
            end,
            outcome,
            escape(trial.detail),
        )
    return table


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
    """What a program said, without what XML cannot hold."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def crashtest(
    command: Annotated[
        list[str], typer.Argument(help="The program, after --.", metavar="-- COMMAND...")
    ],
    trials: Annotated[int, typer.Option(help="How often it is killed, and resumed.", min=1)] = 20,
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
    grace: Annotated[float, typer.Option(help="Seconds from SIGTERM to SIGKILL.", min=0.0)] = 5.0,
    seed: Annotated[int, typer.Option(help="Draws the points of the kills.")] = 1,
    at: Annotated[
        str | None, typer.Option(metavar="POINT,POINT", help="One trial, killed at these points.")
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

    Again and again. The program is run in copies of the working directory. Exit code 1 if any trial
    was not a clean resume.

    Example: pmstore crashtest --trials 50 -- python train.py --steps 200

    Example: pmstore crashtest --model power --verify checks:sound -- python train.py

    Example: pmstore crashtest --model term --resume "python train.py --resume" --result final.pt --
        python train.py
    """
    say = console(stderr=True)
    check = _function(verify) if verify else None
    try:
        points = [int(point) for point in at.split(",")] if at else []
    except ValueError:
        raise fail(f"--at {at}: persistence points are numbers, as 120,45", 2) from None

    asked = 1 if points else trials
    if not as_json:
        first = "two runs that nobody kills" if compare else "a run that nobody kills"
        say.print(f"{first}, then {counted(asked, 'trial')} of three runs each", highlight=False)

    def on_trial(trial: Trial) -> None:
        if not as_json:
            say.print(
                f"trial {trial.number} of {asked}: "
                f"[{_STYLES[trial.outcome]}]{trial.outcome.value}[/]"
            )

    with ending():
        result = crash_test(
            Program(command, shlex.split(resume or ""), results or (), timeout, grace),
            trials=trials,
            model=model.value,
            verify=check,
            compare=compare,
            seed=seed,
            at=points,
            jobs=jobs,
            keep=keep,
            on_trial=on_trial,
        )
    if as_json:
        counts = {outcome.value: result.count(outcome) for outcome in Outcome}
        answer = {
            **dataclasses.asdict(result),
            "outcomes": counts,
            "trials": [_row(trial) for trial in result.trials],
        }
        typer.echo(json.dumps(answer))
    else:
        console().print(_table(result.trials))
        clean = result.count(Outcome.CLEAN)
        typer.echo(
            f"{clean} of {len(result.trials)} resumed cleanly; {result.primitives} persistence "
            f"points, seed {seed}"
        )
        if not result.deterministic:
            names = ", ".join(result.not_compared[:4]) + (
                ", ..." if len(result.not_compared) > 4 else ""
            )
            typer.echo(
                "not compared at the end, because two runs that nobody killed differ there: "
                f"{names}"
            )
        bad = next((trial for trial in result.trials if trial.outcome is not Outcome.CLEAN), None)
        if bad and all(kill.primitive for kill in bad.kills):
            typer.echo(
                f"one of them again: add --at {','.join(str(kill.primitive) for kill in bad.kills)}"
            )
    with ending():
        if summary:
            with summary.open("a") as file:
                file.write(_markdown(result))
        if junit:
            junit.write_text(_junit(result))
    if not result.ok:
        raise typer.Exit(1)
