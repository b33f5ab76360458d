"""Charts as SVG. Curves stretch with the page; texts and the width of lines do not. Colours are the
page's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, pairwise
from typing import Any

import numpy as np

from pmstore.show.series import Series
from pmstore.show.units import is_logarithmic, number, seconds, size

WIDTH, HEIGHT = 4000, 1000
"""Of the box that curves are drawn in: it is stretched."""
COLOURS, DASHES = 8, 3


@dataclass(frozen=True)
class Chart:
    """Curves over the steps, in one chart.

    Attributes:
        lines: for each run its number, title and series.
        unit: "s" of seconds, "B" of bytes. zero: the axis begins at 0, unless it is logarithmic.
    """

    name: str
    title: str
    lines: Sequence[tuple[int, str, Series]]
    unit: str = ""
    zero: bool = False

    def text(self, value: float) -> str:
        """Writes a value for people."""
        if not math.isfinite(value):
            return str(value)
        return {"s": seconds, "B": size}.get(self.unit, number)(value)


@dataclass(frozen=True)
class Axis:
    """Maps values to places in the box. low, high: of the values, or of their logarithms."""

    low: float
    high: float
    logarithmic: bool = False
    binary: bool = False

    def share(self, values: Any) -> Any:
        """Returns where the values are, from 0 at the low end to 1 at the high one."""
        with np.errstate(all="ignore"):
            values = np.log10(values) if self.logarithmic else np.asarray(values, np.float64)
            share = (values - self.low) / (self.high - self.low)
            return np.nan_to_num(share, nan=-1.0).clip(-1.0, 2.0)

    def ticks(self) -> list[float]:
        if self.logarithmic:
            first, last = math.floor(self.low), math.ceil(self.high)
            for parts in ((1, 2, 5), (1, 3), (1,)):
                all_ = [10.0**n * part for n in range(first, last + 1) for part in parts]
                inside = [one for one in all_ if self.low <= math.log10(one) <= self.high]
                if len(inside) <= 7:
                    break
            if len(inside) > 1:
                return inside[:: -(-len(inside) // 7)]
            low, high = 10.0**self.low, 10.0**self.high
        else:
            low, high = self.low, self.high
        unit = 1024.0 ** max(0, math.floor(math.log(high, 1024))) if self.binary else 1.0
        step = _nice((high - low) / 5 / unit) * unit
        first = math.ceil(low / step - 1e-9)
        return [n * step for n in range(first, first + 12) if n * step <= high + step * 1e-6]


def _nice(step: float) -> float:
    """Returns the least of 1, 2 or 5 times a power of ten that is not less than the step."""
    ten = 10.0 ** math.floor(math.log10(step))
    return next(ten * n for n in (1, 2, 5, 10) if ten * n >= step * (1 - 1e-9))


def look(run: int) -> str:
    """Returns the classes of a run's colour and dashes."""
    return f"c{run % COLOURS} d{run // COLOURS % DASHES}"


def steps_axis(lines: Iterable[Series], steps: Iterable[int]) -> Axis:
    """Returns the axis of steps that all charts of a page share. steps: that it has at least."""
    ends = [float(one.step[at]) for one in lines if one.step.size for at in (0, -1)]
    ends += map(float, steps)
    low, high = min([0.0, *ends]), max([1.0, *ends])
    return Axis(low, high)


def axes(chart: Chart) -> tuple[Axis, Axis | None, bool]:
    """Returns the axis of the values, the logarithmic one if it can be, and whether that reads
    better: where values are far apart, and most of them are small. Few points whose least or
    greatest value lies far off do not say how far the axis goes."""
    values, lows, highs = (
        np.sort(np.concatenate([np.zeros(0), *(getattr(one, name) for _, _, one in chart.lines)]))
        for name in ("value", "low", "high")
    )
    if not values.size:
        return Axis(0.0, 1.0), None, False
    few = len(values) // 50
    first, last = float(values[0]), float(values[-1])
    low, high = min(first, float(lows[few])), max(last, float(highs[-1 - few]))
    by_log, better = None, False
    if first > 0.0:
        ends = _apart(math.log10(first), math.log10(high))
        by_log = Axis(max(ends[0], -307.0), min(ends[1], 307.0), logarithmic=True)
        small = float(values[len(values) // 2]) < first + last / 4
        better = small and not chart.zero and is_logarithmic(first, last)
    ends = _apart(min(low, 0.0) if chart.zero else low, high)
    return Axis(*ends, binary=chart.unit == "B"), by_log, better


_MOST = 7e307
"""Of the ends of an axis: what lies between them is a number, too."""


def _apart(low: float, high: float) -> tuple[float, float]:
    """Returns the ends of an axis, with some room around the values; none below 0."""
    low, high = max(low, -_MOST), min(high, _MOST)
    room = (high - low) * 0.04
    if room <= 1e-12 * max(abs(low), abs(high), 1e-300):
        room = abs(low) * 0.5 or 0.5
    return low - room * (low != 0.0), high + room


def draw(chart: Chart, steps: Axis) -> str:
    """Returns the svg element of the chart; the page has the marks that lie over its curves."""
    plain, by_log, better = axes(chart)
    y = by_log if by_log is not None and better else plain
    curves = "".join(_curve(run, one, steps, y) for run, _, one in chart.lines)
    said = "; ".join(_summary(chart, name, one) for _, name, one in chart.lines[:8])
    return (
        f'<svg id="{chart.name}" class="chart" tabindex="0" role="img" '
        f'aria-label="{escape(f"{chart.title}. {said}. Arrow keys read the points.")}">'
        f"{_rows(plain, chart, y is plain)}{_rows(by_log, chart, y is by_log)}{_columns(steps)}"
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">'
        f"{curves}</svg>"
        '<use href="#marks"/><line class="cursor" y1="0" y2="100%"/></svg>'
    )


def _rows(axis: Axis | None, chart: Chart, shown: bool) -> str:
    if axis is None:
        return ""
    told = "".join(
        f'<line class="rule" x2="100%" y1="{at:.2f}%" y2="{at:.2f}%"/>'
        f'<text class="end" x="-7" y="{at:.2f}%" dy=".35em">{escape(text)}</text>'
        for tick in axis.ticks()
        for at in (100 - 100 * float(axis.share(tick)),)
        for text in [chart.text(tick) if chart.unit or abs(tick) < 1e5 else f"{tick:.4g}"]
    )
    kind = "log" if axis.logarithmic else "plain"
    return f'<g class="{kind}"{"" if shown else " hidden"}>{told}</g>'


def _columns(steps: Axis) -> str:
    return "".join(
        f'<text class="mid{" odd" * (number % 2)}" x="{100 * float(steps.share(tick)):.2f}%" '
        f'y="100%" dy="1.5em">{_short(tick)}</text>'
        for number, tick in enumerate(steps.ticks())
    )


def _short(step: float) -> str:
    """Returns a number of steps in few letters."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if step >= unit and step % (unit / 10) == 0:
            return f"{step / unit:g}{name}"
    return f"{step:g}"


def _curve(run: int, of: Series, steps: Axis, y: Axis) -> str:
    """Draws the curve of a run, and what its points stand for as a band behind it."""
    if not of.value.size:
        return f'<g class="r{run}"></g>'
    x = np.rint(steps.share(of.step) * WIDTH).astype(int).tolist()
    value, low, high = (
        np.rint((1.0 - y.share(one)) * HEIGHT).astype(int).tolist()
        for one in (of.value, of.low, of.high)
    )
    band = line = lone = ""
    for first, end in pairwise([0, *of.breaks, len(x)]):
        part = slice(first, end)
        if end - first == 1:
            lone += f"M{x[first]} {value[first]}h0"
        else:
            line += f"M{_words(x[part], value[part])}"
        if low[part] != high[part]:
            band += f"M{_words(x[part], high[part])} {_words(x[part][::-1], low[part][::-1])}Z"
    drawn = (("band", band), ("line", line), ("line lone", lone))
    paths = "".join(f'<path class="{kind}" d="{path}"/>' for kind, path in drawn if path)
    return f'<g class="r{run} {look(run)}">{paths}</g>'


def _words(x: Sequence[int], y: Sequence[int]) -> str:
    return " ".join(map(str, chain(*zip(x, y, strict=True))))


def points(chart: Chart) -> dict[str, Any]:
    """Returns the points of the chart's curves, and its axes, for the script of the page."""
    plain, by_log, better = axes(chart)
    return {
        "plain": [plain.low, plain.high],
        "log": by_log and [by_log.low, by_log.high],
        "better": better,
        "unit": chart.unit,
        "lines": [
            {
                "run": run,
                "x": one.step.astype(int).tolist(),
                "y": _rounded(one.value),
                **({"low": _rounded(one.low), "high": _rounded(one.high)} if _wide(one) else {}),
                **({"breaks": one.breaks} if one.breaks else {}),
            }
            for run, _, one in chart.lines
        ],
    }


def _wide(of: Series) -> bool:
    return bool((of.low < of.high).any())


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]


def _summary(chart: Chart, name: str, of: Series) -> str:
    last, least, most = map(chart.text, (of.last, *of.ends))
    return f"{name}: {len(of.step)} points, last {last}, from {least} to {most}"
