"""A report of runs as one HTML file, for one store or for those of several ranks side by side."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pmstore._base.version import VERSION
from pmstore._engine.reports import SegmentUsage
from pmstore.show import svg
from pmstore.show.run_charts import charts_of
from pmstore.show.snapshot_of_runs import Gathered, RunState, TierContent
from pmstore.show.svg import Chart
from pmstore.show.units import moment, number, seconds, size

if TYPE_CHECKING:
    import jinja2

BEGIN = b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>pmstore report: '
"""What every report begins with."""
BYTES_MOST = 2_000_000
"""The most bytes that the file has."""
_POINTS = (600, 300, 150, 75, 40, 20)
"""How many points a chart has. A table has half as many rows. There are fewer where the file would
be too large."""


@dataclass(frozen=True)
class Reported:
    """A store in a report: what it tells of itself, and its tiers."""

    store: Gathered
    tiers: Sequence[TierContent]


@dataclass(frozen=True)
class _Run:
    """A run of a store in a report, with its charts."""

    state: RunState
    title: str
    charts: Sequence[Chart]


@dataclass(frozen=True)
class _Table:
    """kinds: for each column "t" if it is text, "l" if it is long, else a number."""

    caption: str
    titles: Sequence[str]
    rows: Sequence[Sequence[object]]
    kinds: str


@dataclass(frozen=True)
class _Panel:
    """What stands under a title: those of these that are not empty, in this order. none: says why
    there is nothing to see."""

    title: str
    dim: str = ""
    line: str = ""
    none: str = ""
    chart: dict[str, Any] | None = None
    segments: Sequence[dict[str, Any]] = ()
    table: _Table | None = None


def report(stores: Sequence[Reported], now: float | None = None) -> str:
    """Returns the HTML file, at most 2 MB, as text. now: when it is made; default: now.

    Raises: ValueError: too many stores for so much.
    """
    for points in _POINTS:
        made = _report(stores, points, time.time() if now is None else now)
        if len(made.encode(errors="replace")) <= BYTES_MOST:
            return made
    raise ValueError(
        f"a report of {len(stores)} stores is larger than {size(BYTES_MOST)}: give fewer"
    )


def _report(stores: Sequence[Reported], points: int, now: float) -> str:
    runs = list(_runs(stores, points))
    title = ", ".join(one.store.info.path for one in stores[:3]) + (
        f" and {len(stores) - 3} more" if len(stores) > 3 else ""
    )
    no_run = "There is no training run in it."
    sections = (
        ("overview", "Overview", [_overview(stores)], ""),
        ("loss", "Loss", _charts(runs, "loss"), no_run),
        ("commits", "Commits and what they cost", _charts(runs, "cost", "bytes", "rate"), no_run),
        ("decisions", "Decisions, and why", _decisions(runs, points // 2), no_run),
        ("heap", "Heap", [_heap(stores, one) for one in stores], ""),
        ("tiers", "Tiers and epochs", _tiers(stores, points // 2), "No store has a tier."),
        ("starts", "Starts of the program", _starts(runs), no_run),
    )
    return _template().render(
        title=title,
        now=moment(now),
        version=VERSION,
        sections=sections,
        data={
            "stores": [_numbers(one) for one in stores],
            "charts": {chart.name: svg.points(chart) for run in runs for chart in run.charts},
        },
        box={"wide": svg.WIDTH, "top": svg.TOP, "foot": svg.HEIGHT - svg.BOTTOM},
    )


@cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pmstore", "show"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("report.html.j2")


def _runs(stores: Sequence[Reported], points: int) -> Iterable[_Run]:
    number_of = 0
    alone = len(stores) == 1 and len(stores[0].store.runs) == 1
    for one in stores:
        for run in one.store.runs:
            title = run.name if alone else f"{_called(stores, one)}: {run.name}"
            charts = charts_of(run.course, f"{number_of}", points) if run.course else ()
            yield _Run(run, title, charts)
            number_of += 1


def _called(stores: Sequence[Reported], one: Reported) -> str:
    """Returns what a store is called: its rank, if it has one, and its file's name. Where other
    stores have the same file name, it is called by its path."""
    path = one.store.info.path
    short = path.rsplit("/", 1)[-1]
    if sum(other.store.info.path.rsplit("/", 1)[-1] == short for other in stores) > 1:
        short = path
    ranks = [f"rank {job.rank}" for job in one.store.info.jobs[:1]]
    return ", ".join([*ranks, short])


def _numbers(one: Reported) -> dict[str, Any]:
    """Returns the numbers that the overview shows, for programs to read."""
    info = one.store.info
    return {
        "path": info.path,
        "domain": info.domain,
        "epoch": info.epoch,
        "used_bytes": info.used_bytes,
        "file_bytes": info.file_bytes,
        "opens": info.opens,
        "unclean_opens": info.unclean_opens,
        "runs": [
            {
                "name": run.name,
                "step": run.step,
                "data_epoch": run.data_epoch,
                "decisions": len(run.course.decisions) if run.course else 0,
                "commits": sum(each.commits for each in run.course.whole()) if run.course else 0,
                "commit_share": _known(run.course.commit_share()) if run.course else None,
                "stake_seconds": _known(run.course.stake_seconds) if run.course else None,
                "stake_steps": _known(run.course.stake_steps) if run.course else None,
            }
            for run in one.store.runs
        ],
    }


def _known(value: float) -> float | None:
    return value if value == value else None


# ---- sections


def _overview(stores: Sequence[Reported]) -> _Panel:
    rows = []
    for one in stores:
        info = one.store.info
        about = (
            *(info.domain, f"{info.epoch:,}", size(info.used_bytes), size(info.file_bytes)),
            f"{info.opens:,}, {info.unclean_opens:,} after a crash",
        )
        rows += [
            (
                _called(stores, one),
                *(run.name if run else "-", f"{run.step:,}" if run else "-"),
                *_lately(run),
                *about,
            )
            for run in one.store.runs or (None,)
        ]
    titles = (
        *("store", "run", "step", "loss", "steps a second", "commit", "share of time", "at risk"),
        *("domain", "commits", "used", "file", "opened"),
    )
    return _Panel("All stores", table=_Table("Stores and runs", titles, rows, "tt"))


def _lately(run: RunState | None) -> tuple[str, ...]:
    """Returns five cells about a run: its last loss, its steps a second, what its last commit took,
    the share of the time that all commits took, and the most work that was at risk. "-" stands for
    what is not known."""
    course = run.course if run else None
    if course is None:
        return ("-",) * 5
    newest = list(course.whole())[::-1]
    loss = next((one.loss for one in newest if one.loss == one.loss), float("nan"))
    cost = next((one.seconds / one.commits for one in newest if one.commits), float("nan"))
    share = course.commit_share()
    told = f"{share:.2%}" if share == share else "-"
    return number(loss), number(course.rate()), seconds(cost), told, seconds(course.stake_seconds)


def _charts(runs: Sequence[_Run], *kinds: str) -> list[_Panel]:
    drawn = [
        _Panel(f"{chart.title}: {run.title}", chart=_chart(chart))
        for kind in kinds
        for run in runs
        for chart in run.charts
        if chart.name.startswith(f"{kind}-")
    ]
    old = "Nothing was recorded by the version that wrote it."
    return drawn + [_Panel(run.title, none=old) for run in runs if not run.charts]


def _chart(chart: Chart) -> dict[str, Any]:
    from markupsafe import Markup

    keys = [(line.kind, line.label) for line in chart.lines]
    keys += [(marks.kind, marks.label) for marks in chart.marks if marks.label and len(marks.x)]
    log = ", logarithmic" if not chart.empty and svg.scales(chart)[1].logarithmic else ""
    drawn = Markup(svg.draw(chart))  # which escapes
    return {"name": chart.name, "y_title": chart.y_title + log, "svg": drawn, "legend": keys}


def _decisions(runs: Sequence[_Run], most: int) -> list[_Panel]:
    titles = (
        *("step", "at", "to", "why", "at risk", "expected cost", "failures an hour"),
        "predicted overhead",
    )
    drawn = []
    for run in runs:
        made = run.state.course.decisions if run.state.course else ()
        rows = [
            (
                *(f"{one.step:,}", moment(one.time), one.target, one.reason),
                *(seconds(one.risk), seconds(one.cost), number(one.hazard * 3600)),
                f"{number(one.predicted_overhead * 100)} %",
            )
            for one in reversed(made[-most:])
        ]
        if rows:
            told = _Table(f"The newest {len(rows)} decisions", titles, rows, "nttt")
            drawn.append(_Panel(run.title, table=told))
        else:
            drawn.append(_Panel(run.title, none="No scheduler decided: every step commits."))
    return drawn


def _heap(stores: Sequence[Reported], one: Reported) -> _Panel:
    segments = [_segment(number, each) for number, each in enumerate(one.store.usage)]
    return _Panel(_called(stores, one), segments=segments)


def _segment(place: int, segment: SegmentUsage) -> dict[str, Any]:
    """Describes a segment as a line of cells: the more of a cell is in use, the darker it is."""
    room = segment.data_bytes / max(len(segment.cells), 1)
    width = 640 / max(len(segment.cells), 1)
    cells = [
        {
            "x": f"{cell * width:.4g}",
            "opacity": f"{max(used / room, 0.15):.2f}",
            "told": f"{size(used)} of {size(room)}",
        }
        for cell, used in enumerate(segment.cells)
        if used
    ]
    told = (
        f"Segment {place}: {size(segment.used_bytes)} of {size(segment.data_bytes)} in "
        f"{segment.blocks:,} blocks"
    )
    return {"told": told, "width": f"{width:.4g}", "cells": cells}


def _tiers(stores: Sequence[Reported], most: int) -> list[_Panel]:
    titles = ("epoch", "made", "state", "files", "ranks", "kept", "problem")
    drawn = []
    for one in stores:
        states = {
            tier.name: tier for run in one.store.runs if run.course for tier in run.course.tiers
        }
        for tier in one.tiers:
            now = ""
            if (state := states.get(tier.name)) is not None:
                flush = "the last flush failed" if state.failed else "no flush was under way"
                if state.under_way:
                    flush = f"epoch {state.under_way:,} was {state.share:.0%} written"
                now = f"At {moment(state.time)}: newest epoch {state.epoch:,}; {flush}."
            rows = [
                (
                    *(f"{each.epoch:,}", moment(each.time), size(each.state_bytes)),
                    *(size(each.file_bytes), f"{len(each.ranks)} of {each.world_size}"),
                    *(", ".join(map(str, each.kept)), each.problem or ""),
                )
                for each in tier.epochs[:most]
            ]
            told = _Table(f"Epochs in {tier.name}", titles, rows, "ntnnnll")
            every = f", every {tier.every} commits" if tier.every else ""
            drawn.append(
                _Panel(
                    f"{_called(stores, one)}: {tier.name}",
                    dim=f"{tier.url}{every}",
                    line=now,
                    none=tier.problem or "",
                    table=None if tier.problem else told,
                )
            )
    return drawn


def _starts(runs: Sequence[_Run]) -> list[_Panel]:
    titles = ("after step", "at", "process", "opens of the store", "of them after a crash")
    drawn = []
    for run in runs:
        rows = [
            (f"{one.step:,}", moment(one.time), one.pid, f"{one.opens:,}", f"{one.unclean_opens:,}")
            for one in (run.state.course.starts if run.state.course else ())
        ]
        told = _Table("Processes that trained", titles, rows, "nt")
        drawn.append(_Panel(run.title, table=told))
    return drawn
