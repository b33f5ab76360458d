"""Parameters and buffers of a model, in the heap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pmstore import Store
from pmstore._base.text import encode_name
from pmstore._engine._binding import Watch
from pmstore.torch._state import fsdp
from pmstore.torch._state.common_part import check_fit, copy_common, of_wrapper
from pmstore.torch._state.heap import (
    UNFIT,
    Memory,
    Placed,
    check_movable,
    fill,
    same_bytes,
    set_apart,
    take_in,
)
from pmstore.torch._state.layout import (
    Member,
    Place,
    as_stored,
    compare,
    decode_place,
    encode_place,
    members_of,
    plan,
    resized,
    span,
    storage_of,
)
from pmstore.torch._state.replaced import watch
from pmstore.torch._state.sharded import local
from pmstore.torch.changes import SAME, all_of


class ModelBinding:
    """Keeps the parameters and buffers (those that are not persistent too) of a lone model in
    `<path>/<name>`, of several in `<path>/<key>/<name>`.

    The tensors stay the objects they are; their `.data` becomes the store's memory. Tied ones stay
    tied, those of different models too: they lie under the first of their names.

    Attributes:
        parameters: each once, with its first name; another list when they may be others.
        names: of all parameters, those that are kept elsewhere too: the first of each, by id.
        linked: another object whenever the modules may be others.
        before: what the optimizers know, by name; None: what is in the members.
    """

    devices: Sequence[str] = ("cpu",)

    def __init__(
        self,
        store: Store,
        path: str,
        models: Mapping[str, nn.Module],
        elsewhere: Iterable[torch.Tensor] = (),
    ) -> None:
        """Changes nothing yet. models: by key; a lone one has the key "". elsewhere: parameters
        that something else keeps: they are followed, and have no place here.

        Raises:
            AttachError: a tensor is of a kind that cannot be moved.
        """
        self._store = store
        self._path = path
        self._models = models
        away = {id(parameter) for parameter in elsewhere}
        every = list(members_of(models))
        # the names at which they are, or were
        self._elsewhere = {one.name for one in every if id(one.tensor) in away}
        self._all: list[Member] = []
        self._members: list[Member] = []  # all but those
        self._places: Watch | None = None  # of the members, as linked; None: to be made
        self._placed: dict[str, Placed] = {}
        self._placed_of: dict[int, Placed] = {}  # id of a tensor -> its block
        self.displaced: Callable[[], None] = lambda: None
        """Called before tensors that left their places are brought back."""
        self._loose: dict[str, Member] = {}  # buffers that lie outside the heap
        self._of_fsdp: list[Any] = []  # what fully_shard knows of its parameters
        self._resized = False  # whether a buffer was given another block since the last `open`
        self.before: dict[str, torch.Tensor] | None = None
        found = self._keeps(every)
        self._check_movable(found[1])
        self._scan(*found)

    # ---- attach

    def create(self) -> None:
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
                value = member.part if place.view is None else span(tied)
                bases[place.tied_to] = Placed.create(self._store, path, value)
            self._placed[member.name] = self._view(place, bases[place.tied_to])
        self._write_layout(places)

    def _block(self, name: str) -> str:
        """The path of a member's block. The names of several models' are paths already."""
        return f"{self._path}/{encode_name(name) if '' in self._models else name}"

    @staticmethod
    def _view(place: Place, base: Placed) -> Placed:
        return base if place.view is None else base.view(*place.view)

    def check(self) -> None:
        """Compares the model with the stored one. Changes nothing.

        Raises: MismatchError: they differ; it lists how.
        """
        stored = self._layout()
        given = as_stored(stored, plan(self._members))
        what = "the model is not the one whose state is stored"
        if wrapper := of_wrapper(stored, given):
            compare(stored, given, f"{what}: {wrapper}", ())
        compare(
            stored,
            given,
            what,
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
        stored = self._layout()
        given = as_stored(stored, plan(self._members))
        if stored == given:
            return False
        check_fit(
            {name: place.shape for name, place in stored.items()},
            {name: place.shape for name, place in given.items()},
        )
        self._refit(stored, given)
        return True

    def _refit(self, stored: Mapping[str, Place], given: Mapping[str, Place]) -> None:
        self.open()
        held = {name: self._placed[name].heap.clone() for name in given if name in stored}
        self._store.pop(self._path, None)
        self._placed.clear()
        self.create()
        grown = {name: held.pop(name) for name, place in given.items() if place.first is not None}
        if grown:
            self._give_blocks(grown, {name: given[name] for name in plan(self._members)})
        for name in reversed(held):  # of tied ones the first counts
            copy_common(self._placed[name].heap, held[name])

    def open(self) -> None:
        """Finds the stored blocks. Reads no data, and the model is untouched until `bind`."""
        bases: dict[str, Placed] = {}
        for name, place in self._layout().items():
            if place.tied_to not in bases:
                bases[place.tied_to] = Placed.open(self._store, self._block(place.tied_to))
            self._placed[name] = self._view(place, bases[place.tied_to])
        self._resized = False

    def bind(self) -> None:
        """Makes every parameter and buffer the stored tensor. What they held is dropped."""
        self._put_back()
        if self._resized:
            self.open()
        self._places = self.before = None
        for member in self._members:
            placed = self._placed[member.name]
            self._placed_of[id(member.tensor)] = placed
            if member.name in self._loose:
                fill(member.tensor, placed.heap)
            elif not placed.holds(member.tensor):
                placed.bind(member.tensor)
        self._tell_fsdp()

    def restore(self) -> None:
        """Gives the model what is stored, after a roll back or in a run that goes on."""
        self.bind()
        fsdp.drop_unreduced(self._of_fsdp)

    def _put_back(self) -> None:
        """What is another object than at the last look is the earlier one again: a roll back undoes
        an assignment too."""
        if self._of_fsdp:
            fsdp.reshard(self._models.values())
        places = {member.name: member for member in self._all}
        if self.linked.look() != SAME:  # modules too may be at other names now
            places.update((one.name, one) for one in members_of(self._models))
        for member in self._all:
            owner, key = places[member.name].owner, places[member.name].key
            if owner.get(key) is not None:
                owner[key] = member.tensor

    def _tell_fsdp(self) -> None:
        """It gathers from the parameters' blocks, padded, and not from the parameters."""
        for member in self._members:
            if member.fsdp is not None and self._placed[member.name].holds(member.tensor):
                fsdp.move(member.fsdp, member.tensor)

    def _write_layout(self, places: dict[str, Place]) -> None:
        self._store[f"{self._path}_layout"] = {
            name: encode_place(place) for name, place in places.items()
        }

    def _layout(self) -> dict[str, Place]:
        return {
            name: decode_place(raw) for name, raw in self._store[f"{self._path}_layout"].items()
        }

    # ---- while it trains

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

    def follow(self) -> dict[int, torch.Tensor]:
        """Notices parameters and buffers that are other objects now, as after
        `load_state_dict(assign=True)`. They are brought back by `capture`. Nothing is another one
        while `before` is None and `linked` sees nothing.

        Returns: for parameters, the new one by id of the old (for the optimizer's groups).

        Raises:
            MismatchError: names, dtypes, ties or parameters' shapes are no longer those of the
                store.
        """
        if self.before is None:
            self.before = {member.name: member.tensor for member in self._all}
        return self._follow(self.before)

    def followed(self) -> None:
        """The optimizers have what `follow` returned. Until then it returns it again: an interrupt
        in between is made good by the next call."""
        self.before = None

    @property
    def watch(self) -> Watch | None:
        """See `Part`."""
        return None if self._loose or self._of_fsdp else self._places

    def capture(self) -> None:
        """Brings back what left the heap: `param.data = ...`, and what `follow` noticed; copies in
        what lies outside. A buffer of another shape is given another block.

        Raises:
            MismatchError: a tensor does not fit its place in the store.
            StoreFullError.
        """
        if self._places is None:
            pairs = [(member.tensor, self._placed[member.name]) for member in self._inside]
            self._places = watch([], pairs, all_of((self.linked,)))
        if self._places.look() != SAME:
            inside = self._inside
            self.displaced()
            self._make_room(inside)
            take_in(
                (member.name, member.tensor, self._placed[member.name])
                for member in inside
                if not self._placed[member.name].holds(member.tensor)
            )
            self._tell_fsdp()
        if self._of_fsdp:
            fsdp.refuse_unreduced(self._of_fsdp)
        if self._loose:
            outside = list(self._loose.values())
            self._make_room(outside)
            for member in outside:
                heap = self._placed[member.name].heap
                if not same_bytes(member.tensor, heap):
                    heap.copy_(member.tensor.detach())

    @property
    def _inside(self) -> list[Member]:
        """Those that lie in the heap."""
        return [member for member in self._members if member.name not in self._loose]

    def _make_room(self, members: list[Member]) -> None:
        """New blocks, for buffers of another shape."""
        moved = {
            member.name: member.tensor
            for member in members
            if member.kind == "buffer" and member.part.shape != self._placed[member.name].shape
        }
        if not moved:
            return
        given = plan(self._members)
        now = resized(self._layout(), given)
        compare(now, given, UNFIT)
        self._resized = True
        self._give_blocks(moved, now)

    def _give_blocks(self, moved: Mapping[str, torch.Tensor], layout: dict[str, Place]) -> None:
        """New blocks with these bytes, of other shapes than the old ones, as the layout says."""
        for name, tensor in moved.items():
            root = layout[name].tied_to
            if root == name:
                self._store.pop(self._block(name), None)
                self._placed[name] = Placed.create(self._store, self._block(name), tensor)
            else:
                self._placed[name] = self._placed[root]
        self._write_layout(layout)
        self._places = None

    def _check_movable(self, members: list[Member]) -> None:
        for member in members:
            called = f"{member.kind} {member.name}"
            check_movable(called, member.tensor, self.devices)
            if member.fsdp is not None and "cuda" not in self.devices:
                fsdp.refuse_pinned(called, member.fsdp)

    def check_ties(self) -> None:
        """Raises MismatchError unless whoever shared memory still does, and nobody else."""
        if all(member.tensor.device.type == "cpu" for member in self._members):
            given = plan(self._members)
            compare(resized(self._layout(), given), given, UNFIT)

    def set_apart(self) -> None:
        """Tensors that left their places get memory that is nobody's place."""
        for member in self._members:
            if member.name not in self._loose and not self._placed[member.name].holds(
                member.tensor
            ):
                set_apart(member.tensor)

    def _find(self) -> tuple[list[Member], list[Member]]:
        """All members, and those that are kept here."""
        return self._keeps(list(members_of(self._models)))

    def _keeps(self, every: list[Member]) -> tuple[list[Member], list[Member]]:
        if not self._elsewhere:
            return every, every
        known = {one.name for one in self._members}
        # tied to one of them since
        away = {id(one.tensor) for one in every if one.name in self._elsewhere}
        return every, [
            one
            for one in every
            if one.name not in self._elsewhere and (one.name in known or id(one.tensor) not in away)
        ]

    def _scan(self, every: list[Member], members: list[Member]) -> None:
        """Takes what `_find` has found for the members from now on."""
        self._members = members
        found = {one.name for one in every}
        # one that is kept elsewhere, and whose name is gone for now, stays
        gone = (one for one in self._all if one.name in self._elsewhere - found)
        self._all = [*every, *gone]
        self._places = None
        self._loose = self._find_loose()
        self._of_fsdp = list({id(one.fsdp): one.fsdp for one in self._members if one.fsdp}.values())
        first: dict[int, tuple[str, torch.Tensor]] = {}
        for member in self._members:
            if member.kind == "parameter":
                first.setdefault(id(member.tensor), (member.name, member.tensor))
        self.parameters: list[tuple[str, torch.Tensor]] = list(first.values())
        self.names: dict[int, str] = {}
        for member in self._all:
            if member.kind == "parameter":
                self.names.setdefault(id(member.tensor), member.name)
        # where modules keep parameters, buffers and modules
        self.linked: Watch = watch(
            [
                table
                for model in self._models.values()
                for module in model.modules()
                for table in (module._parameters, module._buffers, module._modules)
            ]
        )

    def _find_loose(self) -> dict[str, Member]:
        """Those that are loose, or were; but none that shares its memory with another tensor."""
        found = {
            id(member.tensor)
            for member in self._members
            if member.loose or member.name in self._loose
        }
        if not found:
            return {}
        owners: dict[int, set[int]] = {}
        for member in self._members:
            owners.setdefault(storage_of(member.tensor), set()).add(id(member.tensor))
        return {
            member.name: member
            for member in self._members
            if id(member.tensor) in found and len(owners[storage_of(member.tensor)]) == 1
        }

    def _follow(self, before: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Looks at the model anew; its names, shapes and dtypes must be those of the store. May be
        repeated with the same tensors of before."""
        found = self._find()
        self._check_movable(found[1])
        now = plan(found[1])
        what = "the model was changed after attach, to one that does not fit its place in the store"
        ways = [
            'to add layers: run.detach() after a commit, then attach with Resume(model="partial")'
        ]
        stored = resized(self._layout(), now)
        new = [name for name in now if name not in stored]
        if new and all(now[name].kind == "buffer" for name in new):
            ways.clear()
            what += (
                ". A buffer is there from the beginning: in place of None write register_buffer("
                f"{new[0].rpartition('.')[2]!r}, torch.empty(0)), which may get another shape later"
            )
        compare(stored, now, what, ways)
        self._scan(*found)
        alive = {id(member.tensor): self._placed[member.name] for member in self._members}
        for name, old in before.items():
            if name in self._placed and id(old) not in alive:
                # Whoever still holds the old object sees the stored values, as before.
                placed = self._placed[name]
                if local(old).shape == placed.shape and not placed.holds(old):
                    placed.bind(old)
        self._placed_of = alive
        self._tell_fsdp()
        return self._replaced(before)

    def _replaced(self, before: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Parameters that are other objects than before, by id of those."""
        return {
            id(before[member.name]): member.tensor
            for member in self._all
            if member.kind == "parameter"
            and before.get(member.name, member.tensor) is not member.tensor
        }
