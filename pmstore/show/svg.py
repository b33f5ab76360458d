"""Charts as SVG, drawn by a few lines: axes, lines, bands, marks. Colours are the page's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from pmstore.show.units import is_logarithmic

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 34
MARKS_MOST = 400


@dataclass(frozen=True)
class Line:
    """A curve in a chart, with the band that it is the middle of. A value that is not finite is a
    gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    kind: str = "a"
    """Its colour: a class of the page's."""
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Marks:
    """Upright lines at places on the x axis: short ones at its foot, or of the whole height. label:
    for the legend; "": other marks have said it."""

    label: str
    x: Sequence[float]
    kind: str
    whole: bool = False
    titles: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """A chart with its axes, lines and marks. logarithmic: None: it is so if the values are
    positive, and some are far apart."""

    name: str
    title: str
    x_title: str
    y_title: str
    lines: Sequence[Line]
    marks: Sequence[Marks] = ()
    x_text: Callable[[float], str] = str
    y_text: Callable[[float], str] = str
    logarithmic: bool | None = None
    zero: bool = False
    """The y axis begins at 0, unless it is logarithmic."""
    binary: bool = False
    """It counts bytes."""
    texts: Sequence[str] = ()
    """What each point of the first line says, to who asks for it."""

    @property
    def empty(self) -> bool:
        return not any(_finite(line.x, line.y) for line in self.lines)


@dataclass(frozen=True)
class Scale:
    """Maps the values of an axis to places in the drawing."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False
    binary: bool = False

    def __call__(self, value: float) -> float:
        if self.logarithmic:
            value = math.log10(value) if value > 0.0 else -math.inf
        share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(max(share, -0.05), 1.05)

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


def _finite(*values: Sequence[float]) -> list[tuple[float, ...]]:
    return [one for one in zip(*values, strict=True) if all(map(math.isfinite, one))]


def scales(chart: Chart) -> tuple[Scale, Scale]:
    """Returns the scales of x and y. REQUIRES: the chart is not empty."""
    xs = [x for line in chart.lines for x, _ in _finite(line.x, line.y)]
    ys = [
        y
        for line in chart.lines
        for row in (line.y, line.low, line.high)
        for y in row
        if math.isfinite(y)
    ]
    low, high = min(ys), max(ys)
    logarithmic = chart.logarithmic
    if logarithmic is None:
        logarithmic = is_logarithmic(low, high)
    if logarithmic:
        low, high = math.log10(low), math.log10(high)
    elif chart.zero:
        low = min(low, 0.0)
    low, high = _apart(low, high)
    room = (high - low) * 0.04
    low = low if chart.zero and not logarithmic else low - room
    x = Scale(*_apart(min(xs), max(xs)), LEFT, WIDTH - RIGHT)
    return x, Scale(low, high + room, HEIGHT - BOTTOM, TOP, logarithmic, chart.binary)


def _apart(low: float, high: float) -> tuple[float, float]:
    """Returns the ends of an axis; two that are the same get some room between them."""
    if high - low > 1e-12 * max(abs(low), abs(high), 1e-300):
        return low, high
    room = abs(low) * 0.5 or 0.5
    return low - room, high + room


def draw(chart: Chart) -> str:
    """Returns the svg element of the chart."""
    if chart.empty:
        return '<p class="none">Nothing was recorded.</p>'
    x, y = scales(chart)
    foot, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    rows = [(_at(y(tick)), escape(chart.y_text(tick))) for tick in y.ticks()]
    columns = [(_at(x(tick)), escape(chart.x_text(tick))) for tick in x.ticks()]
    parts = (
        (
            f'<svg id="{chart.name}" class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" tabindex="0" '
            f'role="img" aria-label="{escape(_summary(chart))}">'
        ),
        *(f'<path class="grid" d="M{LEFT} {at}H{right}"/>' for at, _ in rows),
        *(
            f'<text class="tick end" x="{LEFT - 6}" y="{at}" dy=".32em">{text}</text>'
            for at, text in rows
        ),
        *(f'<text class="tick mid" x="{at}" y="{foot + 15}">{text}</text>' for at, text in columns),
        f'<path class="axis" d="M{LEFT} {foot}H{right}"/>',
        *(_marks(marks, x) for marks in chart.marks),
        *(_line(line, x, y) for line in chart.lines),
        f'<text class="tick end" x="{right}" y="{HEIGHT - 4}">{escape(chart.x_title)}</text>',
        '<path class="cursor" d=""/><circle class="cursor" r="0"/></svg>',
    )
    return "".join(parts)


def points(chart: Chart) -> dict[str, list[object]]:
    """Returns where the points of the chart's first line are in the drawing, and what they say."""
    if chart.empty:
        return {"x": [], "y": [], "text": []}
    x, y = scales(chart)
    places: list[object] = []
    heights: list[object] = []
    texts: list[object] = []
    line = chart.lines[0]
    for place, (a, b) in enumerate(zip(line.x, line.y, strict=True)):
        if math.isfinite(a) and math.isfinite(b):
            places.append(round(x(a), 1))
            heights.append(round(y(b), 1))
            texts.append(chart.texts[place])
    return {"x": places, "y": heights, "text": texts}


def _line(line: Line, x: Scale, y: Scale) -> str:
    drawn = ""
    if line.low:
        band = _finite(line.x, line.low, line.high)
        upper = " ".join(f"{_at(x(a))} {_at(y(high))}" for a, _, high in band)
        lower = " ".join(f"{_at(x(a))} {_at(y(low))}" for a, low, _ in reversed(band))
        drawn = f'<path class="band {line.kind}" d="M{upper} {lower}Z"/>' if band else ""
    path, gap, last = [], True, None
    for a, b in zip(line.x, line.y, strict=True):
        if not (math.isfinite(a) and math.isfinite(b)):
            gap = True
            continue
        here = f"{_at(x(a))} {_at(y(b))}"
        if here != last:
            path.append(f"{'M' if gap else 'L'}{here}")
        gap, last = False, here
    alone = len(path) == 1
    if alone:  # a lone point is a dot
        path.append("h0")
    return drawn + f'<path class="line {line.kind}{" dot" * alone}" d="{"".join(path)}"/>'


def _marks(marks: Marks, x: Scale) -> str:
    foot = HEIGHT - BOTTOM
    height = foot - TOP if marks.whole else 7
    inside = [
        (at, title)
        for at, title in zip(marks.x, marks.titles or [""] * len(marks.x), strict=True)
        if x.low <= at <= x.high
    ]
    places = {}  # one mark for each place that can be told from others
    for at, title in inside:
        places[f"{x(at):.0f}" if len(inside) > MARKS_MOST else _at(x(at))] = title
    if marks.titles:
        return "".join(
            f'<path class="mark {marks.kind}" d="M{at} {foot}v-{height}"><title>{escape(title)}'
            "</title></path>"
            for at, title in places.items()
        )
    path = "".join(f"M{at} {foot}v-{height}" for at in places)
    return f'<path class="mark {marks.kind}" d="{path}"/>'


def _at(place: float) -> str:
    return f"{place:.1f}".removesuffix(".0")


def _summary(chart: Chart) -> str:
    """Describes the chart in words, for people who hear it instead of seeing it."""
    told = []
    for line in chart.lines:
        points = _finite(line.x, line.y)
        if points:
            values = [y for _, y in points]
            told.append(
                f"{line.label}: {len(points)} points, from {chart.y_text(values[0])} to "
                f"{chart.y_text(values[-1])}, least {chart.y_text(min(values))}, greatest "
                f"{chart.y_text(max(values))}"
            )
    return f"{chart.title}. {'; '.join(told)}. Arrow keys read the points."
