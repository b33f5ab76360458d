"""The state of a store that a crash test compares: what it holds, by name."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pmstore.course.records import GROUP as COURSE
from pmstore.errors import PmstoreError
from pmstore.objects.containers import Group
from pmstore.objects.generations import Key, Member
from pmstore.objects.job_record import members, without_run
from pmstore.objects.lists import List
from pmstore.objects.slots import Slots
from pmstore.opening import open as open_store
from pmstore.store import Store
from pmstore.testing.outcomes import Finding, Outcome

Verify = Callable[[Store], object]


def _leaves(mapping: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in mapping:
        value = mapping[name]
        if isinstance(value, Group):
            yield from _leaves(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def _content(value: Any) -> bytes:
    if isinstance(value, Slots):
        value = value.current
    if hasattr(value, "detach"):  # a tensor, of a dtype that numpy may not have
        import torch

        raw = value.detach().contiguous().flatten().view(torch.uint8).numpy()
        return f"{value.dtype} {tuple(value.shape)} ".encode() + bytes(raw)
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    return repr([_content(item) for item in value] if isinstance(value, List) else value).encode()


def _digest(store: Store) -> dict[str, str]:
    """Returns hashes of what the store holds, by name. What was measured of its runs is left
    out."""
    return {
        name: hashlib.sha256(_content(value)).hexdigest()
        for name, value in _leaves(store)
        if not name.startswith(f"{COURSE}/")
    }


def digest_files(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Returns hashes of the files that are there, by name, as `_digest` does for a store."""
    found = {name: folder / name for name in names}
    return {
        f"file {name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in found.items()
        if path.is_file()
    }


@dataclass(frozen=True)
class Examined:
    """What a store holds: its number of commits, hashes by name, and what it would bring to the
    joining of a job of each of its training runs, or of another one."""

    commits: int
    state: dict[str, str]
    members: dict[str, Member]
    bare: Member


def examine(path: Path, verify: Verify | None, name: str = "") -> Examined:
    """Opens a copy of the store, as the resumed program will open it. name: of it, for messages."""
    copy = path.with_name(path.name + ".examined")
    shutil.copyfile(path, copy)
    try:
        # nobody wrote while it was copied; closed as it is, whatever it holds for a job
        with closing(open_store(copy, mode="r+", force=True)) as store:
            problems = store.check().problems
            if problems:
                raise Finding(Outcome.MANUAL, f"the check finds: {problems[0]}")
            if verify is not None and store.epoch > 0:
                try:
                    answer = verify(store)
                except Exception as error:  # the user's function, in any way
                    raise Finding(Outcome.DIFFERENT, f"the verification fails: {error!r}") from None
                if answer is False:
                    raise Finding(Outcome.DIFFERENT, "the verification says no")
            found = members(store, name)
            return Examined(store.epoch, _digest(store), found, without_run(store, name))
    except (PmstoreError, OSError) as error:
        raise Finding(Outcome.MANUAL, f"the store does not open: {error}") from None
    finally:
        copy.unlink(missing_ok=True)


@dataclass(frozen=True)
class Stores:
    """The stores of a program as a run left them, by their names. Those that are not there yet are
    left out."""

    names: Sequence[str]
    found: Mapping[str, Examined]

    @classmethod
    def left(cls, cwd: Path, names: Iterable[str], verify: Verify | None) -> Stores:
        """Opens a copy of each. Raises: Finding: a store does not open, is not sound, or does not
        pass the verification."""
        found, names = {}, list(names)
        for name in names:
            if (cwd / name).exists():
                try:
                    found[name] = examine(cwd / name, verify, name)
                except Finding as finding:
                    raise Finding(finding.outcome, f"{name}: {finding}") from None
        return cls(names, found)

    @property
    def state(self) -> dict[str, str]:
        """Hashes of what all of them hold, by name: of several stores, after the store's."""
        several = len(self.names) > 1
        return {
            f"{name}: {path}" if several else path: digest
            for name, examined in self.found.items()
            for path, digest in examined.state.items()
        }

    @property
    def missing(self) -> list[str]:
        return [name for name in self.names if name not in self.found]

    def commits(self, name: str) -> int:
        return self.found[name].commits if name in self.found else 0

    def runs(self) -> list[str]:
        return sorted({run for examined in self.found.values() for run in examined.members})

    def members(self, run: str) -> list[Member]:
        """Returns what each store would bring to a joining of that run."""
        return [
            self.found[name].members.get(run, self.found[name].bare)
            if name in self.found
            else Member(None, "", held=False, run_step=None, name=name)
            for name in self.names
        ]

    def rank(self, name: str) -> int:
        members = self.found[name].members.values() if name in self.found else ()
        return min((one.record.rank for one in members if one.record is not None), default=0)

    def newest(self) -> list[Key]:
        """Returns the last generation of each run, of each store."""
        return [one.keys[0] for run in self.runs() for one in self.members(run)]


def differing(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
