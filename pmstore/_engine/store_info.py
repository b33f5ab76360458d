"""What a store says of itself: of its last recovery, its sizes and counts, its soundness, the
places of its bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pmstore._base import notebook
from pmstore._base.text import counted
from pmstore._engine.pool_info import PoolInfo

SURVIVES = {
    "dax": "power failure (persistent memory, MAP_SYNC)",
    "file": "power failure (journal, one fdatasync for each commit)",
    "process": "death of the process; not of the machine",
    "emulated": (
        "death of the process; not of the machine (persistent-memory instructions over ordinary "
        "memory)"
    ),
}
"""What a commit survives in each domain."""


def _counts(title: str, report: Any, picture: notebook.Drawn | None = None) -> str:
    """Returns the HTML of a report in a notebook: its fields, without those that are zero or
    empty."""
    told = [(field.name.replace("_", " "), getattr(report, field.name)) for field in fields(report)]
    rows = [(name, f"{value:,}" if type(value) is int else value) for name, value in told if value]
    return notebook.facts(title, rows, picture)


_SHOWN = 2
"""`PoolInfo.beside` of a reader that a writer shows the store to."""


@dataclass(frozen=True)
class Recovery:
    """The findings of an open, and what it had to do. `print(store.recovery)` says it in words.

    Attributes:
        created: this open made the store.
        clean: the last writer closed it.
        undone_entries: pre-images put back: writes of a transaction that never committed.
        replayed_records: commits of domain "file" that were in the journal and not yet in their
            place.
        torn: an incomplete last entry or record was dropped; what it belonged to had not been
            acknowledged.
        opens: for writing, since creation, this one included.
        live: another process had it open for writing, and this one reads beside it.
    """

    created: bool
    clean: bool
    undone_entries: int
    undone_bytes: int
    replayed_records: int
    replayed_bytes: int
    torn: bool
    opens: int
    unclean_opens: int
    live: bool = False

    def __str__(self) -> str:
        if self.created:
            return "new store"
        if self.live:
            return "another process has it open for writing: nothing to recover"
        if self.clean:
            return "closed cleanly by its last writer, nothing to recover"
        parts = ["the last writer was killed"]
        if self.undone_entries:
            parts.append(
                f"its uncommitted writes were undone ({self.undone_bytes:,} bytes in "
                f"{counted(self.undone_entries, 'piece')})"
            )
        if self.replayed_records:
            were = "was" if self.replayed_records == 1 else "were"
            parts.append(
                f"{counted(self.replayed_records, 'commit')} {were} replayed from the journal "
                f"({self.replayed_bytes:,} bytes)"
            )
        if self.torn:
            parts.append("an incomplete write of its last transaction was dropped")
        if len(parts) == 1:
            parts.append("nothing had to be undone")
        return "; ".join(parts)

    def _repr_html_(self) -> str:
        return _counts(f"recovery: {self}", self)


def recovery_of(info: PoolInfo) -> Recovery:
    """Returns the report of the recovery that the store's open did."""
    kept = {field.name for field in fields(Recovery)} & set(info._fields)
    return Recovery(**{name: getattr(info, name) for name in kept}, live=info.beside == _SHOWN)


@dataclass(frozen=True)
class Stats:
    """The sizes of a store as they are now, and counts since open: struct pms_stats. All are in
    bytes or pieces.

    Attributes:
        pinned_bytes: freed, but held by arrays that are still alive.
        faults: first writes that were noticed by page protection.
        own_bytes: domain file: of pages that were written to, are this process's alone and take
            memory.
        given_back_bytes: of these, what became the file's again since the open, for want of memory.
    """

    epoch: int
    tx: int
    file_bytes: int
    data_bytes: int
    used_bytes: int
    free_bytes: int
    pinned_bytes: int
    largest_free_bytes: int
    blocks: int
    log_bytes: int
    log_need_bytes: int
    commits: int
    rollbacks: int
    faults: int
    captures: int
    captured_bytes: int
    hot_ranges: int
    hot_bytes: int
    fences: int
    lines: int
    syncs: int
    protects: int
    journal_bytes: int
    home_bytes: int
    straight_bytes: int
    home_syncs: int
    journal_waits: int
    own_bytes: int
    given_back_bytes: int

    def _repr_html_(self) -> str:
        used = notebook.share(self.used_bytes, self.used_bytes + self.free_bytes, 240)
        return _counts(f"epoch {self.epoch:,}: bytes in use", self, used)


@dataclass(frozen=True)
class CheckReport:
    """The findings of `Store.check`. `problems` is empty if the store is sound.

    Attributes:
        leaks: blocks that belong to nobody. Each is among the problems.
        sound_copies: of the superblock's two, by bits. With one the store works; `pmstore repair`
            restores the other.
    """

    blocks: int
    names: int
    groups: int
    lists: int
    extents: int
    leaks: int
    leaked_bytes: int
    sound_copies: int
    problems: tuple[str, ...]

    def __str__(self) -> str:
        found = (
            f"{counted(self.names, 'name')} in {counted(self.groups, 'group')}, "
            f"{counted(self.lists, 'list')}, {counted(self.blocks, 'block')} in "
            f"{counted(self.extents, 'extent')}: "
        )
        return found + (
            "sound"
            if not self.problems
            else counted(len(self.problems), "problem") + "\n" + "\n".join(self.problems)
        )

    def _repr_html_(self) -> str:
        if self.problems:
            told = [("✗", problem) for problem in self.problems]
            return notebook.facts(counted(len(self.problems), "problem"), told)
        return _counts("✓ sound", self)


@dataclass(frozen=True)
class JobState:
    """A run of a store that is in a job of several ranks.

    Attributes:
        job: the first digits of its id.
        term, generation, step: of the last commit.
    """

    run: str
    job: str
    rank: int
    world: int
    term: int
    generation: int
    step: int

    def __str__(self) -> str:
        return (
            f"{self.run} is rank {self.rank} of {self.world} in job {self.job}, at generation "
            f"{self.generation} (step {self.step}, term {self.term})"
        )


@dataclass(frozen=True)
class Info:
    """A summary of a store in a few lines: `print(store.info())`."""

    path: str
    domain: str
    survives: str
    flush: str
    read_only: bool
    epoch: int
    names: int
    file_bytes: int
    used_bytes: int
    free_bytes: int
    opens: int
    unclean_opens: int
    uuid: str
    recovery: Recovery
    held: bool
    """Whether the version before the last commit can still be had: `Store.rewind`. It is False for
    a store that another process writes to: that process alone knows."""
    in_doubt: bool
    """Whether it is held for a job of several ranks, which are not known to have the last
    commit."""
    jobs: tuple[JobState, ...]
    """The states of its runs that are in a job."""

    def __str__(self) -> str:
        return "\n".join(
            (
                f"path      {self.path}{' (read-only)' if self.read_only else ''}",
                f"domain    {self.domain}: a commit survives {self.survives}",
                f"epoch     {counted(self.epoch, 'commit')}",
                (
                    f"content   {counted(self.names, 'name')} at the top, {self.used_bytes:,} "
                    f"bytes used, {self.free_bytes:,} free, file {self.file_bytes:,} bytes"
                ),
                (
                    f"opened    {counted(self.opens, 'time')} for writing, {self.unclean_opens} of "
                    "them after a crash"
                ),
                f"recovery  {self.recovery}",
                *(f"job       {one}" for one in self.jobs),
                *self._held(),
            )
        )

    def _repr_html_(self) -> str:
        lines = [line for line in str(self).splitlines() if line]
        told = [(line[:10].rstrip(), line[10:]) for line in lines]
        used = notebook.share(self.used_bytes, self.used_bytes + self.free_bytes, 240)
        return notebook.facts("pmstore: bytes in use", told, used)

    def _held(self) -> tuple[str, ...]:
        if self.in_doubt:
            return (
                "held      for a job: not known to be committed by all ranks: start the job again,",
                "          which decides; only if it is over: pmstore resolve",
            )
        if self.held:
            return ("held      the version before the last commit: pmstore resolve",)
        return ()


@dataclass(frozen=True)
class SegmentUsage:
    """Says where the bytes of one segment of the file are. The store begins with one segment, and
    each growth adds one.

    Attributes:
        table_off: where the segment begins in the file: with its page table, then come its log and
            its data.
        cells: bytes in use of each of 64 equal parts of the data.
    """

    table_off: int
    log_bytes: int
    data_off: int
    data_bytes: int
    used_bytes: int
    blocks: int
    cells: tuple[int, ...]
