"""A DataLoader that Accelerate has prepared, opened anywhere.

Accelerate's loader takes one batch ahead, to know which is the last of its epoch: the Accelerator
then steps, however many batches it accumulates. So a batch is loaded one step before it is trained
on. Where loading draws numbers, a resume has to load it with those.

accelerate is not imported: only a program that uses it has such a loader.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from pmstore.torch._data.dataloader import MapLoader
from pmstore.torch._data.position import Position
from pmstore.torch._random import defaults as rng
from pmstore.torch.run_errors import AttachError

_END = object()


def is_prepared(loader: Any) -> bool:
    """Whether Accelerate made it. (Its loaders say that they are DataLoaders.)"""
    return type(loader).__module__ == "accelerate.data_loader"


class PreparedLoader(MapLoader):
    """Gives what the loader gives, and tells the Accelerator as it does which batch is the last.

    Attributes:
        prepared: Accelerate's loader.
        counted: whether the run keeps how many batches the Accelerator has accumulated.
    """

    says_where = True
    """Of the batch that was taken ahead: see `state`."""

    def __init__(self, loader: Any) -> None:
        """Raises: TypeError: it is of a kind whose place cannot be kept."""
        if why := _unfit(loader):
            raise TypeError(f"the prepared loader {why}")
        self.counted = False
        self.prepared: Any = loader
        self._sampler: Any = seedable_sampler(loader)
        super().__init__(loader.base_dataloader)
        self._watched = rng.Watched(self)
        self._taken: Any = None  # the generators before the batch taken ahead was loaded
        self._resumed: Any = None
        self._state: Any = None  # the last one that was told

    def state(self) -> dict[str, Any]:
        seed = None if self._sampler is None else self._sampler.initial_seed
        last = self._state
        if last is None or last["ahead"] is not self._taken or last["seed"] != seed:
            self._state = {"ahead": self._taken, "seed": seed}
        return self._state  # type: ignore[no-any-return]

    def begin(self, position: Position) -> tuple[Iterator[Any], dict[str, Any]]:
        self._adopt(position)
        return super().begin(position)

    def reopen(self, position: Position) -> Iterator[Any]:
        accumulation = self.prepared.gradient_state
        whole = accumulation.sync_with_dataloader  # each epoch begins to count anew
        if (
            not self.counted
            and accumulation.num_steps > 1
            and (position.batch % accumulation.num_steps or not whole)
        ):
            raise AttachError(
                f"the run goes on after batch {position.batch} of a data epoch, amid "
                f"{accumulation.num_steps} that the Accelerator accumulates, and it would count "
                "from 0: write pmstore.integrations.accelerate.register(accelerator, run) before "
                "run.batches()"
            )
        self._adopt(position)
        self._resumed = position.state and position.state["ahead"]
        return super().reopen(position)

    def _adopt(self, position: Position) -> None:
        """The order is drawn from the sampler's seed, which is the first process's."""
        if self._sampler is not None and position.state:
            self._sampler.initial_seed = position.state["seed"]

    def open(self, skip: int, start: dict[str, Any]) -> Iterator[Any]:
        self.prepared.set_epoch(self.data_epoch)
        if self._sampler is not None:
            self._sampler.set_epoch(self.data_epoch)
        if self.prepared.rng_types is not None:
            from accelerate.utils import synchronize_rng_states

            synchronize_rng_states(self.prepared.rng_types, self.prepared.synchronized_generator)
        resumed, self._resumed = self._resumed, None
        return self._ahead(super().open(skip, start), resumed)

    def _ahead(self, batches: Iterator[Any], resumed: Any) -> Iterator[Any]:
        """Gives batches as the prepared loader's own iterator does. resumed: the generators before
        the first batch was loaded that was taken ahead."""
        from accelerate.utils import send_to_device

        loader = self.prepared
        loader.begin()
        try:
            if resumed is None:
                batch = next(batches, _END)
            else:
                with rng.unchanged(self.generators):
                    rng.restore(resumed, self.generators)
                    batch = next(batches, _END)
            while batch is not _END:
                if loader.device is not None:
                    batch = send_to_device(batch, loader.device, non_blocking=loader._non_blocking)
                before = self._watched.capture()
                ahead = next(batches, _END)
                drew = not rng.same(before, self._watched.capture())
                self._taken = before if drew and ahead is not _END else None
                loader.end_of_dataloader = ahead is _END
                given = [batch]
                batch = ahead
                del ahead
                yield given.pop()  # the program alone says how long it lives
        finally:
            loader.end()


def seedable_sampler(loader: Any) -> Any:
    """Accelerate's sampler that draws its order from a seed and the epoch's number; None: the
    loader has another one."""
    kind = getattr(sys.modules.get("accelerate.data_loader"), "SeedableRandomSampler", ())
    one = loader.batch_sampler
    for _ in range(4):
        if one is None or isinstance(one, kind):
            break
        one = getattr(one, "sampler", None) or getattr(one, "batch_sampler", None)
    if not isinstance(one, kind):
        return None
    if one.generator is None:  # it makes one when it is first iterated
        one.generator = torch.Generator()
    return one


def _unfit(loader: Any) -> str:
    """Why the place of a prepared loader cannot be kept; "": it can."""
    kind = type(loader).__name__
    if kind == "DataLoaderDispatcher":
        return (
            "is a DataLoaderDispatcher, whose first process reads for all: let each read its own, "
            "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))"
        )
    if kind != "DataLoaderShard":
        return f"is a {kind}: give the one that accelerator.prepare returned"
    if loader.use_stateful_dataloader:
        return (
            "is over a StatefulDataLoader, and the run keeps the place itself: leave out "
            "use_stateful_dataloader"
        )
    if loader.skip_batches or type(loader.batch_sampler).__name__ == "SkipBatchSampler":
        return "skips batches: give the whole one, as run.batches() skips those trained on"
    base: DataLoader[Any] = loader.base_dataloader
    if isinstance(base.dataset, IterableDataset):
        return (
            "is over an IterableDataset: give attach the DataLoader itself, which is not prepared, "
            "and move batches by accelerator.prepare's device; or a data set with indices"
        )
    if isinstance(base.sampler, BatchSampler):
        return "has a batch sampler as its sampler: give it as batch_sampler="
    return ""
