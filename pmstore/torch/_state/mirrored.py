"""A run whose tensors stay where they are, on an accelerator, and are mirrored: copied into slots
of the store at each commit.

They lie in one pair of slots of bytes: parameters, buffers, and the optimizer's state, one after
another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from pmstore import Store
from pmstore.mirror.copier import flat_bytes
from pmstore.mirror.mirror import Mirror, MirrorPart
from pmstore.objects.slots import Slots
from pmstore.torch._state import fsdp
from pmstore.torch._state.heap import UNFIT, check_movable, fill
from pmstore.torch._state.layout import Place, compare, plan, resized, root_tensors
from pmstore.torch._state.model import ModelBinding
from pmstore.torch._state.optimizer import OptimizerBinding
from pmstore.torch._state.optimizer_state import drop_tensors, read_layout, state_block
from pmstore.torch._state.sharded import ShardRecord, as_recorded, local, record_of
from pmstore.torch.keys import under
from pmstore.torch.optim.base import NativeOptimizer
from pmstore.torch.run_errors import AttachError

_ALIGN = 64
_DEVICES = ("cpu", "cuda")


class _RunMirror(Mirror):
    """The run restores its tensors itself: after a roll back there may be other ones than before.
    And a program that is interrupted while a step ends may write to its parameters at once."""

    __slots__ = ()
    fenced = True

    def restore(self) -> None:
        pass


def packed(slots: Slots, layout: list[list[Any]]) -> dict[str, torch.Tensor]:
    """The tensors of a `Pack`, by name: over the current slot."""
    whole = flat_bytes(slots.current)
    held = {}
    for name, shape, stride, dtype, _, at in layout:
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        held[name] = (
            whole[at : at + count * kind.itemsize].view(kind).as_strided(shape, stride)
            if count
            else torch.empty(shape, dtype=kind, device="cpu")
        )
    return held


def packed_whole() -> AttachError:
    """Why a mirrored run is not taken in part."""
    return AttachError(
        "the tensors of a mirrored run lie in one piece, which cannot be taken in part. Begin a "
        "run with another name from the stored model: pmstore.torch.load(store, model), then "
        "attach(..., name=...)"
    )


class Pack:
    """Tensors under one pair of slots, `<path>`; `<path>_layout` says which: [name, shape, strides,
    dtype, on the CPU, offset].

    When the set of tensors changes (an optimizer makes its state in its first step), the slots are
    made anew, in the same transaction.
    """

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        self._mirrors = store._open_mirrors()
        self._layout: list[list[Any]] | None = None  # as stored, if known
        self._mirror: Mirror | None = None

    def write(self, tensors: list[tuple[str, torch.Tensor, bool]]) -> None:
        """These are copied by the next commit. (name, tensor, live): others than live ones are
        copied now, on their device: what the program writes before it asks for the fence.

        Raises: AttachError: a tensor is not dense. StoreFullError.
        """
        layout, end = self._plan(tensors)
        if layout != self._layout or self._mirror is None:
            self._store.pop(self._path, None)
            slots = self._store.slots(self._path, max(end, 1), torch.uint8)
            self._store[f"{self._path}_layout"] = layout
            self._layout = layout
            self._mirror = self._use(slots)
        away = any(tensor.device.type != "cpu" for _, tensor, _ in tensors)
        parts = []
        for (_, tensor, live), row in zip(tensors, layout, strict=True):
            # numbers of steps: nobody waits for those
            live = live and not (away and tensor.device.type == "cpu")
            held = tensor.detach()
            parts.append(
                MirrorPart(
                    held if live else held.clone(memory_format=torch.preserve_format), row[5], live
                )
            )
        self._mirror.parts = tuple(parts)

    @staticmethod
    def _plan(tensors: list[tuple[str, torch.Tensor, bool]]) -> tuple[list[list[Any]], int]:
        layout, at = [], 0
        for name, tensor, _ in tensors:
            if (
                tensor.numel()
                and torch.empty_like(tensor, device="meta").stride() != tensor.stride()
            ):
                raise AttachError(f"{name} is not dense in memory: make it so, with .contiguous()")
            dtype = str(tensor.dtype).removeprefix("torch.")
            on_cpu = tensor.device.type == "cpu"
            layout.append([name, list(tensor.shape), list(tensor.stride()), dtype, on_cpu, at])
            at += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        return layout, at

    def _use(self, slots: Slots) -> Mirror:
        made = _RunMirror(slots, (), False)
        self._mirrors.add(made)
        return made

    def open(self) -> dict[str, torch.Tensor]:
        """What the store's last commit holds, by name: tensors over the current slot. A commit
        before the next `write` leaves it so."""
        slots = self._store[self._path]
        layout = self._store[f"{self._path}_layout"]
        if self._mirror is None or layout != self._layout:
            self._layout = layout
            self._mirror = self._use(slots)
        self._mirror.parts = ()  # some are copies from before a roll back
        return packed(slots, layout)

    @property
    def on_cpu(self) -> dict[str, bool]:
        """Whether each stored tensor was on the CPU, by name."""
        return {row[0]: row[4] for row in self._layout or ()}

    def fence(self) -> None:
        """What the program does from now on does not touch what is being committed."""
        self._mirrors.fence()

    def wait_over(self) -> None:
        """Waits until a commit under way is over."""
        self._mirrors.wait_over()

    def release(self) -> None:
        if self._mirror is not None and not self._store.closed:
            self._mirrors.remove(self._mirror.name)


class MirroredModel(ModelBinding):
    """A `ModelBinding` whose parameters and buffers keep their memory."""

    devices: Sequence[str] = _DEVICES
    _shapes: list[torch.Size] | None = None  # of the buffers, as in the stored layout, if known

    def create(self) -> None:
        self._write_layout(plan(self._members))

    def open(self) -> None:
        pass

    def _refit(self, stored: Mapping[str, Place], given: Mapping[str, Place]) -> None:
        raise packed_whole()

    def bind(self) -> None:
        pass

    def tensors(self) -> list[tuple[str, torch.Tensor, bool]]:
        """What is to be kept: tied ones once. Buffers are not live: the forward pass writes
        them."""
        found = root_tensors(self._members)
        return [(f"model/{name}", tensor, kind == "parameter") for name, kind, tensor in found]

    def load(self, held: dict[str, torch.Tensor]) -> None:
        self._put_back()
        self._shapes = None
        with torch.no_grad():
            for name, tensor, live in self.tensors():
                if live:
                    tensor.copy_(held[name])
                else:
                    fill(tensor, held[name])

    def capture(self) -> None:
        """They lie where the program put them; the layout follows buffers that have another
        shape."""
        shapes = [member.tensor.shape for member in self._members if member.kind == "buffer"]
        if shapes != self._shapes:
            stored, given = self._layout(), plan(self._members)
            now = resized(stored, given)
            compare(now, given, UNFIT)
            if now != stored:
                self._write_layout(now)
            self._shapes = shapes
        if self._of_fsdp:
            fsdp.refuse_unreduced(self._of_fsdp)

    def _follow(self, before: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        stored = self._layout()
        found = self._find()
        self._check_movable(found[1])
        self._scan(*found)
        given = plan(self._members)
        what = "the model was changed after attach, to one that does not fit its place in the store"
        compare(resized(stored, given), given, what)
        return self._replaced(before)


class MirroredOptimizer(OptimizerBinding):
    """An `OptimizerBinding` whose parameters and state keep their memory."""

    devices: Sequence[str] = _DEVICES

    def __init__(
        self,
        store: Store,
        path: str,
        key: str,
        optimizer: Optimizer,
        model: MirroredModel | None,
        pack: Pack,
    ) -> None:
        if isinstance(optimizer, NativeOptimizer):
            raise AttachError(
                f"pmstore.torch.optim.{type(optimizer).__name__} keeps its parameters in slots "
                "itself: mirror an optimizer of torch.optim, or attach without mirror=True"
            )
        super().__init__(store, path, key, optimizer, model)
        self._pack = pack
        self._prefix = f"{under('optimizer', key)}/" if key else ""  # of its names in the pack

    def create(self) -> None:
        self._write_plain()

    def beside(self, optimizer: Optimizer) -> OptimizerBinding:
        raise packed_whole()

    def open(self) -> None:
        self._rest.forget()
        self._groups.forget()
        groups, tensors, own, self._shards = read_layout(self._store, self._path)
        self._layout = [groups, tensors, own]

    def tensors(self) -> list[tuple[str, torch.Tensor, bool]]:
        """State, and parameters that are in no module."""
        known = self._known()
        found: list[tuple[str, torch.Tensor, bool]] = []
        shards: dict[str, ShardRecord] = {}
        for index, parameter in enumerate(self.parameters):
            if id(parameter) not in known:
                found.append((f"{self._prefix}parameter/{index}", local(parameter), True))
                if record := record_of(parameter):
                    shards[f"parameters/{index}"] = record
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    if not isinstance(key, str):
                        raise AttachError(
                            f"{self.called} keeps state under {key!r}: only names that "
                            "are str can be stored"
                        )
                    check_movable(f"state {key!r} of {self.describe(index)}", value, self.devices)
                    found.append((f"{self._prefix}state/{index}/{key}", local(value), True))
                    if record := record_of(value):
                        shards[state_block(index, key)] = record
        if shards != self._shards:
            self._shards = shards
            self._write_layout()
        return found

    def load(self, held: dict[str, torch.Tensor]) -> None:
        """State that is not stored vanishes, other state is made."""
        self._arrange()
        on_cpu = self._pack.on_cpu
        stored: dict[int, dict[str, torch.Tensor]] = {}
        states = f"{self._prefix}state/"
        for name, value in held.items():
            if name.startswith(states):
                number, key = name.removeprefix(states).split("/", 1)
                stored.setdefault(int(number), {})[key] = value
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                own = held.get(f"{self._prefix}parameter/{index}")
                if own is not None:
                    local(parameter).copy_(own)
                state = self.optimizer.state.get(parameter, {})
                mine = stored.get(index, {})
                drop_tensors(state, mine)
                for key, value in mine.items():
                    device = "cpu" if on_cpu[f"{states}{index}/{key}"] else parameter.device
                    here = state.get(key)
                    shard = self._shards.get(state_block(index, key))
                    if (
                        not isinstance(here, torch.Tensor)
                        or local(here).shape != value.shape
                        or here.dtype != value.dtype
                        or record_of(here) != shard
                    ):
                        made = torch.empty_like(value, device=device)
                        here = as_recorded(made, shard, parameter)
                        self.optimizer.state[parameter][key] = here
                    local(here).copy_(value)

    def bind(self) -> None:
        pass

    @property
    def kept(self) -> list[torch.Tensor]:
        return [parameter for _, parameter in self.extra_parameters]

    @property
    def behind(self) -> bool:
        return False

    def collect(self) -> None:
        pass
