"""Tells what ranks say of themselves beside the job's messages: how far each has come, and that one
ends.

It lies in the store of addresses that `init_process_group` made. The process that has that store
may be gone, and then an answer never comes: so all is said and read on a thread, over a connection
of its own. Nothing is decided by it, but that nobody waits in `attach` for a process that has
ended; messages name the ranks that are waited for. Without the board (with a version of torch whose
stores have no `clone`), messages name all ranks that it may be.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

_BEAT_SECONDS = 0.5
_FIRST_BEAT_SECONDS, _FAST_BEAT_SECONDS = 0.001, 0.05
"""Until all have come: each is twice as long as the one before."""
_END_SECONDS = 2.0
"""How long the end of a process waits to say so, at most. Rank 0, which mostly has the store of
addresses, waits for others to read it."""
_MOST_CHARACTERS = 1000
_over = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_made: Counter[str] = Counter()


class Board:
    """The board of a group of ranks, where each says how far it has come. Each rank makes as many
    boards, in one order.

    Attributes:
        come: how many messages this rank has begun; the first is that it has come.
        behind: ranks that had begun fewer at the last `look`.
        ended: ranks whose processes an error has ended; which, and whether it is permanent.
        all_come: set when they have, or if nobody can know.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        """Opens the board. rank: in the group. ranks: of the group, as torch.distributed numbers
        all processes."""
        group = f"{ranks[0]} to {ranks[-1]}, {len(ranks)}"
        _made[group] += 1
        self._place = f"{group}/{_made[group]}"
        self._rank = rank
        self._ranks = ranks
        self._store: Any = None
        self._open = True
        self._said = 0
        self._beat = _FIRST_BEAT_SECONDS
        self._asked = False
        self._looked = threading.Event()
        self.come: int = 1
        self.behind: list[int] = []
        self.ended: dict[int, tuple[str, bool]] = {}
        self.all_come: threading.Event = threading.Event()
        again(self._keep)

    def look(self, seconds: float) -> None:
        """Waits at most that long until it is known what the others have said. `behind` and `ended`
        tell it."""
        self.behind = []
        if self._open:
            self._looked.clear()
            self._asked = True
            self._looked.wait(seconds)

    def close(self) -> None:
        """Stops reading and saying. It is called before this rank or another may end: torch
        complains where an answer does not come."""
        self._open = False

    def _keep(self) -> float | None:
        """Says and reads. Returns in how many seconds to do that again; None: never."""
        if not self._open:
            return None
        try:
            if self._store is None:
                self._store = _notes()
                self._store.add(f"{self._place}/come", 1)
            more = self.come - self._said
            if more:
                self._store.add(f"{self._place}/{self._rank}", more)
                self._said += more
            if not self.all_come.is_set() or self._asked:
                self._read()
        except (
            RuntimeError,
            AttributeError,
            ValueError,
            TypeError,
        ):  # it is gone, none, or strange
            self.close()
            self.all_come.set()
            self._looked.set()
            return None
        self._beat = min(2 * self._beat, _FAST_BEAT_SECONDS)
        return _BEAT_SECONDS if self.all_come.is_set() else self._beat

    def _read(self) -> None:
        store, asked = self._store, self._asked
        if asked:
            every = range(len(self._ranks))
            self.behind = [
                rank for rank in every if store.add(f"{self._place}/{rank}", 0) < self._said
            ]
        if store.check(["ended"]):
            self.ended = {
                rank: _decode(store.get(f"ended/{number}"))
                for rank, number in enumerate(self._ranks)
                if store.check([f"ended/{number}"])
            }
        if store.add(f"{self._place}/come", 0) >= len(self._ranks):
            self.all_come.set()
        if asked:
            self._asked = False
            self._looked.set()


def _decode(told: bytes) -> tuple[str, bool]:
    said, permanent = json.loads(told)
    return str(said)[:_MOST_CHARACTERS], bool(permanent)


def _notes() -> Any:
    made: Any = dist.distributed_c10d
    return made.PrefixStore("pmstore", made._get_default_store().clone())


def again(call: Callable[[], float | None]) -> None:
    """Calls a method on a thread of its own, again and again, as long as its object lives. The
    method returns after how many seconds it is called next."""
    method: Any = weakref.WeakMethod(call)

    def work() -> None:
        while not _over.is_set() and (bound := method()) is not None:
            seconds = bound()
            if seconds is None:
                return
            del bound
            _over.wait(seconds)

    thread = threading.Thread(target=work, name="pmstore ranks", daemon=True)
    _threads.add(thread)
    thread.start()


def _say_end() -> None:
    """Tells the other ranks that an error ends this process. Ranks that wait for it in `attach`
    would otherwise do so until their timeout, and not know why. No thread may be in torch at the
    end: that would abort the process."""
    _over.set()
    for thread in list(_threads):
        thread.join(_END_SECONDS)
    error = getattr(sys, "last_value", None)
    if error is None or not (dist.is_available() and dist.is_initialized()):
        return
    said = f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS]
    rank, told = dist.get_rank(), json.dumps([said, getattr(error, "permanent", False)])

    def say() -> None:
        with suppress(RuntimeError, AttributeError):
            store = _notes()
            store.set(f"ended/{rank}", told)
            store.set("ended", "1")

    thread = threading.Thread(target=say, daemon=True)
    with suppress(RuntimeError):  # of an interpreter that starts none any more
        thread.start()
        thread.join(_END_SECONDS)
        if rank == 0 and dist.get_world_size() > 1:
            time.sleep(_END_SECONDS)


Finalize(None, _say_end, exitpriority=100)
