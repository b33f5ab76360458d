"""Connects the ranks of a job, over a gloo group of their own. What they tell each other is bytes
of msgpack and whole numbers: never pickle."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgpack
import torch
import torch.distributed as dist

from pmstore.errors import PeerLostError
from pmstore.job.board import Board, again

_log = logging.getLogger("pmstore")
_SLICE_SECONDS = 0.2
"""The time between two looks at signals."""
_LATER = 5.0
"""Seconds: the group's own limit comes first, whose error says more."""
_TELL_SECONDS = 10.0
"""Who waits for longer says so: else a job that hangs by a mistake of the program's tells nothing
until the timeout."""
_LOOK_SECONDS = 1.0
"""How long a rank waits for what the others said, where one is lost."""
_LARGEST_BYTES = 64 << 20
"""The most that one rank tells the others. A peer that says that it tells more is not believed."""

_Told = TypeVar("_Told")


@dataclass
class _Message:
    """The newest message. ended: returns whether it has ended without an error; what: a rank has
    not done that it waits for, in words."""

    ended: Callable[[], bool]
    what: str
    began: float
    told: int = 0


class Peers:
    """The ranks of a process group. All of them make each call, in the same order.

    Attributes:
        rank: of this process in the group.
        world: how many there are.
        ranks: of all of them, as torch.distributed numbers all processes.
        timeout: seconds that ranks wait for each other.

    Raises (gather, wait): PeerLostError: a rank has died, or did not come within the timeout.
    """

    def __init__(self, process_group: Any, timeout: float) -> None:
        """Makes a group of its own of the one that is given ("world": all ranks), so that no
        message comes between those of the program.

        Raises: ValueError: torch.distributed is not initialised, has no gloo, or this process is
            not in the group; PeerLostError: a rank did not come.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "the process group is not initialised: call "
                "torch.distributed.init_process_group() before attach(process_group=...)"
            )
        if not dist.is_gloo_available():
            raise ValueError(
                "this build of torch has no gloo, over which the ranks of a job tell each other "
                "what is committed: use one with gloo"
            )
        given = dist.group.WORLD if process_group == "world" else process_group
        if given is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(given) < 0:
            raise ValueError("this process is not in the process group that was given to attach")
        self.rank: int = dist.get_rank(given)
        self.world: int = dist.get_world_size(given)
        self.timeout = timeout
        self.ranks: list[int] = dist.get_process_group_ranks(given)
        ranks = self.ranks
        self._board = Board(self.rank, ranks)
        self._message: _Message | None = None
        again(self._watch)
        self._group: Any = self._meet(
            lambda: dist.new_group(
                ranks,
                timedelta(seconds=timeout),
                "gloo",
                use_local_synchronization=len(ranks) != dist.get_world_size(),
            )
        )

    def _meet(self, make: Callable[[], Any]) -> Any:
        """Makes the group when all ranks have come, on a thread: where one dies while it connects,
        gloo waits for longer than it is told, and sees no signals."""
        made: Future[Any] = Future()

        def work() -> None:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)

        board, what, began = self._board, "did not come to attach()", time.monotonic()
        self._message = _Message(made.done, what, began)
        self._wait_for(
            lambda slice_: board.all_come.wait(slice_) or bool(board.ended), what, self.timeout
        )
        if not board.all_come.is_set():
            raise self._lost(what, ChildProcessError("its process has ended"))
        threading.Thread(target=work, name="pmstore attach", daemon=True).start()
        self._wait_for(
            lambda slice_: bool(futures.wait([made], slice_).done),
            what,
            max(self.timeout - (time.monotonic() - began), _LATER),
        )
        return self._telling(what, made.result)

    def _telling(self, what: str, call: Callable[[], _Told]) -> _Told:
        try:
            return call()
        except (RuntimeError, ValueError) as error:  # gloo's own are RuntimeErrors
            raise self._lost(what, error) from error

    # ---- who is waited for

    def _begins(self, ended: Callable[[], bool], what: str) -> None:
        self._board.come += 1
        self._message = _Message(ended, what, time.monotonic())

    def _watch(self) -> float:
        """Warns of a message that takes too long. It runs on a thread: where the program waits in a
        collective of its own, nobody else would say it. Returns in how many seconds to look
        again."""
        message = self._message
        if message is None or message.ended():
            return _LOOK_SECONDS
        waited = time.monotonic() - message.began
        if waited > self.timeout + 2 * _LATER and message.told < 2:
            message.told = 2
            _log.error(
                f"rank {self.rank} of {self.world}: {self._others(late=True)} is lost, or "
                f"{message.what} within {self.timeout:g} seconds. The job is over, and this rank "
                "hangs in something of the program's own, such as a collective of its model, "
                "whose limit is the timeout of init_process_group: end the process, and start the "
                "job again"
            )
        elif waited > _TELL_SECONDS and not message.told:
            message.told = 1
            _log.warning(
                f"rank {self.rank} of {self.world} has waited for {_TELL_SECONDS:g} seconds: "
                f"{self._others(late=True)} {message.what}. It gives up after {self.timeout:g} "
                "(attach(job=Job(timeout=...)))"
            )
        return _LOOK_SECONDS

    def _lost(self, what: str, error: Exception) -> PeerLostError:
        began = time.monotonic() if self._message is None else self._message.began
        told = PeerLostError(
            f"rank {self.rank} of {self.world}: "
            f"{self._others(late=time.monotonic() - began > self.timeout / 2)} is lost, or {what} "
            f"within {self.timeout:g} seconds ({_first_line(error)})"
        )
        told.permanent = any(permanent for _, permanent in self._board.ended.values())
        self._message = None
        return told

    def _others(self, late: bool) -> str:
        """Says in words which ranks are waited for, as far as is known. late: all ranks that live
        have come by now."""
        self._board.look(_LOOK_SECONDS)
        if ended := self._board.ended:
            return " and ".join(
                f"rank {rank} (it has ended: {of})" for rank, (of, _) in ended.items()
            )
        every = [one for one in range(self.world) if one != self.rank] or [self.rank]
        behind = self._board.behind if late else []
        return ("one of the " if len(behind or every) > 1 else "") + named(behind or every)

    # ---- all at once

    def gather(self, told: object, within: float = math.inf) -> list[Any]:
        """Returns what every rank tells, in the order of ranks: plain data, as msgpack has it.
        within: seconds, if less than the timeout."""
        data = msgpack.packb(told)
        lengths = self._gather(torch.tensor([len(data)]), within)
        longest = max(int(length) for length in lengths)
        if longest > _LARGEST_BYTES:
            raise PeerLostError(f"a rank of the job wants to tell {longest:,} bytes: it is damaged")
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [
            msgpack.unpackb(bytes(one[: int(length)].tolist()), strict_map_key=False)
            for one, length in zip(self._gather(mine, within), lengths, strict=True)
        ]

    def _gather(self, mine: torch.Tensor, within: float = math.inf) -> list[torch.Tensor]:
        every = [torch.empty_like(mine) for _ in range(self.world)]
        work = self._start(
            lambda: dist.all_gather(every, mine, self._group, async_op=True), "did not answer"
        )
        self.wait(work, within)
        return every

    def part(self) -> None:
        """Waits until all ranks have read what this one told them last, if they live. It is called
        before a rank may end: the end of a process resets its connections, and what a peer had not
        read by then is lost."""
        self._board.close()
        with suppress(PeerLostError):
            self._gather(torch.zeros(1, dtype=torch.uint8))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wraps what raises at all ranks if it does at one: after an error each waits until all
        know of it."""
        try:
            yield
        except PeerLostError:
            raise
        except Exception:
            self.part()
            raise

    # ---- while the program goes on

    def start_min(self, numbers: torch.Tensor, what: str) -> Any:
        """Begins to make each number the least of all ranks', in place. `wait` waits for it.
        what: a rank has not done that does not come, in words."""
        # as dist.all_reduce does it, in two thirds of its time
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        return self._start(lambda: self._group.allreduce([numbers], options), what)

    def _start(self, call: Callable[[], Any], what: str) -> Any:
        work = self._telling("has ended its process group", call)
        self._begins(lambda: _succeeded(work), what)
        return work

    def wait(self, work: Any, within: float = math.inf) -> None:
        """Waits for the newest message until every rank has come. Signals are handled meanwhile.
        within: seconds."""

        def ended(seconds: float) -> bool:
            with suppress(RuntimeError):  # not yet, or its own: raised below
                if not work.is_completed():
                    work.wait(timedelta(seconds=seconds))
            return bool(work.is_completed())

        assert self._message is not None
        what = self._message.what
        self._wait_for(ended, what, min(within, self.timeout + _LATER))
        self._telling(what, work.wait)

    def _wait_for(self, ended: Callable[[float], bool], what: str, limit: float) -> None:
        """Waits until the message has ended. ended: waits for so many seconds at most. Raises:
        PeerLostError."""
        end = time.monotonic() + limit
        while not ended(_SLICE_SECONDS):
            if time.monotonic() > end:
                raise self._lost(what, TimeoutError("no answer"))


def _succeeded(work: Any) -> bool:
    with suppress(RuntimeError):
        if work.is_completed():
            work.wait()
            return True
    return False


def _first_line(error: Exception, most: int = 160) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if len(text) <= most else text[: most - 3] + "..."


def checked_timeout(timeout: Any) -> float:
    """Returns a timeout, checked, in seconds. Raises: TypeError, ValueError."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout={timeout!r}: seconds that ranks wait for each other")
    if not 0.0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout!r}: seconds that ranks wait for each other, above 0")
    return float(timeout)


def named(ranks: Sequence[int]) -> str:
    """Writes the ranks in words."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
