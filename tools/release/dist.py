"""`make dist`: the source package and the wheels, in dist/, each tried where nothing else is.

A wheel for each CPython that is found here, for x86-64 and aarch64, and for any Linux with glibc
2.28 or newer (manylinux_2_28). --debian: also for those that Debian's packages have. zig compiles
the wheels, whose compiler brings what it links against. They are built from the source package:
what is not in that is in no wheel.

Each wheel for this machine is installed into an empty environment whose PATH has no compiler, and
runs what a newcomer runs: tools/release/newcomer.py. `make nightly WHAT=dist-test` runs tests from
the unpacked source package.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tools.release.debian import python_of_debian
from tools.release.python import VERSIONS, environment, install, pythons, run

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "dist"
DIST = ROOT / "dist"
GLIBC = "2.28"
ARCHITECTURES = ("x86_64", "aarch64")
CONSTRAINTS = ROOT / "constraints.txt"
NEEDED = ("setuptools>=77", "cffi>=1.16", "numpy>=2")  # to build; as in pyproject.toml

started = time.monotonic()


def say(what: str) -> None:
    print(f"{time.monotonic() - started:6.0f} s  {what}", flush=True)


def make_tools() -> Path:
    """The environment with the tools; its Python."""
    wanted = (ROOT / "tools" / "release" / "requirements.txt").read_text(encoding="utf-8")
    tools, stamp = BUILD / "tools", BUILD / "tools" / "requirements.txt"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        python = environment(tools, Path(sys.executable))
        install(python, "-r", ROOT / "tools" / "release" / "requirements.txt")
        stamp.write_text(wanted, encoding="utf-8")
    return tools / "bin" / "python"


def make_source(tools: Path) -> Path:
    """The source package, unpacked."""
    run([tools, "-m", "build", "--sdist", "--outdir", DIST, ROOT])
    (archive,) = DIST.glob("*.tar.gz")
    source = unpack(archive, BUILD / "source")
    if (ROOT / ".git").exists():
        tracked = run(["git", "ls-files"], cwd=ROOT).splitlines()
        left = [name for name in tracked if not (source / name).exists()]
        if left:
            raise SystemExit(f"MANIFEST.in leaves out: {', '.join(left)}")
    return source


def unpack(archive: Path, into: Path) -> Path:
    """Into a new folder; the one that was packed."""
    shutil.rmtree(into, ignore_errors=True)
    with tarfile.open(archive) as opened:
        opened.extractall(into, filter="data")
    (source,) = into.iterdir()
    return source


def debians_headers(version: str, python: Path) -> Path:
    """Where pyconfig.h of a Python of Debian's is found, which lies in a folder of the machine's
    architecture. It is the same for both: their words and alignments are."""
    folder = BUILD / "headers"
    asked = run([python, "-c", "import sysconfig; print(sysconfig.get_path('include'))"])
    for there in Path(asked.strip()).parent.glob(f"*-linux-gnu/python{version}/pyconfig.h"):
        for architecture in ARCHITECTURES:
            place = folder / f"{architecture}-linux-gnu" / there.parent.name
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(there, place)
    return folder


def make_wheel(tools: Path, source: Path, version: str, python: Path, architecture: str) -> Path:
    """One wheel in dist/."""
    tag = "cp" + version.replace(".", "")
    builder = BUILD / f"builder-{tag}"
    if not (builder / "done").exists():
        install(environment(builder, python), *NEEDED, "-c", CONSTRAINTS)
        (builder / "done").touch()
    compiler = f"{tools} -m ziglang cc -target {architecture}-linux-gnu.{GLIBC}"
    env = {
        **os.environ,
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared -Wl,--strip-debug",
        "CFLAGS": f"-I{debians_headers(version, python)}",
        "LDFLAGS": "",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{tag[2:]}-{architecture}-linux-gnu.so",
        "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
        "ZIG_GLOBAL_CACHE_DIR": str(BUILD / "zig"),
    }
    shutil.rmtree(source / "build", ignore_errors=True)
    before = set(DIST.glob("*.whl"))
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
    run(
        [
            *(builder / "bin" / "python", "-m", "pip", "wheel", "--no-deps"),
            *("--no-build-isolation", "--disable-pip-version-check", "-w", DIST),
            *(f"--config-settings=--build-option=--plat-name={tag}", source),
        ],
        env=env,
    )
    (wheel,) = set(DIST.glob("*.whl")) - before
    keeps_its_word(tools, wheel, architecture)
    page_stands_alone(wheel, source)
    return wheel


def keeps_its_word(tools: Path, wheel: Path, architecture: str) -> None:
    """It has both extension modules, for this architecture, and asks for no newer glibc than its
    name says. (auditwheel's repair would bring foreign libraries in. There are none, and it works
    for the machine's own architecture alone.)"""
    said = " ".join(run([tools, "-m", "auditwheel", "show", wheel]).split())
    found = re.search(rf'platform tag: "manylinux_(\d+)_(\d+)_{architecture}"', said)
    newest = tuple(map(int, GLIBC.split(".")))
    if not found or tuple(map(int, found.groups())) > newest:
        raise SystemExit(said)
    with zipfile.ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if name.endswith(".so")]
    if len(names) != 2:
        raise SystemExit(f"{wheel.name} has {names}")


def page_stands_alone(wheel: Path, source: Path) -> None:
    """Each link of the page that an index shows leads somewhere, from there."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        page = opened.read(name).decode()
    (home,) = re.findall(r"^Project-URL: Repository, (.*)$", page, re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", page):
        inside = re.match(rf"{re.escape(home)}/(?:blob|raw)/v[^/]+/([^#]+)", link)
        if inside and not (source / inside[1]).exists():
            raise SystemExit(f"README.md on the index: {link} leads to no file of this version")
        if not inside and not link.startswith("https://"):
            raise SystemExit(f"README.md on the index: {link} leads nowhere from there")


def try_wheel(wheel: Path, source: Path, version: str, python: Path, with_torch: bool) -> str:
    """Installs and runs it with nothing else: no compiler, no source. What it said."""
    place = BUILD / f"try-{version}"
    fresh = environment(place / "venv", python)
    env = {"PATH": str(fresh.parent), "HOME": str(place), "TMPDIR": str(place)}
    env |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    for compiler in ("cc", "gcc", "clang", "c++", "zig"):
        assert shutil.which(compiler, path=env["PATH"]) is None
    extras = "demo" if with_torch else "cli"
    what = f"pmstore[{extras}] @ {wheel.as_uri()}"
    pip = ("--only-binary", ":all:", "-c", CONSTRAINTS)
    if not with_torch:  # first without any extra
        install(fresh, *pip, wheel, env=env)
    install(fresh, *pip, what, env=env)
    newcomer: list[str | Path] = [
        fresh,
        "-I",
        ROOT / "tools" / "release" / "newcomer.py",
        source / "README.md",
    ]
    said = run([*newcomer, *(["--torch"] if with_torch else [])], cwd=place, env=env)
    shutil.rmtree(place)
    return said.strip().splitlines()[-1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="*", default=VERSIONS, help="versions, as 3.11")
    parser.add_argument("--torch", nargs="*", help="versions that are tried with torch, too")
    parser.add_argument(
        "--debian", action="store_true", help="takes what is not here from Debian's packages"
    )
    parser.add_argument("--tools", action="store_true", help="makes the tools, and nothing else")
    chosen = parser.parse_args(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    tools = make_tools()
    say("tools are there")
    if chosen.tools:
        return
    shutil.rmtree(DIST, ignore_errors=True)
    source = make_source(tools)
    say(f"{source.name}.tar.gz")
    found = pythons(chosen.python)
    with_torch = found if chosen.torch is None else chosen.torch
    for version in chosen.python:
        if version not in found and chosen.debian:
            patchelf = tools.with_name("patchelf")
            python = python_of_debian(version, BUILD / f"debian-{version}", patchelf)
            if python is not None:
                found[version] = python
                say(f"Python {version} of Debian's packages")
        if version not in found:
            say(f"no Python {version} with headers here: no wheels for it")
    for architecture in ARCHITECTURES:
        for version, python in found.items():
            wheel = make_wheel(tools, source, version, python, architecture)
            say(f"{wheel.name}, {wheel.stat().st_size:,} bytes")
            if architecture == platform.machine():
                said = try_wheel(wheel, source, version, python, version in with_torch)
                say(f"  in an empty environment: {said}")
    run([tools, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir())])
    say("twine check: passed")
    say(f"{len(list(DIST.iterdir()))} files in dist/")


if __name__ == "__main__":
    main()
