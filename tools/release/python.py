"""The Pythons of this machine that a release is built for, and the environments made of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

HEADERS = "import os, sysconfig; print(os.path.exists(sysconfig.get_path('include') + '/Python.h'))"
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def run(
    command: Sequence[str | Path], cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """What it said. Raises SystemExit with the end of it if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-60:])
        raise SystemExit(f"{end}\n{' '.join(map(str, command))}: exit {done.returncode}")
    return done.stdout


def pythons(versions: Sequence[str]) -> dict[str, Path]:
    """Of each version the newest that is found: in PATH, then where pyenv puts them."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for version in versions:
        in_path = shutil.which(f"python{version}")
        there = [Path(in_path)] if in_path else []
        for path in (*there, *sorted(pyenv.glob(f"{version}.*/bin/python3"))):
            # a pyenv's python3.x in PATH may refuse to be one; without headers nothing is built
            asked: list[str | Path] = [path, "-c", HEADERS]
            said = subprocess.run(asked, capture_output=True, text=True, check=False)
            if said.stdout.strip() == "True":
                found[version] = path
                break
    return found


def environment(at: Path, python: Path) -> Path:
    """A new virtual environment; its Python."""
    shutil.rmtree(at, ignore_errors=True)
    run([python, "-m", "venv", at])
    return at / "bin" / "python"


def install(python: Path, *what: str | Path, env: Mapping[str, str] | None = None) -> None:
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what], env=env)
