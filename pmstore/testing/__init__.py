"""Crash-tests programs: kills them at a chosen instruction, and workloads by the hundred.

A `ForkServer` is one process that has imported what the workload needs. For each run it forks a
child, which does the work until SIGKILL; so a run costs milliseconds, and the children share
nothing with the tests but files.

    with ForkServer() as server:
        run = server.run("mytests:work", ["/dev/shm/x.pm"], delay_seconds=0.003)
        ...  # open the store: it holds the state of run.acknowledged, or of the step after it

The workload is a function `work(ack, *args)`: it calls `ack(n)` when step n has been committed.

Where pytest is installed there is also a fixture, `crashtest`, which does what `pmstore crashtest`
does. Put `pytest_plugins = ["pmstore.testing"]` into the topmost `conftest.py`, then

    def test_training_survives(crashtest):
        crashtest([sys.executable, "train.py"], trials=9)

and a suite of tests, `PlaceTests`, that tells whether a place does for tiers (docs/TIERS.md).
"""

from pmstore._engine.crash_points import kill_at_primitive, primitives_seen
from pmstore.testing.forkserver import ForkServer, KilledRun, shared_words
from pmstore.testing.outcomes import CrashTestResult, Outcome
from pmstore.testing.runner import Program
from pmstore.testing.trials import crash_test, job_test

__all__ = [
    "CrashTestResult",
    "ForkServer",
    "KilledRun",
    "Outcome",
    "Program",
    "crash_test",
    "job_test",
    "kill_at_primitive",
    "primitives_seen",
    "shared_words",
]

try:
    import pytest  # noqa: F401
except ImportError:  # only the fixture and the suite need it
    pass
else:
    from pmstore.testing.fixture import crashtest as crashtest
    from pmstore.testing.place_tests import PlaceTests as PlaceTests
