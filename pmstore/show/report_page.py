"""A report of runs as one HTML file: of one run, or of several side by side."""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pmstore._base.text import counted
from pmstore._base.version import VERSION
from pmstore._engine.store_info import JobState, SegmentUsage
from pmstore.course.reader import Decided, Start
from pmstore.show import series, svg
from pmstore.show.series import BYTES, COST, LETTERS, SPEED, Series
from pmstore.show.snapshot_of_runs import (
    Gathered,
    RunState,
    TierContent,
    gather,
    settings,
    tier_contents,
)
from pmstore.show.svg import Chart, look
from pmstore.show.units import moment, number, seconds, size

if TYPE_CHECKING:
    import jinja2

    from pmstore.store import Store

BEGIN = b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>pmstore report: '
"""What every report begins with."""
BYTES_MOST = 2_000_000
"""The most bytes that the file has."""
_POINTS = (600, 300, 150, 75, 40, 20, 10)
"""How many points a curve has. There are fewer where the file would be too large."""
_POINT_BYTES = 24
"""That a point takes, at least."""
_ROWS = 64
"""Of a table of what happened, at most."""
_HEAPS = 8
"""Stores that have a picture of the heap, at most."""
_CURVES = 1024
"""Of logged values, at most, where there are more than four names."""


@dataclass(frozen=True)
class Reported:
    """A store in a report. curves, settings: of its runs, by name."""

    store: Gathered
    tiers: Sequence[TierContent]
    curves: dict[str, dict[str, Series]]
    settings: dict[str, dict[str, str]]


@dataclass(frozen=True)
class _Run:
    """A run in a report. In a job it stands for all ranks whose stores are given."""

    number: int
    title: str
    state: RunState
    curves: dict[str, Series]
    settings: dict[str, str]

    @property
    def starts(self) -> Sequence[Start]:
        return self.state.course.starts if self.state.course else ()

    @property
    def look(self) -> str:
        return look(self.number)


@dataclass(frozen=True)
class _Table:
    """A table. A cell is a text, or a number with its text: (text, number). runs: of its rows, if
    they can be hidden in the charts. stacked: where there is little room, each row is a list."""

    caption: str
    titles: Sequence[str]
    rows: Sequence[Sequence[object]]
    runs: Sequence[_Run] = ()
    stacked: bool = False


@dataclass(frozen=True)
class _Panel:
    """What stands under a title: those of these that are not empty."""

    title: str
    lines: Sequence[str] = ()
    chart: Chart | None = None
    table: _Table | None = None
    facts: Sequence[tuple[str, str]] = ()
    segments: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class _Section:
    """kind: "curves" have the controls of charts, "folded" is shown when it is asked for."""

    name: str
    title: str
    panels: Sequence[_Panel]
    kind: str = ""


def reported(store: Store) -> Reported:
    """Reads what a report tells of a store.

    Raises: CorruptStoreError, SnapshotLostError.
    """
    told = gather(store)
    curves = {}
    for run in told.runs:
        logged = series.logged(store, run.name)
        seen = series.of_course(run.course) if run.course else {}
        if logged:
            seen.pop("loss", None)
        curves[run.name] = logged | seen
    given = {run.name: settings(store, run.name) for run in told.runs}
    return Reported(told, tier_contents(store), curves, given)


def report(stores: Sequence[Reported], now: float | None = None, unread: Sequence[str] = ()) -> str:
    """Returns the HTML file, at most 2 MB, as text. now: when it is made; default: now. unread:
    of each store that could not be read, a line that says why.

    Raises: ValueError: too many stores for so much.
    """
    of = [curves for store in stores for each in store.curves.values() for curves in each.values()]
    for points in _POINTS:
        if sum(min(len(one.step), points) for one in of) * _POINT_BYTES <= BYTES_MOST:
            made = _report(stores, points, time.time() if now is None else now, unread)
            if len(made.encode(errors="replace")) <= BYTES_MOST:
                return made
    raise ValueError(
        f"a report of {len(stores)} stores is larger than {size(BYTES_MOST)}: give fewer"
    )


def _report(stores: Sequence[Reported], points: int, now: float, unread: Sequence[str]) -> str:
    from markupsafe import Markup

    titles = _titles(stores)
    runs = list(_runs(stores, titles, points))
    lines = (one for run in runs for one in run.curves.values())
    steps = svg.steps_axis(lines, (run.state.step for run in runs))
    missing = list(_missing(stores, titles, unread))
    sections = (
        _Section("overview", "Overview", [*_overview(runs), *missing]),
        _Section("curves", "Curves", _charts(runs), "curves"),
        _Section("settings", "Settings", list(_settings(runs))),
        _Section("lives", "Lives", list(_lives(runs))),
        _Section("tiers", "Tiers", list(_tiers(stores, titles))),
        _Section("cost", "What keeping it cost", list(_cost(stores, titles, runs)), "folded"),
    )
    charts = [panel.chart for each in sections for panel in each.panels if panel.chart]
    more = f" and {len(titles) - 3} more" if len(titles) > 3 else ""
    return _template().render(
        title=", ".join(titles[:3]) + more,
        now=moment(now),
        version=VERSION,
        sections=[one for one in sections if one.panels],
        runs=runs,
        marks=Markup(_marks(runs, steps)),  # which escape, as charts do
        drawn={one.name: Markup(svg.draw(one, steps)) for one in charts},
        data={
            "steps": [steps.low, steps.high],
            "runs": [{"title": run.title, **run.state.as_dict()} for run in runs],
            "charts": {one.name: svg.points(one) for one in charts},
        },
        box={"wide": svg.WIDTH, "high": svg.HEIGHT},
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


def _titles(stores: Sequence[Reported]) -> list[str]:
    """Returns what each store is called: its path, as far as that tells it from the others."""
    paths = [one.store.info.path for one in stores]
    if len(paths) == 1:
        return [os.path.basename(paths[0])]
    among = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [os.path.relpath(path, among) for path in paths]


def _runs(stores: Sequence[Reported], titles: Sequence[str], points: int) -> Iterator[_Run]:
    """Yields the runs; of a job that of its first rank."""
    jobs: dict[tuple[str, str], list[JobState]] = {}
    for one in stores:
        for job in one.store.info.jobs:
            jobs.setdefault((job.job, job.run), []).append(job)
    number = 0
    for one, title in zip(stores, titles, strict=True):
        mine = {job.run: job for job in one.store.info.jobs}
        for state in one.store.runs:
            called = title if len(one.store.runs) == 1 else f"{title}: {state.name}"
            if state.name in mine:
                job = mine[state.name]
                ranks = sorted(each.rank for each in jobs[job.job, job.run])
                if job.rank != ranks[0]:
                    continue
                called += f" (rank {job.rank} of {job.world}, {len(ranks)} given)"
            curves = {
                name: series.thinned(each, points) for name, each in one.curves[state.name].items()
            }
            given = {
                setting: value
                for setting, value in (one.settings[state.name] | _program(state)).items()
                if not any(part.startswith("_") for part in setting.split("."))
            }
            yield _Run(number, called, state, curves, given)
            number += 1


def _program(state: RunState) -> dict[str, str]:
    """Returns what the command line of the newest life set, and where it ran."""
    if state.course is None or not state.course.starts:
        return {}
    life = state.course.starts[-1].life
    found = {}
    try:
        words = [*shlex.split(life.command), ""]
    except ValueError:  # it was cut short
        words = [*life.command.split(), ""]
    for word, following in pairwise(words):
        name, equals, value = word.partition("=")
        if equals and _OPTION.fullmatch(name):
            found[name] = value
        elif name.startswith("--") and _OPTION.fullmatch(name):
            found[name] = "yes" if following.startswith("--") or not following else following
    about = dict(zip(_ABOUT, (life.host, life.revision[:12], life.torch), strict=True))
    return {name: value[:LETTERS] for name, value in (found | about).items() if value.strip("*")}


_ABOUT = ("host", "revision", "torch")
_OPTION = re.compile(r"(--)?[A-Za-z][\w.-]*")


def _names(runs: Sequence[_Run]) -> list[str]:
    """Returns the names of logged values, as many as there is room for."""
    names = dict.fromkeys(name for run in runs for name in run.curves)
    named = [name for name in names if name not in (SPEED, COST, BYTES)]
    return named[: max(4, _CURVES // max(len(runs), 1))]


def _rows(runs: Sequence[_Run]) -> int:
    """Returns how many rows a run has in a table of what happened."""
    return max(4, _ROWS // max(len(runs), 1))


def _of(value: float, told: str = "") -> tuple[str, float | str]:
    """Returns a cell. told: how it is written, if that is not as a number."""
    if value != value and told in ("", "-"):
        return _UNKNOWN
    return told or (number(value) if abs(value) < float("inf") else str(value)), value


_UNKNOWN = ("-", "")
"""A cell."""


# ---- sections


def _overview(runs: Sequence[_Run]) -> Iterator[_Panel]:
    if len(runs) == 1:
        run = runs[0]
        figures = [(name, *_figures(run, name)) for name in _names(runs)]
        table = _Table("Logged values", ("name", "last", "least", "greatest"), figures)
        yield _Panel(run.title, [" \N{MIDDLE DOT} ".join(run.state.facts())], table=table)
    elif runs:
        differ, names = _differing(runs), _names(runs)
        titles = ["run", "step"]
        titles += [f"{name}: {what}" for name in names for what in ("last", "least", "greatest")]
        rows: list[Sequence[object]] = [
            (
                *(run.title, _of(run.state.step, _whole(run.state))),
                *(cell for name in names for cell in _figures(run, name)),
                *(_setting(run, name) for name in differ),
                *_going(run.state),
            )
            for run in runs
        ]
        titles += [*differ, *_GOING]
        known = [at for at in range(len(titles)) if any(row[at] != _UNKNOWN for row in rows)]
        told = [[row[at] for at in known] for row in rows]
        said = "A click on a title sorts them; one that is not checked leaves the curves."
        caption = "Runs, and the settings that differ"
        table = _Table(caption, [titles[at] for at in known], told, runs)
        yield _Panel(f"{len(runs)} runs", [said], table=table)


def _missing(
    stores: Sequence[Reported], titles: Sequence[str], unread: Sequence[str]
) -> Iterator[_Panel]:
    """Yields what is in no curve, and why."""
    empty = [title for one, title in zip(stores, titles, strict=True) if not one.store.runs]
    lines = [*unread, *([f"no training run in: {', '.join(empty)}"] if empty else [])]
    if lines:
        yield _Panel("Without curves", lines)


def _whole(state: RunState) -> str:
    return f"{state.step:,}" if state.steps is None else f"{state.step:,} of {state.steps:,}"


_GOING = ("learning rate", "steps a second", "left", "lives", "kills", "trained for", "last step")


def _going(state: RunState) -> list[tuple[str, float | str]]:
    """Returns cells about how it goes."""
    course = state.course
    rate = course.rate() if course else float("nan")
    spent = course.seconds if course else float("nan")
    left = state.seconds_left()
    return [
        _of(max(state.rates, default=float("nan")), ", ".join(map(number, state.rates))),
        _of(rate),
        _of(left, seconds(left)),
        _of(state.lives),
        _of(state.kills),
        _of(spent, seconds(spent)),
        _of(state.stepped_at, moment(state.stepped_at)),
    ]


def _figures(run: _Run, name: str) -> list[tuple[str, float | str]]:
    """Returns three cells about a logged value."""
    one = run.curves.get(name)
    if one is None:
        return [_UNKNOWN] * 3
    last = _of(one.last, "" if math.isfinite(one.last) else str(one.last))
    return [last, *map(_of, one.ends)]


def _differing(runs: Sequence[_Run]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if len({_rounded(run, name) for run in runs}) > 1]


def _rounded(run: _Run, name: str) -> tuple[str, float | str]:
    """Returns a cell of a setting. It may be several numbers: of the groups of an optimizer."""
    text = run.settings.get(name, "-")
    words = text.split(", ")
    try:
        numbers = [float(f"{float(one):.9g}") for one in words if name not in _ABOUT]
    except ValueError:
        numbers = []
    if not numbers:
        return text, text
    whole = all(one.isdigit() for one in words)
    return text if whole else ", ".join(map(number, numbers)), numbers[0]


def _setting(run: _Run, name: str) -> object:
    """Returns a cell of the table of runs, where a list has little room."""
    text, value = _rounded(run, name)
    if not isinstance(value, str):
        return text, value
    short = text.startswith(("[", "(", "{")) and len(text) > _SHORT
    return f"{text[: _SHORT - 1]}\N{HORIZONTAL ELLIPSIS}" if short else text


_SHORT = 32


def _charts(runs: Sequence[_Run]) -> list[_Panel]:
    titles = [*_names(runs), *([SPEED] if any(SPEED in run.curves for run in runs) else [])]
    drawn = [_chart(runs, f"chart-{at}", name) for at, name in enumerate(titles)]
    old = [run for run in runs if run.state.course is None]
    return drawn + [
        _Panel(run.title, ["Nothing was recorded by the version that wrote it."]) for run in old
    ]


def _chart(runs: Sequence[_Run], name: str, of: str, unit: str = "") -> _Panel:
    lines = [(run.number, run.title, run.curves[of]) for run in runs if of in run.curves]
    bad = [(f"{title}: " * (len(runs) > 1), one) for _, title, one in lines if one.bad]
    said = [title + _not_finite(one) for title, one in bad[:_BAD]]
    said += [f"{len(bad) - _BAD:,} more of its runs have such values."] * (len(bad) > _BAD)
    zero = of in (SPEED, COST, BYTES)
    return _Panel(of, said, Chart(name, of, lines, unit, zero))


_BAD = 8


def _not_finite(of: Series) -> str:
    told = f"{of.bad:,} of its values {'was' if of.bad == 1 else 'were'} not finite"
    ever = of.bad_from == of.bad_from
    return told + (f"; from step {int(of.bad_from):,} on, none was finite." if ever else ".")


def _settings(runs: Sequence[_Run]) -> Iterator[_Panel]:
    differ = set(_differing(runs))
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in differ)
    facts = [(name, _rounded(runs[0], name)[0]) for name in names]
    if runs:
        title = "As the program gave them last" if len(runs) == 1 else "That all runs share"
        yield _Panel(title, facts=facts)


def _lives(runs: Sequence[_Run]) -> Iterator[_Panel]:
    several = len(runs) > 1
    rows: list[Sequence[object]] = []
    lost = work = 0.0
    for run in runs:
        lived, down, again = _lived(run)
        lost, work = lost + down, work + again
        rows += [(run.title, *row) if several else row for row in lived[-_rows(runs) :]]
    lives = sum(run.state.lives for run in runs)
    told = f"{lives:,} {'life' if lives == 1 else 'lives'}, "
    told += counted(sum(run.state.kills for run in runs), "kill")
    if lost:
        told += (
            f". From the last commits before them to the next lives it took {seconds(lost)}; of "
            f"that, work of {seconds(work)} at most was done again"
        )
    titles = ("life", "after step", "began", "how it ended", "what Resume changed", "what ran")
    table = _Table("The newest processes", ("run",) * several + titles, rows, stacked=True)
    if runs:
        yield _Panel("Processes that trained", [f"{told}."], table=table)


def _lived(run: _Run) -> tuple[list[Sequence[object]], float, float]:
    """Returns rows of the lives and rewinds of a run, the time that kills cost, and how much of it
    was work that was done again, at most."""
    course, state = run.state.course, run.state
    rows: list[tuple[float, Sequence[object]]] = []
    lost = work = 0.0
    for start, following in pairwise([*run.starts, None]):
        assert start is not None
        life, ended = start.life, "ended"
        if start.number not in state.killed:
            ended = "it trains" if following is None and state.live else ended
        elif following is None or following.life.after is None or course is None:
            ended = "killed"
        else:
            down = following.time - following.life.after
            again = min(down, course.stake_seconds)
            lost, work = lost + down, work + again
            ended = f"killed: {seconds(down)} until it went on, {seconds(again)} of work at most"
        changed = [f"{what}: {was} to {now} by {how}" for what, was, now, how in life.changed]
        versions = {"Python": life.python, "torch": life.torch, "pmstore": life.pmstore}
        about = [
            life.host,
            f"process {start.pid}",
            life.revision[:12] and f"git {life.revision[:12]}",
        ]
        about += [f"{name} {told}" for name, told in versions.items() if told]
        row = (
            *(_of(start.number), _of(start.step), moment(start.time), ended),
            "; ".join(changed)[:_LONG],
            "\n".join(filter(None, (life.command[:_LONG], ", ".join(filter(None, about))))),
        )
        rows.append((start.time, row))
    for each in course.rewinds if course else ():
        told = f"rewound from step {each.step:,}"
        rows.append((each.time, ("rewind", _of(each.to), moment(each.time), told, *("",) * 2)))
    return [row for _, row in sorted(rows, key=lambda one: one[0])], lost, work


_LONG = 1000


def _marks(runs: Sequence[_Run], steps: svg.Axis) -> str:
    """Draws what happened at which step: over all the height, or at the foot if there are several
    runs."""
    top = 0 if len(runs) == 1 else 88
    drawn = []
    for run in runs:
        found = [
            (
                "kill" if before.number in run.state.killed else "start",
                start.step,
                f"life {start.number} began, {moment(start.time)}",
            )
            for before, start in pairwise(run.starts)
        ]
        for each in run.state.course.rewinds if run.state.course else ():
            told = f"rewound from step {each.step:,}, {moment(each.time)}"
            found.append(("rewind", each.to, told))
        found = found[-_rows(runs) :]
        places: dict[tuple[str, str], str] = {}  # one mark for each place that is seen apart
        for kind, step, told in found:
            at = f"{100 * float(steps.share(step)):.1f}%"
            places[kind, at] = f"{run.title}, step {step:,}: {told}"
        drawn += [
            f'<g class="mark {kind} r{run.number}"><title>{escape(told)}</title>'
            f'<line x1="{at}" x2="{at}" y1="{top}%" y2="100%"/></g>'
            for (kind, at), told in places.items()
        ]
    return "".join(drawn)


def _tiers(stores: Sequence[Reported], titles: Sequence[str]) -> Iterator[_Panel]:
    columns = ("epoch", "made", "state", "files", "ranks", "kept", "problem")
    for one, title in zip(stores, titles, strict=True):
        states = {
            tier.name: tier for run in one.store.runs if run.course for tier in run.course.tiers
        }
        for tier in one.tiers:
            lines = [tier.url + (f", every {tier.every} commits" if tier.every else "")]
            if (state := states.get(tier.name)) is not None:
                flush = "the last flush failed" if state.failed else "no flush was under way"
                if state.under_way:
                    flush = f"epoch {state.under_way:,} was {state.share:.0%} written"
                lines.append(f"At {moment(state.time)}: newest epoch {state.epoch:,}; {flush}.")
            rows = [
                (
                    *(
                        _of(each.epoch),
                        moment(each.time),
                        _of(each.state_bytes, size(each.state_bytes)),
                    ),
                    _of(each.file_bytes, size(each.file_bytes)),
                    f"{len(each.ranks)} of {each.world_size}",
                    *(", ".join(map(str, each.kept)), each.problem or ""),
                )
                for each in tier.epochs[: _ROWS // len(stores) or 1]
            ]
            told = _Table(f"Epochs in {tier.name}", columns, rows, stacked=True)
            table = None if tier.problem else told
            yield _Panel(f"{title}: {tier.name}", [*lines, tier.problem or ""], table=table)


def _cost(
    stores: Sequence[Reported], titles: Sequence[str], runs: Sequence[_Run]
) -> Iterator[_Panel]:
    rows = [
        (
            *(title, one.store.info.domain, _of(one.store.info.epoch)),
            *_of_commits(one.store.runs),
            *(_of(bytes_, size(bytes_)) for bytes_ in _bytes(one)),
            _of(one.store.info.opens),
            _of(one.store.info.unclean_opens),
        )
        for one, title in zip(stores, titles, strict=True)
    ]
    columns = (
        *("store", "domain", "commits", "share of time", "mean", "slowest", "most at risk"),
        *("used", "file", "opened", "after a crash"),
    )
    yield _Panel("Stores", table=_Table("Commits and room", columns, rows, stacked=True))
    for name, of, unit in (("cost", COST, "s"), ("bytes", BYTES, "B")):
        if any(of in run.curves for run in runs):
            yield _chart(runs, name, of, unit)
    for run in runs:
        made = run.state.course.decisions if run.state.course else ()
        if made:
            yield _Panel(run.title, table=_decisions(made[-_rows(runs) :]))
    for one, title in zip(stores[:_HEAPS], titles, strict=False):
        segments = [_segment(place, each) for place, each in enumerate(one.store.usage)]
        yield _Panel(f"{title}: heap", segments=segments)


def _of_commits(runs: Sequence[RunState]) -> list[tuple[str, float | str]]:
    """Returns cells about what the commits of a store's runs cost: of the last one, if there are
    several."""
    course = next((run.course for run in reversed(runs) if run.course), None)
    if course is None:
        return [_UNKNOWN] * 4
    made = [one for one in course.whole() if one.commits]
    count, spent = sum(one.commits for one in made), sum(one.seconds for one in made)
    share, slowest = course.commit_share(), max((one.slowest for one in made), default=0.0)
    mean = spent / count if count else float("nan")
    return [
        _of(share, f"{share:.2%}" if share == share else "-"),
        *(_of(each, seconds(each)) for each in (mean, slowest, course.stake_seconds)),
    ]


def _bytes(one: Reported) -> tuple[int, int]:
    return one.store.info.used_bytes, one.store.info.file_bytes


def _decisions(made: Sequence[Decided]) -> _Table:
    titles = (
        *("step", "at", "to", "why", "at risk", "expected cost", "failures an hour"),
        "predicted overhead",
    )
    rows = [
        (
            *(_of(one.step), moment(one.time), one.target, one.reason),
            *(_of(each, seconds(each)) for each in (one.risk, one.cost)),
            _of(one.hazard * 3600),
            _of(one.predicted_overhead, f"{number(one.predicted_overhead * 100)} %"),
        )
        for one in reversed(made)
    ]
    return _Table("The newest decisions of its scheduler", titles, rows)


def _segment(place: int, segment: SegmentUsage) -> dict[str, Any]:
    """Describes a segment as a line of cells: the more of a cell is in use, the wider its bar."""
    part = 100 / max(len(segment.cells), 1)
    room = segment.data_bytes / max(len(segment.cells), 1)
    cells = [
        {
            "x": f"{cell * part:.4g}",
            "width": f"{used / room * part:.3g}",
            "told": f"{size(used)} of {size(room)}",
        }
        for cell, used in enumerate(segment.cells)
        if used
    ]
    told = (
        f"Segment {place}: {size(segment.used_bytes)} of {size(segment.data_bytes)} in "
        f"{segment.blocks:,} blocks"
    )
    return {"told": told, "cells": cells}
