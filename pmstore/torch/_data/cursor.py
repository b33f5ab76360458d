"""The batches of a loader from any place in the data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pmstore.torch._data.batch_source import Source
from pmstore.torch._data.position import Held, Position
from pmstore.torch._random import defaults as rng

_END = object()


class Cursor:
    """Loads one batch after the other, over the ends of epochs.

    Attributes:
        behind: the position behind the last one.
    """

    def __init__(
        self, source: Source, behind: Position, opens: Callable[[], None] | None = None
    ) -> None:
        """opens: called before an epoch is opened. None: the caller opens each by `begin`."""
        self.behind: Position = behind
        self._source = source
        self._opens = opens
        self._batches: Iterator[Any] | None = None
        self._watched = rng.Watched(source)
        self._begun: dict[str, Any] | None = None  # the generators when `begin` returned

    def go_to(self, behind: Position) -> None:
        self.behind = behind
        self._batches = self._begun = None

    def next_epoch(self) -> None:
        """Goes to the end of the present epoch."""
        state = self._source.state_of(self.behind)
        self.go_to(Position(self.behind.data_epoch + 1, state=state))

    def begin(self) -> None:
        """Opens a new epoch now, and not with its first batch: it draws as `iter(loader)` does.
        REQUIRES: `behind` is where one begins."""
        self._batches, start = self._source.begin(self.behind)
        self.behind = Position(self.behind.data_epoch, 0, start, self.behind.state)
        self._begun = rng.capture(self._source.generators)

    def _first(self) -> None:
        """Notes, before the first batch of an epoch that `begin` opened, what the program drew
        since then: it belongs to the epoch's start."""
        self._source.follow()
        now, begun = rng.capture(self._source.generators), self._begun
        self._begun = None
        start = self.behind.start
        if begun is not None and start is not None and rng.bits_of(now) != rng.bits_of(begun):
            start["first"] = now

    def load(
        self, epochs: int | None, again: deque[Held], *, careful: bool
    ) -> tuple[list[Any], dict[str, Any] | None] | None:
        """A batch, in a list, and the generators' states before it was loaded, if loading drew from
        them and careful. Those in `again` are loaded with the generators as they were. None: there
        are no more epochs."""
        source = self._source
        while epochs is None or self.behind.data_epoch < epochs:
            now = rng.capture(source.generators) if source.late else None
            here = self.behind
            held = again[0] if again else None
            if held is not None and held.behind.data_epoch != here.data_epoch:
                held = None  # of the next epoch, if this one is at its end
            before = None
            if self._batches is None and self._opens is not None:
                self._opens()
            if self._batches is None and here.start is None:
                batch = self._load_first(held)
                if batch is _END:
                    raise ValueError("the loader gave no batch in a whole data epoch")
            else:
                if self._begun is not None:
                    self._first()
                if self._batches is None:
                    self._batches = self._open_again(here)
                if careful or held is not None:
                    batch, before = self._load_next(held)
                else:
                    batch = next(self._batches, _END)
                if batch is _END:
                    self.next_epoch()  # worker processes end here
                    continue
                state = source.state() if source.says_where else None
                self.behind = Position(here.data_epoch, here.batch + 1, here.start, state)
            if source.looks and self._made_late(here, now):
                self.go_to(here)
                continue
            if held is not None:
                again.popleft()
            return [batch], before
        return None

    def _open_again(self, here: Position) -> Iterator[Any]:
        if here.batch or self._opens is not None:
            return self._source.resume(here)
        with rng.unchanged(self._source.generators):
            return self._source.reopen(here)  # what the first batch draws was not drawn yet

    def _load_first(self, held: Held | None) -> Any:
        source, epoch = self._source, self.behind.data_epoch
        if held is None:
            self._batches, start = source.begin(self.behind)
            batch = next(self._batches, _END)
        else:
            start = held.behind.start or {}
            with rng.unchanged(source.generators):
                self._batches = source.reopen(Position(epoch, 0, start))
                batch = next(self._batches, _END)
        self.behind = Position(epoch, 1, start, source.state())
        return batch

    def _load_next(self, held: Held | None) -> tuple[Any, dict[str, Any] | None]:
        """And the generators' states before it was loaded, if loading drew from them."""
        assert self._batches is not None
        source = self._source
        if held is not None:
            with rng.unchanged(source.generators):
                if held.before is not None:
                    rng.restore(held.before, source.generators)
                return next(self._batches, _END), held.before
        before = self._watched.capture()
        batch = next(self._batches, _END)
        return batch, None if rng.same(before, self._watched.capture()) else before

    def _made_late(self, here: Position, now: dict[str, Any] | None) -> bool:
        """Looks for generators that were made while the batch was loaded. Returns whether it has to
        be loaded again: they have a stored state."""
        source = self._source
        source.looks -= 1
        new = {one.place for one in source.look()}
        known = new & source.late.keys()
        if not known or now is None:
            return False
        rng.restore(now, source.generators)
        started = here.start is not None and known <= here.start["generators"].keys()
        late = {place: source.late.pop(place) for place in known}
        if source.replays and not started:
            return False  # it was made in this epoch, and so it was now
        rng.set_states(late, source.generators)
        return True


# ---- copies of batches to a device, beside the training


class Transfer:
    """Copies one batch to a device while another one is trained on. Tensors are copied, also those
    in lists, tuples and dicts; everything else is left as it is.

    The copies run beside the training only from pinned memory: DataLoader(pin_memory=True).
    """

    def __init__(self, device: Any) -> None:
        """Raises: RuntimeError: torch knows no such device."""
        self._device = torch.device(device)
        self._stream: Any = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def start(self, batch: Any) -> Any:
        """The copy of a batch, which is under way."""
        if self._stream is None:
            return _map(batch, lambda one: one.to(self._device))
        with torch.cuda.stream(self._stream):
            return _map(batch, lambda one: one.to(self._device, non_blocking=True))

    def finish(self, batch: Any) -> Any:
        """The same batch, which what is computed from now on waits for."""
        if self._stream is None:
            return batch
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)

        def used_here(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:
                tensor.record_stream(current)
            return tensor

        return _map(batch, used_here)


def _map(batch: Any, change: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(one, change) for one in batch))
    if type(batch) in (list, tuple):
        return type(batch)(_map(one, change) for one in batch)
    if isinstance(batch, dict):
        return {key: _map(one, change) for key, one in batch.items()}
    return batch
