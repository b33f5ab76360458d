"""Draws docs/pictures/kills.svg: the loss of `pmstore demo`'s training, killed twice, over that of
the same training undisturbed. python docs/site/kills.py"""

from __future__ import annotations

import tempfile
from pathlib import Path

import matplotlib

import pmstore
from pmstore_lab.demo import KILLED, UNDISTURBED, Report, Settings, run_demo

PICTURE = Path(__file__).resolve().parent.parent / "pictures" / "kills.svg"
CARD, INK, WIDE, KILL = "#f8fafc", "#1f2933", "#c3ccd5", "#c62828"
LIVES = ("#1f77b4", "#2e8b3d", "#8e44ad")  # a colour for each process that trains


def losses(folder: Path, job: str) -> list[float]:
    with pmstore.open(folder / f"{job.split()[0]}.pm", "r") as store:
        return list(store["losses"])


def draw(report: Report, whole: list[float], killed: list[float]) -> None:
    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.hashsalt": "pmstore", "font.size": 13, "text.color": INK}
    figure, axis = pyplot.subplots(figsize=(8, 3.6), layout="constrained", facecolor=CARD)
    axis.set_facecolor(CARD)
    axis.plot(whole, color=WIDE, linewidth=6, label="never killed")
    kills = report.jobs[KILLED].kills
    ends = [kill.resumed_at_step for kill in kills]
    names = ("started", "started again", "and again")
    for begin, end, name, color in zip([0, *ends], [*ends, len(killed)], names, LIVES, strict=True):
        axis.plot(range(begin, end), killed[begin:end], color=color, linewidth=1.4, label=name)
    for end, where in zip(ends, ("at a random moment", "inside a commit"), strict=True):
        axis.axvline(end, color=KILL, linestyle="--", linewidth=1.4)
        axis.annotate(
            f"SIGKILL\n{where}", (end + 5, max(whole)), color=KILL, verticalalignment="top"
        )
    axis.set(xlabel="training step", ylabel="loss", xlim=(0, len(whole)), ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        report = run_demo(Settings(400, 7, "process", Path(name), True, 1), lambda job, step: None)
        assert report.ok
        assert report.folder is not None
        whole, killed = (losses(report.folder, job) for job in (UNDISTURBED, KILLED))
    assert killed == whole
    draw(report, whole, killed)


if __name__ == "__main__":
    main()
