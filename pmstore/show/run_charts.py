"""The charts of a run: loss, cost and bytes of commits, speed."""

from __future__ import annotations

from itertools import pairwise

from pmstore.course.reader import Stretch, Told, thinned
from pmstore.show.svg import Chart, Line, Marks
from pmstore.show.units import moment, number, seconds, size

_NAN = float("nan")
_TITLED = 64
"""How many marks of a kind say what they are. If there are more, they are lines alone."""


def charts_of(course: Told, name: str, points: int) -> tuple[Chart, ...]:
    """Returns the four charts of a run. name: what follows "loss-", "cost-" and so on in their
    names. points: of each chart, at most."""
    whole = list(course.whole())
    told = thinned(whole, points)
    began = whole[0].time if whole else 0.0
    spans = _spans(told)
    return (
        _loss(course, whole, told, f"loss-{name}"),
        _cost(course, told, began, f"cost-{name}"),
        _bytes(told, began, f"bytes-{name}"),
        _rate(told, spans, began, f"rate-{name}"),
    )


def _where(one: Stretch) -> str:
    return f"step {one.last:,}" if one.first == one.last else f"steps {one.first:,} to {one.last:,}"


def _loss(course: Told, whole: list[Stretch], told: list[Stretch], name: str) -> Chart:
    commits = [float(one.last) for one in whole if one.commits]
    starts = [one for one in course.starts[-_TITLED:] if one.step]
    older, decisions = course.decisions[:-_TITLED], course.decisions[-_TITLED:]
    wide = any(one.loss_min < one.loss_max for one in told)
    return Chart(
        name,
        *("Loss", "step", "loss, with the least and greatest of each point" if wide else "loss"),
        lines=[
            Line(
                "loss",
                [float(one.last) for one in told],
                [one.loss for one in told],
                low=[one.loss_min for one in told] if wide else (),
                high=[one.loss_max for one in told] if wide else (),
            )
        ],
        marks=[
            Marks("commit", commits, "commit"),
            Marks("", [float(one.step) for one in older], "decision"),
            Marks(
                "decided by the scheduler",
                [float(one.step) for one in decisions],
                "decision",
                titles=[f"step {one.step:,}: to {one.target}, {one.reason}" for one in decisions],
            ),
            Marks(
                "the program began again",
                [float(one.step) for one in starts],
                "start",
                whole=True,
                titles=[f"after step {one.step:,}, at {moment(one.time)}" for one in starts],
            ),
        ],
        x_text=number,
        y_text=number,
        texts=[
            f"{_where(one)}: loss {number(one.loss)}"
            + (
                f" ({number(one.loss_min)} to {number(one.loss_max)})"
                if one.loss_min < one.loss_max
                else ""
            )
            + (f", {one.bad:,} not finite" if one.bad else "")
            + f", {one.commits:,} committed"
            for one in told
        ],
    )


def _cost(course: Told, told: list[Stretch], began: float, name: str) -> Chart:
    made = [one for one in told if one.commits]
    mean = [one.seconds / one.commits for one in made]
    several = any(one.commits > 1 for one in made)
    slowest = Line("slowest", _times(made, began), [one.slowest for one in made], "b")
    return Chart(
        name,
        *("Cost of a commit", "time since the first step", "seconds that a commit took"),
        lines=[
            Line("mean" if several else "each", _times(made, began), mean),
            *([slowest] if several else []),
        ],
        marks=[
            Marks(
                "the program began again",
                [one.time - began for one in course.starts[-_TITLED:] if one.step],
                "start",
                whole=True,
            )
        ],
        x_text=seconds,
        y_text=seconds,
        zero=True,
        texts=[
            f"{_where(one)}, at {moment(one.time)}: {one.commits:,} commits, {seconds(cost)} each, "
            f"slowest {seconds(one.slowest)}"
            for one, cost in zip(made, mean, strict=True)
        ],
    )


def _bytes(told: list[Stretch], began: float, name: str) -> Chart:
    made = [one for one in told if one.commits]
    mean = [one.bytes / one.commits for one in made]
    return Chart(
        name,
        *("Bytes of a commit", "time since the first step", "bytes that a commit wrote"),
        lines=[Line("mean", _times(made, began), mean)],
        x_text=seconds,
        y_text=size,
        zero=True,
        binary=True,
        texts=[
            f"{_where(one)}, at {moment(one.time)}: {size(each)} a commit"
            for one, each in zip(made, mean, strict=True)
        ],
    )


def _spans(told: list[Stretch]) -> list[float]:
    """Returns the steps a second up to each stretch; nan for the first one."""
    rates = [
        (one.last - before.last) / (one.time - before.time) if one.time > before.time else _NAN
        for before, one in pairwise(told)
    ]
    return [_NAN, *rates][: len(told)]


def _rate(told: list[Stretch], rates: list[float], began: float, name: str) -> Chart:
    return Chart(
        name,
        *("Speed", "time since the first step", "steps a second"),
        lines=[Line("steps a second", _times(told, began), rates)],
        x_text=seconds,
        y_text=number,
        zero=True,
        texts=[
            f"{_where(one)}, at {moment(one.time)}: {number(rate)} steps a second"
            for one, rate in zip(told, rates, strict=True)
        ],
    )


def _times(told: list[Stretch], began: float) -> list[float]:
    return [one.time - began for one in told]
