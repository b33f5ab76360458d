"""A question's plot: bars of every method in one case, or lines over a size, both with logarithmic
axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import Row, time_text

COLORS = {"none": "#999999", "torn": "#d62728", "kill-safe": "#1f77b4", "power-safe": "#2ca02c"}


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope in log-log axes: 1 is linear, 0 is constant.

    >>> round(slope([(1, 5), (10, 50), (100, 500)]), 3)
    1.0
    """
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (sum(v) / len(logs) for v in zip(*logs, strict=True))
    below = sum((x - mean_x) ** 2 for x, _ in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / below if below else math.nan


def draw(
    path: Path,
    title: str,
    rows: Sequence[Row],
    *,
    lines: str | None = None,
    cases: Sequence[str] | None = None,
    unit: str = "median, on a logarithmic axis; whiskers: least, greatest",
    value: str = "median_us",
) -> None:
    """lines: the name in `Row.extra` of what goes on the x axis, one line per method and case;
    None: bars per case. value: of a row, that bars show."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if lines:
        figure = _lines(pyplot, rows, lines)
    else:
        every = list(dict.fromkeys(r.case for r in rows))
        shown = ([c for c in every if c in (cases or ())] or every)[:4]
        figure = _bars(pyplot, rows, shown, unit, value)
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _bars(pyplot, rows: Sequence[Row], cases: Sequence[str], unit: str, value: str):  # type: ignore[no-untyped-def]
    most = max(sum(r.case == c for r in rows) for c in cases)
    across = 2 if len(cases) > 2 else 1
    down = -(-len(cases) // across)
    size = 2 + 9 * across, 1.2 + down * (0.8 + 0.24 * most)
    figure, axes = pyplot.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(cases) :]:
        axis.remove()
    for axis, case in zip(axes.flat, cases, strict=False):
        here = sorted(
            (r for r in rows if r.case == case and r.median_us > 0),
            key=lambda r: -getattr(r, value),
        )
        shown = [getattr(r, value) for r in here]
        axis.barh(
            [r.method for r in here],
            shown,
            color=[COLORS.get(r.durability, "#777777") for r in here],
        )
        axis.set_xlabel(unit)
        if value == "median_us":
            spans = [[r.median_us - r.min_us for r in here], [r.max_us - r.median_us for r in here]]
            axis.errorbar(
                shown, range(len(here)), xerr=spans, fmt="none", ecolor="black", elinewidth=0.7
            )
            axis.set_xscale("log")
            axis.set_xlim(left=0.5 * min(r.min_us for r in here))
            if "instructions" not in unit:
                _in_time(axis.xaxis)
        else:
            axis.bar_label(axis.containers[0], fmt="%.3g", padding=3, fontsize=8)
        axis.set_title(case, fontsize=10)
        axis.margins(y=0.01)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=c) for c in COLORS.values()]
    figure.legend(handles, COLORS, loc="outside lower center", ncols=len(COLORS), fontsize=8)
    return figure


def _in_time(axis):  # type: ignore[no-untyped-def]
    """Ticks at 1, 2, 5, 10, ... in words; at powers of ten where those would be too many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(
        LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,), numticks=20)
    )
    axis.set_major_formatter(FuncFormatter(lambda us, _: time_text(us)))
    axis.set_minor_formatter(NullFormatter())


def _lines(pyplot, rows: Sequence[Row], name: str):  # type: ignore[no-untyped-def]
    groups: dict[str, list[tuple[str, list[Row]]]] = {}
    for group in dict.fromkeys(r.case.partition(":")[0] for r in rows if name in r.extra):
        here = [r for r in rows if name in r.extra and r.case.partition(":")[0] == group]
        groups[group] = [
            (m, [r for r in here if r.method == m]) for m in dict.fromkeys(r.method for r in here)
        ]
    across = min(len(groups), 2)
    down = -(-len(groups) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(6.5 * across, 4.5 * down), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(groups) :]:
        axis.remove()
    for axis, (group, methods) in zip(axes.flat, groups.items(), strict=False):
        for method, here in methods:
            points = [(r.extra[name], r.median_us) for r in here]
            label = f"{method} (slope {slope(points):.2f})" if len(points) > 1 else method
            axis.loglog(*zip(*points, strict=True), marker="o", label=label)
        axis.set_xlabel(group)
        axis.set_ylabel("median")
        _in_time(axis.yaxis)
        axis.legend(fontsize=8, title="slope 1: linear; 0: constant", title_fontsize=8)
        axis.grid(alpha=0.3)
    return figure
