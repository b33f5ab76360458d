"""What a loop over the data shows of batches that its program holds.

A program that looks ahead takes batches before it trains on them: some more before its first step,
then one for each that it trains on. One that accumulates gradients, leaves batches out or takes
them in pairs does not look so; here is told which it is, from what can be seen:

- whether anything was computed for gradients since the batch before was taken. Look-ahead takes its
  first batches with nothing in between. Accumulation does not, nor does a step left out for a loss
  that is not finite.
- where in the program a batch was asked for. Look-ahead takes the first batches elsewhere than the
  later ones; a loop that passes over a batch takes all in one place.
- which batches are alive. A loop that passes over a batch drops it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from pmstore.torch._data.position import Place
from pmstore.torch.errors import LookaheadError

_FRAMES = 24
"""How many callers tell where a batch was asked for."""


_MOST = 16
"""Batches that a program may hold."""


class Lookahead:
    """Watches one loop. It is asked no more once it is sure."""

    def __init__(self, place: Place, ahead: int | None) -> None:
        """ahead: as the program says; None: it says nothing, which means 0."""
        self._place = place
        self._told = ahead
        self._mark: int | None = None  # when the last batch was handed out
        self._thread: int | None = None
        self._sites: list[int] = []  # where each was asked for
        self._alive: list[list[weakref.ref[Any]]] = []  # the last batches that were handed out
        self._first: int | None = None  # batches taken before the first was used
        self._sure = ahead == 0
        self._steps = 0  # that ended with a batch more than the one before
        self._seen = 0
        self._ended = False
        self._taken_back = False

    def ask(self) -> None:
        """The program wants a batch."""
        if self._sure:
            return
        self._thread = threading.get_ident()
        used = self._used()
        self._sites.append(_site())
        if len(self._sites) == 1:
            return
        if self._first is None:
            if used:
                self._first = len(self._sites) - 1
                self._check_first()
            elif len(self._sites) > _MOST:
                self._clear()  # they are gone through for something else than training
            elif self._told is None:
                self._place.doubt()
        elif not used:
            self._clear()  # batches are passed over, or taken together

    def hand_out(self, batch: Any) -> None:
        if self._sure:
            return
        self._alive = [*self._alive[-_MOST:], [weakref.ref(one) for one in _tensors(batch)]]
        self._mark = _made()

    def end(self) -> None:
        """The program wanted a batch, and there is none."""
        self._ended = True
        if not self._sure:
            self._mark = _made()

    def roll_back(self) -> None:
        """What the program holds is of steps that were taken back, if it holds any."""
        self._taken_back = bool(self._told)
        self._mark = _made()

    def require(self) -> None:
        """Raises: LookaheadError: the loop has to be begun anew."""
        if self._taken_back:
            raise LookaheadError(
                f"after a roll back a loop over run.batches(ahead={self._told}) has to be begun "
                "anew: the batches that the program holds are of steps that were taken back"
            )

    def finish(self) -> None:
        """The program ends a step.

        Raises: LookaheadError.
        """
        if self._taken_back and self._used():
            self.require()
        if self._sure or not self._sites:
            return
        if self._thread != threading.get_ident():
            raise LookaheadError(
                "run.batches() is iterated in another thread than run.commit() is called in, so "
                "that nobody knows which batches the step was of. Iterate in the thread that "
                "trains; DataLoader(num_workers=...) loads ahead by itself"
            )
        if self._first is None:
            if not self._used():
                self._clear()  # nothing is to be seen here: no gradients
                return
            self._first = len(self._sites)
            self._check_first()
        if not self._sure:
            self._weigh()

    def _weigh(self) -> None:
        """A step ended in which batches were used. Were more taken than used?"""
        assert self._first is not None
        if len(self._sites) == self._seen and not self._ended:
            return
        self._seen = len(self._sites)
        self._steps += 1
        extra = self._place.ahead if self._told is None else self._told
        if self._ended:
            if self._told is None and self._used():
                self._refuse(extra)
        elif len(self._sites) > self._first:
            self._decide(extra)

    def _check_first(self) -> None:
        """Once a batch was used for the first time."""
        assert self._first is not None
        told = self._told
        if told is None:
            if self._first == 1:
                self._clear()
        elif self._first <= told and not self._ended:
            self._sure = True
            raise LookaheadError(
                f"run.batches(ahead={told}) says that the program holds {_batches(told)} that it "
                f"has not trained on, but it took {_batches(self._first)} before it trained on "
                f"the first: write run.batches(ahead={self._first - 1})"
            )

    def _decide(self, extra: int) -> None:
        """At the second step: one batch after the other was used since the first was."""
        assert self._first is not None
        steady = self._sites[self._first :]
        elsewhere = sum(site not in steady for site in self._sites[: self._first])
        if self._told is not None:
            if elsewhere > self._told:
                self._refuse(elsewhere)
            self._sure = True
            return
        alive = [any(one() is not None for one in batch) for batch in self._alive]
        kept = alive[-extra - 1 :]
        dropped = not any(alive[: -extra - 1])
        if elsewhere == extra and not (kept[-1] and not any(kept[:-1])):
            self._refuse(extra)
        if self._steps >= 3 and len(kept) == extra + 1 and all(kept) and dropped:
            self._refuse(extra)
        if self._steps >= 3 and kept[-1] and not any(kept[:-1]):
            self._clear()

    def _refuse(self, held: int) -> None:
        told = self._told or 0
        one = "one" if held == 1 else str(held)
        raise LookaheadError(
            f"the program seems to hold {one} batch{'' if held == 1 else 'es'} ahead of the one "
            f"that it trains on, and run.batches({f'ahead={told}' if told else ''}) counts what "
            f"was taken as trained on: write run.batches(ahead={held}), and a commit stores the "
            "place of the batch that was trained on. If it does not hold any, but passed over "
            "batches at the beginning, write run.batches(ahead=0)"
        )

    def _clear(self) -> None:
        self._sure = True
        self._alive.clear()
        self._place.believe(self._told or 0)

    def _used(self) -> bool:
        """Whether something was computed for gradients since the last batch was handed out."""
        made = _made()
        return made is not None and self._mark is not None and made - self._mark > 1


def _made() -> int | None:
    """A number that counts what autograd has recorded in this thread, and this call with it."""
    if torch.is_inference_mode_enabled():
        return None
    with torch.enable_grad():
        node: Any = (torch.zeros((), requires_grad=True) * 1).grad_fn
    number: int = node._sequence_nr()
    return number


def _site() -> int:
    """Where the batch is asked for: the callers of the loop, and how far each is."""
    frame: FrameType | None = sys._getframe(3)  # from _site, ask, the loop
    places: list[tuple[Any, int]] = []
    while frame is not None and len(places) < _FRAMES:
        places.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(places))


def _tensors(batch: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth and isinstance(batch, dict):
        for part in batch.values():
            yield from _tensors(part, depth - 1)
    elif depth and isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _tensors(part, depth - 1)


def _batches(number: int) -> str:
    return "one batch" if number == 1 else f"{number} batches"
