"""Where a run is in its data, and how it gets there again.

The order of a data epoch (in this file: of an epoch) is a function of the generators' states at
its start. So that state is stored once an epoch, with the number of batches taken, and resuming is:
set the generators back, open the loader, skip, set the generators to where the run is. What is
skipped is not loaded, where the loader draws indices first (a map-style `DataLoader`) or is a
sequence.

Three things of `torch.utils.data` would make the same order come out differently after a resume,
and are done otherwise here:

- Random transforms in worker processes depend on which batches a worker has seen. Here each batch
  has a seed of its own.
- With `persistent_workers` a second epoch draws one number less than a first. Here each epoch has
  new workers.
- A sampler that goes on drawing from the default generator while the epoch runs gets other numbers
  when nothing is trained in between. Here everything after the first draw comes from a stream that
  belongs to the loader.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from pmstore.torch import rng

_DRAW_ONCE = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
"""Samplers that take what they need from the default generators before their first index."""


@dataclass(slots=True)
class Position:
    """Batches taken of an epoch, and the generators' states at its start (None: it has not
    started)."""

    data_epoch: int = 0
    batch: int = 0
    start: dict[str, Any] | None = None


class Source:
    """A loader that can be opened anywhere. This one consumes what it skips: it suits all that
    iterates again."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.generators: list[torch.Generator] = []
        self.data_epoch = 0  # that was opened last
        self.begun: int | None = None  # a data epoch whose first batch was trained in part

    def replace_batches(self, wrap: Callable[[Any], Any]) -> None:
        """Its batch sampler is wrapped from now on, where it has one that indices come from."""

    def length(self) -> int | None:
        """Batches of an epoch; None: not known, as of a DataLoader over an IterableDataset."""
        try:
            return len(self.loader) if isinstance(self.loader, Sized) else None
        except TypeError:
            return None

    def open_at(self, position: Position) -> Iterator[Any]:
        """The batches of the position's epoch that are left. Sets its start if it is a new epoch.

        The default generators, and the loader's, come out as they went in, but for a new epoch's
        own draws.
        """
        self.data_epoch = position.data_epoch
        if position.batch == 0 and self.begun != position.data_epoch:
            position.start = rng.capture(self.generators)
            return self.open(0, position.start)
        assert position.start is not None
        now = rng.capture(self.generators)
        rng.restore(position.start, self.generators)
        try:
            return self.open(position.batch, position.start)
        finally:
            rng.restore(now, self.generators)

    def open(self, skip: int, start: dict[str, Any]) -> Iterator[Any]:
        """The batches of one epoch after the first `skip`. The generators are in the state `start`
        now."""
        iterator = iter(self.loader)
        end = object()
        if skip == 0:
            return self._stream(iterator, None)
        first = next(iterator, end)
        stream = rng.capture()
        with rng.isolated(stream):
            for _ in range(skip - 1):
                if first is end or next(iterator, end) is end:
                    break
        return self._stream(iterator, stream)

    @staticmethod
    def _stream(iterator: Iterator[Any], stream: dict[str, Any] | None) -> Iterator[Any]:
        end = object()
        while True:
            if stream is None:
                batch = next(iterator, end)
                stream = rng.capture()
            else:
                with rng.isolated(stream):
                    batch = next(iterator, end)
            if batch is end:
                return
            yield batch


class _Sequence(Source):
    """A list of batches, or anything with len and []: what is skipped is not touched."""

    loader: Sequence[Any]

    def open(self, skip: int, start: dict[str, Any]) -> Iterator[Any]:
        return (self.loader[index] for index in range(skip, len(self.loader)))


class _Loader(Source):
    """A DataLoader over an IterableDataset: it has no indices to skip."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(_clone(loader))
        self.generators = _generators(loader)


class _MapLoader(Source):
    """A DataLoader over a map-style dataset: skipped batches are only counted."""

    loader: DataLoader[Any]

    def __init__(self, loader: DataLoader[Any]) -> None:
        clone = _clone(loader)
        table = clone.__dict__
        self._slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._indices = table[self._slot]
        if loader.num_workers:
            table["dataset"] = _Seeded(loader.dataset)
        super().__init__(clone)
        self.generators = _generators(loader)
        inner = (
            getattr(self._indices, "sampler", None)
            if type(self._indices) is BatchSampler
            else self._indices
        )
        self._draws_once = type(inner) in _DRAW_ONCE

    def replace_batches(self, wrap: Callable[[Any], Any]) -> None:
        self._indices = wrap(self._indices)

    def open(self, skip: int, start: dict[str, Any]) -> Iterator[Any]:
        seeded = self.loader.num_workers > 0
        stream = _Indices(self._indices, skip, _digest(start) if seeded else None, self._draws_once)
        self.loader.__dict__[self._slot] = stream
        iterator = iter(self.loader)
        if skip or self.begun == self.data_epoch:
            # Now, while the generators are those of the epoch's start. (With workers it is done
            # already: they have asked for their first indices.)
            stream.ahead()
        return iterator


def _clone(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy with new workers each epoch, and other samplers if need be: DataLoader refuses to have
    its own set, and a subclass keeps what it overrides."""
    clone = copy.copy(loader)
    clone.__dict__.update(persistent_workers=False, _iterator=None)
    return clone


class _Indices:
    """Stands in a DataLoader for its (batch) sampler, for one epoch: skips, numbers and isolates
    the draws."""

    def __init__(
        self, sampler: Iterable[Any], skip: int, seed: bytes | None, draws_once: bool
    ) -> None:
        self._sampler = sampler
        self._to_skip = skip
        self._seed = seed
        self._draws_once = draws_once
        self._number = 0
        self._stream: dict[str, Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._drawn: list[Any] = []  # ahead

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # as the sampler's own: TypeError if it has none

    def __iter__(self) -> Iterator[Any]:
        return self  # DataLoader's iterators ask twice, before the first index

    def __next__(self) -> Any:
        if self._drawn:
            return self._drawn.pop()
        self.skip()
        number = self._number
        item = self._draw()
        return item if self._seed is None else (self._seed_of(number), item)

    def ahead(self) -> None:
        """Skips now; where nothing is to be skipped, draws what comes next now."""
        if self._to_skip:
            self.skip()
        elif not self._number:
            self._drawn = list(itertools.islice(self, 1))

    def skip(self) -> None:
        while self._to_skip:
            self._to_skip -= 1
            try:
                self._draw()
            except StopIteration:
                self._to_skip = 0

    def _draw(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._sampler)
        if self._draws_once or self._number == 0:
            item = next(self._iterator)
        else:
            assert self._stream is not None
            with rng.isolated(self._stream):
                item = next(self._iterator)
        self._number += 1
        if not self._draws_once and self._stream is None:
            self._stream = rng.capture()
        return item

    def _seed_of(self, number: int) -> int:
        assert self._seed is not None
        digest = hashlib.blake2b(
            number.to_bytes(8, "little"), key=self._seed, digest_size=8
        ).digest()
        return int.from_bytes(digest, "little") >> 1


class _Seeded(Dataset[Any]):
    """A dataset that, in a worker, seeds the generators for each batch. All other attributes are
    the dataset's own."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        object.__setattr__(self, "_pmstore_dataset", dataset)

    def __getitem__(self, index: tuple[int, Any]) -> Any:
        seed, item = index
        _seed_all(seed)
        return self._pmstore_dataset[item]

    def __getitems__(self, batch: tuple[int, list[Any]]) -> Any:
        seed, indices = batch
        _seed_all(seed)
        dataset = self._pmstore_dataset
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__(indices)
        return [dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self._pmstore_dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_pmstore_") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # while it is unpickled in a spawned worker
        return getattr(self._pmstore_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._pmstore_dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Seeded, (self._pmstore_dataset,)


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _digest(start: dict[str, Any]) -> bytes:
    """32 bytes that name the epoch's start: the same after a resume, different from epoch to
    epoch."""
    digest = hashlib.blake2b(start["torch"].numpy().tobytes(), digest_size=32)
    for state in start["generators"]:
        digest.update(state.numpy().tobytes())
    return digest.digest()


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Generators that the loader and its samplers draw from, each once."""
    found: list[torch.Generator] = []
    holder: Any = loader
    for holder in (
        loader,
        loader.sampler,
        loader.batch_sampler,
        getattr(loader.batch_sampler, "sampler", None),
    ):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is one for one in found):
            found.append(generator)
    return found


def open_source(loader: Iterable[Any]) -> Source:
    """The source for a loader.

    Raises:
        TypeError: it cannot be iterated, or only once.
    """
    if isinstance(loader, DataLoader):
        return (
            _Loader(loader) if isinstance(loader.dataset, IterableDataset) else _MapLoader(loader)
        )
    if isinstance(loader, Sequence) and not isinstance(loader, (str, bytes)):
        return _Sequence(loader)
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
    return Source(loader)
