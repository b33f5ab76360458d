"""An optimizer's state, in the heap: moments as stored tensors, the rest as values."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, cast

import torch
from torch.optim import Optimizer

from pmstore import Store
from pmstore.torch.errors import AttachError
from pmstore.torch.groups import compare_groups, restore_groups
from pmstore.torch.groups import describe_groups as _describe
from pmstore.torch.keys import called, encode_name, under
from pmstore.torch.model import ModelBinding
from pmstore.torch.part import Part
from pmstore.torch.placed import Memory, Placed, Places, check_movable, set_apart, take_in

_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class _Synced:
    """What an optimizer held when all of it was in the store. While it holds the same objects, and
    these are where they were, there is nothing to write: most steps change what is in the heap
    only."""

    objects: list[object]  # see `OptimizerBinding._objects`
    places: Places
    # a parameter, and what is written when it has a gradient
    writes: list[tuple[torch.Tensor, list[Memory]]]


def _constant(item: object) -> bool:
    """Whether the object is data that cannot change."""
    return type(item) in _IMMUTABLE or (type(item) is tuple and all(map(_constant, item)))


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """In the order of the groups, as `Optimizer.state_dict` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def drop_tensors(state: dict[str, Any], kept: Container[str]) -> None:
    """Of one parameter: those that are not among the kept ones vanish."""
    for key in [key for key, value in state.items() if isinstance(value, torch.Tensor)]:
        if key not in kept:
            del state[key]


class OptimizerBinding:
    """Keeps an optimizer in the store.

    `<path>/state/<i>.<key>`    state tensors of parameter i, counted over the groups as in
                                `Optimizer.state_dict`
    `<path>/parameters/<i>`     parameters that are in no module of the model
    `<path>/rest`, `/groups`    everything else: other state, hyperparameters
    `<path>/layout`             which state tensors there are, and the parameters' shapes

    State that the optimizer makes in its first step, or replaces later, is moved in by `collect`;
    the optimizer's own tensor objects stay, their `.data` becomes the store's memory.
    """

    devices: Sequence[str] = ("cpu",)

    def __init__(
        self, store: Store, path: str, key: str, optimizer: Optimizer, model: ModelBinding | None
    ) -> None:
        """Changes nothing yet. path: of all optimizers. key: of this one; "": it is the only one.

        Raises:
            AttachError: a parameter is of a kind that cannot be moved.
        """
        self._store = store
        self._parent = path
        self._path = path = under(path, key)
        self._key = key
        self.called = called("optimizer", key)
        self._optimizer = optimizer
        self._model = model
        self._rest = Part(store, f"{path}/rest")
        self._groups = Part(store, f"{path}/groups")
        self._placed: dict[int, dict[str, Placed]] = {}
        self._own: dict[int, Placed] = {}  # of parameters that are in no module
        self._layout: list[Any] | None = None  # as stored, if known
        self._synced: _Synced | None = None
        self.displaced: Callable[[], None] = lambda: None
        """Called before tensors that left their places are brought back."""
        for index, parameter in enumerate(self.parameters):
            check_movable(self.describe(index), parameter, self.devices)

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    @property
    def piece(self) -> str:
        """Its path under the run's name."""
        return under("optimizer", self._key)

    def beside(self, optimizer: Optimizer) -> OptimizerBinding:
        """Keeps another optimizer over the same parameters in the same place."""
        return OptimizerBinding(self._store, self._parent, self._key, optimizer, self._model)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return parameters_of(self._optimizer)

    @property
    def extra_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Those that are in no module, with a name that none in a module can have."""
        known = self._known()
        return [
            (self._name_extra(index), one)
            for index, one in enumerate(self.parameters)
            if id(one) not in known
        ]

    def describe(self, index: int) -> str:
        """A parameter in a message."""
        return f"parameter {index} of {self.called}"

    def _name_extra(self, index: int) -> str:
        return f"{under('optimizer', self._key)}..{index}"

    def _known(self) -> set[int]:
        return {id(one) for _, one in self._model.parameters} if self._model is not None else set()

    # ---- attach

    def write(self) -> None:
        """Copies parameters and state into the store. The optimizer is untouched until `bind`."""
        known = self._known()
        for index, parameter in enumerate(self.parameters):
            if id(parameter) not in known:
                self._own[index] = Placed.create(
                    self._store, f"{self._path}/parameters/{index}", parameter
                )
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    self._create(index, key, value)
        self._write_plain()

    def check(self) -> None:
        """Compares the parameters with the stored ones. Changes nothing.

        Raises:
            MismatchError: they differ; it lists how.
        """
        compare_groups(self.called, self._store[f"{self._path}/layout"][0], self.describe_groups())

    def open(self) -> None:
        """Finds the stored placed. Reads no tensor's data, and the optimizer is untouched until
        `bind`."""
        self._rest.forget()
        self._groups.forget()
        self._placed.clear()
        self._own.clear()
        self._layout = self._store[f"{self._path}/layout"]
        _, tensors, own = self._layout
        for index in own:
            self._own[index] = Placed.open(self._store, f"{self._path}/parameters/{index}")
        for index, key in tensors:
            self._placed.setdefault(index, {})[key] = Placed.open(
                self._store, self._state_path(index, key)
            )

    def bind(self) -> None:
        """Makes the state what the blocks hold: tensors that are not stored vanish, others become
        the heap's."""
        for index, parameter in enumerate(self.parameters):
            own = self._own.get(index)
            if own is not None and not own.holds(parameter):
                parameter.data = own.heap
            placed = self._placed.get(index, {})
            state = self._optimizer.state.get(parameter, {})
            drop_tensors(state, placed)
            for key, one in placed.items():
                here = state.get(key)
                if not isinstance(here, torch.Tensor):
                    self._optimizer.state[parameter][key] = one.heap
                elif not one.holds(here):
                    here.data = one.heap

    def restore(self) -> None:
        """`bind`, and hyperparameters and plain state from the store too: when resuming, and after
        a roll back."""
        self._synced = None
        self.bind()
        parameters = self.parameters
        rest = self._rest.read()
        for index, parameter in enumerate(parameters):
            state = self._optimizer.state.get(parameter, {})
            for key in [key for key, value in state.items() if not isinstance(value, torch.Tensor)]:
                del state[key]
            for key, value in rest.get(index, {}).items():
                self._optimizer.state[parameter][key] = value
            if not state:
                self._optimizer.state.pop(parameter, None)  # as before its first step
        for key in [key for key in self._optimizer.state if not isinstance(key, torch.Tensor)]:
            del self._optimizer.state[key]
        for key, value in rest.get("others", {}).items():
            self._optimizer.state[key] = value
        restore_groups(self._optimizer, self._groups.read())

    # ---- while it trains

    def take_in(self) -> dict[int, torch.Tensor]:
        """Follows parameters that are other objects now, where the model's binding does not. Old id
        to new object."""
        return {}

    def release(self) -> None:
        """The run ends; parameters and state stay where they are."""

    def writes(self) -> list[Any]:
        """The memory that the optimizer's next step writes: parameters with a gradient, and their
        state."""
        pairs = self._synced.writes if self._synced is not None else self._written()
        return [
            memory
            for parameter, written in pairs
            if parameter.grad is not None
            for memory in written
        ]

    @property
    def kept(self) -> list[torch.Tensor]:
        """Parameters that it keeps, and not the model's binding."""
        parameters = self.parameters if self._own else []
        return [parameters[index] for index in self._own]

    def memory(self) -> list[Memory]:
        """What its state lies in, and parameters that are in no module."""
        state = [one.memory for placed in self._placed.values() for one in placed.values()]
        return [*(one.memory for one in self._own.values()), *state]

    def _written(self) -> list[tuple[torch.Tensor, list[Memory]]]:
        found = []
        for index, parameter in enumerate(self.parameters):
            own = self._own.get(index) or (self._model.placed(parameter) if self._model else None)
            placed = [*((own,) if own is not None else ()), *self._placed.get(index, {}).values()]
            found.append((parameter, [one.memory for one in placed]))
        return found

    @property
    def behind(self) -> bool:
        """Whether parameters have state of which nothing is in the heap yet."""
        return len(self._optimizer.state) != len(self._placed)

    def replace(self, replaced: dict[int, torch.Tensor]) -> None:
        """Puts parameters that are other objects now, by id of the old, into groups and state."""
        self._synced = None
        for group in self._optimizer.param_groups:
            parameters = group["params"]
            for place, old in enumerate(parameters):
                new = replaced.get(id(old))
                if new is not None:
                    parameters[place] = new
                    if old in self._optimizer.state:
                        self._optimizer.state[new] = self._optimizer.state.pop(old)

    def collect(self) -> None:
        """Moves into the heap what is not there: state made or replaced since the last call. Writes
        no plain values."""
        displaced: list[tuple[str, torch.Tensor, Placed]] = []
        changed = left = False
        for index, parameter in enumerate(self.parameters):
            changed |= self._collect_parameter(index, parameter, displaced)
            state = self._optimizer.state.get(parameter, {})
            placed = self._placed.get(index, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                one = placed.get(key)
                if one is not None and one.holds(value):
                    continue
                if one is None or one.shape != value.shape or one.dtype is not value.dtype:
                    check_movable(f"state {key!r} of {self.describe(index)}", value)
                    one = self._create(index, key, value)
                    changed = True
                else:
                    left = True
                displaced.append((f"state {key!r} of {self.describe(index)}", value, one))
            for key in [key for key in placed if not isinstance(state.get(key), torch.Tensor)]:
                self._remove(index, key)
                changed = True
        if left or (displaced and self._own):
            self.displaced()
        take_in(displaced)
        if changed:
            self._write_layout()

    def set_apart(self) -> None:
        """Tensors that left their places get memory that is nobody's place."""
        parameters = self.parameters
        pairs = [(parameters[index], one) for index, one in self._own.items()]
        for index, placed in self._placed.items():
            state = self._optimizer.state.get(parameters[index], {})
            pairs += [(state[key], one) for key, one in placed.items() if key in state]
        for tensor, one in pairs:
            if isinstance(tensor, torch.Tensor) and not one.holds(tensor):
                set_apart(tensor)

    def sync(self) -> None:
        """`collect`, and the plain values: everything is in the store, pending until the next
        commit."""
        synced, objects = self._synced, self._objects()
        if (
            synced is None
            or len(objects) != len(synced.objects)
            or not all(map(is_, objects, synced.objects))
            or not synced.places.hold()
        ):
            self._synced = None
            self.collect()
            self._write_plain()
            self._synced = self._describe()

    def _objects(self) -> list[object]:
        """All that the optimizer holds: groups, their keys, values and parameters; state, its keys
        and values."""
        found: list[object] = []
        for group in self._optimizer.param_groups:
            found.append(group)
            found += group
            found += group.values()
            found += group["params"]
        state = cast(dict[Any, Any], self._optimizer.state)
        found += state
        for held in state.values():
            found.append(held)
            if type(held) is dict:
                found += held
                found += held.values()
        return found

    def _describe(self) -> _Synced | None:
        """None if it holds something, beside the tensors that are in placed, that can change and
        stay the same object."""
        for group in self._optimizer.param_groups:
            if not all(_constant(value) for key, value in group.items() if key != "params"):
                return None
        for key, held in cast(dict[Any, Any], self._optimizer.state).items():
            if not isinstance(key, torch.Tensor) or type(held) is not dict:
                return None
            if not all(
                isinstance(value, torch.Tensor) or _constant(value) for value in held.values()
            ):
                return None
        return _Synced(self._objects(), Places(self._pairs()), self._written())

    def _pairs(self) -> list[tuple[torch.Tensor, Placed]]:
        """What has to lie in the blocks of this binding."""
        pairs = []
        for index, parameter in enumerate(self.parameters):
            if index in self._own:
                pairs.append((parameter, self._own[index]))
            state = self._optimizer.state.get(parameter, {})
            pairs += [(state[key], one) for key, one in self._placed.get(index, {}).items()]
        return pairs

    def _collect_parameter(
        self, index: int, parameter: torch.Tensor, displaced: list[tuple[str, torch.Tensor, Placed]]
    ) -> bool:
        """Moves a parameter in that is in no module. True if it is new (`add_param_group`)."""
        if self._model is not None and self._model.placed(parameter) is not None:
            return False
        own = self._own.get(index)
        created = own is None
        if own is None:
            check_movable(self.describe(index), parameter)
            path = f"{self._path}/parameters/{index}"
            own = self._own[index] = Placed.create(self._store, path, parameter)
        if not own.holds(parameter):
            displaced.append((self.describe(index), parameter, own))
        return created

    def _state_path(self, index: int, key: str) -> str:
        return f"{self._path}/state/{index}.{encode_name(key)}"

    def _create(self, index: int, key: str, value: torch.Tensor) -> Placed:
        """A new block with the value's bytes, in place of an old one of that name. The value itself
        is not bound."""
        if not isinstance(key, str):
            raise AttachError(
                f"{self.called} keeps state of a parameter under {key!r}: only names that are str "
                "can be stored"
            )
        if key in self._placed.get(index, {}):
            self._remove(index, key)
        made = Placed.create(self._store, self._state_path(index, key), value)
        self._placed.setdefault(index, {})[key] = made
        return made

    def _remove(self, index: int, key: str) -> None:
        self._store.pop(self._state_path(index, key), None)
        self._placed[index].pop(key, None)

    def _write_plain(self) -> None:
        parameters = self.parameters
        rest: dict[Any, Any] = {}
        for index, parameter in enumerate(parameters):
            state = self._optimizer.state.get(parameter, {})
            plain = {key: one for key, one in state.items() if not isinstance(one, torch.Tensor)}
            if plain:
                rest[index] = plain
        known = {id(parameter) for parameter in parameters}
        others: dict[Any, Any] = {}
        for key, value in cast(dict[Any, Any], self._optimizer.state).items():
            if isinstance(key, torch.Tensor):
                if id(key) not in known:
                    raise AttachError(
                        f"{self.called} has state of a tensor that is in none of its groups: "
                        "remove it from .state"
                    )
            else:
                others[key] = value
        if others:
            rest["others"] = others
        self._rest.write(rest)
        self._groups.write(
            [
                {key: value for key, value in group.items() if key != "params"}
                for group in self._optimizer.param_groups
            ]
        )
        if self._layout is None or [len(group["shapes"]) for group in self._layout[0]] != [
            len(group["params"]) for group in self._optimizer.param_groups
        ]:
            self._write_layout()

    def _write_layout(self) -> None:
        tensors = [[index, key] for index, placed in self._placed.items() for key in placed]
        self._layout = None  # until it is written
        layout = [self.describe_groups(), tensors, list(self._own)]
        self._store[f"{self._path}/layout"] = layout
        self._layout = layout

    def describe_groups(self) -> list[dict[str, Any]]:
        named = self._model.parameters if self._model is not None else ()
        names = {id(tensor): name for name, tensor in named}
        return _describe(self._optimizer, type(self._optimizer).__name__, names)
