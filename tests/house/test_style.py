"""The layers of the engine and of the package: includes, calls and imports point downward
(docs/ARCHITECTURE.md). Fences say what they order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import pmstore.extras
from pmstore.commands.table import TABLE

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"


def _law(part: str) -> list[str]:
    """Returns the rooms of a part of the project, lowest first, as the file LAYERS has them."""
    (rooms,) = re.findall(rf"^{part}: (.*)$", (ROOT / "LAYERS").read_text(), re.MULTILINE)
    return str(rooms).split()


LAYERS = _law("native")
SOURCES = [path for layer in LAYERS for path in sorted((NATIVE / layer).glob("*.[ch]"))]


def _rank(path: Path) -> int:
    return LAYERS.index(path.parent.name)


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _bare(text: str) -> str:
    """Without comments and strings, line by line as before."""
    return re.sub(
        r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"',
        lambda found: "\n" * found[0].count("\n"),
        text,
        flags=re.DOTALL,
    )


def _homes(sources: list[Path], prefix: str) -> dict[str, Path]:
    """Returns where each function that others may call is defined."""
    homes: dict[str, Path] = {}
    for path in sources:
        text = _bare(path.read_text())
        for name in re.findall(
            rf"^(?!static|typedef|[A-Z_]+\b)[A-Za-z][\w *]*?\b({prefix}\w+)\([^;{{]*\)\s*\{{",
            text,
            re.MULTILINE,
        ):
            assert path.suffix == ".c", f"{_name(path)} defines {name}"
            assert name not in homes, f"{name} is in {_name(path)} and in {_name(homes[name])}"
            homes[name] = path
    return homes


HOMES = _homes(SOURCES, "pms_")
BINDING = sorted((ROOT / "pmstore" / "_engine").glob("_*.[ch]"))
BINDING_HOMES = _homes(BINDING, "binding_")


def test_every_source_has_a_layer() -> None:
    found = {path.parent.name for path in NATIVE.glob("*/*.[ch]")} - {"tests", "build"}
    assert found == set(LAYERS)
    assert not list(NATIVE.glob("*.[ch]"))
    assert len(SOURCES) > 80
    assert len(HOMES) > 300


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_includes_and_calls_point_downward(path: Path) -> None:
    """The order of the folders is the order of the layers."""
    upward = []
    lines = path.read_text().splitlines()
    code = _bare(path.read_text()).splitlines()
    for number, (line, bare) in enumerate(zip(lines, code, strict=True), 1):
        for header in re.findall(r'^#include "([^"]+)"', line):
            assert (NATIVE / header).exists(), (
                f"{_name(path)}:{number}: include a header by its folder and name: {header}"
            )
            if _rank(NATIVE / header) > _rank(path):
                upward.append(f"{number}: includes {header}")
        names = re.findall(r"(?<!struct )(?<!enum )\bpms_\w+", bare) if path.suffix == ".c" else ()
        upward += [
            f"{number}: {name} is in {_name(HOMES[name])}"
            for name in names
            if name in HOMES and _rank(HOMES[name]) > _rank(path)
        ]
    assert not upward, f"{_name(path)} reaches into a layer above: " + "; ".join(upward)


@pytest.mark.parametrize("binding", [False, True], ids=["native", "binding"])
def test_no_files_call_each_other_in_a_loop(binding: bool) -> None:
    """Nor do the files of one folder: each can be read with those below it in mind."""
    sources, homes, prefix = (
        (BINDING, BINDING_HOMES, "binding_") if binding else (SOURCES, HOMES, "pms_")
    )
    assert len(homes) > 30
    below = {
        path: {
            homes[name]
            for name in re.findall(rf"(?<!struct )(?<!enum )\b{prefix}\w+", _bare(path.read_text()))
            if homes.get(name, path) != path
        }
        for path in sources
        if path.suffix == ".c"
    }
    while free := [path for path, calls in below.items() if not calls & below.keys()]:
        for path in free:
            del below[path]
    assert not below, "in a loop, or above one: " + " ".join(map(_name, below))


@pytest.mark.parametrize("path", [path for path in SOURCES if path.suffix == ".c"], ids=_name)
def test_every_fence_says_what_it_orders(path: Path) -> None:
    """A fence without the two writes it orders is one that somebody will drop, or one too many."""
    if path.stem.startswith("persist"):
        return
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines):
        if "pms_persist_fence(" in line:
            near = "\n".join(lines[max(0, i - 3) : i + 1])
            assert "/*" in near, f"{path.name}:{i + 1}: {line.strip()}"


def test_only_the_seam_stores_and_syncs() -> None:
    """I7: file operations and write-back instructions stay behind persist.h."""
    forbidden = re.compile(
        r"\b(fdatasync|fsync|msync|pwritev?|(?:posix_)?fallocate|ftruncate|_mm_clwb|_mm_sfence)\s*\("
    )
    for path in SOURCES:
        # power is the medium itself, as a failure leaves it; footer is no part of the state
        if path.suffix == ".h" or path.stem in ("persist", "persist_file", "power", "footer"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if (
                (found := forbidden.search(line))
                and "fsync(dir)" not in line
                and "pwrite(mem," not in line
            ):  # no medium
                pytest.fail(f"{path.name}:{number}: {found.group(1)} outside the seam")


def test_no_merge_was_left_half_done() -> None:
    folders = (
        "native",
        "pmstore",
        "pmstore_lab",
        "crashtests",
        "benchmarks",
        "tools",
        "examples",
        "tests",
        "docs",
        ".",
    )
    files = [
        path
        for folder in folders
        for path in (NATIVE.parent / folder).glob("*.*" if folder == "." else "**/*.*")
    ]
    texts = [
        path
        for path in files
        if path.suffix in (".c", ".h", ".py", ".pyi", ".md", ".toml", ".txt", ".json")
    ]
    assert len(texts) > 300
    marked = [
        str(path) for path in texts if re.search(r"^(<{7}|>{7}) ", path.read_text(), re.MULTILINE)
    ]
    assert marked == []


def test_the_name_of_a_test_holds_no_address(request: pytest.FixtureRequest) -> None:
    """A name is the same in every process: two that share the tests collect the same ones."""
    named = [item.nodeid for item in request.session.items]
    assert len(set(named)) == len(named)
    assert not [name for name in named if re.search(r"\bat 0x[0-9a-f]+", name)]


# ---- pmstore/ ------------------------------------------------------------------------------------

PYTHON_LAYERS = _law("pmstore")
"""Folders and modules of pmstore/, and pmstore itself, whose names count as where they are from."""


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_module(path): path for path in sorted((ROOT / "pmstore").rglob("*.py"))}
DOOR = {
    alias.name: node.module
    for node in ast.walk(ast.parse(MODULES["pmstore"].read_text()))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
    if f"{node.module}.{alias.name}" not in MODULES
}


@cache
def _imports(path: Path) -> list[tuple[int, str]]:
    """All, those in functions and for types too: (line, module)."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            assert not node.level, f"{path}:{node.lineno}: import by the whole name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                home = DOOR.get(alias.name) if node.module == "pmstore" else None
                found.append((node.lineno, whole if whole in MODULES else home or node.module))
    return found


def _python_layer(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def _meant(path: Path) -> Iterator[tuple[int, str]]:
    """The imports from this project that have to point downward."""
    for number, module in _imports(path):
        if module.partition(".")[0] == "pmstore":
            yield number, module


def test_every_module_has_a_layer() -> None:
    assert {_python_layer(module) for module in MODULES} == set(PYTHON_LAYERS)
    assert len(MODULES) > 100


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module: str) -> None:
    rank = PYTHON_LAYERS.index(_python_layer(module))
    upward = [
        f"{number}: {found}"
        for number, found in _meant(MODULES[module])
        if PYTHON_LAYERS.index(_python_layer(found)) > rank
    ]
    assert not upward, f"{module} imports from a layer above: {'; '.join(upward)}"


def test_no_imports_go_in_circles() -> None:
    known = MODULES.keys() - {"pmstore"}
    graph = {
        module: {found for _, found in _meant(path) if found in known and found != module}
        for module, path in MODULES.items()
    }
    while ends := [
        module
        for module, needs in graph.items()
        if not needs & graph.keys() or not any(module in others for others in graph.values())
    ]:
        for module in ends:
            del graph[module]
    assert not graph, f"in circles, or between two: {sorted(graph)}"


ROOMS = {
    folder: _law(f"pmstore/{folder}")
    for folder in re.findall(r"^pmstore/(\w+):", (ROOT / "LAYERS").read_text(), re.MULTILINE)
}
"""By folder of pmstore/: its rooms, and the files beside them, each of which imports from those
before it alone."""


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_of_a_folder_have_an_order(folder: str) -> None:
    def room(module: str) -> int:
        return ROOMS[folder].index(
            module.removeprefix(inside).strip(".").split(".")[0] or "__init__"
        )

    inside = f"pmstore.{folder}"
    upward = [
        f"{module}: {found}"
        for module, path in MODULES.items()
        for _, found in _meant(path)
        if module.startswith(inside) and found.startswith(inside) and room(found) > room(module)
    ]
    assert not upward


@pytest.mark.parametrize("module", MODULES)
def test_only_the_engine_folder_knows_the_engine_and_nothing_the_lab(module: str) -> None:
    for number, found in _imports(MODULES[module]):
        assert found.partition(".")[0] != "pmstore_lab", f"{module}:{number}: {found}"
        if found == "pmstore._engine._native":
            assert _python_layer(module) == "_engine", f"{module}:{number}: {found}"


def test_a_name_stands_for_one_module() -> None:
    """Who reads or looks for the name of a file knows which one is meant."""
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        if not path.stem.startswith("__"):
            homes.setdefault(path.stem, []).append(module)
    assert not [modules for modules in homes.values() if len(modules) > 1]


def test_a_module_of_commands_has_the_name_of_one() -> None:
    assert {place.module for place in TABLE.values()} <= TABLE.keys()


def test_what_is_told_to_install_is_an_extra() -> None:
    extras = re.findall(r"^([a-z0-9-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    told = list(pmstore.extras._EXTRAS.values())
    for folder in ("pmstore", "pmstore_lab", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            told += re.findall(r"""install\(["'](\w+)""", text)
            assert path.name == "extras.py" or "pip install 'pmstore" not in re.sub(
                r'""".*?"""', "", text, flags=re.DOTALL
            )
    assert {"torch", "cli", "tiers", "demo", "plot", "bench"} <= set(told) <= set(extras)


PACKAGE = [*MODULES.values(), *sorted((ROOT / "pmstore").rglob("*.[ch]"))]


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_of_the_package_is_longer_than_a_reader_likes(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 700


_PREPOSITIONS = re.compile(
    r"(?:Of|At|In|To|From|For|By|With|After|Before|On|Under|Over|As|Like|Without|Into|Around|Behind"
    r"|Beside|Between|Among|Against|During|Since|Until|Within|Through|Along|Above|Below)\b"
)


def _docstrings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yields line, name and text of each docstring of a module, of its classes and functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            text := ast.get_docstring(node)
        ):
            yield node.body[0].lineno, getattr(node, "name", path.stem), text


@pytest.mark.parametrize("module", MODULES)
def test_no_docstring_begins_with_a_preposition(module: str) -> None:
    """A sentence has a subject, a verb and an object: "Of one store." has none of them."""
    bare = [
        f"{number}: {name}: {text.splitlines()[0]}"
        for number, name, text in _docstrings(MODULES[module])
        if _PREPOSITIONS.match(text)
    ]
    assert not bare, f"{module}: say who does what: {'; '.join(bare)}"
