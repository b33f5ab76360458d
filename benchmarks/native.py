"""Compiles the C programs of benchmarks/native/ with the engine's sources, which are compiled once
for all of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness import OUT, ROOT

SOURCES = ROOT / "benchmarks" / "native"
ENGINE = ROOT / "native"
COMPILE = ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g", "-I", str(ENGINE)]


class CompileError(RuntimeError):
    """The compiler's words are the message."""


def compile_program(name: str, *flags: str, shared: bool = False) -> Path:
    """The program of native/<name>.c, linked with the engine; shared: a library of that file alone.

    Raises: CompileError.
    """
    OUT.mkdir(parents=True, exist_ok=True)
    made = OUT / (f"{name}.so" if shared else name)
    what = ["-shared", "-fPIC"] if shared else _engine()
    _cc(*what, str(SOURCES / f"{name}.c"), "-o", str(made), *flags, "-lpthread", "-lm", "-ldl")
    return made


def _engine() -> list[str]:
    """The engine's objects; those older than their source, or than a header, are made anew, on all
    cores."""
    folder = OUT / "engine"
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(path for path in ENGINE.glob("*/*.c") if path.parent.name != "tests")
    headers = _newest([*ENGINE.glob("*/*.h"), Path(__file__)])
    objects = {source: folder / f"{source.parent.name}-{source.stem}.o" for source in sources}
    stale = [
        s
        for s, o in objects.items()
        if not o.exists() or o.stat().st_mtime <= max(headers, s.stat().st_mtime)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: _cc("-c", str(source), "-o", str(objects[source])), stale))
    return [str(o) for o in objects.values()]


def _newest(paths: Iterable[Path]) -> float:
    return max(path.stat().st_mtime for path in paths)


def _cc(*arguments: str) -> None:
    done = subprocess.run([*COMPILE, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr)
