"""`pmstore crashtest`: it finds the loop that commits half of an update, and passes one that does
not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import pmstore
from pmstore.testing import Outcome, Program, crash_test, crashboard

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "crashtest_two_commits.py"

CORRECT = """
import pmstore
with pmstore.open("run.pm", size="4MiB", domain="{domain}") as store:
    a = store.require("a", (3000,), "float64")
    b = store.require("b", (3000,), "float64")
    for step in range(store.get("step", 0), 12):
        with store.transaction():
            a[step::7] += step
            b[:] = a * 2
            store["step"] = step + 1
"""


def write(folder: Path, source: str, domain: str = "file") -> list[str]:
    (folder / "train.py").write_text(source.replace("{domain}", domain))
    return [sys.executable, "train.py"]


def in_step(store: pmstore.Store) -> None:
    assert "step" not in store or (store["b"] == 2 * store["a"]).all()


@pytest.mark.parametrize("model", ["kill", "power"])
@pytest.mark.parametrize("domain", ["file", "emulated"])
def test_a_correct_loop_passes(disk: Path, domain: str, model: str) -> None:
    result = crash_test(
        write(disk, CORRECT, domain), folder=disk, trials=2, model=model, verify=in_step
    )  # type: ignore[arg-type]
    assert result.ok, str(result)
    assert result.domain == domain
    assert result.deterministic
    assert all(
        kill.found is None or kill.acknowledged <= kill.found <= kill.acknowledged + 1
        for t in result.trials
        for kill in t.kills
    )
    assert {trial.commits for trial in result.trials} == {result.commits}


def test_two_commits_for_one_update_are_found(disk: Path) -> None:
    """A thread of domain "file" writes committed pages home meanwhile: on a busy machine a point
    may lie elsewhere in the second run, or all that is found may have been killed at a random time.
    So a few seeds are tried."""
    command = [sys.executable, str(EXAMPLE)]
    for seed in range(1, 7):
        result = crash_test(command, folder=disk, trials=6, jobs=2, seed=seed)
        different = [t for t in result.trials if t.outcome is Outcome.DIFFERENT]
        assert not different or "momentum" in str(result)
        for bad in different:
            if all(kill.primitive for kill in bad.kills):
                again = crash_test(command, folder=disk, at=[kill.primitive for kill in bad.kills])
                if [t.outcome for t in again.trials] == [Outcome.DIFFERENT]:
                    return
    pytest.fail("no trial found the bug at a point where a second one finds it again")


def test_a_loop_that_starts_over_loses_work(disk: Path) -> None:
    source = CORRECT.replace('store.get("step", 0)', "0").replace(
        "a[step::7] += step", "a[:] = step"
    )
    result = crash_test(write(disk, source), folder=disk, at=[150, 150])
    assert [t.outcome for t in result.trials] == [Outcome.LOST], str(result)


@pytest.mark.parametrize("compare", [True, False])
def test_a_store_of_another_name_in_each_run_is_lost(disk: Path, compare: bool) -> None:
    """No run is resumed: what is committed is found by nobody."""
    source = "import os" + CORRECT.replace('"run.pm"', 'f"run-{os.getpid()}.pm"')
    result = crash_test(write(disk, source), folder=disk, at=[150, 160], compare=compare)
    assert [t.outcome for t in result.trials] == [Outcome.LOST], str(result)
    assert "has to open the same one" in str(result)


def test_a_run_that_does_not_open_the_store_has_lost_it(disk: Path) -> None:
    """Killed before there is a store; the next run believes that there is nothing to do."""
    source = "import os, sys; os.path.exists('begun') and sys.exit(); open('begun', 'x')" + CORRECT
    result = crash_test(write(disk, source), folder=disk, at=[1], compare=False)
    assert [t.outcome for t in result.trials] == [Outcome.LOST], str(result)


def test_a_loop_that_cannot_resume_needs_work(disk: Path) -> None:
    source = CORRECT.replace("store.require", "store.zeros")
    result = crash_test(write(disk, source), folder=disk, at=[150, 150], keep=disk / "kept")
    assert [t.outcome for t in result.trials] == [Outcome.MANUAL], str(result)
    with pmstore.open(disk / "kept" / "trial1" / "run.pm") as store:
        assert store["step"] >= 1


def test_a_verification_that_fails_is_a_different_state(disk: Path) -> None:
    result = crash_test(
        write(disk, CORRECT),
        folder=disk,
        at=[150, 160],
        verify=lambda store: store.get("step", 0) in (0, 12),
    )
    assert [t.outcome for t in result.trials] == [Outcome.DIFFERENT], str(result)
    (kill,) = result.trials[0].kills  # the second one was not come to
    assert kill.acknowledged > 0  # what had been committed is said


def test_only_what_two_runs_agree_on_is_compared(disk: Path) -> None:
    source = CORRECT.replace(
        'store["step"] =', "import time; store['when'] = time.time_ns(); store[\"step\"] ="
    )
    result = crash_test(write(disk, source), folder=disk, at=[150, 160])
    assert result.ok, str(result)
    assert not result.deterministic
    assert result.not_compared == ("when",)
    source = source.replace(
        "    for step in", '    store["opens"] = store.get("opens", 0) + 1\n    for step in'
    )
    result = crash_test(write(disk, source), folder=disk, at=[150, 160])
    assert [t.outcome for t in result.trials] == [Outcome.DIFFERENT], str(result)
    assert "opens" in str(result)
    assert "when" not in str(result)


ABSOLUTE = Path(f"/dev/shm/pmstore-test-{os.getpid()}-absolute.pm")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import sys; sys.exit(3)", "status 3"),
        ("print()", "opens no store"),
        (CORRECT.replace("run.pm", str(ABSOLUTE)), "relative"),
        ("import pmstore; pmstore.open('run.pm', size='4MiB').close()", "commits nothing"),
        (CORRECT + "import os; os.rename('run.pm', 'final.pm')", "leaves no store run.pm"),
    ],
)  # fmt: skip
def test_programs_that_cannot_be_tested(disk: Path, source: str, says: str) -> None:
    try:
        with pytest.raises(ValueError, match=says):
            crash_test(write(disk, source), folder=disk, trials=1)
    finally:
        ABSOLUTE.unlink(missing_ok=True)


def test_power_failure_is_not_asked_of_a_domain_that_does_not_claim_it(disk: Path) -> None:
    with pytest.raises(ValueError, match="domain process"):
        crash_test(write(disk, CORRECT, "process"), folder=disk, trials=1, model="power")


@pytest.mark.parametrize("domain", ["file", "emulated"])
def test_a_power_failure_takes_what_was_not_durable(disk: Path, domain: str) -> None:
    """At some of these points it leaves another file than SIGKILL does; and the file can always be
    opened."""
    command, differ = write(disk, CORRECT, domain), 0
    for point in range(120, 136, 4):
        left = {}
        for seed in ("", "77"):
            (disk / "run.pm").unlink(missing_ok=True)
            env = crashboard.environment(
                disk / "board", at=point, power_seed=int(seed) if seed else None
            )
            assert subprocess.run(command, cwd=disk, env=env).returncode == -9
            seen = crashboard.read(disk / "board")
            assert seen.primitives == point
            assert seen.power == bool(seed)
            pages = (disk / "run.pm").read_bytes()
            # without the session record, which has the pid
            left[seed] = pages[: 5 * 4096] + pages[7 * 4096 :]
            with pmstore.open(disk / "run.pm") as store:
                in_step(store)
        differ += left[""] != left["77"]
    assert differ > 0


RESUMED = """
import sys
from pathlib import Path
if Path("run.pm").exists() != ("--resume" in sys.argv):
    sys.exit("another command resumes")
"""


def test_another_command_resumes_and_leaves_a_file(disk: Path) -> None:
    """What the program leaves beside the store is compared too."""
    command = write(disk, RESUMED + CORRECT + '    Path("out").write_text(str(b.sum()))\n')
    wrong = crash_test(command, folder=disk, at=[150, 160])
    assert [t.outcome for t in wrong.trials] == [Outcome.MANUAL], str(wrong)
    assert "another command resumes" in str(wrong)
    resume = [*command, "--resume"]
    right = crash_test(Program(command, resume, ["out"]), folder=disk, at=[150, 160])
    assert right.ok, str(right)
    with pytest.raises(ValueError, match="leaves no file other"):
        crash_test(Program(command, resume, ["other"]), folder=disk, at=[150, 160])
    command = write(disk, RESUMED + CORRECT + '    Path("out").write_text(str(sys.argv))\n')
    different = crash_test(Program(command, resume, ["out"]), folder=disk, at=[150, 160])
    assert [t.outcome for t in different.trials] == [Outcome.DIFFERENT]
    assert "file out" in str(different)


ASKED = """
import signal, sys, time
def asked_to_end(*_):
    {handler}
    sys.exit(3)
signal.signal(signal.SIGTERM, asked_to_end)
"""


def test_sigterm(disk: Path) -> None:
    """As a scheduler of jobs ends a program: what it does in its last seconds has to be right,
    too."""
    loop = CORRECT.replace("        with store", "        time.sleep(0.05)\n        with store")
    with pytest.raises(ValueError, match="random times"):
        crash_test(["true"], model="term", at=[5])
    right = crash_test(
        write(disk, ASKED.replace("{handler}", "pass") + loop),
        folder=disk,
        model="term",
        trials=2,
        jobs=2,
    )
    assert right.ok, str(right)
    assert all(kill.primitive == 0 for trial in right.trials for kill in trial.kills)
    command = write(
        disk, ASKED.replace("{handler}", "store['asked'] = True; store.commit()") + loop
    )
    for seed in range(6):  # some signals come before the program is there, or after its end
        wrong = crash_test(command, folder=disk, model="term", trials=3, jobs=3, seed=seed)
        if not wrong.ok:
            assert "asked" in str(wrong)
            return
    pytest.fail("no SIGTERM reached the program")


def test_an_interrupt_ends_what_runs(disk: Path) -> None:
    """Ctrl-C in a trial: nobody waits for a training to end."""
    source = """
import os, time
from pathlib import Path
if Path("run.pm").exists():
    Path("{marker}.new").write_text(str(os.getpid()))
    Path("{marker}.new").rename("{marker}")
    time.sleep(1000)
"""
    marker = disk / "resumed"
    command = write(disk, source.replace("{marker}", str(marker)) + CORRECT)
    words = [sys.executable, "-m", "pmstore", "crashtest", "--at", "150,160", "--", *command]
    process = subprocess.Popen(
        words, cwd=disk, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 300
    while not marker.exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert (process.returncode, said.splitlines()[-1]) == (130, "pmstore: stopped")
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_the_command(disk: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pmstore", "crashtest", *arguments]
        return subprocess.run(command, cwd=disk, capture_output=True, text=True, timeout=600)

    program = write(disk, CORRECT)
    (disk / "checks.py").write_text(
        "def right(store):\n    return True\ndef wrong(store):\n    return False\n"
    )
    good = run("--trials", "2", "--json", "--verify", "checks:right", "--", *program)
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["outcomes"]["clean resume"] == 2
    bad = run("--at", "150,160", "--summary", "out.md", "--verify", "checks:wrong", "--", *program)
    assert bad.returncode == 2, bad.stdout  # the run that nobody kills does not pass either
    assert "verification says no" in bad.stderr
    assert run("--verify", "checks:gone", "--", *program).returncode == 2
    (disk / "broken.py").write_text("1 / 0")
    for wrong, said in (
        ("checks", "as checks:sound"),
        ("broken:x", "ZeroDivisionError"),
        ("none:x", "No module named 'none'"),
    ):
        refused = run("--verify", wrong, "--", *program)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
        assert said in refused.stderr
    broken = write(disk, CORRECT.replace("store.require", "store.zeros"))
    resume = " ".join(program)
    bad = run(
        "--at",
        "150,160",
        "--summary",
        "out.md",
        "--junit",
        "out.xml",
        "--resume",
        resume,
        "--",
        *broken,
    )
    assert bad.returncode == 1, bad.stderr
    assert "two runs that nobody kills, then 1 trial of three runs each" in bad.stderr
    (suite,) = ElementTree.parse(disk / "out.xml").iter("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    assert [failure.get("type") for failure in suite.iter("failure")] == ["needs manual work"]
    assert "already" in str(next(suite.iter("failure")).get("message"))
    assert run("--result", "nothing", "--", *program).returncode == 2
    nowhere = run("--at", "150,160", "--junit", "no/folder.xml", "--resume", resume, "--", *broken)
    assert (nowhere.returncode, "Traceback" in nowhere.stderr) == (2, False)
    assert "needs manual work" in nowhere.stdout  # said all the same
    assert "needs manual work" in bad.stdout
    assert "| 1 | point 150" in (disk / "out.md").read_text()


def test_the_fixture(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["pmstore.testing"]')
    write(pytester.path, CORRECT)
    (pytester.path / "wrong.py").write_text(
        CORRECT.replace("{domain}", "file").replace("store.require", "store.zeros")
    )
    pytester.makepyfile(
        """
        import sys
        def test_right(crashtest):
            assert crashtest([sys.executable, "train.py"], at=[150, 160]).ok
        def test_wrong(crashtest):
            crashtest([sys.executable, "wrong.py"], at=[150, 160])
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*needs manual work*"])


@pytest.mark.parametrize(
    "wrong", [{"model": "powr"}, {"trials": 0}, {"jobs": 0}, {"at": "150,160"}, {"at": [0]}]
)
def test_what_tests_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        crash_test(["true"], **wrong)  # type: ignore[arg-type]


def test_programs_that_are_no_command() -> None:
    wrong: Any
    for wrong, told in (
        (
            "python a.py",
            r"command='python a.py': a list of words, such as \['python', 'train.py'\]",
        ),
        (3, "command=3: a list of words"),
        (["sleep", 3], "command: 3 is no str"),
    ):
        with pytest.raises(TypeError, match=told):
            crash_test(wrong)
    with pytest.raises(TypeError, match=r"results='out': a list of words, such as \['out.txt'\]"):
        Program(["true"], results="out")
    with pytest.raises(ValueError, match="nothing to run"):
        crash_test([])


def test_points_that_no_run_reaches_are_refused(disk: Path) -> None:
    """Nothing would be killed, and the trial would pass."""
    with pytest.raises(ValueError, match=r"at=\[150, 9000000\]: an undisturbed run has \d+ points"):
        crash_test(write(disk, CORRECT), folder=disk, at=[150, 9_000_000])
