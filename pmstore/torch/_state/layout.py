"""Which tensors a model has, and how they lie in the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pmstore.torch._state import fsdp
from pmstore.torch._state.heap import is_loose
from pmstore.torch._state.sharded import (
    HOW_TO_RESHARD,
    ShardRecord,
    describe,
    is_sharded,
    local,
    record_of,
)
from pmstore.torch.keys import full_name
from pmstore.torch.run_errors import MismatchError


@dataclass(slots=True)
class Member:
    """A name under which a module has a tensor."""

    name: str
    kind: str  # "parameter" or "buffer"
    owner: dict[str, torch.Tensor | None]  # the module's _parameters or _buffers
    key: str
    tensor: torch.Tensor
    loose: bool  # see `is_loose`
    fsdp: Any = None  # what `fully_shard` knows of it

    @property
    def part(self) -> torch.Tensor:
        """Whose bytes are kept."""
        return local(self.tensor)


@dataclass(frozen=True, slots=True)
class Place:
    """How a member lies in the store; the layout stored with the model is a list of these. Of a
    DTensor shape, dtype and view are those of the part that is here."""

    kind: str
    shape: list[int]
    dtype: str
    tied_to: str  # name of the first member that shares its memory; its own if none does
    # [shape, stride, offset] in a one-dimensional block, for members that overlap otherwise
    view: list[Any] | None
    # of a buffer whose shape has changed since the first attach: the shape it had
    first: list[int] | None = None
    # of a DTensor: which part of which whole it is
    shard: ShardRecord | None = None


def members_of(models: Mapping[str, nn.Module]) -> Iterator[Member]:
    sharded = fsdp.fsdp_parameters()
    for model_key, model in models.items():
        for prefix, module in model.named_modules():
            dot = f"{prefix}." if prefix else ""
            for kind, owner in (("parameter", module._parameters), ("buffer", module._buffers)):
                for key, tensor in owner.items():
                    of_fsdp = sharded.get((id(owner), key)) if sharded else None
                    if of_fsdp is not None:  # whole while it computes
                        tensor = of_fsdp.sharded_param
                    if tensor is not None:
                        name = full_name(model_key, dot + key)
                        loose = kind == "buffer" and is_loose(module, tensor)
                        yield Member(name, kind, owner, key, tensor, loose, of_fsdp)


def plan(members: list[Member]) -> dict[str, Place]:
    """How the members shall lie in the store: tied ones share a block, all others have their
    own."""
    places: dict[str, Place] = {}
    # storage -> members of which each lies apart from the others
    roots: dict[int, list[Member]] = {}
    for member in members:
        roots.setdefault(storage_of(member.tensor), []).append(member)
    for group in roots.values():
        for cluster in _overlapping(group) if len(group) > 1 else [group]:
            places.update(_plan_cluster(cluster))
    return {member.name: places[member.name] for member in members}


def storage_of(tensor: torch.Tensor) -> int:
    # Empty tensors have no memory to share; their identity stands for it.
    part = local(tensor)
    return part.untyped_storage().data_ptr() if part.numel() else -id(tensor)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the one after the last, that the tensor touches, in its storage."""
    tensor = local(tensor)
    first = int(tensor.storage_offset()) * tensor.element_size()
    last = sum(
        (length - 1) * abs(step) for length, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first, first + (last + 1) * tensor.element_size() if tensor.numel() else first


def _overlapping(members: list[Member]) -> list[list[Member]]:
    """The members of one storage, in clusters whose memory overlaps (disjoint slices of one buffer
    are not tied)."""
    clusters: list[tuple[int, list[Member]]] = []
    for member in sorted(members, key=lambda one: extent(one.tensor)[0]):
        first, end = extent(member.tensor)
        if clusters and (first < clusters[-1][0] or member.tensor is clusters[-1][1][-1].tensor):
            clusters[-1][1].append(member)
            clusters[-1] = (max(end, clusters[-1][0]), clusters[-1][1])
        else:
            clusters.append((end, [member]))
    names = {member.name: index for index, member in enumerate(members)}
    return [sorted(cluster, key=lambda one: names[one.name]) for _, cluster in clusters]


def _plan_cluster(cluster: list[Member]) -> dict[str, Place]:
    root = cluster[0]
    seen = set()
    if len(cluster) > 1:
        seen = {(*extent(one.tensor), one.part.shape, one.part.stride()) for one in cluster}
    places = {}
    for member in cluster:
        tensor = local(member.tensor)
        if tensor.dtype != root.tensor.dtype:
            raise MismatchError(
                "tensors share memory under different dtypes, which a store cannot keep",
                mismatched=[
                    f"{root.name} ({root.tensor.dtype}) and {member.name} ({tensor.dtype})"
                ],
            )
        view = None
        padded = member.fsdp is not None and fsdp.padded_numel(member.fsdp) != member.part.numel()
        if len(seen) > 1 or padded:
            start = min(extent(one.tensor)[0] for one in cluster)
            offset = (extent(tensor)[0] - start) // tensor.element_size()
            view = [list(tensor.shape), list(tensor.stride()), offset]
        dtype = str(tensor.dtype).removeprefix("torch.")
        places[member.name] = Place(member.kind, list(tensor.shape), dtype, root.name, view)
        if tensor is not member.tensor and (record := record_of(member.tensor)):
            places[member.name] = replace(places[member.name], shard=record)
    return places


def span(tied: list[Member]) -> torch.Tensor:
    """The memory that overlapping members cover, as one dimension."""
    tensor = tied[0].part.detach()
    if tied[0].fsdp is not None:
        return tensor.as_strided((fsdp.padded_numel(tied[0].fsdp),), (1,), 0)
    first = min(extent(member.tensor)[0] for member in tied) // tensor.element_size()
    end = max(extent(member.tensor)[1] for member in tied) // tensor.element_size()
    return tensor.as_strided((end - first,), (1,), first)


def root_tensors(members: list[Member]) -> list[tuple[str, str, torch.Tensor]]:
    """(name, kind, tensor) of the members without those that are tied to others: all memory,
    once."""
    places = plan(members)
    found = []
    for member in members:
        place = places[member.name]
        if place.tied_to != member.name:
            continue
        tied = [other for other in members if places[other.name].tied_to == member.name]
        found.append((member.name, member.kind, member.part if place.view is None else span(tied)))
    return found


def encode_place(place: Place) -> list[Any]:
    raw = [place.kind, place.shape, place.dtype, place.tied_to, place.view]
    if place.shard is not None:
        return [*raw, place.first, place.shard]
    return raw if place.first is None else [*raw, place.first]


def decode_place(raw: list[Any]) -> Place:
    return Place(*raw)


def resized(stored: dict[str, Place], given: dict[str, Place]) -> dict[str, Place]:
    """The stored layout, but for the shapes of buffers, which are the given ones."""
    now = dict(stored)
    for name, ours in stored.items():
        theirs = given.get(name)
        if (
            theirs is not None
            and ours.kind == theirs.kind == "buffer"
            and ours.view is None
            and theirs.view is None
            and ours.shape != theirs.shape
        ):
            now[name] = replace(ours, shape=theirs.shape, first=ours.first or ours.shape)
    return now


def as_stored(stored: Mapping[str, Place], given: Mapping[str, Place]) -> dict[str, Place]:
    """The given layout, but for buffers that have the shape of the first attach, and are stored
    with a later one: those have the stored one."""
    known = dict(given)
    for name, place in stored.items():
        if place.first is None or name not in known:
            continue
        if known[name].shape in (place.first, place.shape):
            known[name] = replace(known[name], shape=place.shape, first=place.first)
    return known


def compare(
    stored: dict[str, Place], given: dict[str, Place], what: str, ways: Iterable[str] = ()
) -> None:
    """Raises: MismatchError: they differ; it lists how, and the ways out."""
    missing = [
        f"{stored[name].kind} {name} {_describe(stored[name])}"
        for name in stored
        if name not in given
    ]
    unexpected = [
        f"{given[name].kind} {name} {_describe(given[name])}"
        for name in given
        if name not in stored
    ]
    mismatched, resharded = [], False
    for name, ours in stored.items():
        theirs = given.get(name)
        if theirs is None:
            continue
        if ours.shard != theirs.shard:
            mismatched.append(f"{name}: stored {_describe(ours)}, given {_describe(theirs)}")
            resharded = True
        elif (ours.kind, ours.shape, ours.dtype) != (theirs.kind, theirs.shape, theirs.dtype):
            mismatched.append(
                f"{name}: stored {ours.kind} {_describe(ours)}, given {theirs.kind} "
                f"{_describe(theirs)}"
            )
        elif ours.tied_to != theirs.tied_to:
            mismatched.append(f"{name}: stored {_tie(name, ours)}, given {_tie(name, theirs)}")
    if missing or unexpected or mismatched:
        if resharded:
            what, ways = f"{what}: {HOW_TO_RESHARD}", ()
        raise MismatchError(
            what, missing=missing, unexpected=unexpected, mismatched=mismatched, ways=ways
        )


def refuse_resharded(stored: Mapping[str, Place], models: Mapping[str, nn.Module]) -> None:
    """Raises: MismatchError: a tensor that both have is sharded in another way."""
    tensors = (one for model in models.values() for one in model.parameters())
    if not any(place.shard for place in stored.values()) and not any(map(is_sharded, tensors)):
        return
    given = plan(list(members_of(models)))
    other = [name for name in stored if name in given and stored[name].shard != given[name].shard]
    what = "the model is sharded in another way than the one whose state is stored"
    compare({name: stored[name] for name in other}, {name: given[name] for name in other}, what)


def _describe(place: Place) -> str:
    return f"{tuple(place.shape)} {place.dtype}" if place.shard is None else describe(place.shard)


def _tie(name: str, place: Place) -> str:
    return "as a tensor of its own" if place.tied_to == name else f"tied to {place.tied_to}"
