"""The programs of docs/gallery: each is killed at several places, and ends in the same bits as one
that nobody kills. (`test_examples.py` and `tests/plugins` do this with the others.) Its pages have
lines of the programs, and the figures that were measured."""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from pmstore.testing import ForkServer, primitives_seen
from pmstore.testing.store_state import differing, examine

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))
import gallery  # noqa: E402

sys.path.pop(0)
PAGES = sorted(gallery.GALLERY.glob("*.md"))
LEARNED: dict[str, tuple[int, Callable[[Any], bool]]] = {
    "cnn": (2, lambda right: right > 0.8),
    "transformer": (40, lambda loss: loss < 4.0),
    "lora": (3, lambda rights: rights[1] > rights[0] + 0.3),
    "gan": (250, lambda found: found[0] > 0.1),
    "rl": (8, lambda balanced: balanced > 40),
    "diffusion": (15, lambda beside: beside > 0.25),
}
"""How many epochs, steps or updates, and what has been learned by then."""


def live(ack: Callable[[int], None], name: str, folder: str, count: int) -> None:
    """A life of a program, in a child."""
    import torch

    torch.set_num_threads(1)
    random.seed(0)  # the run keeps this one too, and the programs leave it as it began
    result = importlib.import_module(f"examples.{name}").train(f"{folder}/run.pm", count)
    Path(folder, "result").write_text(json.dumps(result))
    ack(primitives_seen())


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    preload = ["torch._dynamo", "sklearn.datasets", "pmstore.torch"]
    with ForkServer([str(Path(__file__).parent), str(ROOT)], preload=preload) as made:
        yield made


@pytest.mark.parametrize("name", LEARNED)
def test_killed_at_several_places(server: ForkServer, shm: Path, name: str) -> None:
    count, learned = LEARNED[name]
    whole, killed = shm / "whole", shm / "killed"
    whole.mkdir()
    killed.mkdir()
    ran = server.run("test_gallery:live", [name, str(whole), count], kill_at=gallery.NEVER)
    assert ran.exit_code == 0
    result = json.loads((whole / "result").read_text())
    assert learned(result), result
    chance = random.Random(name)
    for share in (0.02, 0.3, 0.4):  # in attach, or soon after it; then in steps and commits
        kill_at = int(ran.acknowledged * share) + chance.randrange(1, 20)
        assert server.run("test_gallery:live", [name, str(killed), count], kill_at=kill_at).killed
    for _ in range(2):  # the second time there is nothing left to do
        assert server.run("test_gallery:live", [name, str(killed), count]).exit_code == 0
        assert json.loads((killed / "result").read_text()) == result
        one, other = (examine(folder / "run.pm", None).state for folder in (whole, killed))
        assert len(one) > 10
        assert differing(one, other) == []


# ---- its pages


def test_pages_have_the_figures_that_were_measured() -> None:
    """And no others: `python docs/site/gallery.py --pages` writes them."""
    measured = json.loads(gallery.MEASURED.read_text())
    assert measured["programs"].keys() == gallery.PROGRAMS.keys()
    made = gallery.blocks(measured)
    pages = {path.stem: path.read_text(encoding="utf-8") for path in PAGES}
    assert made.keys() == pages.keys()
    assert [page for page, block in made.items() if block not in pages[page]] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_quoted_lines_stand_in_the_program(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    quoted = re.findall(r"^<!-- not run: (\S+) is -->\n```python\n(.*?)^```$", text, re.M | re.S)
    assert len(quoted) == text.count("```python")
    assert quoted or path.stem == "index"
    for program, lines in quoted:
        found = (ROOT / program).read_text(encoding="utf-8")
        depths = (textwrap.indent(lines, " " * depth) for depth in range(0, 20, 4))
        assert any(f"\n{indented}" in found for indented in depths), f"{program}:\n{lines}"


def test_every_program_has_a_picture() -> None:
    pages = {f"{path.stem}-kills.svg" for path in PAGES if path.stem != "index"}
    assert {path.name for path in gallery.PICTURES.glob("*")} == pages
