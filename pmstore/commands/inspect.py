"""Commands that look at a store: info, ls, check. typer is not imported here (`table.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pmstore._base.text import counted
from pmstore.commands.common import bar, fail, find, reading, say, size
from pmstore.errors import CorruptStoreError, TierError
from pmstore.objects.containers import Group, tree
from pmstore.objects.entries import Entry
from pmstore.show.terminal import Column, Terminal, printable

if TYPE_CHECKING:
    from pmstore.commands.app import GroupName, Json, Recursive, StorePath
    from pmstore.store import Store

_TITLES = 10
"""Columns of the titles in `Info`'s own lines."""
STYLES = {"group": "blue", "list": "yellow", "value": "green"}
"""The colours of names, by the kind of what has them."""


def _say_json(told: object) -> None:
    import json

    say(json.dumps(told, indent=2))


def info(path: StorePath, as_json: Json = False) -> None:
    """Says what a store is: domain, sizes, commits, recovery.

    It also draws a map of the heap. The map has a line for each segment of the file (the file
    begins with one, and each growth adds one). A line has 64 cells (fewer, where there is little
    room) from the segment's first byte of data to its last. The more of a cell is in use, the
    darker it is.

    Example: pmstore info run.pm

    Example: pmstore info run.pm --json | jq .epoch
    """
    from pmstore.show.shades import heap_line

    with reading(path) as store:
        about, usage, tiers = store.info(), store.usage(), list(_tiers(store))
    if as_json:
        segments = [asdict(segment) for segment in usage]
        _say_json({**asdict(about), "segments": segments, "tiers": tiers})
        return
    out = Terminal()
    facts: list[tuple[str, str]] = []
    for line in str(about).splitlines():
        title, text = line[:_TITLES].rstrip(), line[_TITLES:]
        if not title:  # the line before goes on
            title, before = facts.pop()
            text = f"{before} {text}"
        facts.append((title, text))
    for number, tier in enumerate(tiers):
        facts.append(("tiers" if number == 0 else "", _tier_line(path, tier)))
    for title, text in facts:
        say(*out.titled(title, printable(text), _TITLES))
    for number, segment in enumerate(usage):
        cells = out.room(16, len(segment.cells), _TITLES + 2)
        line = heap_line(segment, cells, out.blocks)
        share = (
            f"{size(segment.used_bytes)} of {size(segment.data_bytes)} in {segment.blocks:,} blocks"
        )
        title = out.paint("heap", "cyan") + " " * (_TITLES - 4) if number == 0 else " " * _TITLES
        drawn = f"{title}|{out.paint(line, 'green')}|"
        if out.width is None or _TITLES + len(line) + 3 + len(share) <= out.width:
            say(f"{drawn} {share}")
        else:
            say(drawn, *(" " * _TITLES + line for line in out.wrap(share, _TITLES)))


def _tier_line(path: Path, tier: dict[str, Any]) -> str:
    told = tier["problem"] or f"{tier['name']} at {tier['url']}"
    if tier["every"]:
        told += f", every {counted(tier['every'], 'commit')}"
    if tier["added_here"] is False:
        told += f"; not added here, and not flushed to by itself: pmstore trust {path}"
    return str(told)


def _tiers(store: Store) -> Iterator[dict[str, Any]]:
    """Yields what the store remembers of its tiers."""
    try:
        strange = store._open_tiers().strange
        for name, tier in store.tiers.items():
            yield {
                "name": name,
                "url": tier.url,
                "every": tier.every,
                "added_here": name not in strange,
                "problem": None,
            }
    except (TierError, CorruptStoreError) as error:  # the rest is told all the same
        yield {"name": None, "url": None, "every": None, "added_here": None, "problem": str(error)}


def ls(
    path: StorePath, group: GroupName = "", recursive: Recursive = False, as_json: Json = False
) -> None:
    """Lists the names of a store or group, with what they hold.

    Sizes are bytes of data; of slots, those of one version. For groups and lists it tells how many
    names or items they have.

    Example: pmstore ls -r run.pm run/model
    """
    with reading(path) as store:
        place = find(store, group) if group else store
        if not isinstance(place, Group):
            raise fail(f"{path}: {group!r} is no group: pmstore show {path} {group}", 2)
        entries = tree(place) if recursive else place.entries()
    prefix = f"{group}/" if group else ""
    if as_json:
        _say_json([_row(prefix, entry) for entry in entries])
        return
    out = Terminal()
    columns = [
        Column("name", path=True),
        *(Column("kind"), Column("dtype"), Column("shape"), Column("size", right=True)),
    ]
    rows = [
        (printable(prefix + entry.name), entry.kind, entry.dtype or "", shape(entry), extent(entry))
        for entry in entries
    ]
    styles = [(STYLES.get(entry.kind, ""), "dim", "", "", "") for entry in entries]
    say(*out.table(columns, rows, styles))


def shape(entry: Entry) -> str:
    """Writes a shape as 3x4; "" for an entry that has none."""
    return "" if entry.shape is None else "x".join(map(str, entry.shape)) or "scalar"


def extent(entry: Entry) -> str:
    """Writes how large an entry is, or how many names or items are in it."""
    return size(entry.nbytes) if entry.items is None else entry.extent()


def _row(prefix: str, entry: Entry) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": f"{prefix}{entry.name}",
        "kind": entry.kind,
        "dtype": entry.dtype,
        "shape": None if entry.shape is None else list(entry.shape),
        "bytes": entry.nbytes,
    }
    return told if entry.items is None else {**told, "items": entry.items}


def check(path: StorePath, as_json: Json = False) -> None:
    """Checks every invariant of a store, and changes nothing. Exit code 1 if one is broken.

    It walks the log, the allocator's tables and bitmaps, every group and list, and every value and
    description: leaks, overlaps, double ownership. pmstore repair tells what can be mended.

    Example: pmstore check run.pm && echo sound
    """
    with reading(path) as store, bar("checking", objects=True) as show:
        report = store.check(progress=show)
    notes = []
    if report.sound_copies != 0b11:
        notes.append(
            f"a copy of the superblock is damaged, the other one is in use: pmstore repair {path} "
            "restores it"
        )
    if as_json:
        told = {"path": str(path), "sound": not report.problems, **asdict(report), "notes": notes}
        _say_json({**told, "problems": list(report.problems)})
    else:
        out = Terminal()
        say(*(out.paint(printable(problem), "red") for problem in report.problems))
        if not report.problems:
            *_, words = str(report).rpartition(": ")
            told_of = f"{path}: {report}".removesuffix(words)
            say(printable(told_of) + out.paint(words, "green"))
        say(*(printable(f"note: {note}") for note in notes))
    if report.problems:
        raise SystemExit(1)
