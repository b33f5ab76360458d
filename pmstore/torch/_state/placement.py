"""Where models and optimizers of a run lie: in the heap, those of native optimizers in slots; or
where they were, on an accelerator, mirrored into the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer

from pmstore import Store
from pmstore.torch._state.layout import extent, storage_of
from pmstore.torch._state.mirrored import MirroredModel, MirroredOptimizer, Pack
from pmstore.torch._state.model import ModelBinding
from pmstore.torch._state.optimizer import OptimizerBinding
from pmstore.torch._state.optimizer_state import parameters_of
from pmstore.torch._state.sharded import is_sharded, local
from pmstore.torch._state.slotted import SlottedBinding
from pmstore.torch.optim.base import NativeOptimizer
from pmstore.torch.run_errors import AttachError


class Placement:
    """The memory in which all models and optimizers of a run lie. Nothing is to do where it is the
    store's own.

    Attributes:
        in_store: a step writes into the store's memory. Else only a commit does, and copies the
            tensors; if nobody waits for it, it goes on beside the next step.
    """

    model: ModelBinding | None
    optimizers: dict[str, OptimizerBinding]
    in_store: bool

    def capture(self) -> None:
        """The tensors go into the store with the next commit, as far as they do not lie there."""

    def restore(self) -> None:
        """The tensors become what the last commit holds."""

    def fence(self) -> None:
        """Lets the program write again: a commit under way has read the tensors, or their device
        reads them first."""

    def wait_over(self) -> None:
        """Waits until a commit under way is over. Whether it failed, the next commit says."""

    def release(self) -> None:
        """The run is detached."""

    def note(self) -> None:
        """What the tensors hold now is what `written` compares with."""

    def written(self) -> bool:
        """Whether the program has written to the tensors since."""
        raise NotImplementedError


class InHeap(Placement):
    """The tensors' memory is the store's."""

    in_store = True

    def __init__(
        self,
        store: Store,
        name: str,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
    ) -> None:
        """Touches neither store nor program. Raises: AttachError: a tensor cannot be kept."""
        self._store = store
        self.model: ModelBinding | None = None
        self.optimizers: dict[str, OptimizerBinding] = {}
        path, in_slots = f"{name}/optimizer", dict[str, NativeOptimizer]()
        for key, one in optimizers.items():
            if isinstance(one, NativeOptimizer):
                in_slots[key] = one
        if models:
            kept = [parameter for one in in_slots.values() for parameter in parameters_of(one)]
            self.model = ModelBinding(store, f"{name}/model", models, kept)
        for key, one in optimizers.items():
            self.optimizers[key] = (
                SlottedBinding(store, path, key, in_slots[key], self.model)
                if key in in_slots
                else OptimizerBinding(store, path, key, one, self.model)
            )
        check_apart(self.model, self.optimizers.values())
        for binding in self._bindings:
            binding.displaced = self._set_apart

    @property
    def _bindings(self) -> list[ModelBinding | OptimizerBinding]:
        return [*((self.model,) if self.model is not None else ()), *self.optimizers.values()]

    def _set_apart(self) -> None:
        """Tensors that left their places are about to be brought back. Some may lie in the place of
        another (`.data` that was swapped), which is not to be overwritten before it is read.

        Raises: AttachError, MismatchError: some share memory that did not, or no longer do.
        """
        if self.model is not None:
            self.model.check_ties()
        check_apart(self.model, self.optimizers.values())
        for binding in self._bindings:
            binding.set_apart()

    def written(self) -> bool:
        memory = [memory for binding in self._bindings for memory in binding.memory()]
        return bool(memory) and self._store.written(memory)


class Mirrored(Placement):
    """The tensors keep their memory, and each commit copies them."""

    in_store = False

    def __init__(
        self,
        store: Store,
        name: str,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
    ) -> None:
        """Takes what `InHeap` takes."""
        self._pack = Pack(store, f"{name}/mirror")
        self._all: list[MirroredModel | MirroredOptimizer] = []
        model = MirroredModel(store, f"{name}/model", models) if models else None
        if model is not None:
            self._all.append(model)
        self.model: ModelBinding | None = model
        self.optimizers: dict[str, OptimizerBinding] = {}
        for key, one in optimizers.items():
            made = MirroredOptimizer(store, f"{name}/optimizer", key, one, model, self._pack)
            self.optimizers[key] = made
            self._all.append(made)

    def capture(self) -> None:
        self._pack.write([one for binding in self._all for one in binding.tensors()])

    def restore(self) -> None:
        held = self._pack.open()
        for binding in self._all:
            binding.load(held)

    def fence(self) -> None:
        self._pack.fence()

    def wait_over(self) -> None:
        self._pack.wait_over()

    def release(self) -> None:
        self._pack.release()

    def _versions(self) -> list[int]:
        """Returns how often each tensor was written. torch counts writes to a DTensor's part
        apart."""
        found = [tensor for binding in self._all for tensor in binding.kept]
        found += [local(tensor) for tensor in found if is_sharded(tensor)]
        return [tensor._version for tensor in found]

    def note(self) -> None:
        self._noted = self._versions()

    def written(self) -> bool:
        return self._versions() != self._noted


def check_apart(model: ModelBinding | None, optimizers: Iterable[OptimizerBinding]) -> None:
    """The models keep what is shared among them. A parameter that an optimizer keeps itself, one
    that is in no model or is native's, shares its memory with nothing else.

    Raises: AttachError: it does.
    """
    kept = {id(one) for _, one in model.parameters} if model is not None else set()
    own = [
        (optimizer.describe(index), one)
        for optimizer in optimizers
        for index, one in enumerate(optimizer.parameters)
        if id(one) not in kept
    ]
    if not own:
        return
    others = model.named_tensors if model is not None else []
    found: dict[int, list[tuple[int, int, str, bool]]] = {}
    for tensors, alone in ((others, False), (own, True)):
        for name, tensor in tensors:
            if local(tensor).numel():
                where = (*extent(tensor), name, alone)
                found.setdefault(storage_of(tensor), []).append(where)
    for spans in found.values():
        spans.sort()
        end, last, last_alone = -1, "", False
        for first, after, name, alone in spans:
            if first < end and (alone or last_alone):
                raise AttachError(
                    f"{last} and {name} share memory, which attach would tear apart: give the "
                    "modules that hold it to attach, all of them "
                    '(model={"name": module, ...}), and let optimizers of torch.optim, not of '
                    "pmstore.torch.optim, train it"
                )
            if after > end:
                end, last, last_alone = after, name, alone
