"""Keeps the Trainer's data: a data epoch that a kill cut off comes again as it was.

The Trainer counts its place itself: on a resume it takes the epoch and the batches to skip from the
number of steps. What it does not keep is what the order and the batches are drawn from. So the
generators' states at the epoch's start are stored, and are set again before the epoch is opened
anew. Batches are loaded before the step begins that they are trained in, the next one by look-ahead
too: where loading them drew numbers, the states before it are stored for those that were loaded and
not trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import DataLoader, IterableDataset

from pmstore.torch._data.accelerate_loader import seedable_sampler
from pmstore.torch._data.batch_source import Source
from pmstore.torch._data.dataloader import MapLoader, holders_of
from pmstore.torch._random import defaults as rng
from pmstore.torch.run_errors import AttachError

_LOOKS = 16
"""Batches after which generators are looked for that were made while one was loaded. (To look takes
milliseconds.)"""


class TrainerData:
    """Watches the loader that the Trainer iterates. An object with a state, for `attach`.

    Attributes:
        updates: optimizer steps of a data epoch; None: the data set has no length.
        trained: batches of the data epoch under way that were trained on.
    """

    def __init__(self, loader: Any, accumulation: int) -> None:
        """Changes the loader: its base loader becomes another one over the same data.

        Raises: AttachError: it is of a kind whose place the Trainer cannot come back to.
        """
        if not isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)):
            raise AttachError(
                f"the Trainer's train_dataloader is a {type(loader).__name__}, and its place "
                "cannot be kept: let the Trainer make it, of a train_dataset"
            )
        base: DataLoader[Any] = loader.base_dataloader
        self._iterable = isinstance(base.dataset, IterableDataset)
        if isinstance(loader, DataLoaderDispatcher) and not self._iterable:
            raise AttachError(
                "dispatch_batches=True with a data set that has indices: on a resume accelerate "
                "would skip too few batches. Leave it out of accelerator_config"
            )
        if loader.use_stateful_dataloader:
            raise AttachError(
                "use_stateful_dataloader=True: the Trainer skips batches itself on a resume, so "
                "leave it out of accelerator_config"
            )
        self.trained: int = 0
        self._accumulation = accumulation
        self._workers = base.num_workers > 0
        self._seedable = seedable_sampler(loader)
        if self._iterable:
            self._source: Source = Source(base, holders_of(base))
            # DataLoader refuses to have its own set
            base.__dict__["batch_sampler"] = _Asked(base.batch_sampler, self._drawn)
        else:
            self._source = source = MapLoader(base)
            source.watch(self._drawn)
            loader.base_dataloader = base = source.loader
        if not self._workers:
            base.collate_fn = _Collate(base.collate_fn, self)
        try:
            length = len(loader)
        except TypeError:
            length = None
        self.updates: int | None = (
            None if length is None else max(math.ceil(length / accumulation), 1)
        )
        self._epoch: int | None = None
        self._start: dict[str, Any] = {}
        self._watched = rng.Watched(self._source)
        self._before: dict[str, Any] | None = None  # the batch that is being loaded
        self._number = 0  # of that batch
        self._looks = _LOOKS
        self._drew: dict[int, dict[str, Any]] = {}  # states before batches whose loading drew
        self._again: dict[int, dict[str, Any]] = {}  # of those that were loaded before a kill
        self._late: dict[str, Any] = {}  # states of generators that are not there yet
        self._stored: dict[str, Any] | None = None  # that the next epoch goes on from

    @property
    def description(self) -> dict[str, Any]:
        """The settings that the order of the data depends on."""
        base = self._source.loader
        assert isinstance(base, DataLoader)
        found: dict[str, Any] = {"dataloader_num_workers": base.num_workers}
        try:
            found["length of the data set"] = len(base.dataset)  # type: ignore[arg-type]
        except TypeError:
            found["length of the data set"] = None
        return found

    # ---- a data epoch

    def begin(self, step: int) -> None:
        """Begins an epoch of the Trainer. step: optimizer steps until now.

        Raises: AttachError: the Trainer could not come back into it.
        """
        if self._epoch is None:
            self._epoch = step // self.updates if self.updates is not None else 0
        else:
            self._epoch += 1
            first = self._epoch * self.updates if self.updates is not None else -1
            if step != first:
                raise AttachError(self._no_way_back(step))
        stored, self._stored = self._stored, None
        source = self._source
        source.data_epoch = self._epoch
        self._drew, self._again, self._number = {}, {}, -1
        if stored is None or stored["epoch"] != self._epoch:
            self._start = rng.capture(source.generators)
        else:
            self._start = stored["start"]
            there = {one.place for one in source.generators}
            self._late = {at: one for at, one in stored["now"].items() if at not in there}
            if at := next((at for at in self._late if not at.startswith("collate_fn")), None):
                raise AttachError(
                    f"a generator of the data is not there after a resume: {at}. Make it in "
                    "__init__, and not when data is first read"
                )
            rng.restore(self._start, source.generators)
            self._again = dict(stored["loaded"])
            self._drew = dict(self._again)
        if self._seedable is not None:
            # accelerate does not reach it behind a sampler that skips, on several ranks
            self._seedable.set_epoch(self._epoch)
        if isinstance(source, MapLoader):
            source.prepare(0, self._start)

    def _no_way_back(self, step: int) -> str:
        if self.updates is None:
            return (
                f"the data set has no length and came to its end after step {step}. The Trainer "
                "begins it anew, and could not come back into a second pass after a kill: let the "
                "data set repeat itself (dataset.repeat() of datasets, or a loop in __iter__), "
                "or give it __len__"
            )
        return (
            f"data epoch {self._epoch} begins after step {step}, and not after step "
            f"{(self._epoch or 0) * self.updates}: something ended the epoch before early "
            "(control.should_epoch_stop). The Trainer takes its place in the data from the number "
            "of steps, so it could not come back after a kill"
        )

    def finish(self, step: int) -> None:
        """Sets the state that is to be stored: after so many steps, all of this epoch's batches
        that were loaded until now being ahead, but for those that were trained on."""
        if self._epoch is None:
            return
        first = self._epoch * self.updates if self.updates is not None else 0
        self.trained = (step - first) * self._accumulation
        for number in [one for one in self._drew if one < self.trained]:
            del self._drew[number]

    # ---- one batch

    def _drawn(self, number: int) -> None:
        """Notes that a batch's indices were drawn. Without workers the batch is loaded next."""
        if self._workers:
            return
        self._number = number
        if number in self._again:
            rng.restore(self._again[number], self._source.generators)
        self._before = self._watched.capture()

    def loaded_anew(self) -> bool:
        """Returns whether the batch has to be made again: after a resume, a generator that it draws
        from was made only while the batch was made."""
        if not self._late:
            return False
        self._source.look()
        there = {one.place for one in self._source.generators}
        if made := [place for place in self._late if place in there]:
            # where it was before this batch, or before the next one that drew
            behind = [number for number in sorted(self._again) if number >= self._number]
            states = self._again[behind[0]]["generators"] if behind else self._late
            for place in made:
                del self._late[place]
            rng.set_states(states, self._source.generators)
            if behind[:1] == [self._number]:
                rng.restore(self._again[self._number], self._source.generators)
        return bool(made)

    def loaded(self) -> None:
        """Notes that a batch was loaded, and what the generators were before it if it drew from
        them. Raises: AttachError: a batch of an IterableDataset drew from generators that training
        draws from."""
        before, self._before = self._before, None
        if before is None:
            return  # it is of a loader that the Trainer has made to skip
        if self._looks:
            self._looks -= 1
            self._source.look()
        if self._number in self._again:
            del self._again[self._number]
        elif not rng.same(before, self._watched.capture()):
            if self._iterable:
                raise AttachError(
                    "loading a batch of an IterableDataset draws numbers from the generators that "
                    "training draws from, so that batches that are read again after a kill would "
                    "be others: load in a process of its own, "
                    "TrainingArguments(dataloader_num_workers=1)"
                )
            self._drew[self._number] = before

    # ---- stored with each step

    def state_dict(self) -> dict[str, Any]:
        now = rng.states_of(self._source.generators)
        loaded = sorted(self._drew.items())
        seed = None if self._seedable is None else self._seedable.initial_seed
        return {
            "epoch": self._epoch,
            "start": self._start,
            "amid": self.trained > 0,
            "loaded": loaded,
            "now": now,
            "seed": seed,
        }

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._stored = state
        if self._seedable is not None and state["seed"] is not None:
            self._seedable.initial_seed = state["seed"]
        self._now = state["now"]

    def put_back(self) -> None:
        """Sets the loader's own generators to where they were at the commit."""
        rng.set_states(self._now, self._source.generators)


class _Collate:
    """Stands for a loader's collate_fn, and says when a batch is loaded."""

    def __init__(self, collate: Callable[[Any], Any], data: TrainerData) -> None:
        self._collate = collate
        self._data = data

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        if self._data.loaded_anew():
            batch = self._collate(samples)
        self._data.loaded()
        return batch


class _Asked:
    """Stands for a loader's batch sampler, and says when indices are drawn. Other attributes are
    its own."""

    def __init__(self, sampler: Any, drawn: Callable[[int], None]) -> None:
        self._sampler = sampler
        self._drawn = drawn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[Any]:
        for number, indices in enumerate(self._sampler):
            self._drawn(number)
            yield indices
