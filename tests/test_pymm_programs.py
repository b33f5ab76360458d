"""PyMM programs run when their import is changed, and nothing else (but for the folder of their
pool)."""

from __future__ import annotations

import gc
import unittest
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "pymm_programs"


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
