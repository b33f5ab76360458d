"""Whether the engine that Python has is the one of these sources: what is tested by the crash tests
has to be."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD_IT = "build it first: pip install --no-build-isolation -e ."


def engine_sources(native: Path = ROOT / "native") -> list[Path]:
    """The engine's sources and headers: a folder a layer. Its tests and what was built of it lie
    beside them."""
    return sorted(
        path for path in native.glob("*/*.[ch]") if path.parent.name not in ("tests", "build")
    )


def extension(root: Path = ROOT) -> Path:
    """The tree's extension module of the engine.

    Raises: SystemExit that says what to do: there is none, or a source is newer.
    """
    engine = root / "pmstore" / "_engine"
    found = sorted(engine.glob("_native*.so"))
    if not found:
        raise SystemExit(f"crashtests: {engine} has no built engine (_native*.so): {BUILD_IT}")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise SystemExit(
            f"crashtests: {engine} has several built engines ({names}): remove the old ones"
        )
    sources = [*engine_sources(root / "native"), *engine.glob("_*.c"), engine / "_build_ffi.py"]
    newest = max(
        (path for path in sources if path.exists()), key=lambda path: path.stat().st_mtime_ns
    )
    if newest.stat().st_mtime_ns > found[0].stat().st_mtime_ns:
        where = newest.relative_to(root)
        raise SystemExit(
            f"crashtests: the built engine is older than {where}, so that another one "
            f"would be tested: {BUILD_IT}"
        )
    return found[0]


def compiled(source: str, target: Path, *flags: str, last: tuple[str, ...] = ()) -> Path:
    """Compiles a program or library of `crashtests/native`, and returns its path. Raises:
    CalledProcessError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = ROOT / "crashtests" / "native" / source
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", *flags, "-o", target, path, *last]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target
