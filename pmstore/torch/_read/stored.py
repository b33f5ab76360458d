"""What a stored run holds, under the names that its program knows. Tensors are told with shape and
dtype, and none is read before it is asked for.

A run is read from a store, or from what can be asked like one (`Holding`): an epoch of a tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from pmstore import Store
from pmstore._base.mapping_protocol import Held
from pmstore._base.text import decode_name, encode_name
from pmstore.objects.containers import tree
from pmstore.torch._state.layout import Place, decode_place
from pmstore.torch._state.mirrored import packed
from pmstore.torch._state.optimizer_state import read_layout, state_block
from pmstore.torch._state.sharded import ShardRecord
from pmstore.torch._state.slotted import Kept, SlotViews, described_kept, make_views
from pmstore.torch.kept_structure import read_structure
from pmstore.torch.program import check_format
from pmstore.torch.run_errors import AttachError


class Holding(Held, Protocol):
    """What a stored run is read from. Slots are something with `current`."""

    @property
    def path(self) -> str:
        """The path that messages show."""

    def described(self, name: str, /) -> tuple[tuple[int, ...], torch.dtype]:
        """Returns shape and dtype of a tensor, which is not read. Raises: KeyError."""


class StoreHolding:
    """A store. Tensors alias it, as far as its own do."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def path(self) -> str:
        return self._store.path

    def __contains__(self, name: str, /) -> bool:
        return name in self._store

    def __getitem__(self, name: str, /) -> Any:
        return self._store[name]

    def described(self, name: str, /) -> tuple[tuple[int, ...], torch.dtype]:
        return self._entries[name]

    @cached_property
    def _entries(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            entry.name: (entry.shape or (), getattr(torch, entry.dtype.removeprefix("torch.")))
            for entry in tree(self._store)
            if entry.kind == "tensor" and entry.dtype is not None
        }


@dataclass(frozen=True)
class StoredTensor:
    """shape, dtype: of what `read` returns, a tensor over what the run is read from: never to be
    written to. shard: of a DTensor, of which this is a part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    shard: ShardRecord | None = None


@dataclass(frozen=True)
class StoredOptimizer:
    """Attributes:
    names: of its parameters, in the order of the groups: full names; of one that is in no module
        None.
    groups: hyperparameters, and under "params" indices of parameters, as in
        `Optimizer.state_dict`.
    state: of each parameter, by its index: tensors and plain values.
    own: parameters that are in no module.
    others: state that belongs to no parameter.
    """

    names: list[str | None]
    groups: list[dict[str, Any]]
    state: dict[int, dict[str, Any]] = field(default_factory=dict)
    own: dict[int, StoredTensor] = field(default_factory=dict)
    others: dict[Any, Any] = field(default_factory=dict)


class StoredRun:
    """REQUIRES: nothing is written meanwhile."""

    def __init__(self, held: Holding, name: str = "run") -> None:
        """Raises: AttachError: there is no such run, or of a format that is not known."""
        if f"{name}/about" not in held:
            raise AttachError(f"the store has no run {name!r}: give the name that attach was given")
        check_format(held, name)
        self._held = held
        self._name = name
        self._on_slots: dict[str, _Slots | None] = {}
        self.pieces: dict[str, bool] = held[f"{name}/about"]["pieces"]

    def keys(self, kind: str) -> list[str]:
        """Returns the keys of the pieces of a kind, such as "model". A lone one has the key ""."""
        given = (piece.partition("/") for piece, there in self.pieces.items() if there)
        return [decode_name(key) for what, _, key in given if what == kind]

    @property
    def step(self) -> int:
        return int(self._held[f"{self._name}/progress"][0])

    @cached_property
    def layout(self) -> dict[str, Place]:
        """The places of the models' tensors, by full name; but for those that slots have."""
        if f"{self._name}/model_layout" not in self._held:
            return {}
        stored = self._held[f"{self._name}/model_layout"]
        return {key: decode_place(raw) for key, raw in stored.items()}

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Parameters and buffers of the models, by full name."""
        found = {name: self._of_model(name, place) for name, place in self.layout.items()}
        for key in self.keys("optimizer"):
            slots = self._slots(key)
            for index, name in enumerate(slots.names if slots is not None else ()):
                if slots is not None and name is not None:
                    found[name] = slots.parameter(index)
        return found

    def optimizer(self, key: str) -> StoredOptimizer:
        path = self._path("optimizer", key)
        described = self._held[f"{path}/layout"][0]
        names = [name for group in described for name in group["names"]]
        made = StoredOptimizer(names, self._part(f"{path}/groups"))
        count = 0
        for group, one in zip(made.groups, described, strict=True):
            group["params"] = list(range(count, count + len(one["shapes"])))
            count += len(one["shapes"])
        for index, state, one in self._state(path, key):
            made.state.setdefault(index, {})[state] = one
        made.own.update(self._own(path, key))
        for index, plain in self._part(f"{path}/rest").items():
            if index == "others":
                made.others.update(plain)
            else:
                made.state.setdefault(index, {}).update(plain)
        return made

    def stateful(self, kind: str, key: str) -> Any:
        """A copy of the state of a piece that is no model and no optimizer."""
        return self._part(self._path(kind, key))

    # ---- where things lie

    def _path(self, kind: str, key: str) -> str:
        return f"{self._name}/{kind}/{encode_name(key)}" if key else f"{self._name}/{kind}"

    def _part(self, path: str) -> Any:
        return read_structure(self._held, path)

    def _tensor(self, path: str, shard: ShardRecord | None = None) -> StoredTensor:
        shape, dtype = self._held.described(path)
        return StoredTensor(shape, dtype, lambda: self._held[path], shard)

    def _of_model(self, name: str, place: Place) -> StoredTensor:
        root, view = place.tied_to, place.view
        if self._rows is not None:
            base = self._packed(f"model/{root}")
        else:
            several = self.pieces.get("model") is not True
            base = self._tensor(f"{self._name}/model/{root if several else encode_name(root)}")
        if view is None:
            return replace(base, shard=place.shard)
        read = lambda: base.read().as_strided(*view)  # noqa: E731
        return StoredTensor(tuple(view[0]), base.dtype, read, place.shard)

    def _state(self, path: str, key: str) -> Iterator[tuple[int, str, StoredTensor]]:
        """(parameter, name, tensor)."""
        slots = self._slots(key)
        if slots is not None:
            yield from slots.state()
        elif self._rows is not None:
            shards = read_layout(self._held, path)[3]
            prefix = self._prefix(key) + "state/"
            for name in self._rows:
                if name.startswith(prefix):
                    index, state = name.removeprefix(prefix).split("/", 1)
                    shard = shards.get(state_block(int(index), state))
                    yield int(index), state, replace(self._packed(name), shard=shard)
        else:
            _, tensors, _, shards = read_layout(self._held, path)
            for index, state in tensors:
                block = state_block(index, state)
                yield index, state, self._tensor(f"{path}/{block}", shards.get(block))

    def _own(self, path: str, key: str) -> Iterator[tuple[int, StoredTensor]]:
        slots = self._slots(key)
        if slots is not None:
            for index, name in enumerate(slots.names):
                if name is None:
                    yield index, slots.parameter(index)
        elif self._rows is not None:
            shards = read_layout(self._held, path)[3]
            prefix = self._prefix(key) + "parameter/"
            for name in self._rows:
                if name.startswith(prefix):
                    index = int(name.removeprefix(prefix))
                    shard = shards.get(f"parameters/{index}")
                    yield index, replace(self._packed(name), shard=shard)
        else:
            _, _, own, shards = read_layout(self._held, path)
            for index in own:
                block = f"parameters/{index}"
                yield index, self._tensor(f"{path}/{block}", shards.get(block))

    # ---- mirrored runs

    def _prefix(self, key: str) -> str:
        """Returns what an optimizer's names in a pack begin with."""
        return f"optimizer/{encode_name(key)}/" if key else ""

    @cached_property
    def _rows(self) -> dict[str, list[Any]] | None:
        """How the tensors of a mirrored run lie; None: it is none."""
        path = f"{self._name}/mirror_layout"
        return {row[0]: row for row in self._held[path]} if path in self._held else None

    @cached_property
    def _pack(self) -> dict[str, torch.Tensor]:
        layout = self._held[f"{self._name}/mirror_layout"]
        return packed(self._held[f"{self._name}/mirror"], layout)

    def _packed(self, name: str) -> StoredTensor:
        assert self._rows is not None
        _, shape, _, dtype, *_ = self._rows[name]
        return StoredTensor(tuple(shape), getattr(torch, dtype), lambda: self._pack[name])

    # ---- optimizers on slots

    def _slots(self, key: str) -> _Slots | None:
        if key not in self._on_slots:
            path = self._path("optimizer", key)
            there = f"{path}/slots" in self._held
            self._on_slots[key] = _Slots(self._held, path) if there else None
        return self._on_slots[key]


class _Slots:
    """What an optimizer of pmstore keeps: parameters too."""

    def __init__(self, held: Holding, path: str) -> None:
        self._held = held
        self._path = path
        self.names: list[str | None] = []
        self._kept: list[Kept] = []
        for group in held[f"{path}/layout"][0]:
            self.names += group["names"]
            self._kept += map(described_kept, group["shapes"], group["kept"])

    @cached_property
    def _views(self) -> SlotViews:
        return make_views(writable(self._held[f"{self._path}/slots"].current), self._kept)

    def parameter(self, index: int) -> StoredTensor:
        like = self._kept[index].parameter
        return StoredTensor(tuple(like.shape), like.dtype, lambda: self._views.parameters[index])

    def state(self) -> Iterator[tuple[int, str, StoredTensor]]:
        for index, kept in enumerate(self._kept):
            shapes = dict.fromkeys(kept.names, tuple(kept.parameter.shape))
            for name, shape in {**shapes, "step": ()}.items():
                yield index, name, self._moment(index, name, shape)

    def _moment(self, index: int, name: str, shape: tuple[int, ...]) -> StoredTensor:
        return StoredTensor(shape, torch.float32, lambda: self._views.state[index][name])


class _Shown:
    """Memory that torch takes without a warning, though it cannot be written."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        at = (array.__array_interface__["data"][0], False)
        self.__array_interface__ = {**array.__array_interface__, "data": at}


def writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory, for readers who give it to torch, and write to none."""
    return array if array.flags.writeable else np.asarray(_Shown(array))
