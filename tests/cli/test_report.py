"""`pmstore report`: its numbers are the store's, in the file and in a browser."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")

from typer.testing import CliRunner

import pmstore
from pmstore._engine.store_info import JobState
from pmstore.commands.application import app
from pmstore.course import Course, Start, Told, read
from pmstore.course.reader import Life
from pmstore.course.records import Step
from pmstore.show import series, svg
from pmstore.show.report_page import BYTES_MOST, report, reported
from pmstore.show.units import moment, number, size
from tests.courses import begin, log, made, train

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


class Page(HTMLParser):
    """Tables by their captions."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self._caption, self._open, self._cell = "", "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self._open = tag
        if tag == "tr" and self._caption:
            self.tables[self._caption].append([])
        elif tag in ("td", "th"):
            self._cell = True
            self.tables[self._caption][-1].append("")

    def handle_data(self, data: str) -> None:
        if self._open == "caption":
            self._caption = data
            self.tables.setdefault(data, [])
        elif self._cell:
            self.tables[self._caption][-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""
        self._cell = self._cell and tag not in ("td", "th")


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


def logging(path: Path, rate: float, steps: int = 300, **settings: Any) -> Path:
    """A run that logged two values, with its settings."""
    with begin(path) as store:
        course = Course(store, "run")
        train(store, course, steps)
        loss = [(step, math.exp(-rate * step)) for step in range(1, steps + 1)]
        log(
            store, {"loss": loss, "accuracy": [(step, step / steps) for step in range(9, steps, 9)]}
        )
        given = {"optimizer": {"class": "SGD", "groups": [{"lr": rate, "fused": None}]}, **settings}
        store["run/given"] = {"settings": given, "resume": {}}
    return path


def test_curves_are_what_was_logged(tmp_path: Path) -> None:
    path = logging(tmp_path / "run.pm", 0.01)
    assert run(path, "-o", tmp_path / "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text()
    data, page = embedded(text), Page(text)
    assert page.tables["Logged values"][1:] == [
        ["loss", number(math.exp(-3.0)), number(math.exp(-3.0)), number(math.exp(-0.01))],
        ["accuracy", "0.99", "0.03", "0.99"],
    ]
    assert list(data["charts"]) == ["chart-0", "chart-1", "chart-2", "cost", "bytes"]
    (loss,) = data["charts"]["chart-0"]["lines"]
    assert loss["x"] == list(range(1, 301))
    assert loss["y"] == pytest.approx([math.exp(-0.01 * step) for step in loss["x"]], rel=1e-4)
    (accuracy,) = data["charts"]["chart-1"]["lines"]
    assert accuracy["x"] == list(range(9, 300, 9))
    (state,) = data["runs"]
    assert (state["step"], state["logged"]["accuracy"]) == (300, 0.99)
    assert "step 300 \N{MIDDLE DOT} loss" in text
    assert ("optimizer.lr", "0.01") in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text)


def test_a_long_run_is_thinned_with_what_it_stands_for(tmp_path: Path) -> None:
    values = np.sin(np.arange(20_000.0)) + 2.0
    values[777], values[778:780] = 9.0, np.nan
    with begin(tmp_path / "run.pm") as store:
        log(store, {"loss": list(enumerate(values.tolist(), 1)), "one": [(7, -1.0)]})
        one = reported(store)
    data = embedded(report([one]))
    (line,) = data["charts"]["chart-0"]["lines"]
    assert 300 < len(line["x"]) <= 600
    assert (line["x"][-1], max(line["high"]), min(line["low"])) == (20_000, 9.0, 1.0)
    assert all(
        low <= mean <= high
        for low, mean, high in zip(line["low"], line["y"], line["high"], strict=True)
    )
    assert np.mean(line["y"]) == pytest.approx(np.nanmean(values), rel=1e-3)
    assert "2 of its values were not finite" in report([one])


def test_speed_leaves_out_the_time_between_two_lives(tmp_path: Path) -> None:
    life = [Start(n, 100 * n - 100, 1000.0 * n, 1, n, 0, Life(1000.0 * n - 900)) for n in (1, 2)]
    steps = np.zeros((200, len(Step)))
    steps[:, Step.STEP] = np.arange(1, 201)
    steps[:, Step.TIME] = np.arange(1001, 1201) + np.repeat((0, 900), 100)
    rest = [float("nan")] * 3
    course = Told("run", 1, (), steps, (), tuple(life), (), (), *rest)
    assert series.of_course(course)[series.SPEED].value == pytest.approx(1.0, rel=1e-6)


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    rates = (0.5, 0.003, 0.1)
    paths = [
        logging(tmp_path / f"{rate}" / "run.pm", rate)
        for rate in rates
        if not (tmp_path / f"{rate}").mkdir()
    ]
    assert run(*paths, "-o", tmp_path / "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text()
    data = embedded(text)
    for chart in data["charts"].values():
        assert [line["run"] for line in chart["lines"]] == [0, 1, 2]
    (caption,) = (one for one in Page(text).tables if one.startswith("Runs"))
    titles, *rows = Page(text).tables[caption]
    assert titles[:9] == [
        *("run", "step", "loss: last", "loss: least", "loss: greatest", "accuracy: last"),
        *("accuracy: least", "accuracy: greatest", "optimizer.lr"),
    ]
    assert [(row[0], row[8], row[3]) for row in rows] == [
        (f"{rate}/run.pm", f"{rate}", number(math.exp(-300 * rate))) for rate in rates
    ]
    shared = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text)
    assert ("optimizer.class", "SGD") in shared
    assert "optimizer.lr" not in dict(shared)


def test_ranks_of_a_job_are_one_run(tmp_path: Path) -> None:
    ranks = []
    for rank in (2, 0):
        with pmstore.open(logging(tmp_path / f"{rank}.pm", 0.1), mode="r") as store:
            one = reported(store)
        job = JobState("run", "abcdef", rank, 4, 1, 1, 300)
        info = replace(one.store.info, jobs=(job,))
        ranks.append(replace(one, store=replace(one.store, info=info)))
    text = report(ranks)
    assert [one["title"] for one in embedded(text)["runs"]] == ["0.pm (rank 0 of 4, 2 given)"]
    assert [row[0] for row in Page(text).tables["Commits and room"][1:]] == ["2.pm", "0.pm"]


def test_lives_kills_and_rewinds(tmp_path: Path) -> None:
    path, copy = tmp_path / "run.pm", tmp_path / "copy.pm"
    for life in range(3):
        with begin(path, domain="process") as store:
            course = Course(store, "run", 20 * life)
            course.lives.told["changed"] = [["lr of <it>", "0.1", str(life), 'lr="program"']]
            if life == 1:
                train(store, course, 10)
                store["x"] = 1
                store.rollback()
                course.rolled_back(30)
                course.lives.rewound(35, 30)
            train(store, course, 10 if life == 1 else 20)
            if life == 0:
                copy.write_bytes(path.read_bytes())  # as a kill leaves it
        if life == 0:
            copy.rename(path)
    assert run(path, "-o", tmp_path / "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text()
    rows = Page(text).tables["The newest processes"][1:]
    assert [row[:2] for row in rows] == [["1", "0"], ["2", "20"], ["rewind", "30"], ["3", "40"]]
    assert rows[0][3].startswith("killed: ")
    assert [rows[n][3] for n in (1, 2, 3)] == ["ended", "rewound from step 35", "ended"]
    assert rows[3][4] == 'lr of <it>: 0.1 to 2 by lr="program"'
    assert f"process {os.getpid()}" in rows[0][5]
    assert "3 lives, 1 kill. From the last commits before them to the next lives it took" in text
    marks = re.findall(r'<g class="mark (\w+) r0"><title>(.*?)</title><line x1="(.*?)"', text)
    assert [(kind, at) for kind, _, at in marks] == [
        *(("kill", "33.3%"), ("start", "66.7%"), ("rewind", "50.0%"))
    ]
    assert "rewound from step 35" in marks[2][1]


def test_nothing_is_asked_of_a_network(stores: list[Path], tmp_path: Path) -> None:
    run(*stores, "-o", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!#)|url\(|@import|https?:", text)
    assert (tmp_path / "r.html").stat().st_mode & 0o777 == stores[0].stat().st_mode & 0o666


def test_names_are_shown_and_obeyed_by_nobody(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)><!--"
    path = made(tmp_path / "run.pm", 40, evil)
    with pmstore.open(path) as store:
        course = store["pmstore.course/" + evil.replace("/", "%2F")]
        course["words"] = {"targets": ["<b>store"], "reasons": ["<i>why</i>"], "tiers": []}
        life = {"number": 1, "command": f'a --{evil} --x={evil} "', "host": evil, "revision": evil}
        course["lives"] = [{**life, "changed": [[evil] * 4]}]
        log(store, {evil: [(1, 1.0)], "x" * 10**5: [(2, 2.0)]}, evil)
        store[f"{evil}/given"] = {"settings": {evil: {evil: evil}, "optimizer": {"groups": 7}}}
    for paths in ([path], [path, made(tmp_path / "other.pm", 10)]):
        assert run(*paths, "-o", tmp_path / "r.html").exit_code == 0
        text = (tmp_path / "r.html").read_text()
        assert "<img" not in text
        assert "<i>why" not in text
        assert text.count("</script>") == 2
        assert len(text) < 200_000
        assert html.escape(evil, quote=False) in text


def test_many_long_runs_are_one_small_file(tmp_path: Path) -> None:
    with pmstore.open(logging(tmp_path / "run.pm", 0.01, 1500), mode="r") as store:
        one = reported(store)
    for count in (1, 12, 64):
        text = report([one] * count)
        assert len(text.encode()) <= BYTES_MOST
        assert len(embedded(text)["charts"]) == 5
        assert all(len(chart["lines"]) == count for chart in embedded(text)["charts"].values())


def test_a_store_without_runs_and_one_that_kept_no_course(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "a.pm", size="2MiB") as store:
        store["x"] = 1
    with begin(tmp_path / "b.pm"):
        pass
    answer = run(tmp_path / "a.pm", tmp_path / "b.pm", "-o", tmp_path / "r.html")
    assert answer.exit_code == 0
    assert "Nothing was recorded by the version" in (tmp_path / "r.html").read_text()
    assert "no training run in: a.pm<" in (tmp_path / "r.html").read_text()
    assert run(tmp_path / "a.pm", "-o", tmp_path / "r.html").exit_code == 0
    assert (tmp_path / "r.html").read_text().count("no training run") == 1
    train_one = made(tmp_path / "c.pm", 1)
    assert run(train_one, "-o", tmp_path / "r.html").exit_code == 0
    dot = r'<path class="line lone" d="M\d+ \d+h0"/>'
    assert re.search(dot, (tmp_path / "r.html").read_text())


def test_paths_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    good, notes, none = tmp_path / "good.pm", tmp_path / "notes.txt", tmp_path / "none.pm"
    made(good, 1)
    notes.write_text("not a store")
    output = tmp_path / "r.html"
    answer = run(notes, good, none, "-o", output)
    assert answer.exit_code == 1
    lines = [line.removeprefix("pmstore: ") for line in answer.stderr.splitlines()]
    assert [line.partition(": ")[0] for line in lines] == [str(notes), str(none)]
    text = output.read_text()
    assert all(line in html.unescape(text) for line in lines)
    assert [one["title"] for one in embedded(text)["runs"]] == ["good.pm"]
    output.unlink()
    answer = run(none, notes, "-o", output)
    assert (answer.exit_code, output.exists()) == (2, False)
    assert answer.stderr == f"pmstore: {none}: no such store\n"


def test_settings_are_cells_of_few_letters(tmp_path: Path) -> None:
    paths = [
        logging(
            *(tmp_path / f"{at}.pm", rate, 1),
            trainer={"seed": 12345678 + at, "betas": [0.1 * at] * 20},
            lr_scheduler={"_schedule_phases": at, "factor": factor},
        )
        for at, (rate, factor) in enumerate([(0.0007999999999999986, 0.1 + 0.2), (0.5, 0.3)])
    ]
    assert run(*paths, "-o", tmp_path / "r.html").exit_code == 0
    page = Page((tmp_path / "r.html").read_text())
    (caption,) = (one for one in page.tables if one.startswith("Runs"))
    titles, first, _ = page.tables[caption]
    cells = dict(zip(titles, first, strict=True))
    assert (cells["optimizer.lr"], cells["trainer.seed"]) == ("0.0008", "12345678")
    assert len(cells["trainer.betas"]) == 32
    assert cells["trainer.betas"].endswith("\N{HORIZONTAL ELLIPSIS}")
    assert not {"lr_scheduler._schedule_phases", "lr_scheduler.factor"} & {*titles}


def test_values_that_are_not_finite_are_told_by_run(tmp_path: Path) -> None:
    told = []
    for name, begins in (("a", 3), ("b", 9), ("c", 1)):
        with begin(tmp_path / f"{name}.pm") as store:
            store["run/progress"][0] = 8
            losses = [(step, 1.0 if step < begins else math.nan) for step in range(1, 9)]
            log(store, {"loss": losses})
            told.append(reported(store))
    text = report(told)
    assert "a.pm: 6 of its values were not finite; from step 3 on, none was finite." in text
    assert not re.search(r"b\.pm: \d+ of its", text)
    assert "c.pm: 8 of its values were not finite; from step 1 on, none was finite." in text
    assert embedded(report(told[:1]))["steps"] == [0.0, 8.0]  # not where the finite values end


def test_no_line_is_drawn_over_a_start(tmp_path: Path) -> None:
    """The newest steps before a kill are not known."""
    starts = [Start(n, 100 * (n - 1), 0.0, 1, n, 0, Life()) for n in (1, 2, 3)]
    steps = np.zeros((300, len(Step)))
    steps[:, Step.STEP] = np.arange(1, 301)
    steps[:, Step.TIME] = np.arange(1, 301)
    steps = np.concatenate([steps[:80], steps[100:101], steps[200:]])
    course = Told("run", 1, (), steps, (), tuple(starts), (), (), *[float("nan")] * 3)
    cost = series.of_course(course)[series.COST]
    assert cost.breaks == [80, 81]
    drawn = svg.draw(svg.Chart("cost", "cost", [(0, "run", cost)]), svg.steps_axis([cost], []))
    assert '<path class="line lone" ' in drawn
    (line,) = re.findall(r'<path class="line" d="(.*?)"', drawn)
    assert line.count("M") == 2
    assert series.thinned(cost, 20).gaps == cost.gaps


def test_bars_of_a_heap_are_as_wide_as_their_share(tmp_path: Path) -> None:
    path = made(tmp_path / "run.pm", 1)
    with pmstore.open(path, mode="r") as store:
        one = reported(store)
    widths = re.findall(r'style="width:max\(1px,(.*?)%\)"', report([one]))
    used = sum(each.used_bytes / each.data_bytes for each in one.store.usage)
    assert sum(map(float, widths)) == pytest.approx(100 * used, rel=0.01)


STRANGE = (
    [float("nan")] * 9,
    [0.0] * 9,
    [1e300, -1e300, 1e-300] * 3,
    [-1.7e308, 1.7e308],
    [5e-324, 1e308],
    [-1.0, -5.0],
    [float("inf"), 1.0, float("nan"), 2.0],
)


@pytest.mark.parametrize("logs", [False, True])
def test_strange_losses(tmp_path: Path, logs: bool) -> None:
    """Not finite, all the same, huge, negative: as the course and the log have them."""
    for place, losses in enumerate(STRANGE):
        with begin(tmp_path / f"{place}.pm") as store:
            course = Course(store, "run")
            for step, loss in enumerate(losses, 1):
                course.add(step, loss, 0.001 * step)
            store["run/progress"][0] = len(losses)
            if logs:
                log(store, {"loss": list(enumerate(losses, 1))})
            store.commit()
            text = report([reported(store)])
        drawn = " ".join(re.findall(r'(?:d|x1|y1|x|y)="([^"]*)"', text))
        assert not re.search("nan|inf", drawn)
        (line,) = embedded(text)["charts"]["chart-0"]["lines"]
        good = [loss for loss in losses if math.isfinite(loss)]
        assert line["y"] == pytest.approx(good, rel=1e-4)


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


def test_a_browser_shows_the_stores_numbers(tmp_path: Path, browse: Any) -> None:
    """The values at a step, a smoothed curve, a sorted table."""
    rates = {10: 0.5, 9: 0.003, 2: 0.1}
    paths = [logging(tmp_path / f"run{number}.pm", rate) for number, rate in rates.items()]
    run(*paths, "-o", tmp_path / "r.html")
    asked = """<script>
        weight.value = 0.9; axis.value = "plain"; redraw();
        const titles = [...document.querySelectorAll(".runs th button")];
        titles[0].click();
        document.body.dataset.names = [...document.querySelectorAll(".runs tr")].slice(1)
            .map(row => row.cells[0].textContent).join(" ");
        titles.find(one => one.textContent == "optimizer.lr").click();
        document.querySelector("input[data-run='1']").click();
        document.body.dataset.smooth = JSON.stringify(smooth([1, 2, 4], 0.9));
    </script>"""
    page = tmp_path / "r.html"
    page.write_text(page.read_text().replace("</body>", f"{asked}</body>"))
    text = browse(page, "#chart-1@126")
    assert 'data-names="run2.pm run9.pm run10.pm"' in text
    assert 'data-ready="5"' in text  # the script ran to its end
    legends = re.findall(r'<output class="legend" for="chart-1">(.*?)</output>', text)
    assert re.findall(r"<b[^>]*>([^<]*)</b>", legends[0]) == ["step 126", *["0.42"] * 3]
    assert text.count('class="line smooth"') == 15
    (smoothed,) = re.findall(r'data-smooth="\[(.*?)\]"', text)
    expected = [1.0, (0.09 + 0.2) / 0.19, (0.081 + 0.18 + 0.4) / 0.271]
    assert [float(one) for one in smoothed.split(",")] == pytest.approx(expected)
    (rows,) = (rows for name, rows in Page(text).tables.items() if name.startswith("Runs"))
    assert [row[8] for row in rows[1:]] == ["0.003", "0.1", "0.5"]
    assert '<style id="hidden">.r1 { display: none }</style>' in text
