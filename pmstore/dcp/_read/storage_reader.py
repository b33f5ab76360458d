"""`StoreReader`: torch.distributed.checkpoint reads what pmstore has."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from pmstore.dcp._format.folder_layout import path_of
from pmstore.dcp._read import transfer
from pmstore.dcp._read.checkpoint_source import Source
from pmstore.dcp._read.epoch_holding import open_epoch
from pmstore.dcp._read.folder import FolderSource
from pmstore.dcp._read.rank_stores import Paths, find
from pmstore.dcp._read.run_reader import open_run
from pmstore.dcp._read.state_keys import Prefixes
from pmstore.errors import PmstoreError
from pmstore.tiers._places.url import STALL_SECONDS
from pmstore.tiers._restore.choose import Wanted

_INSTEAD = "StoreReader.of_epoch(url) reads a tier"


class StoreReader(StorageReader):
    """Reads a checkpoint for `torch.distributed.checkpoint.load`, by any number of ranks.

        dcp.load(state_dict, storage_reader=StoreReader("checkpoints"))

    folder: what a `StoreWriter` writes to. The newest checkpoint in it that was published, as of
        the load; a save that goes on meanwhile disturbs nothing. A checkpoint_id that `dcp.load` is
        given is another folder, from then on.
    number: of an older checkpoint in it (see `StoreReader.numbers`).
    trusted: also load objects that torch.load refuses with weights_only=True.

    Tensors are copied out of the file's mapping, by all cores, and their bytes checked. Loading
    raises, inside torch's CheckpointException: CorruptStoreError that names the file and the
    tensor; PmstoreError: an object was refused; FileNotFoundError: there is no checkpoint.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, number: int | None = None, trusted: bool = False
    ) -> None:
        place = path_of(folder, _INSTEAD)
        self._begin(place, lambda rank: FolderSource(self.checkpoint_id, number, rank), trusted)

    def _begin(self, place: str, opens: Callable[[int | None], Source], trusted: bool) -> None:
        """Sets up the reader. opens: opens the source, for metadata of one rank or (None) of
        all."""
        self.checkpoint_id: str = place
        self._opens = opens
        self._trusted = trusted
        self._source: Source | None = None

    @classmethod
    def of_run(
        cls,
        stores: Paths,
        *,
        name: str = "run",
        model: str = "model",
        optimizer: str = "optim",
        trusted: bool = False,
    ) -> StoreReader:
        """Reads an attached run: the stores of all its ranks as one checkpoint, which any number of
        ranks load, with other placements too. Nothing is written, and nothing need be exported.

            dcp.load({"model": state}, storage_reader=StoreReader.of_run("run-*.pm"))

        Keys are those that get_state_dict makes (`pmstore/dcp/_read/state_keys.py`). What all ranks
        have alike (DDP) is taken from the first. A checkpoint_id that `dcp.load` is given is
        another path or pattern, from then on. The newest generation that all ranks have is read.
        The stores may be of a run that was killed. If the run trains meanwhile, each store keeps
        what is read until it was read.

        A store that nobody has open is locked while it is read: a run that starts meanwhile gets
        StoreLockedError, or waits, with `pmstore.open(lock_timeout=...)`.

        Args:
            stores: a path, a pattern such as "run-*.pm", or several.
            name: of the run in them.
            model, optimizer: under which keys the state dict has the model's and the optimizer's;
                with dots: further down ("app.model"); "": at its top.

        Loading raises, inside torch's CheckpointException: MixedStoresError: the stores are not of
        one generation of one job, or a rank's is missing; AttachError: a store has no such run;
        FileNotFoundError.
        """
        reader = cls.__new__(cls)
        given = [stores] if isinstance(stores, (str, os.PathLike)) else list(stores)
        place = " ".join(path_of(one, _INSTEAD) for one in given)
        prefixes = Prefixes(model, optimizer)

        def opens(rank: int | None) -> Source:
            now = reader.checkpoint_id
            return open_run(find(given if now == place else now), name, prefixes)

        reader._begin(place, opens, trusted)
        return reader

    @classmethod
    def of_epoch(
        cls,
        url: str | os.PathLike[str],
        epoch: int | None = None,
        *,
        run: str | None = None,
        kept: str | int | None = None,
        name: str = "run",
        model: str = "model",
        optimizer: str = "optim",
        storage_options: dict[str, Any] | None = None,
        stall_seconds: float | None = STALL_SECONDS,
        trusted: bool = False,
    ) -> StoreReader:
        """Reads an attached run as of an epoch of a tier, where it lies: no store is made. Where
        several ranks flush to one tier, all of them are read, as one checkpoint.

            dcp.load({"model": state}, storage_reader=StoreReader.of_epoch("s3://bucket/run"))

        Keys, and name, model, optimizer: as of `of_run`. A lease keeps the epoch meanwhile.

        Args:
            url, epoch, run, kept, storage_options, stall_seconds: as of `pmstore.restore`: the
                newest epoch that can be read, or the one that is said.

        Loading raises, inside torch's CheckpointException: TierError: no epoch can be read, with
        the reason for each; CorruptStoreError: what is read is damaged.
        """
        prefixes, wanted = Prefixes(model, optimizer), Wanted(epoch, run, kept)
        reader = cls.__new__(cls)
        reader._begin(
            os.fspath(url),
            lambda rank: open_epoch(
                reader.checkpoint_id, wanted, name, prefixes, storage_options, stall_seconds
            ),
            trusted,
        )
        return reader

    @staticmethod
    def numbers(folder: str | os.PathLike[str]) -> list[int]:
        """Returns the numbers of the checkpoints in a writer's folder, the newest last.

        Raises: FileNotFoundError; CorruptStoreError.
        """
        return FolderSource.numbers(os.fspath(folder))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._close()
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Opens the source, and returns what is in it. rank: of one rank's own metadata, where
        ranks saved without collectives."""
        self._close()
        source = self._opens(kwargs.get("rank"))
        try:
            metadata = source.metadata()
        except BaseException:
            source.close()
            raise
        self._source = source
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing: `read_metadata` opened what is read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._source is not None, "read_metadata comes first"
        return replace(plan, storage_data=self._source.mark)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks that all ranks opened the same checkpoint, and returns their plans. Raises:
        PmstoreError: they opened different ones, as somebody saves meanwhile."""
        marks = list(dict.fromkeys(plan.storage_data for plan in plans))
        if len(marks) > 1:
            raise PmstoreError(
                f"{self.checkpoint_id}: somebody writes here meanwhile, and ranks that load found "
                f"different states ({', '.join(map(str, marks[:4]))}): load again, or when nobody "
                "writes"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan names into the planner's tensors. Returns when all is read."""
        source = self._source
        assert source is not None, "read_metadata comes first"
        try:
            transfer.read(source, plan, planner, trusted=self._trusted)
        finally:
            self._close()
        done: Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether a checkpoint is in the folder."""
        return FolderSource.is_one(os.fspath(checkpoint_id))
