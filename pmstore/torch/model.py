"""Parameters and buffers of a model, in the heap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

from pmstore import Store
from pmstore.torch.errors import MismatchError
from pmstore.torch.fit import check_fit, copy_common
from pmstore.torch.keys import encode_name, full_name
from pmstore.torch.placed import UNFIT, Memory, Placed, Places, check_movable, take_in


@dataclass(slots=True)
class _Member:
    """A name under which a module has a tensor."""

    name: str
    kind: str  # "parameter" or "buffer"
    owner: dict[str, torch.Tensor | None]  # the module's _parameters or _buffers
    key: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Place:
    """How a member lies in the store; the layout stored with the model is a list of these."""

    kind: str
    shape: list[int]
    dtype: str
    tied_to: str  # name of the first member that shares its memory; its own if none does
    # [shape, stride, offset] in a one-dimensional block, for members that overlap otherwise
    view: list[Any] | None


def _members(models: Mapping[str, nn.Module], left_out: set[int]) -> Iterator[_Member]:
    for model_key, model in models.items():
        for prefix, module in model.named_modules():
            dot = f"{prefix}." if prefix else ""
            for kind, owner in (("parameter", module._parameters), ("buffer", module._buffers)):
                for key, tensor in owner.items():
                    if tensor is not None and id(tensor) not in left_out:
                        name = full_name(model_key, dot + key)
                        yield _Member(name, kind, owner, key, tensor)


def plan(members: list[_Member]) -> dict[str, _Place]:
    """How the members shall lie in the store: tied ones share a block, all others have their
    own."""
    places: dict[str, _Place] = {}
    # storage -> members of which each lies apart from the others
    roots: dict[int, list[_Member]] = {}
    for member in members:
        roots.setdefault(_storage(member.tensor), []).append(member)
    for group in roots.values():
        for cluster in _overlapping(group):
            places.update(_plan_cluster(cluster))
    return {member.name: places[member.name] for member in members}


def _storage(tensor: torch.Tensor) -> int:
    # Empty tensors have no memory to share; their identity stands for it.
    return tensor.untyped_storage().data_ptr() if tensor.numel() else -id(tensor)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the one after the last, that the tensor touches, in its storage."""
    first = int(tensor.storage_offset()) * tensor.element_size()
    last = sum(
        (length - 1) * abs(step) for length, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first, first + (last + 1) * tensor.element_size() if tensor.numel() else first


def _overlapping(members: list[_Member]) -> list[list[_Member]]:
    """The members of one storage, in clusters whose memory overlaps (disjoint slices of one buffer
    are not tied)."""
    if len(members) == 1:
        return [members]
    clusters: list[tuple[int, list[_Member]]] = []
    for member in sorted(members, key=lambda one: extent(one.tensor)[0]):
        first, end = extent(member.tensor)
        if clusters and (first < clusters[-1][0] or member.tensor is clusters[-1][1][-1].tensor):
            clusters[-1][1].append(member)
            clusters[-1] = (max(end, clusters[-1][0]), clusters[-1][1])
        else:
            clusters.append((end, [member]))
    names = {member.name: index for index, member in enumerate(members)}
    return [sorted(cluster, key=lambda one: names[one.name]) for _, cluster in clusters]


def _plan_cluster(cluster: list[_Member]) -> dict[str, _Place]:
    root = cluster[0]
    start = min(extent(member.tensor)[0] for member in cluster)
    seen = {
        (*extent(member.tensor), member.tensor.shape, member.tensor.stride()) for member in cluster
    }
    places = {}
    for member in cluster:
        tensor = member.tensor
        if tensor.dtype != root.tensor.dtype:
            raise MismatchError(
                "tensors share memory under different dtypes, which a store cannot keep",
                mismatched=[
                    f"{root.name} ({root.tensor.dtype}) and {member.name} ({tensor.dtype})"
                ],
            )
        view = None
        if len(seen) > 1:
            offset = (extent(tensor)[0] - start) // tensor.element_size()
            view = [list(tensor.shape), list(tensor.stride()), offset]
        dtype = str(tensor.dtype).removeprefix("torch.")
        places[member.name] = _Place(member.kind, list(tensor.shape), dtype, root.name, view)
    return places


def _span(tied: list[_Member]) -> torch.Tensor:
    """The memory that overlapping members cover, as one dimension."""
    tensor = tied[0].tensor.detach()
    first = min(extent(member.tensor)[0] for member in tied) // tensor.element_size()
    end = max(extent(member.tensor)[1] for member in tied) // tensor.element_size()
    return tensor.as_strided((end - first,), (1,), first)


def root_tensors(members: list[_Member]) -> list[tuple[str, str, torch.Tensor]]:
    """(name, kind, tensor) of the members without those that are tied to others: all memory,
    once."""
    places = plan(members)
    found = []
    for member in members:
        place = places[member.name]
        if place.tied_to != member.name:
            continue
        tied = [other for other in members if places[other.name].tied_to == member.name]
        found.append(
            (member.name, member.kind, member.tensor if place.view is None else _span(tied))
        )
    return found


class ModelBinding:
    """Keeps the parameters and buffers (those that are not persistent too) of a lone model in
    `<path>/<name>`, of several in `<path>/<key>/<name>`.

    The tensors stay the objects they are; their `.data` becomes the store's memory. Tied ones stay
    tied, those of different models too: they lie under the first of their names.
    """

    devices: Sequence[str] = ("cpu",)

    def __init__(
        self,
        store: Store,
        path: str,
        models: Mapping[str, nn.Module],
        left_out: Iterable[torch.Tensor] = (),
    ) -> None:
        """Changes nothing yet. models: by key; a lone one has the key "". left_out: parameters that
        something else keeps.

        Raises:
            AttachError: a tensor is of a kind that cannot be moved.
        """
        self._store = store
        self._path = path
        self._models = models
        self._left_out = {id(parameter) for parameter in left_out}
        self._members: list[_Member] = []
        # where modules keep parameters, buffers and modules
        self._tables: list[dict[str, Any]] = []
        self._linked: list[object] = []  # what is in the tables: names and objects
        self._parameters: list[tuple[str, torch.Tensor]] = []
        self._places: Places | None = None  # of the members; None: to be made
        self._placed: dict[str, Placed] = {}
        self._placed_of: dict[int, Placed] = {}  # id of a tensor -> its block
        self.displaced: Callable[[], None] = lambda: None
        """Called before tensors that left their places are brought back."""
        self._scan()
        for member in self._members:
            check_movable(f"{member.kind} {member.name}", member.tensor, self.devices)

    # ---- attach

    def write(self) -> None:
        """Copies the model into the store. The model itself is untouched until `bind`."""
        places = plan(self._members)
        bases: dict[str, Placed] = {}
        for member in self._members:
            place = places[member.name]
            if place.tied_to not in bases:
                tied = [
                    other for other in self._members if places[other.name].tied_to == place.tied_to
                ]
                path = self._block(place.tied_to)
                value = member.tensor if place.view is None else _span(tied)
                bases[place.tied_to] = Placed.create(self._store, path, value)
            self._placed[member.name] = self._view(place, bases[place.tied_to])
        self._store[f"{self._path}_layout"] = {
            name: encode_place(place) for name, place in places.items()
        }

    def _block(self, name: str) -> str:
        """The path of a member's block. The names of several models' are paths already."""
        return f"{self._path}/{encode_name(name) if '' in self._models else name}"

    @staticmethod
    def _view(place: _Place, base: Placed) -> Placed:
        return base if place.view is None else base.view(*place.view)

    def check(self) -> None:
        """Compares the model with the stored one. Changes nothing.

        Raises:
            MismatchError: they differ; it lists how.
        """
        compare(
            self._layout(),
            plan(self._members),
            "the model is not the one whose state is stored",
            ('Resume(model="partial") takes what both have, by name, and the rest as given',),
        )

    def fit(self) -> bool:
        """Makes the stored model one that `check` accepts: what both have is taken over, by name.
        Pending until the next commit; the model is untouched until `bind`.

        Returns: whether anything had to be done.

        Raises:
            MismatchError: a tensor has another shape, in more than its first dimension.
            AttachError: nothing that is stored has a name of the given model.
        """
        stored, given = self._layout(), plan(self._members)
        if stored == given:
            return False
        check_fit(
            {name: place.shape for name, place in stored.items()},
            {name: place.shape for name, place in given.items()},
        )
        self._refit(stored, given)
        return True

    def _refit(self, stored: Mapping[str, _Place], given: Mapping[str, _Place]) -> None:
        self.open()
        held = {name: self._placed[name].heap.clone() for name in given if name in stored}
        self._store.pop(self._path, None)
        self._placed.clear()
        self.write()
        for name in reversed(held):  # of tied ones the first counts
            copy_common(self._placed[name].heap, held[name])

    def open(self) -> None:
        """Finds the stored blocks. Reads no data, and the model is untouched until `bind`."""
        bases: dict[str, Placed] = {}
        for name, place in self._layout().items():
            if place.tied_to not in bases:
                bases[place.tied_to] = Placed.open(self._store, self._block(place.tied_to))
            self._placed[name] = self._view(place, bases[place.tied_to])

    def bind(self) -> None:
        """Makes every parameter and buffer the stored tensor. What they held is dropped."""
        self._places = None
        for member in self._members:
            placed = self._placed[member.name]
            self._placed_of[id(member.tensor)] = placed
            if not placed.holds(member.tensor):
                member.tensor.data = placed.heap

    def _layout(self) -> dict[str, _Place]:
        return {name: _decode(raw) for name, raw in self._store[f"{self._path}_layout"].items()}

    # ---- while it trains

    @property
    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Each parameter once, with its first name. Not to be changed."""
        return self._parameters

    @property
    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """All that it keeps, under each of their names: "parameter 0.weight"."""
        return [(f"{member.kind} {member.name}", member.tensor) for member in self._members]

    @property
    def kept(self) -> list[torch.Tensor]:
        """All that it keeps, tied ones more than once."""
        return [member.tensor for member in self._members]

    def memory(self) -> list[Memory]:
        """What the tensors lie in."""
        return [placed.memory for placed in self._placed.values()]

    def placed(self, tensor: torch.Tensor) -> Placed | None:
        """The block of one of the model's tensors."""
        return self._placed_of.get(id(tensor))

    def leave_out(self, replaced: Mapping[int, torch.Tensor]) -> None:
        """Parameters left out are other objects now: by id of the old."""
        self._left_out -= replaced.keys()
        self._left_out |= {id(parameter) for parameter in replaced.values()}

    def follow(self) -> dict[int, torch.Tensor]:
        """Notices parameters and buffers that are other objects now, as after
        `load_state_dict(assign=True)`. They are brought back by `take_in`.

        Returns: for parameters, the new one by id of the old (for the optimizer's groups).

        Raises:
            MismatchError: names, shapes, dtypes or ties are no longer those of the store.
        """
        return self._follow() if self._restructured() else {}

    def take_in(self) -> None:
        """Brings back what left the heap: `param.data = ...`, and what `follow` noticed.

        Raises:
            MismatchError: a tensor does not fit its place in the store.
        """
        if self._places is None:
            self._places = Places(
                (member.tensor, self._placed[member.name]) for member in self._members
            )
        if not self._places.hold():
            self.displaced()
            take_in(
                (member.name, member.tensor, self._placed[member.name])
                for member in self._members
                if not self._placed[member.name].holds(member.tensor)
            )

    def check_ties(self) -> None:
        """Whoever shared memory still does, and nobody else.

        Raises: MismatchError.
        """
        if all(member.tensor.device.type == "cpu" for member in self._members):
            compare(self._layout(), plan(self._members), UNFIT)

    def set_apart(self) -> None:
        """Tensors that left their places get memory that is nobody's place."""
        for member in self._members:
            if not self._placed[member.name].holds(member.tensor):
                member.tensor.data = member.tensor.data.clone()

    def _scan(self) -> None:
        self._members = list(_members(self._models, self._left_out))
        self._places = None
        first: dict[int, tuple[str, torch.Tensor]] = {}
        for member in self._members:
            if member.kind == "parameter":
                first.setdefault(id(member.tensor), (member.name, member.tensor))
        self._parameters = list(first.values())
        self._tables = [
            table
            for model in self._models.values()
            for module in model.modules()
            for table in (module._parameters, module._buffers, module._modules)
        ]
        self._linked = self._look()

    def _look(self) -> list[object]:
        found: list[object] = []
        for table in self._tables:
            found.append(table)
            found += table
            found += table.values()
        return found

    def _restructured(self) -> bool:
        """Whether a module, parameter or buffer is another object than at the last look."""
        now = self._look()
        return len(now) != len(self._linked) or not all(map(is_, now, self._linked))

    def _follow(self) -> dict[int, torch.Tensor]:
        """Looks at the model anew; its names, shapes and dtypes must be those of the store."""
        before = {member.name: member.tensor for member in self._members}
        members = list(_members(self._models, self._left_out))
        for member in members:
            check_movable(f"{member.kind} {member.name}", member.tensor, self.devices)
        stored, now = self._layout(), plan(members)
        what = "the model was changed after attach, to one that does not fit its place in the store"
        compare(stored, now, what)
        self._scan()
        replaced = {}
        for member in self._members:
            old = before[member.name]
            if old is not member.tensor:
                self._placed_of[id(member.tensor)] = self._placed[member.name]
                if member.kind == "parameter":
                    replaced[id(old)] = member.tensor
        alive = {id(member.tensor) for member in self._members}
        for name, old in before.items():
            if id(old) not in alive:
                self._placed_of.pop(id(old), None)
                # Whoever still holds the old object sees the stored values, as before.
                if not self._placed[name].holds(old):
                    old.data = self._placed[name].heap
        return replaced


def encode_place(place: _Place) -> list[Any]:
    return [place.kind, place.shape, place.dtype, place.tied_to, place.view]


def _decode(raw: list[Any]) -> _Place:
    return _Place(*raw)


def compare(
    stored: dict[str, _Place], given: dict[str, _Place], what: str, ways: Iterable[str] = ()
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
    mismatched = []
    for name, ours in stored.items():
        theirs = given.get(name)
        if theirs is None:
            continue
        if (ours.kind, ours.shape, ours.dtype) != (theirs.kind, theirs.shape, theirs.dtype):
            mismatched.append(
                f"{name}: stored {ours.kind} {_describe(ours)}, given {theirs.kind} "
                f"{_describe(theirs)}"
            )
        elif ours.tied_to != theirs.tied_to:
            mismatched.append(f"{name}: stored {_tie(name, ours)}, given {_tie(name, theirs)}")
    if missing or unexpected or mismatched:
        raise MismatchError(
            what, missing=missing, unexpected=unexpected, mismatched=mismatched, ways=ways
        )


def _describe(place: _Place) -> str:
    return f"{tuple(place.shape)} {place.dtype}"


def _tie(name: str, place: _Place) -> str:
    return "as a tensor of its own" if place.tied_to == name else f"tied to {place.tied_to}"
