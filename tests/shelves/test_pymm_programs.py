"""PyMM programs run when their import is changed, and nothing else (but for the folder of their
pool)."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest

import pmstore

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("program", sorted(path.stem for path in PROGRAMS.glob("*.py")))
def test_program(program: str, shm: Path) -> None:
    source = (PROGRAMS / f"{program}.py").read_text()
    assert source.count("\nimport pymm\n") == 1
    if "torch" in source:
        pytest.importorskip("torch")
    source = source.replace("\nimport pymm\n", "\nfrom pmstore import pymm\n").replace(
        "/mnt/pmem0", str(shm)
    )
    namespace: dict[str, Any] = {"__name__": program}
    exec(compile(source, program, "exec"), namespace)
    cases = [
        thing
        for thing in namespace.values()
        if isinstance(thing, type) and issubclass(thing, unittest.TestCase)
    ]
    for case in cases:
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
        assert result.testsRun
        assert not result.errors + result.failures, "".join(
            text for _, text in result.errors + result.failures
        )
    namespace.clear()
    del cases
    gc.collect()


def test_the_runner(shm: Path) -> None:
    """`make nightly WHAT=upstream-pymm`, with a checkout of two programs of ours."""
    folder = shm / "checkout" / "testing"
    folder.mkdir(parents=True)
    (folder / "good.py").write_text(
        "import os, unittest\nimport pymm\n"
        "class T(unittest.TestCase):\n"
        "    def test_it(self):\n"
        "        s = pymm.shelf('s', pmem_path='/mnt/pmem0', size_mb=1)\n"
        "        s.x = 1\n"
        "        assert os.path.exists('/mnt/pmem0/s.pm')\n"
        "if __name__ == '__main__':\n    unittest.main()\n"
    )
    (folder / "later.py").write_text("import pymm\ns = pymm.shelf('s')\nassert s.x == 1\ns.y.z\n")
    (folder / "other.py").write_text("print('no program of PyMM')\n")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.upstream_pymm", str(shm / "checkout")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.stdout.splitlines()[:2] == [
        "testing/good.py: ok",
        "testing/later.py: AttributeError: 'NoneType' object has no attribute 'z'",
    ]
    assert "1 of 2 programs passed, 1 failed, 0 were not run; 1 of 1 unit tests" in ended.stdout
    assert ended.returncode == 1


def test_the_page(shm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program of docs/howto/from_pymm.md."""
    page = Path(__file__).parents[2] / "docs" / "howto" / "from_pymm.md"
    text = page.read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for _ in range(2):
        exec(program.replace("/mnt/pmem0", str(shm)), {})
        assert capsys.readouterr().out == "['x', 'count']\n['x', 'count'] 6\n"
    with pmstore.open(shm / "run.pm") as store:
        assert (store["x"] == 2).all()
        assert store["count"] == 6
