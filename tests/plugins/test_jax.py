"""JAX in processes of its own: it has threads, which a process that forks must not have."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import pmstore
from pmstore.testing import ForkServer

pytestmark = pytest.mark.skipif(
    find_spec("jax") is None or find_spec("optax") is None, reason="not installed"
)


ROOT = Path(__file__).parent.parent.parent


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_trees() -> None:
    """Those of jax_trees.py, with four devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    folder = "tests/plugins/jax_trees.py"
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", folder, XLA_FLAGS=flags)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([str(ROOT), str(ROOT / "tests" / "plugins")]) as made:
        yield made


def state(path: Path) -> dict[str, bytes]:
    with pmstore.open(path, "r") as store:
        assert store.check().problems == ()
        arrays = store["state/arrays"]
        return {name: arrays[name].tobytes() for name in arrays}


def test_killed_loops_end_the_same(server: ForkServer, shm: Path) -> None:
    """At some primitive of the engine, while a tree is made, written, committed; and at any
    time."""
    steps, whole, path = 25, shm / "whole.pm", shm / "killed.pm"
    assert server.run("jax_loops:loop", [str(whole), steps]).exit_code == 0
    rng = random.Random(24)
    for most in (20, 150, 150, 0):
        how = {"kill_at": rng.randrange(1, most)} if most else {"delay_seconds": rng.uniform(1, 2)}
        run = server.run("jax_loops:loop", [str(path), steps], **how)
        assert run.killed or run.exit_code == 0
    assert server.run("jax_loops:loop", [str(path), steps]).exit_code == 0
    assert state(path) == state(whole)
    assert len(state(path)) == 10
