"""Draws docs/pictures/kills.svg: the loss of `pmstore demo`'s training, killed twice, over that of
the same training undisturbed. python docs/site/kills.py"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import matplotlib

import pmstore
from pmstore_lab.demo import KILLED, UNDISTURBED, Settings, run_demo

PICTURE = Path(__file__).resolve().parent.parent / "pictures" / "kills.svg"
CARD, INK, WIDE, KILL = "#f8fafc", "#1f2933", "#c3ccd5", "#c62828"
LIVES = ("#1f77b4", "#2e8b3d", "#8e44ad")  # a colour for each process that trains
NAMES = ("started", "started again", "and again")


def losses(folder: Path, job: str) -> list[float]:
    with pmstore.open(folder / f"{job.split()[0]}.pm", "r") as store:
        return list(store["losses"])


Curve = tuple[Sequence[float], Sequence[float]]
"""Steps, and what was logged of each."""


def draw(
    picture: Path, whole: Curve, killed: Curve, kills: Sequence[tuple[float, str]], label: str
) -> None:
    """Draws the curve of a run, a colour for each life, over that of the run that nobody killed.
    kills: the last step that each life committed, and what is said of it. label: of what is
    logged."""
    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.hashsalt": "pmstore", "font.size": 13, "text.color": INK}
    figure, axis = pyplot.subplots(figsize=(8, 3.6), layout="constrained", facecolor=CARD)
    axis.set_facecolor(CARD)
    axis.plot(*whole, color=WIDE, linewidth=6, label="never killed")
    falls, end = whole[1][0] > whole[1][-1], max(whole[0])
    free = (max(whole[1]), "top") if falls else (min(whole[1]), "bottom")
    ends = [step for step, _ in kills]
    lives = zip([0.0, *ends], [*ends, end + 1], NAMES, LIVES, strict=True)
    for first, last, name, color in lives:
        of_life = [at for at in zip(*killed, strict=True) if first < at[0] <= last]
        axis.plot(*zip(*of_life, strict=True), color=color, linewidth=1.4, label=name)
    for step, words in kills:
        axis.axvline(step, color=KILL, linestyle="--", linewidth=1.4)
        said = f"SIGKILL\n{words}".strip()
        axis.annotate(said, (step + end / 80, free[0]), color=KILL, verticalalignment=free[1])
    axis.set(xlabel="training step", ylabel=label, xlim=(0, end + 1))
    axis.set_ylim(0 if min(whole[1]) >= 0 else None, None)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        report = run_demo(Settings(400, 7, "process", Path(name), True, 1), lambda job, step: None)
        assert report.ok
        assert report.folder is not None
        whole, killed = (losses(report.folder, job) for job in (UNDISTURBED, KILLED))
    assert killed == whole
    kills = [kill.resumed_at_step for kill in report.jobs[KILLED].kills]
    words = ("at a random moment", "inside a commit")
    steps = range(1, len(whole) + 1)
    draw(PICTURE, (steps, whole), (steps, killed), list(zip(kills, words, strict=True)), "loss")


if __name__ == "__main__":
    main()
