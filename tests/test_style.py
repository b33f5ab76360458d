"""The engine's layers: includes point downward (docs/ARCHITECTURE.md), fences say what they
order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parent.parent / "native"

# A file may include headers of its own layer and of those before it.
LAYERS: list[set[str]] = [
    {"layout", "quiet"},
    {"status", "checksum", "lock", "process", "holder", "sort"},
    {"persist", "parallel", "persist_file", "debug", "power", "optim", "optim_kernel"},
    {"map", "footer", "mappings", "super"},
    {"undo", "snapshot", "snapshot_state", "snapshot_keep", "idle", "transfer", "filling"},
    {"heap", "heap_class", "heap_index", "heap_table", "heap_state", "heap_open", "heap_query"},
    {"directory", "directory_table", "directory_check"},
    {"list", "list_tree", "list_edit", "list_check"},
    {"readers", "journal", "journal_ring", "journal_state", "journal_home", "journal_recover"},
    {"capture", "handler"},
    {"pool", "tier", "filelock"},
    {"pool_state"},
    {"populate", "room", "session"},
    {
        "recover",
        "tx",
        "block",
        "object",
        "sequence",
        "slot",
        "check",
        "usage",
        "fork",
        "history",
        "landing",
    },
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
# Each with its reason: the seam's two users above it, and sources that implement an upper header's
# part.
ALLOWED = {
    ("super", "heap"),  # the page table's bytes, for an empty segment
    ("pool", "pool_state"),  # pool.c implements pool.h on the inside that pool_state.h declares
    ("pool", "recover"),
    ("pool", "populate"),
    ("pool", "room"),
    ("pool", "session"),
    ("pool", "landing"),
    ("handler", "pool"),
    ("tier", "pool_state"),  # as pool.c
}


def _includes(path: Path) -> list[str]:
    return re.findall(r'^#include "([a-z_]+)\.h"', path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", sorted(NATIVE.glob("*.[ch]")), ids=lambda p: p.name)
def test_includes_point_downward(path: Path) -> None:
    name = path.stem
    assert name in RANK, f"{name} has no layer: add it to LAYERS"
    upward = [i for i in _includes(path) if RANK[i] > RANK[name] and (name, i) not in ALLOWED]
    assert not upward, f"{path.name} includes {upward} from a layer above"


@pytest.mark.parametrize("path", sorted(NATIVE.glob("*.c")), ids=lambda p: p.name)
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
        r"\b(fdatasync|fsync|msync|pwritev?|(?:posix_)?fallocate|ftruncate|_mm_clwb|"
        r"_mm_sfence)\s*\("
    )
    for path in sorted(NATIVE.glob("*.c")):
        # power is the medium itself, as a failure leaves it; footer is no part of the state
        if path.stem in ("persist", "persist_file", "power", "footer"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            # no medium
            if (
                (found := forbidden.search(line))
                and "fsync(dir)" not in line
                and "pwrite(mem," not in line
            ):
                pytest.fail(f"{path.name}:{number}: {found.group(1)} outside the seam")


def test_no_merge_was_left_half_done() -> None:
    folders = (
        "native",
        "pmstore",
        "pmstore_lab",
        "crashtests",
        "benchmarks",
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
