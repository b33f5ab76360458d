"""What is not supported says so, and what to do instead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pmstore


def test_a_device_is_refused() -> None:
    """devdax is a character device: no file operations to format it with."""
    with pytest.raises(ValueError, match="fsdax"):
        pmstore.open("/dev/zero", "r+")
    with pytest.raises(ValueError, match="fsdax"):
        pmstore.open("/dev/zero")


def test_dax_where_there_is_none(shm: Path) -> None:
    with pytest.raises(pmstore.DomainError, match="MAP_SYNC"):
        pmstore.open(shm / "store.pm", domain="dax")
    assert os.listdir(shm) == []


def test_a_subinterpreter_is_refused() -> None:
    program = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
number = interpreters.create()
code = '''
import importlib.util
spec = importlib.util.spec_from_file_location("pmstore._block", PATH)
try:
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
except ImportError as error:
    print("refused:", error, flush=True)
else:
    print("imported", flush=True)
'''
import sys
interpreters.run_string(number, code.replace("PATH", repr(sys.argv[1])))
"""
    from pmstore import _block

    done = subprocess.run([sys.executable, "-c", program, str(_block.__file__)], capture_output=True, text=True, timeout=60)
    assert "refused: " in done.stdout, (done.stdout, done.stderr)
    if sys.version_info < (3, 12):
        assert "main interpreter" in done.stdout
