"""The program that type checkers read has every public name, `dir` shows the same, and `help` fits
on three screens."""

from __future__ import annotations

import ast
import importlib
import pydoc
import re
from pathlib import Path

import pytest

import pmstore

MODULES = (
    *("pmstore", "pmstore.torch", "pmstore.torch.optim", "pmstore.dcp", "pmstore.scheduler"),
    *("pmstore.tiers", "pmstore.testing", "pmstore.exchange", "pmstore.portable"),
)
PROGRAM = Path(__file__).parent.parent / "typed" / "program.py"


def used() -> set[str]:
    """Names as `pmstore.Store` and `pmstore.torch.Run`, however they were imported."""
    tree = ast.parse(PROGRAM.read_text(encoding="utf-8"))
    found = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_typed_program_uses_every_public_name() -> None:
    pytest.importorskip("torch")
    wanted = {
        f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__
    }
    assert {
        name for name in wanted if not any(f"{one}.".startswith(f"{name}.") for one in used())
    } == set()


def test_dir_shows_what_is_public() -> None:
    assert dir(pmstore) == sorted(pmstore.__all__)


def test_help_fits_on_three_screens_and_names_what_is_public() -> None:
    told = pydoc.plain(pydoc.render_doc(pmstore))
    assert len(told.splitlines()) <= 120
    words = set(re.findall(r"\w+", told.partition("PACKAGE CONTENTS")[0]))
    errors = {name for name in pmstore.__all__ if name.endswith("Error")}
    assert {*pmstore.__all__} - errors - {"__version__"} - words == set()
    assert errors <= {*dir(pmstore.errors)}  # `errors` stands for all of them


def test_import_of_all_names() -> None:
    names: dict[str, object] = {}
    exec("from pmstore import *", names)
    assert names.keys() >= {*pmstore.__all__}
