"""`pmstore report`: its numbers are the store's, in the file and in a browser."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")

from typer.testing import CliRunner

import pmstore
from pmstore.commands.application import app
from pmstore.course import Course, Told, read
from pmstore.show.report import BYTES_MOST, Reported, report
from pmstore.show.snapshot_of_runs import gather, tier_contents
from pmstore.show.units import moment, number, size
from tests.courses import begin, made, train

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


class Page(HTMLParser):
    """Tables by their captions, and texts of elements by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, str] = {}
        self._caption, self._open = "", ""
        self._last: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        known = dict(attributes)
        self._open = tag
        self._last.append((tag, known.get("id") or ""))
        if tag == "tr" and self._caption:
            self.tables[self._caption].append([])

    def handle_data(self, data: str) -> None:
        if self._open == "caption":
            self._caption = data
            self.tables.setdefault(data, [])
        elif self._open in ("td", "th"):
            self.tables[self._caption][-1].append(data)
        elif self._last and self._last[-1][1]:
            self.texts[self._last[-1][1]] = self.texts.get(self._last[-1][1], "") + data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""
        while self._last and self._last.pop()[0] != tag:
            pass


def embedded(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture
def stores(tmp_path: Path) -> list[Path]:
    return [made(tmp_path / f"rank{rank}.pm", 300 + 100 * rank) for rank in range(2)]


def told(path: Path) -> Told:
    with pmstore.open(path, mode="r") as store:
        found = read(store, "run")
    assert found is not None
    return found


def test_numbers_are_the_stores(stores: list[Path], tmp_path: Path) -> None:
    answer = run(*stores, "-o", tmp_path / "r.html")
    assert answer.exit_code == 0, answer.output
    text = (tmp_path / "r.html").read_text()
    data = embedded(text)
    for rank, path in enumerate(stores):
        of = told(path)
        with pmstore.open(path, mode="r") as store:
            info = store.info()
        shown = data["stores"][rank]
        for name in ("epoch", "used_bytes", "file_bytes", "opens", "unclean_opens", "domain"):
            assert shown[name] == getattr(info, name)
        assert shown["runs"][0]["step"] == 300 + 100 * rank
        assert shown["runs"][0]["commits"] == sum(one.commits for one in of.whole())
        assert shown["runs"][0]["decisions"] == len(of.decisions) > 20
        points = data["charts"][f"loss-{rank}"]["text"]
        assert len(points) == 300 + 100 * rank
        for one, point in zip(of.whole(), points, strict=True):
            assert point.startswith(f"step {one.last:,}: loss {number(one.loss)}")
    page = Page(text)
    overview = page.tables["Stores and runs"]
    assert [row[:3] for row in overview[1:]] == [
        ["rank0.pm", "run", "300"],
        ["rank1.pm", "run", "400"],
    ]


def test_every_decision_is_marked(tmp_path: Path) -> None:
    """The newest ones with what they were."""
    path = made(tmp_path / "run.pm", 1200)
    assert run(path, "-o", tmp_path / "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text()
    decisions = told(path).decisions
    assert len(decisions) > 100
    marks = re.findall(r'<path class="mark decision" d="([^"]*)"(/?)>', text)
    assert "".join(path for path, _ in marks).count("M") == len(decisions)
    assert len([path for path, alone in marks if not alone]) == 64
    assert text.count("decided by the scheduler</span>") == 1


def test_nothing_is_asked_of_a_network(stores: list[Path], tmp_path: Path) -> None:
    run(*stores, "-o", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!#)|url\(|@import|https?:", text)
    assert (tmp_path / "r.html").stat().st_mode & 0o777 == stores[0].stat().st_mode & 0o666


def test_names_are_shown_and_obeyed_by_nobody(tmp_path: Path) -> None:
    name = "</script><img src=x onerror=alert(1)><!--"
    path = made(tmp_path / "run.pm", 40, name)
    with pmstore.open(path) as store:
        words = store["pmstore.course/" + name.replace("/", "%2F")]
        words["words"] = {"targets": ["<b>store"], "reasons": ["<i>why</i>"], "tiers": []}
    assert run(path, "-o", tmp_path / "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text()
    assert "<img" not in text
    assert "<i>why" not in text
    assert html.escape(name) in text
    assert embedded(text)["stores"][0]["runs"][0]["name"] == name


def test_many_long_runs_are_one_small_file(tmp_path: Path) -> None:
    path = made(tmp_path / "run.pm", 1500)
    with pmstore.open(path, mode="r") as store:
        one = Reported(gather(store), tier_contents(store))
    for count in (1, 12):
        text = report([one] * count)
        assert len(text.encode()) <= BYTES_MOST
        assert len(embedded(text)["charts"]) == 4 * count


def test_a_store_without_runs_and_one_that_kept_no_course(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "a.pm", size="2MiB") as store:
        store["x"] = 1
    with begin(tmp_path / "b.pm"):
        pass
    answer = run(tmp_path / "a.pm", tmp_path / "b.pm", "-o", tmp_path / "r.html")
    assert answer.exit_code == 0
    assert "Nothing was recorded by the version" in (tmp_path / "r.html").read_text()


def test_strange_losses(tmp_path: Path) -> None:
    """Not finite, none, all the same, huge, negative."""
    for place, losses in enumerate(
        (
            [float("nan")] * 9,
            [None] * 9,
            [0.0] * 9,
            [1e300, -1e300, 1e-300] * 3,
            [-1.0, -5.0],
            [float("inf"), 1.0, float("nan"), 2.0],
        )
    ):
        path = tmp_path / f"{place}.pm"
        with begin(path) as store:
            course = Course(store, "run")
            for step, loss in enumerate(losses, 1):
                course.add(step, loss, 0.001 * step)
            store["run/progress"][0] = len(losses)
        assert run(path, "-o", tmp_path / "r.html").exit_code == 0
        text = (tmp_path / "r.html").read_text()
        assert (
            "nan"
            not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL).split("<script")[0]
        )
        assert len(embedded(text)["charts"]["loss-0"]["x"]) == sum(
            loss is not None and abs(loss) < float("inf") for loss in losses
        )


def test_tiers_and_their_epochs(tmp_path: Path) -> None:
    path = tmp_path / "run.pm"
    with begin(path) as store:
        store.add_tier("disk", tmp_path / "tier")
        store.add_tier("far", "s3://nobody/run")
        train(store, Course(store, "run"), 20)
        store.flush("disk", wait=True)
        train(store, Course(store, "run"), 20)
        store.flush("disk", wait=True)
    assert run(path, "-o", tmp_path / "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text()
    rows = Page(text).tables["Epochs in disk"][1:]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        (f"{one.epoch:,}", moment(one.time), size(one.state_bytes))
        for one in pmstore.epochs(str(tmp_path / "tier"))
    ]
    assert len(rows) == 2
    assert "not listed, as it is remote" in text


def test_what_is_no_report_is_not_replaced(stores: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy.pm"
    copy.write_bytes(stores[0].read_bytes())
    notes = tmp_path / "notes.html"
    notes.write_text("<!doctype html><title>mine</title>")
    for path in (stores[0], copy, notes):
        before = path.read_bytes()
        answer = run(stores[0], "-o", path)
        assert answer.exit_code == 2
        assert "something else than a report" in answer.output
        assert path.read_bytes() == before
    older = tmp_path / "older.html"
    older.touch()
    for source in stores:  # an empty file, then a report
        assert run(source, "-o", older).exit_code == 0
        assert source.name in older.read_text()


def test_wrong_questions(tmp_path: Path, stores: list[Path]) -> None:
    assert run(tmp_path / "none.pm").exit_code == 2
    answer = run(stores[0], "-o", tmp_path / "no" / "r.html")
    assert answer.exit_code == 2
    assert not list(tmp_path.glob(".*part"))


# ---- in a browser


@pytest.fixture
def browse(tmp_path: Path) -> Iterator[Any]:
    """The page after its script has run."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    folder = tmp_path / "chromium"
    folder.mkdir()

    def dumped(path: Path, place: str = "") -> str:
        done = subprocess.run(
            [
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"),
                *("--disable-dev-shm-usage", f"--user-data-dir={folder}", "--dump-dom"),
                f"file://{path}{place}",
            ],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
            env={**os.environ, "HOME": str(folder)},
        )
        return done.stdout

    yield dumped
    shutil.rmtree(folder, ignore_errors=True)


def test_a_browser_shows_the_stores_numbers(
    stores: list[Path], tmp_path: Path, browse: Any
) -> None:
    run(*stores, "-o", tmp_path / "r.html")
    text = browse(tmp_path / "r.html", "#loss-1@123")
    assert 'data-ready="8"' in text  # the script ran to its end
    of = told(stores[1])
    page = Page(text)
    one = list(of.whole())[123]
    assert page.texts["loss-1-out"].startswith(f"step {one.last:,}: loss {number(one.loss)}")
    for rank, path in enumerate(stores):
        with pmstore.open(path, mode="r") as store:
            info = store.info()
        row = page.tables["Stores and runs"][1 + rank]
        assert row[:3] == [path.name, "run", f"{300 + 100 * rank:,}"]
        assert row[8:12] == [
            *(info.domain, f"{info.epoch:,}", size(info.used_bytes), size(info.file_bytes))
        ]
    assert len(re.findall(r'<svg id="[a-z]+-\d" class="chart"[^>]*tabindex="0"', text)) == 8
