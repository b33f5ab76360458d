"""`pmstore crashtest --job`: it kills ranks and whole jobs, and finds jobs whose ranks come apart.

The jobs here are of plain stores, without torch, so that a run takes a second. Their ranks meet by
files, and they write the records of the protocol themselves: as it has to be, or with a rule left
out.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pmstore.testing import Outcome, Program, job_test

LAUNCHER = """
import os, subprocess, sys
restarts = int(sys.argv[1])
for attempt in range(restarts + 1):
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv[2:]],
            env={**os.environ, "RANK": str(rank), "ATTEMPT": f"{os.getpid()}-{attempt}"},
            start_new_session=True,  # as torchrun does
        )
        for rank in range(2)
    ]
    while all(rank.poll() in (None, 0) for rank in ranks) and any(r.poll() is None for r in ranks):
        try:
            next(rank for rank in ranks if rank.poll() is None).wait(0.02)
        except subprocess.TimeoutExpired:
            pass
    bad = any(rank.poll() for rank in ranks)
    for rank in ranks:
        rank.kill()
        rank.wait()
    if not bad:
        sys.exit(0)
sys.exit(1)
"""

RANK = """
import os, sys, time
from contextlib import closing
from pathlib import Path
import pmstore
from pmstore.objects.generations import (
    NO_RUN, Key, Member, Record, encode, newest_common
)
from pmstore.objects.job_record import members, without_run

rank, attempt, left_out = int(os.environ["RANK"]), os.environ["ATTEMPT"], sys.argv[1:]

def meet(what, told=b""):
    # all ranks have got here; what each told
    place = Path("meetings") / attempt
    place.mkdir(parents=True, exist_ok=True)
    mine = place / f"{what}.{rank}"
    mine.with_suffix(f".{rank}.new").write_bytes(told)
    mine.with_suffix(f".{rank}.new").rename(mine)
    other = place / f"{what}.{1 - rank}"
    while True:
        steps = [one.name for one in place.glob(f"step??.{1 - rank}")]
        if other.exists():
            break
        if what.startswith("step") and any(name > other.name for name in steps):
            sys.exit(f"the other rank is ahead of {what}")
        time.sleep(0.002)
    every = {rank: told, 1 - rank: other.read_bytes()}
    return [every[0], every[1]]

def here():
    return members(store, "").get("run", without_run(store, ""))

with closing(pmstore.open(f"rank{rank}.pm", size="4MiB", domain="emulated")) as store:
    pool = store._core.pool
    every = [eval(told) for told in meet("told", repr(here()).encode())]
    target = newest_common(every)
    assert target is not None, every
    pool.hold_for_job()
    if "back" not in left_out and here().keys[0] != target:
        pool.back()
        assert here().keys[0] == target
    pool.allow()
    term = 1 + max(one.record.key.term if one.record else 0 for one in every)
    if target == NO_RUN:
        store["run/about"] = {}
        store.zeros("run/progress", (4,), "int64")
        store.zeros("run/sum", (500,), "float64")
        job = (7, int(attempt.split("-")[0]))
        record = Record(Key(job, term, 0, 0), rank, 2, 9, NO_RUN)
        store.zeros("run/job", (16,), "int64")[:] = encode(record)
    else:
        record = here().record.joined(term)
        store["run/job"][:] = encode(record)
    store.commit()
    meet("begun")
    pool.allow()
    for step in range(record.key.step + 1, 13):
        store["run/sum"][:] += step * (rank + 1)
        store["run/progress"][0] = step
        record = record.following(step)
        store["run/job"][:] = encode(record)
        store.commit()
        if "tickets" not in left_out:
            meet(f"step{step:02}")
        pool.allow()
        if "tickets" in left_out:
            time.sleep(0.01 * rank)
"""


ALONE = """
import os
import pmstore
rank = int(os.environ["RANK"])
with pmstore.open(f"rank{rank}.pm", size="4MiB") as store:
    with store.transaction():
        store["run/about"] = {}
        progress = store.require("run/progress", (4,), "int64")
        total = store.require("run/sum", (500,), "float64")
    done = int(progress[0])
    for step in range(done + 1, 13):
        with store.transaction():
            total[:] += step
            progress[0] = step
"""

CHECK = """
import pmstore, sys
with pmstore.open("rank1.pm", "r") as store:
    step, term = store["run/progress"][0], store["run/job"][4]
sys.exit(f"step {step}, term {term}" if term > 1 else 0)
"""


@pytest.fixture
def job(disk: Path) -> Path:
    (disk / "launch.py").write_text(LAUNCHER)
    (disk / "rank.py").write_text(RANK)
    return disk


def command(*left_out: str, restarts: int = 0) -> list[str]:
    return [sys.executable, "launch.py", str(restarts), "rank.py", *left_out]


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_correct_job_passes(job: Path, restarts: int) -> None:
    """Whether the launcher starts its ranks again, or the command is started again."""
    result = job_test(command(restarts=restarts), folder=job, trials=3)
    assert result.ok, str(result)
    assert result.commits == 12
    assert result.stores == ("rank0.pm", "rank1.pm")
    assert {trial.commits for trial in result.trials} == {12}
    kills = [kill for trial in result.trials for kill in trial.kills]
    assert {kill.whole for kill in kills} == {True, False}
    assert {kill.primitive > 0 for kill in kills} == {True, False}
    assert all(kill.acknowledged - (kill.found or 0) in (0, 1) for kill in kills)
    assert "run/sum" not in str(result.not_compared)


@pytest.mark.parametrize("left_out", ["tickets", "back"])
def test_a_rule_that_is_left_out_is_found(job: Path, left_out: str) -> None:
    program = Program(command(left_out), timeout_seconds=40)  # ranks may wait for each other
    for seed in range(1, 7):
        result = job_test(program, folder=job, trials=3, seed=seed, compare=False)
        if not result.ok:
            return
    pytest.fail("no trial found it")


def test_ranks_that_know_nothing_of_each_other_are_compared_at_the_end(job: Path) -> None:
    (job / "rank.py").write_text(ALONE)
    result = job_test(command(), folder=job, trials=2)
    assert result.ok, str(result)
    assert result.commits == 12
    (job / "rank.py").write_text(ALONE.replace("range(done + 1, 13)", "range(done + 1, 13 - rank)"))
    with pytest.raises(ValueError, match=r"stand apart: rank0\.pm is at step 12 of a run without"):
        job_test(command(), folder=job, trials=1)


def test_a_job_that_hangs_when_a_rank_is_lost(job: Path) -> None:
    """No launcher ends the others, and they wait for ever."""
    (job / "launch.py").write_text(
        LAUNCHER.replace(
            "while all(rank.poll() in (None, 0) for rank in ranks) and any", "while any"
        )
    )
    program = Program(command(), timeout_seconds=8)
    result = job_test(program, folder=job, at=[(1, 150)], compare=False)
    assert [trial.outcome for trial in result.trials] == [Outcome.MANUAL]
    assert "did not end within 8 s, after a rank was killed" in str(result)


def test_the_users_own_check(job: Path) -> None:
    (job / "check.py").write_text(CHECK)
    program = Program(command(), check=[sys.executable, "check.py"])
    result = job_test(program, folder=job, at=[(1, 300)])  # after the first commit of both
    assert [trial.outcome for trial in result.trials] == [Outcome.DIFFERENT], str(result)
    assert "the check ends with status 1: step 12, term 2" in str(result)


def test_nothing_is_left_of_what_was_killed(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are in sessions of their own, and their launcher is killed first."""
    monkeypatch.setenv("PMSTORE_TEST_OF", str(job))
    (job / "launch.py").write_text(
        LAUNCHER.replace("    while all(", "    os.kill(os.getpid(), 9)\n    while all(")
    )
    with pytest.raises(ValueError, match="status -9"):
        job_test(command(), folder=job)
    mark, left = f"PMSTORE_TEST_OF={job}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone
            left += [process.name] * (mark in (process / "environ").read_bytes().split(b"\0"))
    assert left == []


def test_the_command(job: Path) -> None:
    pmstore = [sys.executable, "-m", "pmstore", "crashtest", "--job"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        wide = {**os.environ, "COLUMNS": "200"}  # else a table breaks what it says into lines
        return subprocess.run(
            [*pmstore, *words], cwd=job, env=wide, capture_output=True, text=True, timeout=300
        )

    ran = run("--trials", "1", "--json", "--", *command())
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["stores"] == ["rank0.pm", "rank1.pm"]
    assert told["trials"][0]["outcome"] == "clean resume"
    ran = run("--at", "1:150,0:40", "--", *command())
    assert ran.returncode == 0, ran.stderr
    assert "rank1.pm at point 150" in " ".join(ran.stdout.split())
    assert "1 of 1 resumed cleanly" in ran.stdout
    for words, says in [
        (["--at", "150"], "as 1:120,0:45"),
        (["--at", "5:1"], "rank 0 (rank0.pm) has"),
        (["--model", "power"], "killed with SIGKILL"),
    ]:
        ran = run(*words, "--", *command())
        assert (ran.returncode, says in " ".join(ran.stderr.split())) == (2, True), ran.stderr
    ran = run("--", sys.executable, "-c", "pass")
    assert (ran.returncode, "no process of the job opens a store" in ran.stderr) == (2, True)
