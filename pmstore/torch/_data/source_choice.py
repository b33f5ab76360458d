"""Which source suits a loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from pmstore.torch._data.accelerate_loader import PreparedLoader, is_prepared
from pmstore.torch._data.batch_source import SequenceSource, Source
from pmstore.torch._data.dataloader import MapLoader, clone_of, holders_of, reads_ahead
from pmstore.torch._data.stateful_loader import StatefulLoader
from pmstore.torch._state.stateful import is_stateful


def open_source(loader: Iterable[Any]) -> Source:
    """The source for a loader.

    Raises:
        TypeError: it cannot be iterated, or only once. AttachError: it may read ahead, with
            generators that the run keeps.
    """
    if is_prepared(loader):
        return PreparedLoader(loader)
    if is_stateful(loader):
        own = {"loader": loader}
        return StatefulLoader(loader, holders_of(loader) if isinstance(loader, DataLoader) else own)
    if isinstance(loader, DataLoader):
        if isinstance(loader.dataset, IterableDataset):
            # It has no indices to skip. Its workers are new ones each epoch, also with
            # `persistent_workers`: nothing tells what they would have become in the epochs before.
            source = Source(clone_of(loader, persistent=False), holders_of(loader))
            other = type(loader).__iter__ is not DataLoader.__iter__
            if other and not loader.num_workers and source.draws():
                raise reads_ahead(loader)  # or may: nothing tells how far its data set was read
            return source
        return MapLoader(loader)
    if isinstance(loader, Sequence) and not isinstance(loader, (str, bytes)):
        plain = type(loader) in (list, tuple, range)
        return SequenceSource(loader, {} if plain else {"loader": loader})
    if isinstance(loader, Iterator):
        raise TypeError(
            "loader is an iterator, which can be gone through once: give what it was made from, or "
            "a list of batches"
        )
    if not isinstance(loader, Iterable):
        raise TypeError(
            f"loader is a {type(loader).__name__}, which cannot be iterated: give a DataLoader or "
            "a list of batches"
        )
    return Source(loader, {"loader": loader})
