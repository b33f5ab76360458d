"""A DataLoader over a map-style dataset, opened anywhere: skipped batches are only counted.

It draws indices first, so what is skipped is not loaded. Two things of `torch.utils.data` would
make the same epoch come out differently after a resume, and are done otherwise here:

- Random transforms in worker processes depend on which batches a worker has seen. Here each batch
  has a seed of its own, for the default generators and those that the dataset holds.
- A sampler that goes on drawing from the default generators while the epoch runs gets other numbers
  when nothing is trained in between. Here everything after the first draw comes from a stream that
  belongs to the loader.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from pmstore.torch._data.batch_source import Source, batches_again
from pmstore.torch._data.worker_seeds import Seeded
from pmstore.torch._random import defaults as rng
from pmstore.torch.run_errors import AttachError

_DRAW_ONCE = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
"""Samplers that take what they need from the default generators before their first index."""


class MapLoader(Source):
    loader: DataLoader[Any]
    replays = False

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._persistent = loader.persistent_workers and loader.num_workers > 0
        clone = clone_of(loader, self._persistent)
        slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = clone.__dict__[slot]
        inner = getattr(sampler, "sampler", None) if type(sampler) is BatchSampler else sampler
        self._indices = clone.__dict__[slot] = _Indices(sampler, type(inner) in _DRAW_ONCE)
        if loader.num_workers:
            clone.__dict__["dataset"] = Seeded(
                loader.dataset,
                {"collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn},
            )
        super().__init__(clone, holders_of(loader))

    def open(self, skip: int, start: dict[str, Any]) -> Iterator[Any]:
        self.prepare(skip, start)
        if skip and not self._iterates_as_torch:
            self._begin_now()
        iterator = iter(self.loader)
        if skip:
            if not self.loader.num_workers:
                self.first_draw(start)
            # Now, while the generators are those of the epoch's start. (With workers it is done
            # already: they have asked for their first indices.)
            self._indices.skip()
        if self._iterates_as_torch or self.loader.num_workers:
            return iterator  # workers have generators of their own
        return self._in_turn(iterator, skip)

    @property
    def _iterates_as_torch(self) -> bool:
        return type(self.loader).__iter__ is DataLoader.__iter__

    @property
    def _at_once(self) -> tuple[str, ...]:
        """Where the generators are that an epoch draws from before its first batch alone."""
        return ("generator", "sampler", "batch_sampler") if self._indices.draws_once else ()

    def _begin_now(self) -> None:
        """The iterator of torch that the loader's own loop asks for is made now, and not when that
        loop begins to run: it draws a number, as it did at the epoch's start."""
        made = [self.loader._get_iterator()]

        def get_iterator() -> Any:
            del self.loader.__dict__["_get_iterator"]
            return made.pop()

        self.loader.__dict__["_get_iterator"] = get_iterator

    def _in_turn(self, iterator: Iterator[Any], skip: int) -> Iterator[Any]:
        """The batches of a loader that iterates in a way of its own.

        Raises: AttachError: it reads ahead, with generators that the run keeps.
        """
        for number, batch in enumerate(iterator, skip):
            if self._indices.ran_ahead(number) and self.draws(self._at_once):
                raise reads_ahead(self.loader)
            given = [batch]
            del batch  # the program alone says how long it lives
            yield given.pop()

    def prepare(self, skip: int, start: dict[str, Any]) -> None:
        """What `loader` gives when it is iterated next are the batches of an epoch that begins in
        the state `start`, after the first `skip`."""
        seed = None
        self.loader.__dict__.pop("_get_iterator", None)
        if self.loader.num_workers:
            # With workers that live on, a sampler that draws nothing leaves every start the same.
            seed = _digest(start, self.data_epoch if self._persistent else None)
        self._indices.begin(skip, seed, self._before_first())

    def watch(self, drawn: Callable[[int], None]) -> None:
        """drawn: called with a batch's number in its epoch once its indices are drawn. Without
        workers it is loaded next."""
        self._indices.watch = drawn

    def draw_first(self) -> None:
        self._indices.draw_first()

    def replace_batches(self, wrap: Callable[[Any], Any]) -> None:
        self._indices.wrapped = wrap(self._indices.wrapped)

    def _before_first(self) -> Callable[[], None] | None:
        """Iterators draw one number for their workers' seed; those that live on draw it in their
        first epoch. Here they do in the run's first, in whichever they were started."""
        if not self._persistent:
            return None
        draws = self.data_epoch == 0
        fresh = self.loader._iterator is None
        if draws and not fresh:
            torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
        if draws or not fresh:
            return None
        drawn: torch.Generator = self.loader.generator or torch.default_generator
        state = drawn.get_state()

        def as_before() -> None:
            drawn.set_state(state)

        return as_before

    def close(self) -> None:
        iterator, self.loader._iterator = self.loader._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]  # of several processes


def reads_ahead(loader: DataLoader[Any]) -> AttachError:
    return AttachError(
        f"{type(loader).__qualname__} loads batches before they are asked for, in a thread or a "
        "loop of its own, and its data set or sampler draws from a generator, which would be "
        "stored ahead of the batch that is trained on. Give a plain DataLoader: with num_workers=1 "
        "it loads ahead, and each batch has a seed of its own"
    )


def clone_of(loader: DataLoader[Any], persistent: bool) -> DataLoader[Any]:
    """A copy with workers of its own, and other samplers if need be: DataLoader refuses to have its
    own set, and a subclass keeps what it overrides."""
    clone = copy.copy(loader)
    clone.__dict__.update(persistent_workers=persistent, _iterator=None)
    return clone


def holders_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The objects that a loader draws with, by the names of its arguments. Samplers hold datasets:
    what both hold is the dataset's."""
    return {
        "generator": loader.generator,
        "dataset": loader.dataset,
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
        "sampler": loader.sampler,
        "batch_sampler": loader.batch_sampler,
    }


class _Indices:
    """Stands in a DataLoader for its (batch) sampler: skips, numbers and isolates the draws of one
    epoch after the other. Other attributes are the sampler's own."""

    def __init__(self, sampler: Iterable[Any], draws_once: bool) -> None:
        self.wrapped = sampler
        self.watch: Callable[[int], None] | None = None
        self.draws_once = draws_once
        self.begin(0, None, None)

    def begin(self, skip: int, seed: bytes | None, before: Callable[[], None] | None) -> None:
        """A new epoch; before: called before its first draw."""
        self._to_skip = skip
        self._seed = seed
        self._before = before
        self._number = 0
        self._thread = get_ident()
        self._stream: rng.Stream | None = None
        self._iterator: Iterator[Any] | None = None
        self._drawn: list[Any] = []  # before it was asked for

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __len__(self) -> int:
        return len(self.wrapped)  # type: ignore[arg-type]  # as the sampler's own: TypeError if it has none

    def __iter__(self) -> Iterator[Any]:
        return self  # DataLoader's iterators ask twice, before the first index

    def __next__(self) -> Any:
        if self._drawn:
            return self._drawn.pop()
        if self._to_skip:
            self.skip()
        number = self._number
        item = self._draw()
        return item if self._seed is None else (self._seed_of(number), item)

    def draw_first(self) -> None:
        if not self._number:
            self._drawn = list(itertools.islice(self, 1))

    def ran_ahead(self, number: int) -> bool:
        """Whether more indices were drawn than of this batch, or in another thread."""
        return self._number > number + 1 or self._thread != get_ident()

    def skip(self) -> None:
        for _ in batches_again(self._to_skip):
            self._to_skip -= 1
            try:
                self._draw()
            except StopIteration:
                self._to_skip = 0
                break

    def _draw(self) -> Any:
        if self._iterator is None:
            if self._before is not None:
                self._before()
            self._iterator = iter(self.wrapped)
        self._thread = get_ident()
        if self.draws_once or self._number == 0:
            item = next(self._iterator)
        else:
            assert self._stream is not None
            with self._stream:
                item = next(self._iterator)
        self._number += 1
        if not self.draws_once and self._stream is None:
            self._stream = rng.Stream()
        if self.watch is not None:
            self.watch(self._number - 1)
        return item

    def _seed_of(self, number: int) -> int:
        assert self._seed is not None
        digest = hashlib.blake2b(
            number.to_bytes(8, "little"), key=self._seed, digest_size=8
        ).digest()
        return int.from_bytes(digest, "little") >> 1


def _digest(start: dict[str, Any], data_epoch: int | None) -> bytes:
    """32 bytes that name the epoch's start: the same after a resume, different from epoch to
    epoch."""
    digest = hashlib.blake2b(start["torch"].numpy().tobytes(), digest_size=32)
    for state in start["generators"].values():
        if isinstance(state, torch.Tensor):
            digest.update(state.numpy().tobytes())
    if data_epoch is not None:
        digest.update(data_epoch.to_bytes(8, "little"))
    return digest.digest()
