"""One run of a job that is crash-tested: a launcher, and ranks with a store each."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pmstore.testing import crashboard, processes
from pmstore.testing.outcomes import Finding, Kill, Outcome
from pmstore.testing.runner import Run, Runner, board_of, said

_PROCESSES = 255
"""How many processes may open a store in one run, those that a launcher starts again included."""
_LOOK_SECONDS = 0.01
_EXCEPTION = re.compile(
    r"^(?:\[?rank ?\d+\]?: ?)?([\w.]*(?:Error|Exception): .{1,300})", re.MULTILINE
)


def run_job(
    runner: Runner, cwd: Path, kills: Sequence[Kill], names: Mapping[str, str], *, resumed: bool
) -> Run:
    """Runs the command until it ends by itself, or all of it is killed. Its seconds count from the
    first open of a store.

    kills: in turn, as long as it goes on: a launcher may start what died again. Times count from
        the first open of a store after the kill before. names: of victims, as the program has them.

    Raises: Finding: it does not end.
    """
    board, timeout = board_of(cwd), runner.program.timeout_seconds
    environment = crashboard.environment(board, processes=_PROCESSES)
    token = environment["PMSTORE_CRASH_TOKEN"]
    orders = _Orders(board, kills, names)
    opened = None
    with runner.started(cwd, environment, resumed=resumed) as child:
        until = time.monotonic() + timeout
        while child.poll() is None:
            if time.monotonic() > until:
                after = ", after a rank was killed" if orders.carried_out else ""
                raise Finding(Outcome.MANUAL, f"it did not end within {timeout:g} s{after}")
            time.sleep(_LOOK_SECONDS)
            seen = crashboard.read_job(board)
            if seen and opened is None:
                opened = time.monotonic()
            kill = orders.due(seen)
            if kill is None:
                continue
            if kill.whole:
                processes.end(child, token)
            elif not kill.primitive and not processes.kill(orders.owner(seen), token):
                continue  # it has ended; perhaps it is started again
            orders.next(seen)
        kill = orders.due(crashboard.read_job(board))
        if kill is not None and kill.primitive:  # the command has ended by that kill
            orders.next([])
    ended = time.monotonic()
    return Run(
        status=child.returncode,
        said=_complaints(said(cwd, 1 << 20)) or said(cwd),
        seen=crashboard.read_job(board),
        kills=orders.carried_out,
        failed=child.returncode != 0 and not orders.carried_out,
        over=child.returncode == 0,
        seconds=ended - (opened or ended),
    )


def _complaints(text: str) -> str:
    """Returns the exceptions of ranks, which launchers bury under their own."""
    found = (each[1] for each in _EXCEPTION.finditer(text) if "ChildFailed" not in each[1])
    return "; ".join(list(dict.fromkeys(found))[:3])


class _Orders:
    """Gives the kills of one run, in turn. carried_out: how many were carried out."""

    def __init__(self, board: Path, kills: Sequence[Kill], names: Mapping[str, str]) -> None:
        self.carried_out = 0
        self._board = board
        self._kills = kills
        self._names = names
        self._before = 0  # processes that had opened a store when the order was given
        self._since: float | None = None  # when the first one after them had
        self._give()

    def _give(self) -> None:
        if self.carried_out < len(self._kills):
            kill = self._kills[self.carried_out]
            crashboard.order_kill(self._board, self._name(kill), kill.primitive)

    def _name(self, kill: Kill) -> str:
        return self._names.get(kill.victim, kill.victim)

    def _ranks(self, seen: Sequence[crashboard.Seen]) -> list[crashboard.Seen]:
        """Returns the pages of the victim: of one process, and of those that took its place."""
        name = self._name(self._kills[self.carried_out])
        return [page for page in seen[self._before :] if page.path == name]

    def owner(self, seen: Sequence[crashboard.Seen]) -> int:
        """Returns the process id of the victim."""
        return self._ranks(seen)[-1].owner

    def due(self, seen: Sequence[crashboard.Seen]) -> Kill | None:
        """Returns the kill whose moment has come. At a persistence point the rank is dead
        already."""
        if self.carried_out == len(self._kills) or len(seen) <= self._before:
            return None
        kill, ranks = self._kills[self.carried_out], self._ranks(seen)
        self._since = self._since or time.monotonic()
        if kill.primitive:
            return kill if any(page.killed for page in ranks) else None
        late = time.monotonic() - self._since >= kill.delay_seconds
        return kill if late and (ranks or kill.whole) else None

    def next(self, seen: Sequence[crashboard.Seen]) -> None:
        """Notes that the kill was carried out."""
        self.carried_out += 1
        self._before, self._since = len(seen), None
        self._give()
