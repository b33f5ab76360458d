"""The crash tests with a small budget, and that they would notice. `make nightly WHAT=crashtest` is
the same with more images."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pairwise import ALL
from rich.console import Console

from crashtests import built, campaign, jobs, long, mixtures, mutant_list, mutants
from crashtests.report import Report, commit_id, leave

ROOT = Path(__file__).resolve().parents[2]
KILL_STEP = "41" if ALL else "123"
IMAGES = int(os.environ.get("PMS_CRASH_IMAGES", "250"))

pytestmark = pytest.mark.skipif(
    shutil.which("make") is None or shutil.which("cc") is None, reason="needs a C compiler and make"
)


def crashtests(*arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    command = [sys.executable, "-m", "crashtests", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    return run, json.loads((ROOT / "build" / "crashtest" / "report.json").read_text())


TRAINED = ("train_adamw", "train_kmeans", "train_sgd", "train_gmm")


def shares() -> list[tuple[tuple[str, ...], list[str]]]:
    """Models, and workloads: each workload, and each trained program, under one of the four.
    Nightly: under all."""
    names = jobs.workloads(jobs.build())
    if ALL:
        return [(("i", "ii", "iii", "iv"), [*names, *TRAINED])]
    # the most expensive ones are the last in the table: each model has one of them
    return [
        ((model,), [*names[number::4], TRAINED[number]])
        for number, model in enumerate(("ii", "iii", "iv", "i"))
    ]


def test_every_image_recovers() -> None:
    """Of real training too: AdamW, SGD on slots, KMeans, a Gaussian mixture, whose states are
    compared in Python. They are recorded once."""
    for number, (models, names) in enumerate(shares()):
        settings = campaign.Settings(models, IMAGES, only=tuple(names), record=not number)
        report = campaign.run(settings, Console(stderr=True))
        told = report.as_dict()
        assert report.failures == 0, told["failures"]
        for model in models:
            found = told["models"][model]
            assert found["failures"] == 0
            assert found["distinct"] >= IMAGES
            for name in set(TRAINED) & set(names):
                assert told["workloads"][name][model] > 0


def other_engine(place: Path, built_in: Path, file: str, text: str) -> tuple[Path, Path]:
    """Sources with another text of one file, and a folder to build in, where nothing else has to be
    compiled again."""
    source, target = place / "native", place / "build"
    for path in built.engine_sources():
        link = source / path.relative_to(ROOT / "native")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    (source / file).unlink()
    (source / file).write_text(text)
    target.mkdir()
    for path in built_in.glob("*.o"):
        shutil.copy2(path, target)
    shutil.copytree(built_in / "engine", target / "engine")
    (target / "engine" / file.replace(".c", ".o")).unlink()
    return source, target


def test_mixtures_recover() -> None:
    tally = mixtures.run(examples=3, budget=40, number=1)
    assert tally.failure == ""
    assert tally.examples >= 3
    assert tally.images > 3 * 40


def test_every_kill_recovers() -> None:
    run, report = crashtests("--model", "kill", "--kill-step", KILL_STEP)
    assert run.returncode == 0, run.stdout + run.stderr
    assert report["kills"]["trials"] > 200  # type: ignore[index]


def test_every_failing_system_call_is_survived() -> None:
    """Among them a roll back that gets no memory for its list of entries."""
    only = ["--only", "long_back", "--only", "slots_freed"]
    run, report = crashtests("--model", "fault", *only, "--fault-step", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert report["faults"]["trials"] > 100  # type: ignore[index]


def test_every_store_of_the_engine_goes_through_the_seam(tmp_path: Path) -> None:
    outcomes = jobs.detect()
    assert not [failure for o in outcomes for failure in o.failures]
    assert sum(o.result["stores"] for o in outcomes) > 500
    text = (ROOT / "native" / "log" / "stores.c").read_text()
    rogue = text.replace(
        "pms_persist_store(u->persist, pms_map_at(u->map, off), src, len);",
        "memcpy(pms_map_at(u->map, off), src, len);",
    )
    assert rogue != text
    source, target = other_engine(tmp_path, jobs.BUILD / "detector", "log/stores.c", rogue)
    found = [failure for o in jobs.detect(source, target, "groups") for failure in o.failures]
    assert "past the seam" in found[0]["message"]


def test_the_engine_of_the_tree_is_there_and_new(tmp_path: Path) -> None:
    """Else it says what to do, and tests no other one."""
    for folder in ("native/store", "pmstore/_engine"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "native" / "store" / "open.c").touch()
    with pytest.raises(SystemExit, match=r"has no built engine .* build it first"):
        built.extension(tmp_path)
    engine = tmp_path / "pmstore" / "_engine" / "_native.abi3.so"
    engine.touch()
    os.utime(engine, ns=(1, 1))
    with pytest.raises(SystemExit, match=r"older than native/store/open\.c.* build it first"):
        built.extension(tmp_path)
    os.utime(tmp_path / "native" / "store" / "open.c", ns=(1, 1))
    assert built.extension(tmp_path) == engine
    (tmp_path / "pmstore" / "_engine" / "_native.cpython-311.so").touch()
    with pytest.raises(SystemExit, match="several built engines"):
        built.extension(tmp_path)
    for words in ([], ["--kind", "tiers"]):  # in a tree like that
        code = (
            "import pathlib, runpy, sys; from crashtests import built; "
            f"built.extension.__defaults__ = (pathlib.Path({str(tmp_path / 'native')!r}),); "
            f"sys.argv = {['x', *words]}; runpy.run_module('crashtests', run_name='__main__')"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert run.returncode == 1
        assert "has no built engine" in run.stderr


def test_mutants_are_of_this_engine() -> None:
    """Each changes a text that is in the engine exactly once."""
    assert [said for m in mutant_list.MUTANTS if (said := mutants.stale(m))] == []
    assert len(mutant_list.MUTANTS) > 100


def test_a_broken_engine_is_noticed() -> None:
    """A few of `make nightly WHAT=mutants`: a fence, a write-back, a flush, recovery, and the sync
    before the clean mark left out."""
    names = ["no_f1", "no_write_back", "entry_not_flushed", "recover_nothing", "clean_before_data"]
    command = [sys.executable, "-m", "crashtests.mutants", *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "5 mutants, 5 killed" in run.stdout


BROKEN = """
import functools, sys
from pathlib import Path
from crashtests import __main__, jobs, report
source, target = map(Path, sys.argv[1:3])
jobs.build = functools.partial(jobs.build, source, target)
jobs.KEPT = target / "failures"
report.Report.write.__defaults__ = (target,)
del sys.argv[1:3]
sys.exit(__main__.main())
"""
"""`python -m crashtests` over another engine, which leaves its report elsewhere."""


@pytest.mark.parametrize(
    ("model", "broken"), [("ii", "no_write_back"), ("kill", "recover_nothing")]
)
def test_a_failure_says_how_to_have_it_again(model: str, broken: str, tmp_path: Path) -> None:
    """Exit code 1; commit and command that make the failing image again, and the image
    itself; all in the report, too."""
    jobs.build()
    (mutant,) = (m for m in mutant_list.MUTANTS if m.name == broken)
    text = mutants.broken(mutant, (ROOT / "native" / mutant.file).read_text())
    source, target = other_engine(tmp_path, jobs.BUILD, mutant.file, text)

    options = [
        "--only",
        "write_all",
        "--model",
        model,
        "--images",
        "300",
        "--stop-after",
        "2",
        "--kill-step",
        "3",
    ]
    command = [sys.executable, "-c", BROKEN, str(source), str(target)]
    run = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 1, run.stdout + run.stderr
    report = json.loads((target / "report.json").read_text())
    failed = report["kills" if model == "kill" else "models"]
    count = (failed if model == "kill" else failed[model])["failures"]
    assert (
        f"FAILED: {count} failures; commit {commit_id()}; images in {target / 'failures'}"
        in run.stdout
    )
    assert count >= 2
    assert (report["commit"], len(report["failures"])) == (commit_id(), count)
    for failure in report["failures"]:
        assert failure["message"] in (target / "report.md").read_text()
        assert Path(failure["image"]).stat().st_size > 1 << 20
        assert ("sites" in failure) == (model != "kill")
    line = report["failures"][0]["again"]
    words = line.removeprefix("python -m crashtests ").split()
    again = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 1
    assert again.stdout.endswith(f"\nagain: {line}\n")
    said = [json.loads(one) for one in again.stdout.splitlines() if one.startswith("{")]
    which = ("n", "message") if model == "kill" else ("event", "message", "units")
    first = [one for one in report["failures"] if one["again"] == line]
    assert [[one[key] for key in which] for one in said[: len(first)]] == [
        [one[key] for key in which] for one in first
    ]


def test_the_report_is_for_programs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is promised of report.json, and rows for people of all of it."""
    found = {
        "distinct": 3,
        "images": 4,
        "windows": 2,
        "exhaustive": 1,
        "nested": 0,
        "nested_images": 0,
    }
    outcomes = [jobs.Outcome(jobs.Job("images", "write_all", "file", "iii"), found, [])]
    outcomes += [
        jobs.Outcome(jobs.Job(mode, "write_all", "file"), {"trials": 5}, [])
        for mode in ("kill", "fault")
    ]
    report = Report(9, 1.0, outcomes, {"stores": 8, "failures": 0})
    told = report.as_dict()
    assert told["models"].keys() == {"i", "ii", "iii", "iv"}
    assert all(found.keys() | {"failures"} <= model.keys() for model in told["models"].values())
    assert {"trials", "failures"} <= told["kills"].keys()
    assert {"trials", "failures"} <= told["faults"].keys()
    assert told["mutants"].keys() == {"total", "killed", "equivalent", "commit"}
    assert (told["seed"], told["commit"]) == (9, commit_id())
    assert told["workloads"] == {"write_all": {"iii": 3, "kill": 5, "fault": 5}}
    leave("mixtures", 5, tmp_path, programs=20, images=1234, failures=0)
    monkeypatch.setattr("crashtests.report.BUILD", tmp_path)
    told = report.as_dict()
    assert told["mixtures"] == {
        "commit": commit_id(),
        "seed": 5,
        "programs": 20,
        "images": 1234,
        "failures": 0,
    }
    path = report.write(tmp_path)
    assert (
        "Mixtures of Hypothesis: 20 programs, 1,234 distinct images, 0 failures (seed 5"
        in path.read_text()
    )
    assert json.loads((tmp_path / "report.json").read_text()) == told
    assert "| write_all | 0 | 0 | 3 | 0 | 5 | 5 |" in path.read_text()


def test_a_long_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make nightly WHAT=crashtest-long` with one workload: interrupted after a round, started
    again, until every model has its images."""
    whole, rounds = campaign.run, []

    def small(settings: campaign.Settings, console: Console) -> Report:
        settings = replace(
            settings,
            only=("write_all",),
            kill_step=17 * settings.kill_step,
            fault_step=5,
            record=False,
        )
        rounds.append(settings.seed)
        report = whole(settings, console)
        report.interrupted = len(rounds) == 1
        return report

    monkeypatch.setattr(long, "FOLDER", tmp_path)
    monkeypatch.setattr(long, "STATE", tmp_path / "state.json")
    monkeypatch.setattr(long, "ROUND", 60)
    monkeypatch.setattr(campaign, "run", small)
    monkeypatch.setattr(jobs, "detect", functools.partial(jobs.detect, only="write_all"))
    console = Console(file=io.StringIO())
    progress, ended = long.run(100, 0, console)
    assert (ended, progress.rounds) == (False, 1)
    first = {model: progress.distinct(model) for model in long.IMAGES}
    progress, ended = long.run(100, 0, console)
    assert ended
    assert progress.rounds >= 2
    assert rounds[: progress.rounds] == list(
        range(1, progress.rounds + 1)
    )  # each with a seed of its own
    for model in long.IMAGES:
        assert progress.distinct(model) >= max(100, first[model])
    assert progress.finished == ["kill", "fault", "detect"]
    told: dict[str, Any] = progress.report().as_dict()
    assert told["kills"]["trials"] > 0
    assert told["faults"]["trials"] > 0
    assert told["unlogged_stores"]["stores"] > 0
    assert progress.report().failures == 0
    again, ended = long.run(100, 0, console)  # there is nothing left to do
    assert (ended, again.rounds) == (True, progress.rounds)


def test_a_trained_program_alone_is_planned() -> None:
    """In domain `process` model (iii) has none of them: then there is nothing to plan there."""
    for model in campaign.MODEL_DOMAINS:
        chains = campaign.plan(campaign.Settings((model,)), [], ["adamw"])
        assert chains
        assert all(chain.jobs for chain in chains)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar for each model where a person looks, else a line now and then."""
    monkeypatch.setattr(campaign, "SAY_SECONDS", 0)
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    report = campaign.run(campaign.Settings(("i",), 90, only=("write_all",), record=False), console)
    assert report.failures == 0
    shown = out.getvalue()
    if terminal:
        assert "━" in shown
        assert re.search(r"\d+/90", shown)
    else:
        assert "━" not in shown
        assert re.search(r"\d+ s: \(i\) \d+ of 90", shown)
