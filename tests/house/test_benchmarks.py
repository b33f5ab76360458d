"""The benchmarks do what they say: peers give back what they saved, results have the promised form,
algorithms are right."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.rows
from benchmarks import (
    algorithms,
    harness,
    iterations,
    key_value,
    kills,
    plots,
    results,
    runner,
    summaries,
)
from benchmarks.harness import NONE, POWER, ROOT, SEED, TORN, Row, Target, summarize, with_ratios
from benchmarks.peers import LEFT_OUT, WAYS
from benchmarks.runner import QUESTIONS

CLASSES = {"none", "torn", "kill-safe", "power-safe"}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results go here, not into build/bench."""
    for module in (harness, results):
        monkeypatch.setattr(module, "OUT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "RESULTS.md")
    monkeypatch.setattr(results, "RAW", tmp_path / "results.json.gz")
    return tmp_path


def _flat(path: Path) -> str:
    """Its text, however its lines are wrapped."""
    return " ".join(path.read_text().split())


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_way_gives_back_what_it_saved(name: str, shm: Path, disk: Path) -> None:
    way = WAYS[name]
    if why := harness.absent(way.needs):
        pytest.skip(why)
    folder = shm if way.where == "memory" else disk
    assert way.durability in CLASSES
    first, second = kills.state_of(1), kills.state_of(2)
    peer = way.make(folder, first)
    peer.save(first)
    peer.save(second)
    peer.close()
    again = way.make(folder, first)
    loaded = again.load()
    again.close()
    assert loaded.keys() == second.keys()
    for key, array in second.items():
        np.testing.assert_array_equal(loaded[key], array)
        assert (loaded[key].dtype, loaded[key].shape) == (array.dtype, array.shape)


@pytest.mark.parametrize("name", key_value.TABLES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_table_gives_back_what_was_put(name: str, shm: Path, disk: Path) -> None:
    durability, where, make, needs = key_value.TABLES[name]
    if why := harness.absent(needs):
        pytest.skip(why)
    folder = shm if where == "memory" else disk
    assert durability in CLASSES
    table = make(folder)
    for i in range(5):
        table.put(f"name {i}", key_value.value_of(i))
    table.put("name 3", key_value.value_of(33))
    table.close()
    table = make(folder)
    assert [table.get(f"name {i}") for i in range(5)] == [
        key_value.value_of(33 if i == 3 else i) for i in range(5)
    ]
    table.close()


def test_a_state_names_its_iteration_and_a_torn_one_none() -> None:
    state = kills.state_of(7)
    assert kills.iteration_of(state) == 7
    state["centres"][3, 500] += 1
    assert kills.iteration_of(state) is None
    assert kills.iteration_of({}) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kills_tell_a_safe_method_from_a_torn_one() -> None:
    safe = kills.try_way(WAYS["pmstore process, in place"], 15)
    assert safe.ratio == 1
    assert safe.extra["survived"] == 15
    torn = kills.try_way(WAYS["np.savez, tmpfs"], 40)
    assert torn.extra["torn"] > 0
    assert sum(torn.extra[k] for k in ("survived", "older", "torn")) == torn.extra["kills"] == 40


def test_every_method_is_killed_and_has_the_time_it_needs() -> None:
    ways = [*WAYS.values(), *kills.NOT_DECLARED]
    tasks = kills._tasks(ways, 200, harness.Budget(100))
    assert {name for name, _, _ in tasks} == {way.name for way in ways}
    assert {count for _, count, _ in tasks} == {200}
    assert kills.SLOW.keys() == {name for name, _, _ in tasks[: len(kills.SLOW)]}
    assert max(ends for _, _, ends in tasks) <= time.monotonic() + 100


def test_a_child_that_ended_by_itself_is_not_reaped_by_the_wait() -> None:
    pid = kills._fork(lambda: None)
    kills._wait(pid, lambda: False)
    assert os.waitpid(pid, 0)[0] == pid


def test_kmeans_is_that_of_scikit_learn() -> None:
    from sklearn.cluster import KMeans

    data = algorithms.digits()
    mine = algorithms.KMeans(data, 10, SEED)
    state = mine.start("C")
    start = state["centres"].copy()
    for _ in range(200):
        mine.compute(state)
        mine.publish(state)
        if state["shift"][0] == 0:
            break
    theirs = KMeans(10, init=start, n_init=1, tol=0, max_iter=200).fit(data)
    np.testing.assert_allclose(state["centres"], theirs.cluster_centers_, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(state["labels"], theirs.labels_)


def test_the_mixture_is_that_of_scikit_learn() -> None:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    data = algorithms.synthetic(400, 5, SEED)
    mine = algorithms.Gmm(data, 3, SEED)
    state = mine.start("C")
    begin = {k: a.copy() for k, a in state.items()}
    for _ in range(4):
        mine.compute(state)
        mine.publish(state)
    theirs = GaussianMixture(
        3,
        weights_init=begin["weights"],
        means_init=begin["means"],
        precisions_init=np.linalg.inv(begin["covariances"].astype(np.float64)),
        reg_covar=1e-3,
        max_iter=4,
        tol=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        theirs.fit(data)
    np.testing.assert_allclose(state["means"], theirs.means_, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(state["covariances"], theirs.covariances_, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(state["responsibilities"].sum(1), 1, rtol=1e-5)


def test_rounds_are_interleaved_and_ratios_within_a_case() -> None:
    seen: list[str] = []
    methods = [
        harness.Method("a", NONE, lambda: seen.append("a") or 1e-6),  # type: ignore[func-returns-value]
        harness.Method("b", POWER, lambda: seen.append("b") or 3e-6),  # type: ignore[func-returns-value]
    ]
    rows = with_ratios(harness.measure("case", methods, rounds=3, warm_up=1), "a")
    assert seen == ["a", "b"] * 4
    assert [(r.method, r.median_us, r.ratio) for r in rows] == [
        ("a", pytest.approx(1), 1),
        ("b", pytest.approx(3), pytest.approx(3)),
    ]
    assert with_ratios(rows, "a", speedup=True)[1].ratio == pytest.approx(1 / 3)
    other = with_ratios([*rows, Row("b", "another case", 5, 5, 5, NONE)], "a")
    assert other[2].ratio is None


def test_a_budget_ends_rounds_and_not_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(harness.time, "monotonic", lambda: now[0])
    made: dict[str, int] = {}
    for (case, seconds), part in harness.Budget(100).deal(
        ((("a", 10), 1), (("b", 4), 3), (("c", 30), 1), (("d", 1), 5))
    ):
        for _ in part.rounds(30, warm_up=1):
            now[0] += seconds
            made[case] = made.get(case, -1) + 1  # the first warms up
    assert made["a"] == 2  # its least, over its part
    assert made["b"] == 4  # three ninths of the 70 s that are left
    assert made["c"] == 2
    assert made["d"] == 2  # no time is left: its least
    assert harness.Budget(10).spent is False
    late = harness.Budget(10)
    now[0] += 18
    assert late.spent


def test_a_method_that_fails_is_a_row_that_says_how_and_the_others_go_on() -> None:
    tries: list[int] = []

    def fails() -> None:
        tries.append(1)
        if len(tries) == 3:
            raise OSError(28, "No space left")

    methods = [harness.Method("a", NONE, fails), harness.Method("b", NONE, lambda: 1e-6)]
    a, b = with_ratios(harness.measure("case", methods, 5), "b")
    assert not a.measured
    assert a.note == "failed: OSError: [Errno 28] No space left"
    assert len(tries) == 3
    assert b.rounds == 5


def test_the_shares_of_all_questions_fit_in_a_run() -> None:
    assert sum(q.seconds for q in QUESTIONS.values()) <= runner.ALL_SECONDS
    assert sum(q.quick_seconds for q in QUESTIONS.values()) <= runner.QUICK_SECONDS


def test_a_full_run_ends_though_every_question_goes_to_its_limit() -> None:
    names = list(QUESTIONS)
    left = float(runner.ALL_SECONDS)
    for i, name in enumerate(names):
        share, limit = runner._share_and_limit(names[i:], left, False)
        assert 0 < share <= QUESTIONS[name].seconds
        assert limit >= runner.LEFT_TO_LATER * QUESTIONS[name].seconds - 1e-6
        left -= limit
    assert left >= -runner.OVER_SECONDS - 1e-6
    assert (
        runner._share_and_limit(names, runner.ALL_SECONDS, False)[1]
        > 1.5 * QUESTIONS[names[0]].seconds
    )
    assert (
        runner._share_and_limit(["restart"], runner.ALL_SECONDS, False)[0]
        == QUESTIONS["restart"].seconds
    )


def test_targets_say_whether_they_are_met() -> None:
    assert Target("t", 0.5, 1).met
    assert not Target("t", 1.5, 1).met
    assert Target("t", 80, 75, at_least=True).met
    assert "MISSED" in str(Target("t", 70, 75, at_least=True))


def test_a_report_leaves_json_plot_and_results(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        summarize("a", "one case", NONE, [2.0, 1.0, 9.0], x=10.0),
        summarize("b", "one case", TORN, [4.0]),
    ]
    harness.report(
        "engine", "A title", with_ratios(rows, "a"), targets=[Target("t", 2, 1)], notes=["a note"]
    )
    data = json.loads((out / "engine.json").read_text())
    assert {"machine", "commit", "load", "rows"} <= data.keys()
    assert {"cpu", "cores", "kernel", "python"} <= data["machine"].keys()
    assert set(data["rows"][0]) == {
        "method",
        "case",
        "median_us",
        "min_us",
        "max_us",
        "durability",
        "ratio",
        "extra",
        "note",
        "rounds",
    }
    assert data["rows"][0]["median_us"] == 2
    assert data["rows"][1]["ratio"] == 2
    assert (out / "engine.png").read_bytes().startswith(b"\x89PNG")
    assert "MISSED" in capsys.readouterr().out
    text = _flat(results.write())
    missed = "| engine | t: at most 1; was 2 |"
    for expected in ("one case", "a note", missed, data["machine"]["cpu"], data["commit"][:12]):
        assert expected in text


def test_results_begin_with_what_was_missed_and_the_papers_table(out: Path) -> None:
    case = f"{iterations.PLOTTED[0]}, state A (5 KB)"
    rows = with_ratios(
        [summarize("np.savez, disk", case, TORN, [400.0]), summarize("ours", case, POWER, [4.0])],
        "np.savez, disk",
    )
    missed = [Target(name, 2, 1, reason="a cause") for name in ("first", "second")]
    harness.write_json("iterations", "A title", rows, targets=[Target("third", 1, 1), *missed])
    killed = Row("ours", "kills", 1, 1, 1, POWER, 1.0, {"kills": 200.0})
    harness.write_json("kills", "A title", [killed])
    text = results.write().read_text()
    aims = text.index("1 of 3 aims were met")
    assert aims < text.index("first: at most 1; was 2") < text.index("second: at most 1; was 2")
    assert text.index("second: at most 1") < text.index("| a cause |") < text.index("## iterations")
    assert text.count("a cause") == 1
    assert "third" not in text
    assert "| ours | power-safe | 100 % of 200 | 4 us [4 us - 4 us] 0.01 x |" in text


def test_the_raw_file_holds_what_was_measured(out: Path) -> None:
    rows = [
        summarize("a", "c", NONE, [2.0, 1 / 3, 9.0]),
        harness.missing("b", "c", NONE, "a reason"),
    ]
    harness.write_json("engine", "A title", rows, targets=[Target("case: t", 3, 3.0001, True)])
    results.write()
    raw = results.RAW.read_bytes()
    answer = results.stored()["answers"][0]
    assert answer["rows"][0] == asdict(rows[0]) | {"min_us": pytest.approx(1 / 3, rel=1e-5)}
    assert answer["rows"][1] == asdict(rows[1]) | dict.fromkeys(results.TIMES)
    assert not answer["targets"][0]["met"]
    assert "t: at least 3; was under 3 (case)" in _flat(results.RESULTS)
    assert "Not measured everywhere: b (a reason)" in _flat(results.RESULTS)
    assert "0.333 us" in results.all_rows("engine")
    assert "a reason" in results.all_rows("engine")
    results.write()
    assert results.RAW.read_bytes() == raw


def test_the_document_is_made_from_the_raw_file() -> None:
    text = results.RESULTS.read_text()
    assert text == results.text_of(results.stored()), "python -m benchmarks --report"
    lines = text.splitlines()
    assert len(lines) <= 350
    assert all(len(line) <= results.COLUMNS for line in lines if not line.startswith("|"))
    headings = [
        line.removeprefix("## ").partition(":")[0] for line in lines if line.startswith("## ")
    ]
    assert headings == ["Aims that were missed", *QUESTIONS]


def test_every_question_has_a_table_whatever_was_measured(out: Path) -> None:
    assert list(summaries.SUMMARIES) == list(QUESTIONS)
    nothing = [harness.missing("a method", "a case", NONE, "a reason")]
    for rows in (nothing, [*nothing, Row("another", "other: case", 5, 5, 5, NONE)]):
        for question in QUESTIONS:
            harness.write_json(question, f"Title of {question}", rows)
        text = _flat(results.write())
        assert all(f"Title of {question}" in text for question in QUESTIONS)
    without = [part.partition(":")[0] for part in text.split("## ")[2:] if "| 5 " not in part]
    assert without == ["kills", "scheduler"]  # tables of counts, and of aims


@pytest.mark.parametrize("module", [harness, plots, benchmarks.rows, summaries])
def test_examples(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def test_slopes() -> None:
    assert plots.slope([(1, 2), (10, 20), (1000, 2000)]) == pytest.approx(1)
    assert plots.slope([(1, 5), (100, 5)]) == pytest.approx(0)


def test_every_question_is_documented() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    for question in QUESTIONS:
        assert f"`{question}.py`" in readme
        assert (ROOT / "benchmarks" / f"{question}.py").exists()


def _run(out: Path, program: str, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PMSTORE_BENCH_OUT": str(out)}
    command = [sys.executable, *(["-c", program] if program else ["-m", "benchmarks"]), *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _ended(out: Path, program: str, *arguments: str) -> str:
    """What it said; it ended well and left nothing."""
    process = _run(out, program, *arguments)
    said, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert not _left(process.pid)
    return said


def _left(run: int) -> list[Path]:
    """Scratch directories of a run."""
    return [
        p
        for base in ("/dev/shm", tempfile.gettempdir())
        for p in Path(base).glob(f"{harness.SCRATCH_PREFIX}{run}-*")
    ]


def _sound(rows: list[dict[str, Any]]) -> None:
    assert rows
    for row in rows:
        assert 0 < row["min_us"] <= row["median_us"] <= row["max_us"]
        assert row["durability"] in CLASSES


def test_a_quick_run_answers(tmp_path: Path) -> None:
    _ended(tmp_path, "", "--quick", "growth")
    data = json.loads((tmp_path / "growth.json").read_text())
    assert data["quick"]
    assert not data["failure"]
    _sound(data["rows"])


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning"
)
def test_iterations_are_saved_by_every_method() -> None:
    case = iterations.Case(algorithms.KMeans, "digits", 2, "C", 50, 2)
    rows = iterations._run(case, algorithms.digits(), harness.Budget(0))
    _sound([asdict(r) for r in rows if r.measured])
    assert {r.method for r in rows} == {
        *WAYS,
        *iterations.LIVING,
        "the update alone, in ordinary memory",
        *LEFT_OUT,
    }
    assert {r.method for r in rows if not r.measured} == {
        *LEFT_OUT,
        *(w.name for w in WAYS.values() if harness.absent(w.needs)),
    }
    peers = {r.method.split()[0].rstrip(",") for r in rows} - {"pmstore", "the"}
    assert len(peers) >= 6


def test_a_question_that_runs_too_long_is_ended_and_said_and_the_next_one_runs(
    tmp_path: Path,
) -> None:
    program = (
        "import dataclasses as d, benchmarks.runner as r\n"
        "r.SLACK_SECONDS = 0\n"
        "r.QUESTIONS['growth'] = d.replace(r.QUESTIONS['growth'], quick_seconds=0.02)\n"
        "r.QUESTIONS['key_value'] = d.replace(r.QUESTIONS['key_value'], quick_seconds=110)\n"
        "print([how.name for how in r.run(['growth', 'key_value'], True).values()])"
    )
    assert _ended(tmp_path, program).splitlines()[-1] == "['OUT_OF_TIME', 'ANSWERED']"
    assert "limit of 0.03 s" in json.loads((tmp_path / "growth.json").read_text())["failure"]
    assert json.loads((tmp_path / "key_value.json").read_text())["rows"]


def test_a_question_that_is_told_to_end_reports_what_it_has(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, benchmarks.growth as g, benchmarks.__main__ as m\n"
        "def told(*args):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "g._store_size = told\n"
        "sys.argv[1:] = ['--here', '--quick', 'growth']\n"
        "sys.exit(m.main())"
    )
    _ended(tmp_path, program)
    rows = json.loads((tmp_path / "growth.json").read_text())["rows"]
    assert rows[-1]["note"] == "ended at the limit of its time"
    _sound(rows[:-1])
    assert not any(r["case"].startswith("bytes in the store") for r in rows)


def test_a_case_that_is_told_to_end_reports_its_rounds_and_fails_nothing(tmp_path: Path) -> None:
    """Also where the first word meets a finalizer, which keeps exceptions to itself."""
    program = (
        "import os, signal, sys, time, benchmarks.key_value as k, benchmarks.__main__ as m\n"
        "from benchmarks import harness\n"
        "m._AGAIN_SECONDS = 1\n"
        "class Dying:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(0.1)\n"
        "rounds = []\n"
        "def turn():\n"
        "    rounds.append(1)\n"
        "    if len(rounds) == 9:\n"
        "        Dying()\n"
        "        time.sleep(60)\n"
        "k.main = lambda quick, budget: harness.measure(\n"
        "    'case', [harness.Method('turns', harness.NONE, turn)], 20, warm_up=0)\n"
        "sys.argv[1:] = ['--here', '--quick', 'key_value']\n"
        "sys.exit(m.main())"
    )
    _ended(tmp_path, program)
    rows = json.loads((tmp_path / "key_value.json").read_text())["rows"]
    assert [(r["case"], r["rounds"]) for r in rows[:-1]] == [("case", 8)]


def test_what_fails_is_in_the_exit_status(tmp_path: Path) -> None:
    program = (
        "import sys, benchmarks.runner as r, benchmarks.__main__ as m\n"
        "ends = {'growth': r.Ended.OUT_OF_TIME, 'tiers': r.Ended.ANSWERED}\n"
        "m.run = lambda *args: ends\n"
        "sys.argv[1:] = ['--quick']\n"
        "assert m.main() == 0\n"
        "ends['slots'] = r.Ended.FAILED\n"
        "assert m.main() == 1"
    )
    said = _ended(tmp_path, program)
    assert "out of time, with the rounds that it had: growth" in said
    assert "failed: slots" in said


def test_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    process = _run(tmp_path, "", "--quick", "growth")
    try:
        until = time.monotonic() + 60
        while not _left(process.pid):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
    until = time.monotonic() + 60
    while _left(process.pid):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_peer_that_is_not_installed_is_a_row_that_says_so(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    rows = key_value._run(5, 1)
    absent = [r for r in rows if not r.measured]
    assert {r.method for r in absent} == {
        *LEFT_OUT,
        *(n for n, (*_, needs) in key_value.TABLES.items() if harness.absent(needs)),
    }
    assert {"lmdb, sync", "lmdb, nosync + writemap"} < {r.method for r in absent}
    assert len({r.case for r in absent}) == len({r.case for r in rows}) == 3
    harness.report("key_value", "A title", rows)
    data = json.loads((out / "key_value.json").read_text())
    assert [r["median_us"] for r in data["rows"] if r["method"] == "lmdb, sync"] == [None] * 3
    assert "lmdb is not installed: pip install 'pmstore[bench]'" in _flat(results.write())
