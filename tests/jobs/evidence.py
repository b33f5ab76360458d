"""What ranks leave behind, and what has to hold of it from one life of a job to the next."""

from __future__ import annotations

import pickle
import signal
from dataclasses import dataclass, field
from pathlib import Path

from programs.bits import Bits

import pmstore
from pmstore.objects.generations import decode

from .registry import Job

RAISED = (
    "PeerLostError",
    # of gloo, torch's collectives, and its store: whichever is used when a peer is gone
    "RuntimeError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
)
"""What a rank may raise when another has died."""


class Broken(Exception):
    """A job went as it must not."""


@dataclass(frozen=True)
class Joined:
    """What a rank was when attach returned."""

    step: int
    model: str
    optimizer: str
    term: int
    generation: int


@dataclass
class RankNotes:
    """One life of one rank.

    end: ended, exit CODE, raised NAME; empty if it was killed.
    joining_at, joined_at: moments and primitives when attach was called, and had returned.
    """

    killed: bool
    end: str = ""
    joining: int = 0
    joined: list[Joined] = field(default_factory=list)
    joining_at: tuple[int, int] = (0, 0)
    joined_at: tuple[int, int] = (0, 0)
    committed: list[int] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    result: Bits | None = None
    said: str = ""

    @property
    def died_joining(self) -> bool:
        return self.killed and self.joining > len(self.joined)


def has_met(home: Path, rank: int) -> bool:
    """Whether the rank knew the others, in this life."""
    journal = home / f"journal{rank}"
    return journal.exists() and "met" in journal.read_text().split()


def read_notes(home: Path, rank: int, status: int) -> RankNotes:
    """What a rank left in its last life (under torchrun: in all)."""
    notes = RankNotes(status == -signal.SIGKILL)
    journal = home / f"journal{rank}"
    for line in journal.read_text().splitlines() if journal.exists() else ():
        word, *rest = line.split()
        if word == "joining":
            notes.joining += 1
            notes.joining_at = (int(rest[0]), int(rest[1]))
        elif word == "joined":
            notes.joined_at = (int(rest[1]), int(rest[2]))
            term, generation = map(int, rest[5:7])
            notes.joined.append(Joined(int(rest[0]), rest[3], rest[4], term, generation))
        elif word == "committed":
            notes.committed.append(int(rest[0]))
        elif word == "agreed":
            notes.agreed.append(int(rest[0]))
        elif word in ("ended", "exit", "raised"):
            notes.end = word if word == "ended" else " ".join([word, *rest])
            names = ("moment", "primitive", "joining")
            notes.counts = dict(zip(names, map(int, rest), strict=True)) if word == "ended" else {}
    result = home / f"result{rank}"
    if result.exists() and notes.end == "ended":
        notes.result = pickle.loads(result.read_bytes())
    said = home / f"stderr{rank}"
    notes.said = said.read_text(errors="replace").strip()[-1500:] if said.exists() else ""
    return notes


def store_problems(path: Path) -> tuple[int | None, str]:
    """The generation of a store's last commit (None: there is no run yet), and what is wrong with
    it."""
    if not path.exists():
        return None, ""
    try:
        with pmstore.open(path, mode="r") as store:
            problems = "; ".join(map(str, store.check().problems))
            if "run/job" not in store:
                return None, problems
            return decode(store["run/job"]).key.number, problems
    except pmstore.PmstoreError as error:
        return None, f"{type(error).__name__}: {error}"


def tell(notes: list[RankNotes]) -> str:
    """How each rank ended, and what it said last."""
    return "\n".join(
        f"--- rank {rank} {'was killed' if one.killed else one.end or 'died'}"
        + (f"\n{one.said}" if one.end.startswith("raised") else "")
        for rank, one in enumerate(notes)
    )


class Evidence:
    """Over all lives on the same stores. joins: how often all ranks joined. lost: 1 if at the last
    join a commit of some rank was lost, else 0."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.joins = 0
        self.lost = 0
        self._term = -1
        self._step = 0
        self._agreed = 0
        self._committed: list[int] = []

    def check(self, home: Path, notes: list[RankNotes], told: str) -> bool:
        """Takes in a life. Returns whether all ranks joined. Raises Broken."""
        self.lost = 0
        joined = [one for rank in notes for one in rank.joined]
        if joined:
            self._check_join(joined, told)
        whole = len(joined) == len(notes)
        self.joins += whole
        anybody = any(one.killed for one in notes)
        right = {"ended", *(f"raised {name}" for name in RAISED if anybody)}
        if not all(one.killed or one.end in right for one in notes):
            raise Broken(f"{'after' if anybody else 'without'} a kill; {told}\n{tell(notes)}")
        new = {step for one in notes for step in one.committed}
        self._committed = sorted({*self._committed, *new})
        self._agreed = max([self._agreed, *(step for one in notes for step in one.agreed)])
        for file in home.glob("acknowledged*"):
            self._agreed = max([self._agreed, *map(int, file.read_text().split())])
        return whole

    def _check_join(self, joined: list[Joined], told: str) -> None:
        first = joined[0]
        for other in joined:
            if (other.step, other.term, other.generation) != (
                first.step,
                first.term,
                first.generation,
            ):
                raise Broken(f"ranks are not at the same place: {joined}; {told}")
            if any(getattr(other, one) != getattr(first, one) for one in self.job.alike):
                raise Broken(f"replicas differ at step {first.step}: {joined}; {told}")
        if -1 < first.term <= self._term:
            raise Broken(f"term {first.term} comes after {self._term}; {told}")
        if first.step < self._agreed:
            raise Broken(f"all ranks had step {self._agreed}, and are at {first.step}; {told}")
        before = self._committed[-2] if len(self._committed) > 1 else 0
        if first.step < before:
            raise Broken(
                f"more than one generation is lost: at step {first.step}, after commits with "
                f"{self._committed[-4:]}; {told}"
            )
        self.lost = int(bool(self._committed) and first.step < self._committed[-1])
        self._term = first.term
        self._committed = [step for step in self._committed if step <= first.step]
