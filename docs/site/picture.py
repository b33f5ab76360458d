"""Draws docs/pictures/tutorial.svg: the tutorial's own program, killed in step 150 and resumed,
beside one that was never killed. python docs/site/picture.py"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import torch

import pmstore
import pmstore.torch

DOCS = Path(__file__).resolve().parent.parent


def program() -> str:
    """The tutorial's, which also keeps its losses."""
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(# train.py\n.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1].replace(
        "run.log(loss=", 'store.list("losses").append(loss.item()); run.log(loss='
    )


def train(folder: Path, die_at: int | None = None) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", *([] if die_at is None else [str(die_at)])]
    done = subprocess.run(command, cwd=folder, env=environment)
    assert (done.returncode == 0) == (die_at is None)


def state(folder: Path) -> tuple[list[float], torch.nn.Module]:
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    model = torch.nn.Sequential(linear(2, 64), relu(), linear(64, 64), relu(), linear(64, 1))
    with pmstore.open(folder / "run.pm", "r") as store:
        pmstore.torch.load(store, model)
        return list(store["losses"]), model


def main() -> None:
    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "pmstore"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        killed, whole = Path(name) / "killed", Path(name) / "whole"
        for folder in (killed, whole):
            folder.mkdir()
            (folder / "train.py").write_text(program())
        train(killed, die_at=150)
        before, at_kill = state(killed)
        train(killed)
        after, at_end = state(killed)
        train(whole)
        undisturbed, _ = state(whole)
    assert after == undisturbed
    figure, (left, *maps) = pyplot.subplots(
        1, 3, figsize=(9, 3.1), width_ratios=[2, 1, 1], layout="constrained", facecolor="#f8fafc"
    )
    left.plot(undisturbed, color="#c3ccd5", linewidth=5, label="never killed")
    left.plot(before, color="#1f77b4", linewidth=1, label="until the kill")
    steps = range(len(before), len(after))
    left.plot(steps, after[len(before) :], color="#2ca02c", linewidth=1, label="after the resume")
    left.axvline(len(before), color="#d62728", linestyle="--", linewidth=1)
    left.annotate("SIGKILL", (len(before) + 6, max(after) * 0.93), color="#d62728")
    left.set(xlabel="step", ylabel="loss")
    left.legend(frameon=False)
    side = torch.linspace(-2.5, 2.5, 120)
    y, x = torch.meshgrid(side, side, indexing="ij")
    points = torch.stack([x, y], -1).reshape(-1, 2)
    for axis, model, title in zip(
        maps, (at_kill, at_end), ("when killed", "at the end"), strict=True
    ):
        with torch.no_grad():
            seen = model(points).sigmoid().reshape(120, 120)
        axis.imshow(
            seen, origin="lower", extent=(-2.5, 2.5, -2.5, 2.5), cmap="RdBu", vmin=0, vmax=1
        )
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig(DOCS / "pictures" / "tutorial.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
