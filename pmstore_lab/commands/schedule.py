"""The commands of `pmstore schedule`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from pmstore.commands.app import Json, app
from pmstore.commands.common import console, fail, say
from pmstore.commands.completion import one_of
from pmstore.extras import install

if TYPE_CHECKING:
    from pmstore_lab.simulation.cells import Cell
    from pmstore_lab.simulation.compare import Failures, Row

schedule = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="When to commit: policies compared in simulated time.",
)
app.add_typer(schedule, name="schedule")

Seconds = Annotated[float | None, typer.Option(metavar="SECONDS", show_default=False)]


@schedule.callback()
def _group() -> None:
    """So that `simulate` stays a command of its own."""


@schedule.command()
def simulate(
    cost: Annotated[
        str,
        typer.Option(
            help="Class of commit cost to start from: disk, big or pmem.",
            autocompletion=one_of("disk", "big", "pmem"),
        ),
    ] = "disk",
    curve: Annotated[
        str,
        typer.Option(
            help="Loss curve: exponential, power law, optimus or staircase.",
            autocompletion=one_of("exponential", "power law", "optimus", "staircase"),
        ),
    ] = "exponential",
    mtbf: Annotated[
        str,
        typer.Option(
            help="Hours between failures; or llama3, opt-175b, rsc-1024.",
            autocompletion=one_of("llama3", "opt-175b", "rsc-1024"),
        ),
    ] = "2",
    failures: Annotated[
        str,
        typer.Option(
            help="poisson, weibull, spot, or a file with times in seconds.",
            autocompletion=one_of("poisson", "weibull", "spot"),
        ),
    ] = "poisson",
    hours: Annotated[
        float | None,
        typer.Option(help="Length of the job. [default: that of the class]", show_default=False),
    ] = None,
    iteration: Seconds = None,
    blocking: Seconds = None,
    background: Seconds = None,
    slowdown: Annotated[
        float | None,
        typer.Option(help="Share of time lost beside the background part.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Simulated jobs for each policy.")] = 3,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it: .png, .svg or .pdf.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Runs a training job in simulated time under each policy.

    And holds it against the exact optimum. The policies are driven as in training: the scheduler
    sees noisy losses and times and knows nothing else but the failure rate. "expected" is exact for
    the schedule that a policy made; "simulated" is the mean of the jobs under failures.

    Example: pmstore schedule simulate --cost big --curve "power law" --mtbf llama3 --plot big.png

    Example: pmstore schedule simulate --iteration 0.2 --blocking 0.05 --background 0 --hours 2
        --mtbf 0.5 --json
    """
    from pmstore_lab.simulation.compare import compare

    own = {"iteration": iteration, "blocking": blocking}
    own |= {"background": background, "slowdown": slowdown}
    cell = _cell(cost, curve, mtbf, own, hours)
    times = _failures(failures)
    out = console(stderr=as_json)
    with out.status("computing the optimum") as status:
        rows = compare(cell, seeds, times, lambda name: status.update(f"simulating {name}"))
    if plot is not None:
        _plot(cell, rows, plot)
    if as_json:
        say(json.dumps(_as_json(cell, rows), indent=2))
    else:
        out.print(_table(cell, rows, failures, seeds))


def _cell(
    cost: str, curve: str, mtbf: str, given: dict[str, float | None], hours: float | None
) -> Cell:
    from pmstore_lab.simulation.cells import COSTS, HOUR, Cell
    from pmstore_lab.simulation.curves import CURVES
    from pmstore_lab.simulation.failures import PUBLIC_MTBF_HOURS

    if cost not in COSTS:
        raise fail(f"unknown cost class {cost!r}: use {', '.join(COSTS)}", 2)
    if curve not in CURVES:
        raise fail(f"unknown curve {curve!r}: use {', '.join(map(repr, CURVES))}", 2)
    try:
        between = PUBLIC_MTBF_HOURS[mtbf] if mtbf in PUBLIC_MTBF_HOURS else float(mtbf)
    except ValueError:
        raise fail(
            f"--mtbf {mtbf!r} is neither a number of hours nor one of "
            f"{', '.join(PUBLIC_MTBF_HOURS)}",
            2,
        ) from None
    changes = {name: value for name, value in given.items() if value is not None}
    if hours is not None:
        changes["job"] = hours * HOUR
    chosen = replace(COSTS[cost], **changes)  # type: ignore[arg-type]
    positive = {"--mtbf": between, "--iteration": chosen.iteration, "--hours": chosen.job}
    for name, value in positive.items():
        if not 0.0 < value < math.inf:
            raise fail(f"{name} must be a positive number, not {value:g}", 2)
    if not (
        0.0 <= chosen.blocking < math.inf
        and 0.0 <= chosen.background < math.inf
        and 0.0 <= chosen.slowdown < 1.0
    ):
        raise fail("costs are not negative, and the slowdown is at least 0 and below 1", 2)
    cell = Cell(chosen, CURVES[curve], between * HOUR)
    if not 10 <= cell.iterations <= 1_000_000:
        raise fail(
            f"the job has {cell.iterations:,} iterations: from 10 to 1,000,000 can be simulated", 2
        )
    if chosen.job > 60.0 * cell.mtbf:
        raise fail("the job is longer than 60 times the MTBF: shorten it with --hours", 2)
    return cell


def _failures(kind: str) -> Failures:
    from pmstore_lab.simulation import failures

    known: dict[str, Failures] = {
        "poisson": failures.poisson,
        "weibull": failures.weibull,
        "spot": failures.spot,
    }
    if kind in known:
        return known[kind]
    try:
        recorded = failures.read_trace(Path(kind))
    except FileNotFoundError:
        raise fail(f"--failures {kind!r} is neither {', '.join(known)} nor a file", 2) from None
    except (OSError, ValueError) as error:
        raise fail(str(error), 2) from None
    return lambda rng, _, until_seconds: failures.trace(recorded, rng, until_seconds)


def _plot(cell: Cell, rows: list[Row], path: Path) -> None:
    from pmstore_lab.simulation.plot import plot

    try:
        plot(cell, rows, path)
    except ModuleNotFoundError as error:
        raise fail(f"the plot needs {error.name}: {install('plot')}", 2) from None
    except (ValueError, OSError) as error:
        raise fail(f"cannot draw {path}: {error}", 2) from None


def _table(cell: Cell, rows: list[Row], failures: str, seeds: int) -> Table:
    title = (
        f"{cell.cost.name}, {cell.curve.name}: {cell.iterations:,} iterations of "
        f"{cell.cost.iteration:g} s, commit {cell.cost.price:.3g} s, a failure every "
        f"{cell.mtbf / 3600:.3g} h ({failures}, {seeds} simulated jobs)"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for name in (
        *("commits", "expected overhead", "/ optimum", "value lost", "/ optimum"),
        *("simulated overhead", "failures"),
    ):
        table.add_column(name, justify="right")
    for row in rows:
        run = not math.isnan(row.simulated)
        table.add_row(
            row.policy,
            f"{row.commits:,}",
            f"{row.overhead:,.1f} s",
            f"{row.over_optimum:.3f}",
            f"{row.value:,.1f} s",
            f"{row.value_over_optimum:.3f}",
            f"{row.simulated:,.1f} s" if run else "",
            f"{row.failures:.1f}" if run else "",
        )
    return table


def _as_json(cell: Cell, rows: list[Row]) -> dict[str, object]:
    return {
        "cost": asdict(cell.cost),
        "curve": cell.curve.name,
        "mtbf_seconds": cell.mtbf,
        "policies": [
            {
                key: None if isinstance(value, float) and math.isnan(value) else value
                for key, value in asdict(row).items()
                if key != "at"
            }
            for row in rows
        ],
    }
