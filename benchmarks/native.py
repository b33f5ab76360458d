"""Compiles the C programs of benchmarks/native/ with the engine's sources."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.harness import OUT, ROOT

SOURCES = ROOT / "benchmarks" / "native"


class CompileError(RuntimeError):
    """The compiler's words are the message."""


def compile_program(name: str, *flags: str, shared: bool = False) -> Path:
    """The program of native/<name>.c, linked with the engine; shared: a library of that file alone.

    Raises: CompileError.
    """
    OUT.mkdir(parents=True, exist_ok=True)
    made = OUT / (f"{name}.so" if shared else name)
    what = ["-shared", "-fPIC"] if shared else [str(p) for p in sorted((ROOT / "native").glob("*.c"))]
    command = ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-O2", "-I", str(ROOT / "native"), *what, str(SOURCES / f"{name}.c")]
    done = subprocess.run(
        [*command, "-o", str(made), *flags, "-lpthread", "-lm", "-ldl"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CompileError(done.stderr)
    return made
