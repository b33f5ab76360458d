"""Pythons that are not installed, out of Debian's packages: `make dist DIST_OPTIONS=--debian`.

Nothing is installed. Packages of Debian's unstable suite, which has the newest Pythons, are fetched
by apt from the mirror that this machine uses, checked against Debian's keys, and unpacked into a
folder. With them comes the C library that they need, which is newer than this machine's: patchelf
writes into the interpreter where that lies.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from tools.release.python import run

KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SUITE = "sid"
WHEELS = "/usr/share/python-wheels/"  # where Debian's ensurepip looks


def python_of_debian(version: str, at: Path, patchelf: Path) -> Path | None:
    """The interpreter, in the folder, with headers; None: this machine is none that gets packages
    of Debian's, or Debian has no such Python."""
    mirror = _mirror()
    if mirror is None:
        return None
    prefix = at / "usr"
    python = prefix / "bin" / f"python{version}"
    if (at / "done").exists():
        return python
    shutil.rmtree(at, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=at.parent) as folder:
        state = Path(folder)
        apt = _apt(state, mirror)
        run(["apt-get", *apt, "update"])
        wanted = [f"python{version}-{part}" for part in ("dev", "venv")]
        known = subprocess.run(
            ["apt-cache", *apt, "show", *wanted], capture_output=True, check=False
        )
        if known.returncode:
            return None
        run(["apt-get", *apt, "--download-only", "--yes", "install", *wanted])
        at.mkdir()
        for package in sorted((state / "archives").glob("*.deb")):
            run(["dpkg-deb", "--extract", package, at])
    for told in prefix.glob(f"lib/python{version}/_sysconfig*_*"):
        if not told.is_symlink():
            text = told.read_text(encoding="utf-8")
            told.write_text(text.replace(WHEELS, f"{at}{WHEELS}"), encoding="utf-8")
    (loader,) = prefix.glob("lib64/ld-linux-*.so.*")
    (libraries,) = {path.parent for path in prefix.glob("lib/*-linux-gnu/libc.so.6")}
    run([patchelf, "--set-interpreter", loader, "--force-rpath", "--set-rpath", libraries, python])
    (at / "done").touch()
    return python


def _mirror() -> str | None:
    """Where this machine gets packages of Debian's."""
    if not KEYS.exists() or shutil.which("apt-get") is None:
        return None
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian"]
    return next(iter(run([*asked, "Label: Debian"]).split()), None)


def _apt(state: Path, mirror: str) -> list[str]:
    """Options of apt, which then knows no package to be installed, and writes into the folder
    alone."""
    for folder in ("lists/partial", "archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    sources = state / "sources.list"
    sources.write_text(f"deb [signed-by={KEYS}] {mirror} {SUITE} main\n", encoding="utf-8")
    places = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "-",
        "Dir::State::Lists": state / "lists",
        "Dir::State::Status": state / "status",
        "Dir::Cache": state,
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "false",
    }
    return ["-qq", *(f"-o{name}={place}" for name, place in places.items())]
