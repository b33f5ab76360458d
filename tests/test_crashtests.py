"""The crash tests with a small budget, and that they would notice. `make crashtest` is the same with more images."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from crashtests import jobs, mixtures, mutant_list, mutants

ROOT = Path(__file__).resolve().parent.parent
IMAGES = int(os.environ.get("PMS_CRASH_IMAGES", "2000"))

pytestmark = pytest.mark.skipif(
    shutil.which("make") is None or shutil.which("cc") is None, reason="needs a C compiler and make"
)


def crashtests(*arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    command = [sys.executable, "-m", "crashtests", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    return run, json.loads((ROOT / "build" / "crashtest" / "report.json").read_text())


def test_every_image_recovers() -> None:
    """Of real training too: AdamW, SGD on slots, KMeans, a Gaussian mixture, whose states are compared in Python."""
    models = ("i", "ii", "iii", "iv")
    run, report = crashtests("--images", str(IMAGES), *(word for model in models for word in ("--model", model)))
    assert run.returncode == 0, run.stdout + run.stderr
    for model in models:
        found = report["models"][model]  # type: ignore[index]
        assert found["failures"] == 0
        assert found["distinct"] >= IMAGES
        for name in ("train_adamw", "train_kmeans", "train_sgd", "train_gmm"):
            assert report["workloads"][name][model] > 0  # type: ignore[index]


def test_mixtures_recover() -> None:
    tally = mixtures.run(examples=3, budget=40, number=1)
    assert tally.failure == ""
    assert tally.examples >= 3
    assert tally.images > 3 * 40


def test_every_kill_recovers() -> None:
    run, report = crashtests("--model", "kill", "--kill-step", "41")
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
    for path in (ROOT / "native").glob("*.[ch]"):
        shutil.copy(path, tmp_path)
    text = (tmp_path / "undo.c").read_text()
    rogue = text.replace(
        "pms_persist_store(u->persist, pms_map_at(u->map, off), src, len);", "memcpy(pms_map_at(u->map, off), src, len);"
    )
    assert rogue != text
    (tmp_path / "undo.c").write_text(rogue)
    found = [failure for o in jobs.detect(tmp_path, tmp_path / "build", "groups") for failure in o.failures]
    assert "past the seam" in found[0]["message"]


def test_mutants_are_of_this_engine() -> None:
    """Each changes a text that is in the engine exactly once."""
    assert [said for m in mutant_list.MUTANTS if (said := mutants.stale(m))] == []
    assert len(mutant_list.MUTANTS) > 100


def test_a_broken_engine_is_noticed() -> None:
    """A few of `make mutants`: a fence, a write-back, a flush and recovery left out."""
    names = ["no_f1", "no_write_back", "entry_not_flushed", "recover_nothing"]
    command = [sys.executable, "-m", "crashtests.mutants", *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "4 mutants, 4 killed" in run.stdout
