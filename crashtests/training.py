"""Real training under images: AdamW, SGD on slots, KMeans, a Gaussian mixture on slots. Recorded in
Python, crashed as all."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from crashtests import built, jobs

PYTHON = jobs.BUILD / "python"
PACKAGE = PYTHON / "path" / "pmstore"
FOLDER = jobs.BUILD / "training"
RECORDED = FOLDER / "recorded"
PROGRAMS = ("adamw", "kmeans", "sgd", "gmm")


def available() -> bool:
    return (
        importlib.util.find_spec("torch") is not None
        and importlib.util.find_spec("cffi") is not None
    )


def build(source: Path | None = None) -> Path:
    """A folder for PYTHONPATH: the package as it is here, with an engine that has the recorder.

    Raises: CalledProcessError.
    """
    interface = PYTHON / "_native.c"
    PACKAGE.mkdir(parents=True, exist_ok=True)
    emit = (
        "import runpy; "
        "runpy.run_path('pmstore/_engine/"
        f"_build_ffi.py')['ffibuilder'].emit_c_code({str(interface)!r})"
    )
    subprocess.run(
        [sys.executable, "-c", emit], cwd=jobs.ROOT, check=True, capture_output=True, text=True
    )
    flags = (
        "-O2 -g -fPIC -fvisibility=hidden -ftls-model=initial-exec -fno-math-errno "
        "-fno-trapping-math -ffp-contract=off"
    )
    include = f"-I{sysconfig.get_paths()['include']}"
    jobs.build(
        source,
        PYTHON,
        flags=f"{flags} {include}",
        goal="_native.so",
        variables={"NATIVE_C": str(interface)},
    )
    installed = built.extension().name
    shutil.rmtree(PACKAGE)
    (PACKAGE / "_engine").mkdir(parents=True)
    for folder in ("", "_engine"):
        for path in (jobs.ROOT / "pmstore" / folder).iterdir():
            if path.name not in ("_engine", installed, "__pycache__"):
                (PACKAGE / folder / path.name).symlink_to(path)
    (PACKAGE / "_engine" / installed).symlink_to(PYTHON / "_native.so")
    return PACKAGE.parent


def _run(*arguments: str) -> None:
    script = jobs.ROOT / "crashtests" / "trained.py"
    env = os.environ | {"PYTHONPATH": str(build()), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if run.returncode:
        raise RuntimeError(f"trained.py {' '.join(arguments)}: {run.stderr.strip()}")


def _is_recorded() -> bool:
    """With these sources, and this torch."""
    sources = [*built.engine_sources(), *(jobs.ROOT / "crashtests" / "native").iterdir()]
    sources += [*(jobs.ROOT / "pmstore").rglob("*.py"), jobs.ROOT / "crashtests" / "trained.py"]
    newest = max(path.stat().st_mtime_ns for path in sources)
    return (
        RECORDED.exists()
        and RECORDED.stat().st_mtime_ns > newest
        and RECORDED.read_text() == importlib.metadata.version("torch")
    )


def record() -> None:
    """Runs the programs, with this engine; their stores and traces are kept until the sources
    change.

    Raises: RuntimeError: a program failed."""
    jobs.BUILD.mkdir(parents=True, exist_ok=True)
    with (jobs.BUILD / "training.lock").open("w") as lock:  # tests run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_recorded():
            return
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir(parents=True)
        build()
        _run("record", str(FOLDER))
        RECORDED.write_text(importlib.metadata.version("torch"))


def verify(program: Path) -> None:
    """That the states which images are compared with are those that the programs had: each is
    opened as the program would, and its arrays are compared with what they were at the commit.
    Raises: RuntimeError."""
    for name, domain in itertools.product(PROGRAMS, jobs.DOMAINS):
        made = job(
            name,
            domain,
            "i",
            {"budget": 0, "nested-every": 0, "states": FOLDER / f"{name}-{domain}"},
        )
        scratch = ["--scratch", str(FOLDER / "scratch")]
        run = subprocess.run(
            [*made.command(program), *scratch], capture_output=True, text=True, timeout=120
        )
        if run.returncode:
            raise RuntimeError(f"{made.workload} {domain}: {run.stdout}{run.stderr}")
    _run("verify", str(FOLDER))


def job(program: str, domain: str, model: str, options: dict[str, Any]) -> jobs.Job:
    path = FOLDER / f"{program}-{domain}.pm"
    files = {"trace": path.with_suffix(".trace"), "base": path.with_suffix(".base")}
    return jobs.Job("images", f"train_{program}", domain, model, options | files)
