"""Draws how `pmstore top` shows a store: a panel, drawn anew at each look."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pmstore._base.text import counted, printable
from pmstore.course.reader import Told
from pmstore.show.curve import curve, thinned
from pmstore.show.picture import sparkline
from pmstore.show.snapshot_of_runs import RunState
from pmstore.show.terminal import wrapped
from pmstore.show.units import number, seconds, size
from pmstore.show.watcher import Watched, resident_bytes

_TITLES = 8
_BESIDE = 4 + _TITLES + 2
"""Columns that a panel takes beside a text: its frame, and the titles."""
_CURVE = _BESIDE + 4
"""Columns that a panel takes beside a curve."""


def frame(stores: Sequence[Watched], width: int, height: int, blocks: bool) -> RenderableType:
    """Returns the panels of all stores, in `width` columns and about `height` lines. blocks: dots
    and shades can be shown, or only ASCII."""
    lines = max(3, min(10, height // max(len(stores), 1) - 12))
    return Group(*(_panel(one, width, lines, blocks) for one in stores))


_ROOMY = 8
"""Lines of a curve from which on there is room for more."""
_OTHERS = 3
"""Logged values that are drawn there, beside the loss."""


def _panel(of: Watched, width: int, lines: int, blocks: bool) -> RenderableType:
    rows = _Rows(width - _BESIDE)
    rows.add("state", *state(of))
    if of.problem:
        rows.add("", of.problem, "yellow")
    if of.told is not None:
        info = of.told.info
        for run in of.told.runs:
            _run(rows, of, run, width - _CURVE, lines, blocks)
        told = f"{size(info.used_bytes)} used of a file of {size(info.file_bytes)}"
        rows.add("store", f"{info.epoch:,} commits, {told}, domain {info.domain}")
    title = Text(printable(str(of.path)), "bold")
    border = "green" if of.live else "dim"
    return Panel(rows.table, title=title, title_align="left", border_style=border)


class _Rows:
    """A table of titles, and of what is told beside them."""

    def __init__(self, columns: int) -> None:
        """Makes an empty table. columns: the width of a text beside a title."""
        self.table = Table.grid(padding=(0, 2, 0, 0))
        self.table.add_column(style="cyan", no_wrap=True, min_width=_TITLES)
        self.table.add_column(ratio=1)
        self._columns = columns

    def add(self, title: str, text: str, style: str = "") -> None:
        """Adds a row. The text is shown as it is: what is in a store neither colours the terminal
        nor steers it."""
        lines = wrapped(printable(text), self._columns)
        self.table.add_row(title, Text("\n".join(lines), style))


def state(of: Watched) -> tuple[str, str]:
    """Says whether a program trains in the store, and how that ended; and returns the style to say
    it in."""
    if of.live:
        pids = [pid for pid in of.writers if pid]
        who = ", ".join(f"process {pid}" for pid in pids) or "a process elsewhere"
        memory = sum(filter(None, map(resident_bytes, pids)))
        return f"open for writing by {who}" + (f", {size(memory)} of memory" * bool(memory)), ""
    if of.told is None:
        return "cannot be read", "yellow"
    step = max((run.step for run in of.told.runs), default=None)
    at = "" if step is None else f" at step {step:,}"
    if not of.lived and not of.clean:
        told = "nobody writes to it, and who did was killed: this is its last commit"
        return f"{told}{at and ','}{at}", "red"
    if not of.lived:
        return f"nobody writes to it: this is its last commit{at and ','}{at}", ""
    if of.clean:
        return f"ended: closed{at}", "green"
    return f"its process died: the store is as of its last commit{at and ','}{at}", "red"


def _run(rows: _Rows, of: Watched, run: RunState, width: int, lines: int, blocks: bool) -> None:
    between = " \N{MIDDLE DOT} " if blocks else ", "
    rows.add("run", f"{run.name}: {between.join(run.facts(of.rate(run)))}")
    course = run.course
    if course is None:
        rows.add("", "its program keeps no course", "dim")
        return
    whole = list(course.whole())
    losses = [one.loss for one in whole]
    drawn = curve(losses, max(width, 10), lines, blocks, logarithmic=True)
    if drawn:
        # what was logged is newer than the course, and says where a loss is not finite
        last = run.logged.get("loss", losses[-1])
        rows.add("loss", number(last) if math.isfinite(last) else str(last))
        rows.table.add_row("", Text("\n".join(drawn), "green", no_wrap=True))
    if lines >= _ROOMY:
        others = [name for name in run.lately if name not in ("loss", "lr")]
        for at, name in enumerate(others[:_OTHERS]):
            seen = thinned(run.lately[name], max(width // 3, 10))
            rows.add(
                "lately" * (at == 0),
                f"{sparkline(seen, blocks)} {name} {number(run.lately[name][-1])}",
            )
    if bad := sum(one.bad for one in whole):
        rows.add("", f"{bad:,} losses were not finite", "red")
    rows.add("commits", commits(course))
    if course.seconds == course.seconds:
        rows.add("at risk", at_risk(course))
    if course.decisions:
        made = course.decisions[-1]
        told = f"at step {made.step:,} to {made.target}: {made.reason}"
        costs = f"at risk {seconds(made.risk)}, expected cost {seconds(made.cost)}"
        rows.add("decision", f"{told}; {costs}")
    for tier in course.tiers:
        told = f"{tier.name}: epoch {tier.epoch:,}"
        if tier.under_way is None:
            rows.add("tier", told + ("; the last flush failed" if tier.failed else ""))
        else:
            bar = ProgressBar(total=1.0, completed=tier.share, width=20)
            line = Table.grid(padding=(0, 1, 0, 0))
            under_way = f"; {tier.under_way:,} at {tier.share:.0%}"
            line.add_row(Text(printable(told + under_way)), bar)
            rows.table.add_row("tier", line)


def commits(course: Told) -> str:
    """Says in words how long the course's commits took, and how many bytes they wrote."""
    made = [one for one in course.whole() if one.commits]
    if not made:
        return "none yet"
    last, count = made[-1], sum(one.commits for one in made)
    spent = sum(one.seconds for one in made)
    return (
        f"the last {seconds(last.seconds / last.commits)}, "
        f"{size(last.bytes / last.commits)}; in the mean {seconds(spent / count)}, the slowest "
        f"{seconds(max(one.slowest for one in made))}"
    )


def at_risk(course: Told) -> str:
    """Says in words how much work was at risk at most, and which share of the time the commits
    took."""
    return (
        f"{seconds(course.stake_seconds)} of work at most, or "
        f"{counted(int(course.stake_steps), 'step')}; "
        f"commits took {course.commit_share():.2%} of the time"
    )
