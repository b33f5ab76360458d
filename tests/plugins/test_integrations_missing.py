"""A plug-in whose framework is not installed says what to install."""

from __future__ import annotations

import doctest
import subprocess
import sys

from pmstore.integrations import versions

FRAMEWORKS = {
    "lightning": "lightning",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "sklearn": "scikit-learn",
    "jax": "jax",
    "ray": "'ray[train]'",
}

PROGRAM = """
import importlib, sys
names = {names!r}
for name in names:
    sys.modules[name] = None  # as if it were not there
for name in names:
    try:
        importlib.import_module("pmstore.integrations." + name)
    except ModuleNotFoundError as error:
        print(error)
"""


def test_the_message_names_the_package() -> None:
    program = PROGRAM.format(names=list(FRAMEWORKS))
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("this needs")]
    assert told == [
        f"this needs {name}: pip install {package}" for name, package in FRAMEWORKS.items()
    ]


def test_examples_of_versions() -> None:
    """pytest does not collect the folder: what lies beside it imports frameworks."""
    assert doctest.testmod(versions) == doctest.TestResults(failed=0, attempted=1)
