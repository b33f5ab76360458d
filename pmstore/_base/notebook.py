"""Draws what stores, groups, lists and reports look like in a notebook: tables, and small pictures
in the colour of the text, so that they fit a light and a dark page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

SHOWN = 50
DRAWN = 256
"""Values of a curve, at most."""
_WIDTH, _HEIGHT = 240, 48


class Drawn(str):
    """A piece of HTML that is shown as it is. All other text is escaped."""

    __slots__ = ()


def table(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    total: int,
    picture: Drawn | None = None,
) -> str:
    """Returns the HTML of at most `SHOWN` rows out of total. Everything is escaped: names come from
    the file.

    >>> table("<x>", ["n"], [["a&b"]], 2)
    '<p>&lt;x&gt;</p><table><tr><th>n</th></tr><tr><td>a&amp;b</td></tr></table><p>and 1 more</p>'
    """
    import html  # which takes longer to import than all else that a store's names need

    shown = [
        "<tr>"
        + "".join(
            f"<td>{cell if isinstance(cell, Drawn) else html.escape(str(cell))}</td>"
            for cell in row
        )
        + "</tr>"
        for row in rows
    ]
    more = f"<p>and {total - len(shown):,} more</p>" if total > len(shown) else ""
    first = f"<tr>{''.join(f'<th>{html.escape(title)}</th>' for title in head)}</tr>"
    drawn = f"<p>{picture}</p>" if picture else ""
    body = "".join(shown)
    return f"<p>{html.escape(title)}</p>{drawn}<table>{first}{body}</table>{more}"


def facts(title: str, told: Iterable[tuple[str, object]], picture: Drawn | None = None) -> str:
    """Returns the HTML of a report: names, each with what is said of it."""
    rows = [*told]
    return table(title, ("", ""), rows, len(rows), picture)


def share(part: float, whole: float, width: int = 96) -> Drawn:
    """Draws a bar that is filled as far as the part goes.

    >>> "25 %" in share(1, 4), "0 %" in share(1, 0)
    (True, True)
    """
    filled = min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
    return Drawn(
        f'<svg width="{width}" height="10" role="img" aria-label="{filled:.0%}">'
        f"<title>{100 * filled:.0f} %</title>"
        f'<rect width="{width}" height="10" fill="currentColor" opacity="0.15"/>'
        f'<rect width="{filled * width:.1f}" height="10" fill="currentColor" opacity="0.6"/></svg>'
    )


def curve(values: Sequence[float]) -> Drawn | None:
    """Draws a line through the values, from left to right. Returns None if fewer than two can be
    drawn."""
    finite = [(at, float(value)) for at, value in enumerate(values) if isfinite(value)]
    if len(finite) < 2:
        return None
    low, high = min(v for _, v in finite), max(v for _, v in finite)
    reach, last = high / 2 - low / 2, len(values) - 1
    points = " ".join(
        f"{1 + (_WIDTH - 2) * at / last:.1f},"
        f"{_HEIGHT - 2 - (_HEIGHT - 4) * ((v / 2 - low / 2) / reach if reach > 0 else 0.5):.1f}"
        for at, v in finite
    )
    return Drawn(
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="curve from {finite[0][1]:.6g} to {finite[-1][1]:.6g}">'
        f"<title>{low:.6g} to {high:.6g}</title>"
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )
