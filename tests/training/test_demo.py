"""`pmstore demo`, short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pmstore
from pmstore.commands.application import app
from pmstore_lab import demo

STEPS = 14


def test_the_demo_ends_bitwise_equal(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["demo", "--steps", str(STEPS), "--dir", str(tmp_path), "--json"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"]
    assert (report["differences"], report["plain_differences"]) == ([], [])
    assert report["compared"] > 60
    kills = report["jobs"]["killed twice"]["kills"]
    assert [kill["where"].split(",")[0] for kill in kills] == ["at a random moment", "in a commit"]
    for kill in kills:
        assert kill["resumed_at_step"] >= kill["at_step"]
        assert kill["lost_work_seconds"] > 0
    assert all(job["steps"] == STEPS for job in report["jobs"].values())
    assert report["jobs"]["undisturbed"]["kills"] == []
    assert list(tmp_path.iterdir()) == []


def report_of(folder: Path, *, differences: list[str]) -> demo.Report:
    job = demo.JobReport(
        "x", 3, [0.01] * 3, [0.001] * 3, [demo.Kill("in a commit", 2)], 0.5, 100, "file", 1.0
    )
    return demo.Report(dict.fromkeys(demo.JOBS, job), differences, [], 9, folder)


@pytest.mark.parametrize(("differences", "code"), [([], 0), (["run/model/0.weight"], 1)])
def test_the_table_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, differences: list[str], code: int
) -> None:
    monkeypatch.setattr(
        demo, "run_demo", lambda settings, progress: report_of(tmp_path, differences=differences)
    )
    result = CliRunner().invoke(app, ["demo", "--quick"])
    assert result.exit_code == code
    for part in (
        "kills",
        "commit, share of step time",
        "accuracy",
        "torch.save + fsync",
        "9.1%",
        "kill 1 in a commit",
    ):
        assert part in result.stdout
    assert ("bitwise equal" in result.stdout) == (code == 0)
    assert ("differs after the kills: run/model/0.weight" in result.stdout) == (code == 1)


def test_a_difference_is_found(tmp_path: Path) -> None:
    for number in range(2):
        with pmstore.open(tmp_path / f"{number}.pm") as store:
            store.tensor("a/w", (3,)).fill_(0.0 if number == 0 else -0.0)
            store["a/n"] = 1 if number == 0 else 1.0
            store["same"] = [1]
            store["clock"] = number
    found, compared = demo.differences(tmp_path / "0.pm", tmp_path / "1.pm")
    assert (found, compared) == (["a/n", "a/w"], 3)


def test_a_trainer_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_write_data", lambda folder: None)
    result = CliRunner().invoke(app, ["demo", "--steps", "10", "--dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "failed with status 1" in result.stderr
    assert "images.npy" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_control_c_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pmstore", "demo", "--steps", "100000", "--dir", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while not list(tmp_path.glob("*/undisturbed.pm")):
                assert process.poll() is None
                time.sleep(0.05)
            trainers = [
                pid for pid in os.listdir("/proc") if pid.isdigit() and _parent(pid) == process.pid
            ]
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            words = process.stderr.read()
            assert process.wait() == 130
        finally:
            process.kill()
    assert words.splitlines()[-1] == "pmstore: stopped; nothing is left behind"
    assert list(tmp_path.iterdir()) == []
    assert trainers
    end = time.monotonic() + 60  # one that is told to end may outlive its parent by a moment
    while left := [pid for pid in trainers if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def _parent(pid: str) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(status.split("PPid:")[1].split()[0])
