"""Tests that leave things behind fail; pairs of parameters are all there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

GUILTY = {
    "working directory": "os.chdir('/')",
    "signal handlers": "signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
    "blocked signals": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])",
    "umask": "os.umask(0o7)",
    "sys.path": "sys.path.append('/nowhere')",
    "modules": "sys.modules['json'] = None",
    "logging": "logging.getLogger('pmstore').setLevel(5)",
    "threads": "threading.Thread(target=time.sleep, args=(2,)).start()",
    "child processes": "globals().update(kept=subprocess.Popen(['sleep', '2']))",
    "errors of numpy": "np.seterr(all='raise')",
}


def test_a_test_that_leaves_something_behind_fails(pytester: pytest.Pytester) -> None:
    """And the one after it does not."""
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "import pytest, left_behind\n"
        "left_behind.END_SECONDS = 0.1\n"
        "@pytest.fixture(autouse=True)\n"
        "def _watch():\n"
        "    yield from left_behind.watch()\n"
    )
    tests = [
        f"def test_{number}():\n    {act}\n\ndef test_{number}_next():\n    pass\n"
        for number, act in enumerate(GUILTY.values())
    ]
    pytester.makepyfile(
        "import json, logging, os, signal, subprocess, sys, threading, time\n"
        "import numpy as np\n" + "\n".join(tests)
    )
    run = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    run.assert_outcomes(passed=2 * len(GUILTY), errors=len(GUILTY))
    found = [line for line in run.outlines if line.startswith("This test leaves behind: ")]
    for what, line in zip(GUILTY, found, strict=True):
        assert line.startswith(f"This test leaves behind: {what}: ")


def test_pairs(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each two parameters come together, in less than all combinations."""
    monkeypatch.delenv("PMSTORE_TESTS", raising=False)
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "import pairwise\n"
        "def pytest_collection_modifyitems(items):\n"
        "    out = pairwise.left_out(items)\n"
        "    items[:] = [item for item in items if item not in out]\n"
    )
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.pairwise\n"
        "@pytest.mark.parametrize('a', [1, 2, 3])\n"
        "@pytest.mark.parametrize('b', 'xy')\n"
        "@pytest.mark.parametrize('c', 'pq')\n"
        "def test_it(a, b, c):\n"
        "    pass\n"
        "@pytest.mark.parametrize('a', [1, 2, 3])\n"
        "def test_all(a):\n"
        "    pass\n"
    )
    run = pytester.runpytest_subprocess("-q", "-rA", "-p", "no:cacheprovider")
    told = run.stdout.str()
    assert len(re.findall("PASSED .*::test_all", told)) == 3
    kept = [each.split("-") for each in re.findall(r"PASSED .*::test_it\[(.*)\]", told)]
    assert len(kept) < 12
    assert {(a, c) for c, b, a in kept} == {(a, c) for a in "123" for c in "pq"}
    assert {(b, c) for c, b, a in kept} == {(b, c) for b in "xy" for c in "pq"}
    assert {(a, b) for c, b, a in kept} == {(a, b) for a in "123" for b in "xy"}
