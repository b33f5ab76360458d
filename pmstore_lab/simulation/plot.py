"""The picture of a comparison. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pmstore_lab.simulation.cells import HOUR, Cell
from pmstore_lab.simulation.compare import OPTIMA, Row

_LIMIT = 4.0  # longer bars are cut off; their figure stands in them


def plot(cell: Cell, rows: Sequence[Row], path: Path) -> None:
    """Writes the figure: what each policy costs over the optimum, and how its intervals change
    along the job.

    Raises: ModuleNotFoundError without matplotlib; ValueError for a file type it does not know;
        OSError.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    bars, intervals = figure.subplots(1, 2, width_ratios=(1, 1.4))
    shown = [row for row in rows if row.policy not in OPTIMA]
    places = np.arange(len(shown))
    for shift, label, ratios in (
        (-0.2, "wall time", [row.over_optimum for row in shown]),
        (0.2, "value lost", [row.value_over_optimum for row in shown]),
    ):
        bars.barh(places + shift, np.minimum(ratios, _LIMIT), 0.4, label=label)
        for place, ratio in zip(places, ratios, strict=True):
            far = ratio > 0.8 * _LIMIT
            bars.text(
                min(ratio, _LIMIT),
                place + shift,
                f" {ratio:.2f} " if ratio < 10.0 else f" {ratio:.3g} ",
                ha="right" if far else "left",
                va="center",
                fontsize="x-small",
            )
    bars.axvline(1.0, color="black", linewidth=0.8)
    bars.set_yticks(places, [row.policy for row in shown])
    bars.invert_yaxis()
    bars.set_xlim(0.0, _LIMIT)
    bars.set_xlabel("expected overhead / optimum")
    bars.legend(loc="center right")
    hours = cell.cost.iteration / HOUR
    for row in rows:
        at = np.concatenate([[0], np.array(row.at)])
        if len(at) < 3:
            continue
        dashed = row.policy in OPTIMA
        label, style = row.policy, "--" if dashed else "-"
        seconds = np.diff(at) * cell.cost.iteration
        intervals.step(at[1:] * hours, seconds, style, where="pre", label=label, linewidth=1.2)
    intervals.set_yscale("log")
    intervals.set_xlabel("work done, hours")
    intervals.set_ylabel("seconds of work between commits")
    intervals.legend(fontsize="small", ncols=2)
    what = f"{cell.cost.name}, {cell.curve.name}, MTBF {cell.mtbf / HOUR:.3g} h"
    figure.suptitle(f"{what}: commit {cell.cost.price:.3g} s, iteration {cell.cost.iteration:g} s")
    figure.savefig(path, dpi=130)
