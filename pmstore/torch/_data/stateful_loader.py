"""A loader that says itself where it is, by `state_dict`: nothing is gone through again."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from pmstore.torch._data.batch_source import Source
from pmstore.torch._data.position import Position
from pmstore.torch._random import defaults as rng
from pmstore.torch.run_errors import AttachError


class StatefulLoader(Source):
    """torchdata's StatefulDataLoader, or an object of the program's own. It is used as it is given,
    with its own workers."""

    replays = False
    says_where = True
    asks = False
    loader: Any

    def __init__(self, loader: Any, holders: dict[str, Any]) -> None:
        """Raises: AttachError: its state would not say where it is."""
        _refuse_stateless(loader)
        super().__init__(loader, holders)
        self._first: Any = None  # its state before anything was read from it
        self._at: Any = None  # its state, if that is known: the object of a position

    def state(self) -> Any:
        self._at = copy.deepcopy(self.loader.state_dict())
        return self._at

    def begin(self, position: Position) -> tuple[Iterator[Any], dict[str, Any]]:
        self.follow()
        start = rng.capture(self.generators)
        start["loader"] = position.state
        self.data_epoch: int = position.data_epoch
        if self._first is None and position.state is None:
            self._first = self.state()  # may make the iterator that is taken next, and draw for it
        self.opened = True
        return self._open(position.state), start

    def reopen(self, position: Position) -> Iterator[Any]:
        assert position.start is not None
        self.data_epoch = position.data_epoch
        rng.restore(position.start, self.generators)
        self.opened = True
        if position.batch == 0:
            return self._open(position.start["loader"])
        self._remember()
        self._load(position.state)
        batches: Iterator[Any] = iter(self.loader)
        return batches

    def _open(self, state: Any) -> Iterator[Any]:
        """A new epoch; state: that the epoch before left, None: there was none."""
        self._remember()
        wanted = self._first if state is None else state
        if wanted is not self._at:
            if isinstance(self.loader, DataLoader):
                # What it loads is an iterator at the end of the epoch before.
                with rng.unchanged(self.generators):
                    self._load(wanted)
                    iter(self.loader)
            else:
                self._load(wanted)
        self._at = None
        batches: Iterator[Any] = iter(self.loader)
        return batches

    def _remember(self) -> None:
        if self._first is None:
            with rng.unchanged(self.generators):
                self._first = self.state()

    def _load(self, state: Any) -> None:
        self._at = None
        self.loader.load_state_dict(copy.deepcopy(state))


def _refuse_stateless(loader: Any) -> None:
    """torchdata reads again what a data set without a state has given, from one that is as new; and
    counts what it reads again twice, so that the second resume is at a wrong place."""
    data = getattr(loader, "dataset", None)
    if (
        isinstance(loader, DataLoader)
        and isinstance(data, IterableDataset)
        and not hasattr(data, "state_dict")
        and inspect.isgeneratorfunction(type(data).__iter__)
    ):
        raise AttachError(
            f"{type(loader).__name__} cannot say where its data set is: "
            f"{type(data).__qualname__} has no state_dict() and load_state_dict(). Give it these; "
            "or give a plain torch.utils.data.DataLoader, which is gone through again"
        )
