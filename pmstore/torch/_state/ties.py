"""Memory that two bindings would each move to a place of their own: it would be torn apart."""

from __future__ import annotations

from collections.abc import Iterable

from pmstore.torch._state.layout import extent, storage_of
from pmstore.torch._state.model import ModelBinding
from pmstore.torch._state.optimizer import OptimizerBinding
from pmstore.torch._state.sharded import local
from pmstore.torch.errors import AttachError


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
