"""A report of runs as one HTML file, for one store or for those of several ranks side by side."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pmstore._base.version import VERSION
from pmstore._engine.reports import SegmentUsage
from pmstore.show import page, svg
from pmstore.show.run_charts import charts_of
from pmstore.show.snapshot_of_runs import Gathered, RunState, TierContent
from pmstore.show.svg import Chart
from pmstore.show.units import moment, number, seconds, size

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
class _Panel:
    """A run of a store in a report, with its charts."""

    store: Reported
    run: RunState
    title: str
    charts: Sequence[Chart]


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
    panels = list(_panels(stores, points))
    title = ", ".join(one.store.info.path for one in stores[:3]) + (
        f" and {len(stores) - 3} more" if len(stores) > 3 else ""
    )
    sections = {
        "overview": ("Overview", _overview(stores)),
        "loss": ("Loss", _charts(panels, "loss")),
        "commits": ("Commits and what they cost", _charts(panels, "cost", "bytes", "rate")),
        "decisions": ("Decisions, and why", _decisions(panels, points // 2)),
        "heap": ("Heap", _heaps(stores)),
        "tiers": ("Tiers and epochs", _tiers(stores, points // 2)),
        "starts": ("Starts of the program", _starts(panels)),
    }
    links = " ".join(f'<a href="#{at}">{name}</a>' for at, (name, _) in sections.items())
    body = (
        f'<a class="skip" href="#overview">To the content</a><header>'
        f"<h1>pmstore report: {escape(title)}</h1>"
        f'<p class="dim">As of {moment(now)}, by pmstore {VERSION}. A chart that has '
        "the focus is read by the arrow keys.</p>"
        f'<nav aria-label="Sections">{links}</nav></header><main>'
        + "".join(
            f'<section aria-labelledby="{at}"><h2 id="{at}">{name}</h2>{held}</section>'
            for at, (name, held) in sections.items()
        )
        + "</main>"
    )
    data = {
        "stores": [_numbers(one) for one in stores],
        "charts": {chart.name: svg.points(chart) for panel in panels for chart in panel.charts},
    }
    return page.document(title, body, data, (svg.WIDTH, svg.TOP, svg.HEIGHT - svg.BOTTOM))


def _panels(stores: Sequence[Reported], points: int) -> Iterable[_Panel]:
    number_of = 0
    alone = len(stores) == 1 and len(stores[0].store.runs) == 1
    for one in stores:
        for run in one.store.runs:
            title = run.name if alone else f"{_called(stores, one)}: {run.name}"
            charts = charts_of(run.course, f"{number_of}", points) if run.course else ()
            yield _Panel(one, run, title, charts)
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


def _grid(panels: Iterable[str]) -> str:
    return f'<div class="grid">{"".join(panels)}</div>'


def _panel(title: str, content: str) -> str:
    return f'<div class="panel"><h3>{escape(title)}</h3>{content}</div>'


# ---- sections


def _overview(stores: Sequence[Reported]) -> str:
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
    return _grid([_panel("All stores", page.table("Stores and runs", titles, rows, "tt"))])


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


def _charts(panels: Sequence[_Panel], *kinds: str) -> str:
    old = '<p class="none">Nothing was recorded by the version that wrote it.</p>'
    drawn = [
        _panel(f"{chart.title}: {panel.title}", _chart(chart))
        for kind in kinds
        for panel in panels
        for chart in panel.charts
        if chart.name.startswith(f"{kind}-")
    ]
    drawn += [_panel(panel.title, old) for panel in panels if not panel.charts]
    return _grid(drawn) if drawn else '<p class="none">There is no training run in it.</p>'


def _chart(chart: Chart) -> str:
    keys = [(line.kind, line.label) for line in chart.lines]
    keys += [(marks.kind, marks.label) for marks in chart.marks if marks.label and len(marks.x)]
    legend = "".join(
        f'<span><i class="key {kind}"></i>{escape(label)}</span>' for kind, label in keys
    )
    log = ", logarithmic" if not chart.empty and svg.scales(chart)[1].logarithmic else ""
    return (
        f'<p class="dim">{escape(chart.y_title)}{log}</p>{svg.draw(chart)}'
        f'<output id="{chart.name}-out" for="{chart.name}"></output>'
        f'<p class="legend">{legend}</p>'
    )


def _decisions(panels: Sequence[_Panel], most: int) -> str:
    titles = (
        *("step", "at", "to", "why", "at risk", "expected cost", "failures an hour"),
        "predicted overhead",
    )
    drawn = []
    for panel in panels:
        made = panel.run.course.decisions if panel.run.course else ()
        rows = (
            (
                *(f"{one.step:,}", moment(one.time), one.target, one.reason),
                *(seconds(one.risk), seconds(one.cost), number(one.hazard * 3600)),
                f"{number(one.predicted_overhead * 100)} %",
            )
            for one in reversed(made[-most:])
        )
        told = (
            page.table(f"The newest {min(len(made), most)} decisions", titles, rows, "nttt")
            if made
            else '<p class="none">No scheduler decided: every step commits.</p>'
        )
        drawn.append(_panel(panel.title, told))
    return _grid(drawn) if drawn else '<p class="none">There is no training run in it.</p>'


def _heaps(stores: Sequence[Reported]) -> str:
    return _grid(
        _panel(
            _called(stores, one),
            "".join(_segment(number, each) for number, each in enumerate(one.store.usage)),
        )
        for one in stores
    )


def _segment(place: int, segment: SegmentUsage) -> str:
    """Draws a segment as a line of cells: the more of a cell is in use, the darker it is."""
    room = segment.data_bytes / max(len(segment.cells), 1)
    width = 640 / max(len(segment.cells), 1)
    cells = "".join(
        f'<rect x="{cell * width:.4g}" y="0" width="{width:.4g}" height="30" '
        f'opacity="{max(used / room, 0.15):.2f}"><title>{size(used)} of {size(room)}</title></rect>'
        for cell, used in enumerate(segment.cells)
        if used
    )
    told = (
        f"Segment {place}: {size(segment.used_bytes)} of {size(segment.data_bytes)} in "
        f"{segment.blocks:,} blocks"
    )
    return (
        f'<p>{told}</p><svg class="heap" viewBox="0 0 640 30" preserveAspectRatio="none" '
        f'role="img" aria-label="{told}"><rect class="frame" width="640" height="30"/>{cells}</svg>'
    )


def _tiers(stores: Sequence[Reported], most: int) -> str:
    titles = ("epoch", "made", "state", "files", "ranks", "kept", "problem")
    drawn = []
    for one in stores:
        states = {
            tier.name: tier for run in one.store.runs if run.course for tier in run.course.tiers
        }
        for tier in one.tiers:
            every = f", every {tier.every} commits" if tier.every else ""
            about = f'<p class="dim">{escape(tier.url)}{every}</p>'
            if (state := states.get(tier.name)) is not None:
                now = (
                    f"epoch {state.under_way:,} was {state.share:.0%} written"
                    if state.under_way
                    else ("the last flush failed" if state.failed else "no flush was under way")
                )
                about += f"<p>At {moment(state.time)}: newest epoch {state.epoch:,}; {now}.</p>"
            rows = (
                (
                    *(f"{each.epoch:,}", moment(each.time), size(each.state_bytes)),
                    *(size(each.file_bytes), f"{len(each.ranks)} of {each.world_size}"),
                    *(", ".join(map(str, each.kept)), each.problem or ""),
                )
                for each in tier.epochs[:most]
            )
            held = page.table(f"Epochs in {tier.name}", titles, rows, "ntnnnll")
            told = f'<p class="none">{escape(tier.problem)}</p>' if tier.problem else held
            drawn.append(_panel(f"{_called(stores, one)}: {tier.name}", about + told))
    return _grid(drawn) if drawn else '<p class="none">No store has a tier.</p>'


def _starts(panels: Sequence[_Panel]) -> str:
    drawn = []
    for panel in panels:
        starts = panel.run.course.starts if panel.run.course else ()
        rows = (
            (f"{one.step:,}", moment(one.time), one.pid, f"{one.opens:,}", f"{one.unclean_opens:,}")
            for one in starts
        )
        titles = ("after step", "at", "process", "opens of the store", "of them after a crash")
        drawn.append(_panel(panel.title, page.table("Processes that trained", titles, rows, "nt")))
    return _grid(drawn) if drawn else '<p class="none">There is no training run in it.</p>'
