"""A stored run's model, copied into one that has nothing to do with the store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import pmstore.opening
from pmstore import Store
from pmstore.torch.errors import AttachError, MismatchError, records
from pmstore.torch.fit import of_wrapper
from pmstore.torch.keys import encode_name, full_name, under
from pmstore.torch.layout import Place, decode_place
from pmstore.torch.mirrored import packed
from pmstore.torch.part import Part
from pmstore.torch.program import check_format
from pmstore.torch.slot_views import Kept, described_kept, make_views
from pmstore.torch.stateful import extra_state


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
    if f"{name}/about" not in store:
        raise AttachError(f"the store has no run {name!r}: give the name that attach was given")
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    with records(store.path, name):
        check_format(store, name)
        _check_keys(store, name, models)
        layout = {key: decode_place(raw) for key, raw in store[f"{name}/model_layout"].items()}
        held = _held(store, name, layout)
        grown = {key: place.first for key, place in layout.items() if place.first is not None}
        pairs = _pairs(held, models, strict, grown)
        with torch.no_grad():
            for target, stored in pairs:
                if target.shape != stored.shape:  # a buffer that grew while it was trained
                    target.data = torch.empty_like(stored, dtype=target.dtype, device=target.device)
                target.copy_(stored)
        for key, one in models.items():
            extra, part = extra_state(one), Part(store, f"{name}/{under('model_extra_state', key)}")
            if extra is not None and part.stored:
                extra.load_state_dict(part.read())


def _check_keys(store: Store, name: str, models: Mapping[str, nn.Module]) -> None:
    stored = [
        piece.partition("/")[2]
        for piece, there in store[f"{name}/about"]["pieces"].items()
        if there and piece.partition("/")[0] == "model"
    ]
    if not stored:
        raise AttachError(f"the stored run {name!r} has no model")
    missing = [key for key in models if encode_name(key) not in stored]
    if missing:
        keys = ", ".join(map(repr, stored))
        one = "one model: give it as it is"
        what = one if stored == [""] else f"the models {keys}: give a dict"
        raise MismatchError(
            f"the stored run {name!r} has {what}", unexpected=[repr(key) for key in missing if key]
        )


def _held(store: Store, name: str, layout: Mapping[str, Place]) -> dict[str, torch.Tensor]:
    """All parameters and buffers by their full names. They alias the store."""
    several = store[f"{name}/about"]["pieces"].get("model") is not True
    mirror = (
        packed(store[f"{name}/mirror"], store[f"{name}/mirror_layout"])
        if (f"{name}/mirror_layout" in store)
        else None
    )
    found: dict[str, torch.Tensor] = {}
    for key, place in layout.items():
        root = place.tied_to
        if mirror is not None:
            block = mirror[f"model/{root}"]
        else:
            block = store[f"{name}/model/{root if several else encode_name(root)}"]
        found[key] = block if place.view is None else block.as_strided(*place.view)
    for piece in store[f"{name}/about"]["pieces"]:
        if piece.partition("/")[0] == "optimizer" and f"{name}/{piece}/slots" in store:
            found.update(_of_slots(store, f"{name}/{piece}"))
    return found


def _of_slots(store: Store, path: str) -> dict[str, torch.Tensor]:
    """Parameters that an optimizer of pmstore keeps."""
    names: list[str | None] = []
    kept: list[Kept] = []
    for group in store[f"{path}/layout"][0]:
        if "kept" not in group:
            raise AttachError(
                "the run was written by an earlier version of pmstore.torch.optim, which did not "
                "say how its parameters lie: attach it once with this version"
            )
        names += group["names"]
        kept += map(described_kept, group["shapes"], group["kept"])
    current = store[f"{path}/slots"].current
    # torch takes no memory that cannot be written
    views = make_views(current if current.flags.writeable else current.copy(), kept)
    return {
        key: tensor for key, tensor in zip(names, views.parameters, strict=True) if key is not None
    }


def _pairs(
    held: Mapping[str, torch.Tensor],
    models: Mapping[str, nn.Module],
    strict: bool,
    grown: Mapping[str, list[int]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """grown: the first shapes of buffers that have another one now."""
    given: dict[str, torch.Tensor] = {}
    for key, model in models.items():
        for tensors in (model.named_parameters, model.named_buffers):
            named: Any = tensors(remove_duplicate=False)
            given.update({full_name(key, name): tensor for name, tensor in named})
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
