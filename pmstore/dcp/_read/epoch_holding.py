"""Reads an epoch of a tier as a checkpoint: where it lies, without a store."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import numpy as np
import torch

from pmstore._base.workers import Patience
from pmstore._engine.constants import ARRAY, GROUP, VALUE
from pmstore.dcp._read.rank_stores import mark_of
from pmstore.dcp._read.run_reader import RunSource
from pmstore.dcp._read.state_keys import Prefixes
from pmstore.errors import CorruptStoreError
from pmstore.objects import array, axes, slots, tensor
from pmstore.objects.generations import Member, explain, newest_common
from pmstore.objects.job_record import read_record
from pmstore.tiers._epochs.content import EpochBytes
from pmstore.tiers._epochs.image import Image, Stored
from pmstore.tiers._epochs.leases import Lease
from pmstore.tiers._epochs.listing import EpochInfo
from pmstore.tiers._places.place import BrokenEpochError, Source
from pmstore.tiers._places.url import STALL_SECONDS, open_places
from pmstore.tiers._restore.choose import Wanted, read_first
from pmstore.torch._read.stored import StoredRun, writable


class EpochHolding:
    """One rank's store as of an epoch. Every byte is checked each time that it is read."""

    def __init__(self, place: Source, info: EpochInfo, rank: int) -> None:
        """Opens the epoch's bytes of that rank. Raises: BrokenEpochError, CorruptStoreError."""
        self.path: str = f"{place.url}: epoch {info.epoch}" + (
            f", rank {rank}" if info.world_size > 1 else ""
        )
        self._source = EpochBytes(place, info, rank)
        self._image = Image(self._source.read, self._source.manifest.state_bytes)
        self._there = {one.name: one for one in self._image.objects()}

    def __contains__(self, name: str, /) -> bool:
        return name in self._there

    def __getitem__(self, name: str, /) -> Any:
        one = self._there[name]
        if one.kind == VALUE:
            return self._image.value(one)
        if one.kind == GROUP:
            return _Current(self, one)
        try:
            data = self._source.read(one.offset, one.nbytes)
        except BrokenEpochError as error:
            raise CorruptStoreError(
                f"{self.path}: {name!r} cannot be read: {error}; load an older epoch"
            ) from error
        return self._as_array(one, data)

    def described(self, name: str, /) -> tuple[tuple[int, ...], torch.dtype]:
        one = self._there[name]
        if one.kind != ARRAY:
            raise KeyError(name)
        descriptor = self._image.descriptor(one)
        return descriptor.shape, tensor.dtype_of(descriptor)

    def _as_array(self, one: Stored, data: bytes) -> Any:
        descriptor = self._image.descriptor(one)
        dtype = tensor.dtype_of(descriptor) if descriptor.torch else array.numpy_dtype(descriptor)
        array.check_bytes(descriptor, dtype.itemsize, one.nbytes)
        strides = axes.strides_of(descriptor.shape, descriptor.order)
        flat = np.frombuffer(data, np.uint8)
        if isinstance(dtype, torch.dtype):
            if not data:
                return torch.empty(descriptor.shape, dtype=dtype)
            made = torch.from_numpy(writable(flat)).view(dtype)
            return made.as_strided(descriptor.shape, strides)
        by = [step * dtype.itemsize for step in strides]
        return np.ndarray(descriptor.shape, dtype, flat, strides=by)


class _Current:
    """Slots in an epoch, with their current version."""

    def __init__(self, held: EpochHolding, one: Stored) -> None:
        self._held = held
        self._name = f"{one.name}/{slots.unpack(one.meta)}"

    @cached_property
    def current(self) -> Any:
        return self._held[self._name]


def open_epoch(
    url: str | os.PathLike[str],
    wanted: Wanted,
    name: str,
    prefixes: Prefixes,
    storage_options: dict[str, Any] | None = None,
    stall_seconds: float | None = STALL_SECONDS,
) -> RunSource:
    """Opens the run of that name as of the newest epoch that can be read. A lease holds the epoch
    until the source is closed.

    Raises: TierError: there is none, with the reason for each; ValueError: two things would have
        one key.
    """
    place = open_places(url, storage_options, Patience(stall_seconds))

    def begin(info: EpochInfo) -> RunSource:
        with ExitStack() as stack:
            stack.enter_context(Lease(place, info.epoch, info.run, info.world_size))
            held = [EpochHolding(place, info, rank) for rank in range(info.world_size)]
            mark = _agree(held, name, info)
            runs = [StoredRun(one, name) for one in held]
            return RunSource(runs, prefixes, mark, stack.pop_all().close)

    return read_first(place, wanted, "read", begin)[0]


def _agree(held: list[EpochHolding], name: str, info: EpochInfo) -> str:
    """Returns which state the ranks have in common. Raises: BrokenEpochError: the epoch is not a
    whole job's."""
    members = []
    for rank, one in enumerate(held):
        if f"{name}/progress" not in one:
            raise BrokenEpochError("missing", f"there is no run {name!r} in it")
        record = read_record(one, name, one.path)
        step = int(one[f"{name}/progress"][0])
        members.append(Member(record, f"{info.run}.{rank}", False, step, name=f"rank {rank}"))
    common = newest_common(members)
    if common is None:
        raise BrokenEpochError("incomplete", "; ".join(explain(members)))
    return f"epoch {info.epoch} of {info.run}, {mark_of(members, common)}"
