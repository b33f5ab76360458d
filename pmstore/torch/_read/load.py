"""A stored run's model, copied into one that has nothing to do with the store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import pmstore.opening
from pmstore import Store
from pmstore._base.text import encode_name
from pmstore.torch._read.stored import StoredRun, StoreHolding
from pmstore.torch._state.common_part import of_wrapper
from pmstore.torch._state.sharded import HOW_TO_RESHARD, ShardRecord, describe, local, record_of
from pmstore.torch._state.stateful import extra_state
from pmstore.torch.keys import full_name
from pmstore.torch.run_errors import AttachError, MismatchError, records


def load(
    store: Store | str | os.PathLike[str],
    model: nn.Module | Mapping[str, nn.Module],
    *,
    name: str = "run",
    strict: bool = True,
) -> None:
    """Copies the parameters and buffers of a stored run into a model: to use it, or to begin
    another run with it. Nothing of the model is in the store afterwards, or follows it.

    The model's tensors keep their memory, device and dtype; values are converted, as
    `Module.load_state_dict` does. What modules' `get_extra_state` gave is set too.

    Args:
        store: an open store, of which it takes what is there now, committed or not; or the path of
            one, which is opened for reading and closed.
        model: of the run. Of a run with several, a dict of some of them, by their keys. A buffer
            that grew while it was trained may have its first shape, and is given the stored one.
        name: of the run.
        strict: False: what has no counterpart is left as it is, on either side; but not if that is
            all. Shapes are compared all the same.

    Raises:
        MismatchError: the model's names or shapes are others than the stored ones. It was not
            changed.
        AttachError: there is no such run, or it has no model.
        CorruptStoreError, StoreLockedError, FileNotFoundError: as `pmstore.open`.
    """
    if not isinstance(store, Store):
        with pmstore.opening.open(store, mode="r") as opened:
            load(opened, model, name=name, strict=strict)
        return
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    with records(store.path, name):
        run = StoredRun(StoreHolding(store), name)
        _check_keys(run, name, models)
        held = {key: one.read() for key, one in run.tensors.items()}
        shards = {key: one.shard for key, one in run.tensors.items() if one.shard is not None}
        grown = {key: place.first for key, place in run.layout.items() if place.first is not None}
        pairs = _pairs(held, models, strict, grown, shards)
        with torch.no_grad():
            for target, stored in pairs:
                if target.shape != stored.shape:  # a buffer that grew while it was trained
                    target.data = torch.empty_like(stored, dtype=target.dtype, device=target.device)
                target.copy_(stored)
        for key, one in models.items():
            extra = extra_state(one)
            if extra is not None and key in run.keys("model_extra_state"):
                extra.load_state_dict(run.stateful("model_extra_state", key))


def _check_keys(run: StoredRun, name: str, models: Mapping[str, nn.Module]) -> None:
    stored = run.keys("model")
    if not stored:
        raise AttachError(f"the stored run {name!r} has no model")
    missing = [key for key in models if key not in stored]
    if missing:
        keys = ", ".join(map(repr, stored))
        one = "one model: give it as it is"
        what = one if stored == [""] else f"the models {keys}: give a dict"
        raise MismatchError(
            f"the stored run {name!r} has {what}", unexpected=[repr(key) for key in missing if key]
        )


def _pairs(
    held: Mapping[str, torch.Tensor],
    models: Mapping[str, nn.Module],
    strict: bool,
    grown: Mapping[str, list[int]],
    shards: Mapping[str, ShardRecord],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """grown: the first shapes of buffers that have another one now. shards: of DTensors."""
    given: dict[str, torch.Tensor] = {}
    for key, model in models.items():
        for tensors in (model.named_parameters, model.named_buffers):
            named: Any = tensors(remove_duplicate=False)
            given.update({full_name(key, name): tensor for name, tensor in named})
    resharded = [
        f"{name}: stored {describe(shards.get(name))}, given {describe(record_of(given[name]))}"
        for name in held
        if name in given and shards.get(name) != record_of(given[name])
    ]
    if resharded:
        raise MismatchError(
            f"the model is sharded in another way than the stored one. {HOW_TO_RESHARD}",
            mismatched=resharded,
        )
    given = {name: local(tensor) for name, tensor in given.items()}
    prefixes = tuple(f"{encode_name(key)}/" for key in models if key)
    wanted = [name for name in held if not prefixes or name.startswith(prefixes)]
    missing = [name for name in wanted if name not in given]
    unexpected = [name for name in given if name not in held]
    mismatched = [
        f"{name}: stored {tuple(held[name].shape)}, given {tuple(given[name].shape)}"
        for name in wanted
        if name in given
        and held[name].shape != given[name].shape
        and list(given[name].shape) != grown.get(name)
    ]
    nothing = held.keys().isdisjoint(given) and bool(wanted)
    if mismatched or nothing or (strict and (missing or unexpected)):
        strict = strict or nothing
        wrapper = of_wrapper(wanted, given)
        raise MismatchError(
            "the model is not the one whose state is stored" + (f": {wrapper}" if wrapper else ""),
            missing=missing if strict else (),
            unexpected=unexpected if strict else (),
            mismatched=mismatched,
        )
    return [(given[name], held[name]) for name in wanted if name in given]
