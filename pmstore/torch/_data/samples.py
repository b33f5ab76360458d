"""A place in the data that is kept in samples, for another batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from pmstore import Store
from pmstore.torch._data.batch_source import Source
from pmstore.torch._data.position import Position
from pmstore.torch._state.stateful import is_stateful
from pmstore.torch.run_errors import AttachError
from pmstore.torch.settings import Settings

Cut = tuple[int, int, int]
"""Of which data epoch, of which batch in it, how many samples at its begin were trained before."""


def keep_samples(
    store: Store, path: str, position: Position, before: Settings, loader: Any
) -> Position:
    """The place for the given loader, whose batches have another size than before. If it lies in
    the middle of a batch, `<path>/cut` says so; pending until the next commit.

    Raises:
        AttachError: samples cannot be counted in the loader, or could not be in the one before.
    """
    old, every = before.get("batch_size"), before.get("samples of a data epoch")
    if not _counts(loader) or not isinstance(old, int) or not isinstance(every, int):
        raise AttachError(
            'Resume(batch_size="samples") takes a DataLoader over a map-style data set, with a '
            'batch_size, without a batch sampler of its own or a state_dict. Resume(data="next '
            'epoch") skips what is left of the data epoch'
        )
    done = position.batch * old
    cut = read_cut(store, path)
    if cut is not None and cut[:2] == (position.data_epoch, position.batch):
        done += cut[2]
    if done >= every:
        return Position(position.data_epoch, len(loader), position.start)
    batch, inside = divmod(done, loader.batch_size)
    store[f"{path}/cut"] = [position.data_epoch, batch, inside]
    return Position(position.data_epoch, batch, position.start)


def read_cut(store: Store, path: str) -> Cut | None:
    held = store.get(f"{path}/cut")
    return None if held is None else (int(held[0]), int(held[1]), int(held[2]))


def _counts(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not is_stateful(loader)
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
    )


class CutBatches:
    """Stands for a loader's batch sampler: one batch of one data epoch lacks the samples that were
    trained before."""

    def __init__(self, batches: BatchSampler, cut: Cut, epoch: Callable[[], int]) -> None:
        """epoch: the data epoch that is opened."""
        self.batches = batches
        self._cut = cut
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Any]]:
        epoch, number, inside = self._cut
        here = self._epoch() == epoch
        for index, batch in enumerate(self.batches):
            yield batch[inside:] if here and index == number else batch


def cut_source(source: Source, cut: Cut | None) -> None:
    """The source gives the rest of that batch from now on; None: as its loader does."""

    def wrap(batches: Any) -> Any:
        inner = batches.batches if isinstance(batches, CutBatches) else batches
        return inner if cut is None else CutBatches(inner, cut, lambda: source.data_epoch)

    source.replace_batches(wrap)
