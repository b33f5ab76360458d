"""A native optimizer's parameters and state in slots: each step writes the next version of all of
them into the other slot.

They lie in one `Slots` of bytes. So a commit at every step needs no pre-image and no copy; the flip
takes effect with everything else the transaction wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch

from pmstore import Store
from pmstore.objects.slots import Slots
from pmstore.torch._state.heap import UNFIT, Placed, check_movable, set_apart
from pmstore.torch._state.model import ModelBinding
from pmstore.torch._state.optimizer import OptimizerBinding
from pmstore.torch._state.optimizer_state import describe_groups, parameters_of
from pmstore.torch._state.replaced import Synced
from pmstore.torch._state.sharded import is_sharded
from pmstore.torch.keys import called
from pmstore.torch.optim.base import TABLE, NativeOptimizer
from pmstore.torch.run_errors import AttachError, MismatchError

# ---- how parameters and state lie in a slot
#
# For each parameter its elements and its moments, each at a multiple of 64 bytes, then the numbers
# of steps.


_ALIGN = 64


class Kept(NamedTuple):
    """A parameter, its strides at attach, and the names of its moments, which are float32."""

    parameter: torch.Tensor
    stride: tuple[int, ...]
    names: tuple[str, ...]


def describe_kept(kept: Kept) -> list[Any]:
    """How it lies, as plain data: strides, dtype, names of the moments."""
    dtype = str(kept.parameter.dtype).removeprefix("torch.")
    return [list(kept.stride), dtype, list(kept.names)]


def described_kept(shape: list[int], raw: list[Any]) -> Kept:
    """A tensor without memory stands for the parameter."""
    stride, dtype, names = raw
    like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return Kept(like, tuple(stride), tuple(names))


@dataclass(frozen=True, slots=True)
class SlotViews:
    """One slot, as parameters and state. Aliases the slot."""

    parameters: list[torch.Tensor]
    state: list[dict[str, torch.Tensor]]
    # where each parameter and its state are, in that order: a tensor's `.data` can be replaced
    memory: list[list[int]]


def slot_bytes(all_kept: Sequence[Kept]) -> int:
    """Returns the bytes of a slot that holds these."""
    total = 4 * len(all_kept)
    for parameter, _, names in all_kept:
        for dtype in (parameter.dtype, *(torch.float32 for _ in names)):
            total += _padded(parameter, dtype)
    return total


def _padded(parameter: torch.Tensor, dtype: torch.dtype) -> int:
    return -(-parameter.numel() * dtype.itemsize // _ALIGN) * _ALIGN


def make_views(array: np.ndarray[Any, Any], all_kept: Sequence[Kept]) -> SlotViews:
    """A slot's bytes as what it holds."""
    flat = torch.from_numpy(array)
    at = 0

    def take(like: torch.Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nonlocal at
        size = like.numel() * dtype.itemsize
        made = flat[at : at + size].view(dtype).as_strided(like.shape, stride)
        at += _padded(like, dtype)
        return made

    parameters, state = [], []
    for parameter, stride, names in all_kept:
        parameters.append(take(parameter, stride, parameter.dtype))
        state.append({name: take(parameter, stride, torch.float32) for name in names})
    steps = flat[at : at + 4 * len(parameters)].view(torch.float32)
    for index, held in enumerate(state):
        held["step"] = steps[index]
    tensors = [(one, *held.values()) for one, held in zip(parameters, state, strict=True)]
    return SlotViews(parameters, state, [[one.data_ptr() for one in each] for each in tensors])


def make_table(
    source: SlotViews, target: SlotViews, all_kept: Sequence[Kept]
) -> np.ndarray[Any, Any]:
    """The addresses that a step from one slot into the other needs, without gradients."""
    table = np.zeros(len(source.parameters), TABLE)
    for views, out in ((source, ""), (target, "_out")):
        for row, (_, _, names), one, state in zip(
            table, all_kept, views.parameters, views.state, strict=True
        ):
            row[f"param{out}"], row[f"step{out}"] = one.data_ptr(), state["step"].data_ptr()
            for place, name in enumerate(names):
                row[f"state{out}"][place] = state[name].data_ptr()
    table["count"] = [parameter.numel() for parameter, _, _ in all_kept]
    table["bfloat16"] = [parameter.dtype == torch.bfloat16 for parameter, _, _ in all_kept]
    return table


# ---- the binding


class SlottedBinding(OptimizerBinding):
    """An `OptimizerBinding` for the optimizers of `pmstore.torch.optim`. The model's binding leaves
    their parameters to it.

    `<path>/slots`             the versions
    `<path>/rest`, `/groups`   hyperparameters
    `<path>/layout`            the parameters' names, shapes and dtypes
    """

    def __init__(
        self,
        store: Store,
        path: str,
        key: str,
        optimizer: NativeOptimizer,
        model: ModelBinding | None,
    ) -> None:
        """Changes nothing yet.

        Raises:
            AttachError: there are no parameters, or they are of a kind that cannot be moved.
        """
        if any(map(is_sharded, parameters_of(optimizer))):
            raise AttachError(
                f"{called('optimizer', key)} trains DTensors, and {type(optimizer).__name__} of "
                "pmstore.torch.optim takes plain tensors: use that of torch.optim"
            )
        super().__init__(store, path, key, optimizer, model)
        self._native = optimizer
        self._views: tuple[SlotViews, SlotViews] | None = None
        self._arrays: list[Any] = []
        self._slots: Slots | None = None
        # which slot was current when `collect` looked, and the parameters' state then
        self._here = 0
        self._held: list[dict[str, torch.Tensor]] = []
        self._beside: list[tuple[Any, Any]] = []  # of that, what is plain
        self._tables: dict[tuple[int, int], np.ndarray[Any, Any]] = {}
        self._strides = [parameter.stride() for parameter in self.parameters]
        # the slots have room for these
        self._names_of_groups = [optimizer.names(group) for group in optimizer.param_groups]
        if not self.parameters:
            raise AttachError(f"{self.called} has no parameters: give it some before attach")
        for index, parameter in enumerate(self.parameters):
            check_movable(self.describe(index), parameter)

    # ---- where things lie

    def _kept(self) -> list[Kept]:
        groups = zip(self._names_of_groups, self._native.param_groups, strict=True)
        names = [of_group for of_group, group in groups for _ in group["params"]]
        each = zip(self.parameters, self._strides, names, strict=True)
        return [Kept(*one) for one in each]

    def _turn(self) -> int:
        """Which slot is current."""
        assert self._slots is not None
        return 0 if self._slots.current is self._arrays[0] else 1

    # ---- attach

    def create(self) -> None:
        for index, (parameter, stride, names) in enumerate(self._kept()):
            dense = torch.empty_like(parameter, memory_format=torch.preserve_format)
            if dense.stride() != stride and parameter.numel():
                raise AttachError(
                    f"parameter {index} of {self.called} is not dense: use an optimizer of "
                    "torch.optim for it"
                )
            self._refuse_others(index, self._native.state.get(parameter, {}), (*names, "step"))
        slots = self._store.slots(f"{self._path}/slots", slot_bytes(self._kept()), "uint8")
        views = make_views(slots.current, self._kept())
        with torch.no_grad():
            for index, (parameter, _, names) in enumerate(self._kept()):
                views.parameters[index].copy_(parameter)
                if parameter not in self._native.state:
                    continue
                for name, here in self._native.complete(parameter, names).items():
                    if name in views.state[index]:
                        views.state[index][name].copy_(here)
        self._write_plain()

    def check(self, before: int | None) -> None:
        super().check(before)
        held = self._store[f"{self._path}/slots"]
        if not isinstance(held, Slots) or held.shape != (slot_bytes(self._kept()),):
            raise MismatchError(
                f"{self.called} is not the one whose state is stored",
                mismatched=[
                    (
                        "its parameters and state have other sizes than the stored ones (momentum, "
                        "dtypes)"
                    )
                ],
            )

    def open(self) -> None:
        self._rest.forget()
        self._groups.forget()
        self._layout = self._store[f"{self._path}/layout"]
        if self._views is not None:
            self._arrange()
        self._place()

    def _place(self) -> None:
        self._slots = self._store[f"{self._path}/slots"]
        self._arrays = [self._store[f"{self._path}/slots/{number}"] for number in (0, 1)]
        kept = self._kept()
        self._views = (make_views(self._arrays[0], kept), make_views(self._arrays[1], kept))
        self._tables.clear()

    def bind(self) -> None:
        if self._views is None:
            self._place()
        assert self._views is not None
        views = self._views[self._turn()]
        for parameter, view, state in zip(
            self.parameters, views.parameters, views.state, strict=True
        ):
            parameter.data = view
            self._bind_state(parameter, state)
        self._native.slotted = self

    def _bind_state(self, parameter: torch.Tensor, views: dict[str, torch.Tensor]) -> None:
        """The slot's tensors and no others; what is plain beside them stays."""
        held = self._native.state[parameter]
        if held.keys() != views.keys():
            for key in [
                key
                for key, value in held.items()
                if isinstance(value, torch.Tensor) and key not in views
            ]:
                del held[key]
        held.update(views)

    def release(self) -> None:
        """The optimizer updates in place from now on: parameters and state stay where they are."""
        self._native.slotted = None

    # ---- a step

    def begin(self) -> tuple[np.ndarray[Any, Any], bool]:
        """See `Slotted`. After a flip that is not committed the step is in place: the committed
        slot is not to be written."""
        assert self._slots is not None
        self.collect()
        here = self._here
        if self._slots.flipped:
            return self._table(here, here), False
        there = 1 - here
        if self._slots.next is not self._arrays[there]:  # also makes it writable
            raise AttachError(
                f"the slots {self._path}/slots were replaced in the store: attach anew"
            )
        return self._table(here, there), True

    def finish(self) -> None:
        """Nobody but the kernel was at work since `begin`: what `collect` found there holds."""
        assert self._slots is not None
        assert self._views is not None
        self._slots.flip()
        self._here = 1 - self._here
        views = self._views[self._here]
        for parameter, view, held, state in zip(
            self.parameters, views.parameters, self._held, views.state, strict=True
        ):
            parameter.data = view
            held.update(state)

    def _table(self, here: int, there: int) -> np.ndarray[Any, Any]:
        table = self._tables.get((here, there))
        if table is None:
            assert self._views is not None
            table = make_table(self._views[here], self._views[there], self._kept())
            self._tables[here, there] = table
        return table

    # ---- while it trains

    @property
    def kept(self) -> list[torch.Tensor]:
        return self.parameters

    def memory(self) -> list[Any]:
        return [] if self._slots is None else [self._slots.current]

    def writes(self) -> list[Any]:
        return []  # nothing that is captured

    @property
    def behind(self) -> bool:
        return False

    def _refuse_others(self, index: int, held: dict[str, Any], places: Iterable[str]) -> None:
        """A tensor under another name has no place in the slots: the next turn would lose it."""
        for key, value in held.items():
            if isinstance(value, torch.Tensor) and key not in places:
                raise AttachError(
                    f"the state of parameter {index} of {self.called} holds a tensor under "
                    f"{key!r}, which has no place in the slots: remove it, or hand it to attach "
                    "as an object of its own (stateful=...)"
                )

    def _check_groups(self) -> None:
        for number, (names, group) in enumerate(
            zip(self._names_of_groups, self._native.param_groups, strict=False)
        ):
            if self._native.names(group) != names:
                state = ", ".join(self._native.state_names)
                raise AttachError(
                    f"group {number} of {self.called} was attached "
                    f"{'with' if names else 'without'} {state}, and so are its slots: change what "
                    "decides that (momentum to or from 0) before attach, in a new store"
                )

    def collect(self) -> None:
        """Copies in what left the slots: `param.data = ...`, a loaded state_dict, state that was
        cleared.

        Raises: AttachError for what has no place in the slots; the step or the commit that asked
            did not happen.
        """
        if self._views is None:
            return
        self._moved()
        turn = self._here = self._turn()
        beside: list[tuple[Any, Any]] = []
        every: list[dict[str, torch.Tensor]] = []
        data_ptr = torch.Tensor.data_ptr
        views = self._views[turn]
        if len(views.parameters) != len(self.parameters):
            raise AttachError(
                f"parameters were added to {self.called} after attach: add groups before"
            )
        self._check_groups()
        apart = False
        with torch.no_grad():
            each = zip(
                self.parameters,
                self._strides,
                views.parameters,
                views.state,
                views.memory,
                strict=True,
            )
            for index, (parameter, stride, view, state, memory) in enumerate(each):
                held = self._native.state[parameter]
                every.append(held)
                here = [*map(data_ptr, (parameter, *state.values()))]
                moved = (
                    here != memory
                    or parameter.stride() != stride
                    or not all(map(is_, map(held.get, state), state.values()))
                )
                if moved or len(held) != len(state):
                    self._refuse_others(index, held, state)
                if moved:
                    if not apart:
                        self.displaced()
                        apart = True
                    if here[0] != memory[0] or parameter.stride() != stride:
                        if (
                            parameter.shape != view.shape
                            or parameter.dtype != view.dtype
                            or parameter.device.type != "cpu"
                        ):
                            given = f"{tuple(parameter.shape)} {parameter.dtype}"
                            raise MismatchError(
                                UNFIT, mismatched=[f"parameter {index} of {self.called}: {given}"]
                            )
                        view.copy_(parameter)
                        parameter.data = view
                    self._take_state(turn, index, parameter)
                if len(held) != len(state):
                    beside += [item for item in held.items() if item[0] not in state]
        self._beside, self._held = beside, every

    def set_apart(self) -> None:
        if self._views is None:
            return
        views = self._views[self._turn()]
        for parameter, memory, state in zip(
            self.parameters, views.memory, views.state, strict=True
        ):
            held = self._native.state[parameter]
            tensors = [parameter, *(held.get(name) for name in state)]
            for tensor, place in zip(tensors, memory, strict=True):
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() != place:
                    set_apart(tensor)

    def _take_state(self, turn: int, index: int, parameter: torch.Tensor) -> None:
        """Copies state that is in other tensors, or in other memory, into its place, and binds it
        there."""
        assert self._views is not None
        views = self._views[turn]
        _, _, names = self._kept()[index]
        complete = dict(self._native.complete(parameter, names))
        for (name, view), memory in zip(
            list(views.state[index].items()), views.memory[index][1:], strict=True
        ):
            if view.data_ptr() != memory:
                made = make_views(self._arrays[turn], self._kept())
                views.state[index][name] = made.state[index][name]
            if complete[name] is not views.state[index][name]:
                views.state[index][name].copy_(complete[name])
        self._bind_state(parameter, views.state[index])

    @property
    def watch(self) -> None:
        return None  # `collect` looks

    def capture(self) -> None:
        self.collect()
        if not self._beside:
            super().capture()
            return
        # what is plain lies in tables that change with every step: nobody knows whether it did
        self.synced: Synced | None = None
        super().capture()
        self.synced = None

    def _tables_of_state(self) -> list[Any]:
        """All but the tensors of the slots, which change with every step: `collect` sees to
        them."""
        return [self._native.state]

    def _pairs(self) -> list[tuple[torch.Tensor, Placed]]:
        return []

    def describe_groups(self) -> list[dict[str, Any]]:
        kind = f"pmstore.{type(self._native).__name__}"
        described = describe_groups(self._native, kind, self._names())
        kept = iter(self._kept())
        for group, own in zip(described, self._native.param_groups, strict=True):
            group["kept"] = [describe_kept(next(kept)) for _ in own["params"]]
        return described
