"""Pictures of the last results of the benchmarks, drawn anew for each build: above the tables of
benchmarks/RESULTS.md, and where a document says `<!-- plot: question -->`. The documents themselves
have no pictures of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from benchmarks.plots import draw
from benchmarks.results import rows_of, stored

SHOWN: Mapping[str, Mapping[str, Any]] = {
    "iterations": {"cases": ["KMeans MNIST-5k k=10, state A (63 KB)"]},
    "training": {"cases": ["MLP, 453 MB of state", "transformer, 38 MB of state"]},
    "restart": {
        "cases": [
            "1 GB of state, warm, to the end of the first step",
            "100 MB of state, cold, to the end of the first step",
        ]
    },
    "engine": {},
    "checkpoints": {"cases": ["save, 450 MB, 1 rank, disk", "load, 450 MB, 1 rank, disk"]},
}
"""Questions, and how `draw` shows them."""

RESULTS = "benchmarks/RESULTS"
PLOTS = Path("build") / "plots"


def pictures(app: Sphinx) -> None:
    folder = Path(app.srcdir) / PLOTS
    folder.mkdir(parents=True, exist_ok=True)
    for answer in stored()["answers"]:
        if answer["question"] in SHOWN:
            path = folder / f"{answer['question']}.png"
            rows = [row for row in rows_of(answer) if row.measured]
            draw(path, answer["title"], rows, **SHOWN[answer["question"]])


def add(app: Sphinx, docname: str, content: list[str]) -> None:
    """A picture below each heading that has one, and in the place of each mark."""
    here = os.path.relpath(PLOTS, Path(docname).parent)

    def with_picture(heading: re.Match[str]) -> str:
        question, title = heading["question"], heading["title"]
        if question not in SHOWN:
            return heading[0]
        return f"{heading[0]}\n\n![{title}]({here}/{question}.png)\n"

    def in_its_place(mark: re.Match[str]) -> str:
        if mark[1] not in SHOWN:
            raise ValueError(f"{docname}: no plot is drawn for {mark[1]!r}")
        return f"![Times of {mark[1]}, beside other ways to save]({here}/{mark[1]}.png)"

    if docname == RESULTS:
        content[0] = re.sub(
            r"^## (?P<question>\w+): (?P<title>.*)$", with_picture, content[0], flags=re.MULTILINE
        )
    content[0] = re.sub(r"^<!-- plot: (\w+) -->$", in_its_place, content[0], flags=re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", pictures)
    app.connect("source-read", add)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
