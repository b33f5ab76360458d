"""An optimizer's state, in the heap: moments as stored tensors, the rest as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from pmstore import Store
from pmstore._engine._binding import Watch, Writes
from pmstore.torch._state import fsdp
from pmstore.torch._state.heap import Memory, Placed, check_movable, set_apart, take_in
from pmstore.torch._state.model import ModelBinding
from pmstore.torch._state.optimizer_state import (
    are_moved,
    arrange_groups,
    compare_groups,
    drop_tensors,
    holds_constants,
    parameters_of,
    plain_state,
    read_layout,
    restore_groups,
    state_block,
    tables_of_groups,
    tables_of_state,
)
from pmstore.torch._state.optimizer_state import describe_groups as _describe
from pmstore.torch._state.replaced import Replacing, Synced, watch
from pmstore.torch._state.sharded import (
    HOW_TO_RESHARD,
    ShardRecord,
    as_recorded,
    describe,
    is_sharded,
    local,
    record_of,
)
from pmstore.torch.changes import OTHERS, SAME, VALUES, all_of, asking, still
from pmstore.torch.kept_structure import Structure
from pmstore.torch.keys import called, under
from pmstore.torch.run_errors import AttachError, MismatchError


class OptimizerBinding:
    """Keeps an optimizer in the store.

    `<path>/state/<i>.<key>`    state tensors of parameter i, counted over the groups as in
                                `Optimizer.state_dict`
    `<path>/parameters/<i>`     parameters that are in no module of the model
    `<path>/rest`, `/groups`    everything else: other state, hyperparameters
    `<path>/layout`             which state tensors there are, and the parameters' shapes; of
                                DTensors also their shard records, by the names of their blocks

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
        self.called: str = called("optimizer", key)
        self.optimizer: Optimizer = optimizer
        self._model = model
        self._rest = Structure(store, f"{path}/rest")
        self._groups = Structure(store, f"{path}/groups")
        self._placed: dict[int, dict[str, Placed]] = {}
        self._own: dict[int, Placed] = {}  # of parameters that are in no module
        self._shards: dict[str, ShardRecord] = {}  # of DTensors, by their blocks
        self._layout: list[Any] | None = None  # as stored, if known
        self._order = self.parameters  # that it is of
        self.replacing: Replacing | None = None
        self.synced: Synced | None = None
        """Another object, or None, whenever its groups or their parameters may be others."""
        self.displaced: Callable[[], None] = lambda: None
        """Called before tensors that left their places are brought back."""
        known = self._known()  # which the model checks
        own = [each for each in enumerate(self._order) if id(each[1]) not in known]
        for index, parameter in own:
            check_movable(self.describe(index), parameter, self.devices)
        alone = [one for _, one in own if is_sharded(one)]
        if alone:
            fsdp.refuse_alone(self.called, alone)

    @property
    def piece(self) -> str:
        """Its path under the run's name."""
        return under("optimizer", self._key)

    def beside(self, optimizer: Optimizer) -> OptimizerBinding:
        """Keeps another optimizer over the same parameters in the same place."""
        return OptimizerBinding(self._store, self._parent, self._key, optimizer, self._model)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return parameters_of(self.optimizer)

    @property
    def extra_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Those that the model does not keep: what is in no module has a name that none in a module
        can have."""
        known, names, prefix = self._known(), self._names(), under("optimizer", self._key)
        return [
            (names.get(id(one), f"{prefix}..{index}"), one)
            for index, one in enumerate(self.parameters)
            if id(one) not in known
        ]

    def describe(self, index: int) -> str:
        """A parameter in a message."""
        return f"parameter {index} of {self.called}"

    def _names(self) -> Mapping[int, str]:
        return self._model.names if self._model is not None else {}

    def _known(self) -> set[int]:
        return {id(one) for _, one in self._model.parameters} if self._model is not None else set()

    # ---- attach

    def create(self) -> None:
        """Copies parameters and state into the store. The optimizer is untouched until `bind`."""
        known = self._known()
        for index, parameter in enumerate(self.parameters):
            if id(parameter) not in known:
                self._own[index] = self._create_block(f"parameters/{index}", parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    self._create(index, key, value)
        self._write_plain()

    def check(self, before: int | None) -> None:
        """Compares the parameters with the stored ones. Changes nothing.

        before: groups that the program gave when the run was last attached. Stored ones behind them
        were added while it trained, and `restore` brings them back, if it gives as many now and the
        model has their parameters. None: it says by itself which groups there are.

        Raises:
            MismatchError: they differ; it lists how.
        """
        groups, _, own, shards = read_layout(self._store, self._path)
        here = self.describe_groups()
        if len(here) == before and self._in_model(groups[before:]):
            groups = groups[:before]
        compare_groups(self.called, groups, here)
        parameters = self.parameters
        for index in own:
            stored, given = shards.get(f"parameters/{index}"), record_of(parameters[index])
            if stored != given:
                told = f"{self.describe(index)}: stored {describe(stored)}, given {describe(given)}"
                raise MismatchError(f"{self.called}: {HOW_TO_RESHARD}", mismatched=[told])

    def _in_model(self, groups: list[dict[str, Any]]) -> bool:
        """Whether all their parameters are the model's, and in none of the program's groups."""
        here = {id(one) for one in self.parameters}
        named = self._model.parameters if self._model is not None else []
        left = {name for name, one in named if id(one) not in here}
        return all(name in left for group in groups for name in group["names"])

    def open(self) -> None:
        """Finds the stored placed. Reads no tensor's data, and the optimizer is untouched until
        `bind`."""
        self._rest.forget()
        self._groups.forget()
        self._placed.clear()
        self._own.clear()
        groups, tensors, own, self._shards = read_layout(self._store, self._path)
        self._layout = [groups, tensors, own]
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
                own.bind(parameter)
            placed = self._placed.get(index, {})
            state = self.optimizer.state.get(parameter, {})
            drop_tensors(state, placed)
            for key, one in placed.items():
                here = state.get(key)
                shard = self._shards.get(state_block(index, key))
                if not isinstance(here, torch.Tensor) or record_of(here) != shard:
                    made = as_recorded(one.heap, shard, parameter) if shard else one.heap
                    self.optimizer.state[parameter][key] = made
                elif not one.holds(here):
                    one.bind(here)

    def restore(self) -> None:
        """`bind`, and hyperparameters and plain state from the store too: when resuming, and after
        a roll back."""
        self.synced = None
        self._arrange()
        self.bind()
        parameters = self.parameters
        rest = self._rest.read()
        for index, parameter in enumerate(parameters):
            state = self.optimizer.state.setdefault(parameter, {})
            for key in [key for key, value in state.items() if not isinstance(value, torch.Tensor)]:
                del state[key]
            state.update(rest.get(index, {}))
            if not state:
                del self.optimizer.state[parameter]  # as before its first step
        for key in [key for key in self.optimizer.state if not isinstance(key, torch.Tensor)]:
            del self.optimizer.state[key]
        for key, value in rest.get("others", {}).items():
            self.optimizer.state[key] = value
        restore_groups(self.optimizer, self._groups.read())

    def _arrange(self) -> None:
        """Puts the parameters where the stored layout has them: a roll back undoes a change of the
        groups too."""
        named = dict(self._model.parameters) if self._model is not None else {}
        assert self._layout is not None  # it was opened
        groups, order = self._layout[0], iter(self._order)
        arrange_groups(
            self.optimizer,
            [[(next(order, None), named.get(name)) for name in one["names"]] for one in groups],
        )
        self._order = self.parameters

    def _moved(self) -> bool:  # than in the stored layout
        return are_moved(self.called, self.parameters, self._order, self._known)

    # ---- while it trains

    def release(self) -> None:
        """The run ends; parameters and state stay where they are."""

    def writes(self) -> list[Any]:
        """The memory that the optimizer's next step writes: parameters with a gradient, and their
        state."""
        return [self.synced.writes if self.synced is not None else self._written()]

    @property
    def kept(self) -> list[torch.Tensor]:
        """Parameters that it keeps, and not the model's binding."""
        parameters = self.parameters if self._own else []
        return [parameters[index] for index in self._own]

    def memory(self) -> list[Memory]:
        """What its state lies in, and parameters that are in no module."""
        state = [one.memory for placed in self._placed.values() for one in placed.values()]
        return [*(one.memory for one in self._own.values()), *state]

    def _written(self) -> Writes:
        arrays: list[list[Memory]] = []
        parameters = self.parameters
        for index, parameter in enumerate(parameters):
            own = self._own.get(index) or (self._model.placed(parameter) if self._model else None)
            placed = [*((own,) if own is not None else ()), *self._placed.get(index, {}).values()]
            arrays.append([one.memory for one in placed])
        return self._store._core.pool.handle.writes(parameters, arrays)

    @property
    def behind(self) -> bool:
        """Whether parameters have state of which nothing is in the heap yet."""
        return len(self.optimizer.state) != len(self._placed)

    def replace(self, replaced: dict[int, torch.Tensor], since: object) -> None:
        """Puts parameters that are other objects now, by id of the old, into groups and state.
        since: see `Replacing`. Raises: MismatchError."""
        if self.replacing is None or self.replacing.since is not since:
            if not replaced:
                return
            self.replacing = Replacing(self.optimizer, self._order, since)
        self.synced = None
        self._order = self.replacing.put(self.called, replaced)

    def collect(self) -> None:
        """Moves into the heap what is not there: state made or replaced since the last call. Writes
        no plain values."""
        displaced: list[tuple[str, torch.Tensor, Placed]] = []
        changed = left = False
        for index, parameter in enumerate(self.parameters):
            changed |= self._collect_parameter(index, parameter, displaced)
            state = self.optimizer.state.get(parameter, {})
            placed = self._placed.get(index, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                one = placed.get(key)
                if one is not None and one.holds(value):
                    continue
                if one is None or not self._fits(one, index, key, value):
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
            state = self.optimizer.state.get(parameters[index], {})
            pairs += [(state[key], one) for key, one in placed.items() if key in state]
        for tensor, one in pairs:
            if isinstance(tensor, torch.Tensor) and not one.holds(tensor):
                set_apart(tensor)

    @property
    def watch(self) -> Watch | None:
        """See `Part`."""
        return self.synced.all if self.synced is not None else None

    def capture(self) -> None:
        """`collect`, and the plain values: everything is in the store, pending until the next
        commit."""
        synced, others = self.synced, [0]
        if synced is not None and not (others := synced.all.others()):
            return
        # nothing is known until all is written; what changes after a look is seen by the next
        self.synced = None
        groups = state = OTHERS
        if synced is not None and 0 not in others:  # its roots
            groups = synced.groups.look() if 1 in others else SAME
            state = synced.state.look() if 2 in others else SAME
        if synced is None or max(groups, state) == OTHERS:
            moved = self._moved()
            self.collect()
            synced = self._describe()
            self._write_plain()
            if moved:
                self._write_layout()
        else:
            if groups == VALUES:
                synced.groups.take()
                self._write_settings()
            if state == VALUES:
                synced.state.take()
                self._rest.write(plain_state(self.optimizer, self.called))
        self.synced = synced

    def _describe(self) -> Synced | None:
        """None if it holds something, beside the tensors that are in placed, that can change and
        stay the same object."""
        optimizer = self.optimizer
        if not holds_constants(optimizer):
            return None
        roots = asking(
            [
                still(optimizer, "param_groups", optimizer.param_groups),
                still(optimizer, "state", optimizer.state),
            ]
        )
        groups = watch(tables_of_groups(optimizer))
        state = watch(self._tables_of_state(), self._pairs())
        every = asking(all_of((roots, groups, state)))
        return Synced(every, roots, groups, state, self._written())

    def _tables_of_state(self) -> list[Any]:
        return tables_of_state(self.optimizer)

    def _pairs(self) -> list[tuple[torch.Tensor, Placed]]:
        """What has to lie in the blocks of this binding."""
        pairs = []
        for index, parameter in enumerate(self.parameters):
            if index in self._own:
                pairs.append((parameter, self._own[index]))
            state = self.optimizer.state.get(parameter, {})
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
            own = self._own[index] = self._create_block(f"parameters/{index}", parameter)
        if not own.holds(parameter):
            displaced.append((self.describe(index), parameter, own))
        return created

    def _fits(self, one: Placed, index: int, key: str, value: torch.Tensor) -> bool:
        """Whether the value can be copied into the block."""
        part = local(value)
        return (
            one.shape == part.shape
            and one.dtype is part.dtype
            and record_of(value) == self._shards.get(state_block(index, key))
        )

    def _state_path(self, index: int, key: str) -> str:
        return f"{self._path}/{state_block(index, key)}"

    def _create_block(self, block: str, value: torch.Tensor) -> Placed:
        """The value itself is not bound."""
        record = record_of(value)
        if record is not None:
            self._shards[block] = record
        return Placed.create(self._store, f"{self._path}/{block}", value)

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
        made = self._create_block(state_block(index, key), value)
        self._placed.setdefault(index, {})[key] = made
        return made

    def _remove(self, index: int, key: str) -> None:
        self._store.pop(self._state_path(index, key), None)
        self._shards.pop(state_block(index, key), None)
        self._placed[index].pop(key, None)

    def _write_plain(self) -> None:
        self._rest.write(plain_state(self.optimizer, self.called))
        self._write_settings()
        if self._layout is None or [len(group["shapes"]) for group in self._layout[0]] != [
            len(group["params"]) for group in self.optimizer.param_groups
        ]:
            self._write_layout()

    def _write_settings(self) -> None:
        settings = [dict(group) for group in self.optimizer.param_groups]
        for one in settings:
            del one["params"]
        self._groups.write(settings)

    def _write_layout(self) -> None:
        tensors = [[index, key] for index, placed in self._placed.items() for key in placed]
        self._layout = None  # until it is written
        layout: list[Any] = [self.describe_groups(), tensors, list(self._own)]
        if self._shards:
            layout.append(self._shards)
        self._store[f"{self._path}/layout"] = layout
        self._layout, self._order = layout, self.parameters

    def describe_groups(self) -> list[dict[str, Any]]:
        return _describe(self.optimizer, type(self.optimizer).__name__, self._names())
