"""Which chunks an epoch takes over from the one before, and which files it goes on naming: whatever
files there were."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmstore._engine.constants import PAGE_BYTES
from pmstore.tiers._epochs.manifest import CHUNK, Manifest
from pmstore.tiers._flush.plan import SPACE, Base, carry_over

BYTES = PAGE_BYTES


def manifest(places: list[tuple[int, int, int]], files: list[int]) -> Manifest:
    """places: index, file and position of each chunk. files: how many chunks fit each one."""
    chunks = np.zeros(len(places), CHUNK)
    for chunk, (index, file, position) in zip(chunks, places, strict=True):
        chunk["index"], chunk["file"], chunk["position"] = index, file, position * BYTES
        chunk["crc"] = 1000 + index
    named = tuple(
        (f"run.0-1.deadbeef.{n:06d}.chunks", size * BYTES) for n, size in enumerate(files)
    )
    return Manifest(1, "run", 0, 1, BYTES, b"", named, chunks)


@st.composite
def epochs(draw: st.DrawFn) -> tuple[Manifest, list[int]]:
    """An epoch, and the indices of chunks of the next one; some are in both."""
    files = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    room = [(file, position) for file, size in enumerate(files) for position in range(size)]
    used = draw(st.lists(st.sampled_from(room), min_size=1, unique=True))
    indices = sorted(draw(st.sets(st.integers(0, 60), min_size=len(used), max_size=len(used))))
    old = manifest([(i, *place) for i, place in zip(indices, used, strict=True)], files)
    fresh = draw(st.sets(st.integers(0, 60), max_size=10))
    gone = draw(st.sets(st.sampled_from(indices)))
    return old, sorted(set(indices) - gone | fresh)


@given(epochs(), st.data())
def test_what_is_taken_over_is_the_same_and_little_is_empty(
    drawn: tuple[Manifest, list[int]], data: st.DataObject
) -> None:
    old, indices = drawn
    there = {int(chunk["index"]): chunk for chunk in old.chunks}
    chunks = np.zeros(len(indices), CHUNK)
    chunks["index"] = indices
    same = [i in there and data.draw(st.booleans()) for i in indices]
    keep = np.array(same, bool)
    files = carry_over(BYTES, old, chunks, keep)
    assert not np.any(keep & ~np.array(same, bool))  # never more than was asked for
    assert {name for name, _ in files} <= {name for name, _ in old.files}
    for chunk, kept in zip(chunks, keep, strict=True):
        if kept:
            before = there[int(chunk["index"])]
            assert files[chunk["file"]] == old.files[before["file"]]
            assert (chunk["position"], chunk["crc"]) == (before["position"], before["crc"])
    kept_files = {int(chunk["file"]) for chunk, kept in zip(chunks, keep, strict=True) if kept}
    assert kept_files == set(range(len(files)))  # none is named for nothing
    written = int((~keep).sum()) * BYTES
    if files:
        assert sum(size for _, size in files) + written <= SPACE * len(indices) * BYTES


def test_the_emptiest_file_is_written_anew_first() -> None:
    """One chunk in a file of nine, and two files that are full: 1 + 9 + 9 of 19 chunks."""
    files = [20, 9, 9]
    places = [(0, 0, 7)]
    places += [(1 + n, 1, n) for n in range(9)] + [(10 + n, 2, n) for n in range(9)]
    old = manifest(places, files)
    chunks = np.zeros(19, CHUNK)
    chunks["index"] = np.arange(19)
    keep = np.ones(19, bool)
    assert carry_over(BYTES, old, chunks, keep) == list(old.files)  # 38 for 19: just not too much
    files[0] = 21
    old = manifest(places, files)
    assert carry_over(BYTES, old, chunks, keep := np.ones(19, bool)) == list(old.files[1:])
    assert keep.tolist() == [False] + [True] * 18


@pytest.mark.parametrize("lacks", ["manifest", "file", "bytes", ""])
def test_nothing_rests_on_files_that_somebody_took_away(lacks: str) -> None:
    old = manifest([(0, 0, 0)], [4])
    base = Base(1, "name", 77, old, {})
    names = {"name": 77} | dict(old.files)
    if lacks == "manifest":
        names["name"] = 78
    elif lacks == "file":
        del names[old.files[0][0]]
    elif lacks == "bytes":
        names[old.files[0][0]] -= 1
    assert base.intact(names) is (lacks == "")
