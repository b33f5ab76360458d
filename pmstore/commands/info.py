"""Commands that look at a store: info, ls, check. typer is not imported here (`table.py`)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore._base.text import counted, is_own_name, printable
from pmstore.commands.common import bar, fail, find, reading, say, say_json, size
from pmstore.errors import CorruptStoreError, TierError
from pmstore.objects.containers import Group, tree
from pmstore.objects.entries import Entry
from pmstore.show.terminal import Column, Terminal

if TYPE_CHECKING:
    from pmstore._engine.store_info import SegmentUsage
    from pmstore.commands.app import Everything, GroupName, Json, Recursive, StorePath
    from pmstore.show.snapshot_of_runs import RunState
    from pmstore.store import Store

_TITLES = 10
"""Columns of the titles in `Info`'s own lines."""
_MORE = ("epoch", "opened")
"""Titles of lines that --all alone tells."""
STYLES = {"group": "blue", "list": "yellow", "value": "green"}
"""The colours of names, by the kind of what has them."""


def info(path: StorePath, everything: Everything = False, as_json: Json = False) -> None:
    """Says how far the runs in a store are, and what the store is.

    Of a run it says: step, what was logged last, learning rate, data epoch, in how many lives it
    was trained and how many of them were killed, the most time between two commits, and when the
    last committed step was. Of the store: domain, size, recovery, tiers.

    --all tells more of the store, and draws a map of the heap: a line for each segment of the file
    (the file begins with one, and each growth adds one). A line has 64 cells (fewer, where there is
    little room) from the segment's first byte of data to its last. The more of a cell is in use,
    the darker it is.

    Example: pmstore info run.pm

    Example: pmstore info run.pm --json | jq .runs[0].step
    """
    from pmstore.show.snapshot_of_runs import run_states

    problem = ""
    with reading(path) as store:
        about, usage, tiers = store.info(), store.usage(), list(_tiers(store))
        runs: list[RunState] = []
        try:
            runs = run_states(store, about)
        except CorruptStoreError as error:  # the rest is told all the same
            problem = error.problem or str(error)
    if as_json:
        segments = [asdict(segment) for segment in usage]
        told = {"runs": [run.as_dict() for run in runs], "problem": problem or None}
        say_json({**told, **asdict(about), "segments": segments, "tiers": tiers})
        return
    out = Terminal()
    between = " \N{MIDDLE DOT} " if out.encodes("\N{MIDDLE DOT}") else ", "
    facts = [(run.name, between.join(run.facts())) for run in runs]
    facts += [("runs", problem)] if problem else []
    for line in str(about).splitlines():
        title, text = line[:_TITLES].rstrip(), line[_TITLES:]
        if not title:  # the line before goes on
            title, before = facts.pop()
            text = f"{before} {text}"
        if everything or title not in _MORE:
            facts.append((title, text))
    for number, tier in enumerate(tiers):
        facts.append(("tiers" if number == 0 else "", _tier_line(path, tier)))
    for title, text in facts:
        say(*out.titled(printable(title), printable(text), _TITLES))
    if everything:
        _say_heap(out, usage)


def _say_heap(out: Terminal, usage: Iterable[SegmentUsage]) -> None:
    from pmstore.show.shades import heap_line

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
    path: StorePath,
    group: GroupName = "",
    recursive: Recursive = False,
    everything: Everything = False,
    as_json: Json = False,
) -> None:
    """Lists the names of a store or group, with what they hold.

    Sizes are bytes of data; of slots, those of one version. For groups and lists it tells how many
    names or items they have, for a training run its steps. Of a run it lists model, optimizer
    state and the program's own values: --all also lists what pmstore keeps beside them, in the run
    and in groups of its own.

    Example: pmstore ls -r run.pm run/model
    """
    with reading(path) as store:
        place = find(store, group) if group else store
        if not isinstance(place, Group):
            raise fail(f"{path}: {group!r} is no group: pmstore show {path} {group}", 2)
        prefix = f"{group}/" if group else ""
        entries = [
            replace(entry, name=prefix + entry.name)
            for entry in (tree(place) if recursive else place.entries())
        ]
        runs = dict(_runs(store, group, entries))
    if not everything and not (group and _is_own(group, runs)):  # what was asked for is told
        entries = [entry for entry in entries if not _is_own(entry.name, runs)]
    if as_json:
        say_json([_row(entry, runs) for entry in entries])
        return
    out = Terminal()
    columns = [
        Column("name", path=True),
        *(Column("kind"), Column("dtype"), Column("shape"), Column("size", right=True)),
    ]
    rows = [
        (printable(entry.name), _kind(entry, runs), entry.dtype or "", shape(entry), told)
        for entry in entries
        for told in [f"step {runs[entry.name]:,}" if entry.name in runs else extent(entry)]
    ]
    styles = [(STYLES.get(entry.kind, ""), "dim", "", "", "") for entry in entries]
    say(*out.table(columns, rows, styles))


def _runs(store: Store, group: str, entries: Iterable[Entry]) -> Iterator[tuple[str, int]]:
    """Yields the training runs among the groups that are listed or lead to them, with the steps of
    each."""
    parts = group.split("/") if group else []
    places = ["/".join(parts[: at + 1]) for at in range(len(parts))]
    for name in [*places, *(entry.name for entry in entries if entry.kind == "group")]:
        with suppress(CorruptStoreError):
            numbers = store.get(f"{name}/progress")
            if not isinstance(numbers, np.ndarray) or f"{name}/about" not in store:
                continue
            if (numbers.shape, numbers.dtype) == ((4,), np.int64):
                yield name, int(numbers[0])


_OWN_PARTS = {
    *("about", "attributes", "given", "gradients", "gradients_layout", "heads", "job", "loader"),
    *("log", "loops", "model_layout", "progress", "rng", "scopes", "trainable"),
}
"""Of a run, what pmstore keeps beside model, optimizers and the program's own."""
_OF_OPTIMIZER = {"groups", "layout", "rest"}


def _is_own(name: str, runs: Container[str]) -> bool:
    """Returns whether pmstore keeps it for itself: a group at the top, or a part of a run."""
    if is_own_name(name):
        return True
    parts = name.split("/")
    within = next(
        (parts[at:] for at in range(len(parts) - 1, 0, -1) if "/".join(parts[:at]) in runs), []
    )
    if name in runs or not within:
        return False
    if within[0] == "optimizer":  # or several, under keys
        return any(part in _OF_OPTIMIZER for part in within[1:3])
    return within[0] in _OWN_PARTS


def _kind(entry: Entry, runs: Container[str]) -> str:
    return "run" if entry.name in runs else entry.kind


def shape(entry: Entry) -> str:
    """Writes a shape as 3x4; "" for an entry that has none."""
    return "" if entry.shape is None else "x".join(map(str, entry.shape)) or "scalar"


def extent(entry: Entry) -> str:
    """Writes how large an entry is, or how many names or items are in it."""
    return size(entry.nbytes) if entry.items is None else entry.extent()


def _row(entry: Entry, runs: Mapping[str, int]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": entry.name,
        "kind": _kind(entry, runs),
        "dtype": entry.dtype,
        "shape": None if entry.shape is None else list(entry.shape),
        "bytes": entry.nbytes,
    }
    if entry.items is not None:
        told["items"] = entry.items
    return told | ({"step": runs[entry.name]} if entry.name in runs else {})


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
        say_json({**told, "problems": list(report.problems)})
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
