"""Parameters of `fully_shard` (FSDP2): where it keeps them, and what it must be told when their
memory is another.

Between two steps a module has its *sharded* parameters, which are DTensors. While it computes it
has whole ones in their place, and a root keeps these after a forward without a backward. FSDP
gathers not from the DTensors but from a flat tensor over the same memory, padded to the size that
all ranks have: if only the DTensor moved, the module would compute with what was left behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from pmstore.torch._state.sharded import local
from pmstore.torch.run_errors import AttachError

Slot = tuple[int, str]
"""id of a module's table of parameters, and the name in it."""


def _groups() -> Iterator[Any]:
    """All groups of parameters that `fully_shard` has made in this process."""
    module = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(module, "FSDPModule", None)
    if kind is None:
        return
    from torch.distributed._composable_state import _module_state_mapping

    for one in list(_module_state_mapping):
        if isinstance(one, kind):
            state: Any = one._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            yield from groups


def fsdp_parameters() -> dict[Slot, Any]:
    """What FSDP knows of each parameter (its FSDPParam), by all names that it has in modules.

    Raises: AttachError: this torch keeps them in another way.
    """
    found: dict[Slot, Any] = {}
    try:
        for group in _groups():
            for one in group.fsdp_params:
                info = one._module_info
                found[id(info.module._parameters), info.param_name] = one
                shared = zip(info.shared_modules, info.shared_param_names, strict=True)
                for module, name in shared:
                    found[id(module._parameters), name] = one
                one.sharded_param, one._sharded_param_data, one.padded_sharded_param_size  # noqa: B018
    except (AttributeError, ImportError) as error:
        raise AttachError(
            f"fully_shard of torch {torch.__version__} keeps its parameters in a way that this "
            f"version of pmstore does not know ({error}): attach without it, or use another torch"
        ) from None
    return found


def padded_numel(one: Any) -> int:
    """Elements of the block that a parameter needs."""
    return int(one.padded_sharded_param_size.numel())


def move(one: Any, parameter: torch.Tensor) -> None:
    """Makes FSDP gather from where the parameter's part lies. Its `reset_sharded_param` would take
    what the module has for the parameter, and that may be a whole one now."""
    part = local(parameter)
    one.sharded_param = parameter
    one._sharded_param_data = part.as_strided((padded_numel(one),), (1,), part.storage_offset())
    one._sharding_spec = parameter._spec  # type: ignore[attr-defined]


def reshard(models: Iterable[nn.Module]) -> None:
    """Frees what was gathered: what the parameters hold has changed, or is about to."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return
    for model in models:
        for module in model.modules():
            if isinstance(module, kind):
                module.reshard()


def drop_unreduced(parameters: Iterable[Any]) -> None:
    """No commit has gradients that were not reduced: see `refuse_unreduced`."""
    for one in parameters:
        one.unsharded_accumulated_grad = None
        whole = getattr(one, "_unsharded_param", None)
        if whole is not None:
            whole.grad = None


def refuse_unreduced(parameters: Iterable[Any]) -> None:
    """Raises: AttachError: gradients wait that were not reduced, and are in no parameter's `.grad`
    yet."""
    for one in parameters:
        whole = getattr(one, "_unsharded_param", None)
        if one.unsharded_accumulated_grad is not None or (
            whole is not None and whole.grad is not None
        ):
            raise AttachError(
                "fully_shard has gathered gradients that it has not reduced "
                "(set_requires_gradient_sync(False)), and a commit cannot keep these: commit after "
                "optimizer.step(), or reduce them in each backward"
            )


def refuse_pinned(called: str, one: Any) -> None:
    """Raises: AttachError: FSDP would move the parameter out of the heap."""
    if one.pin_memory:
        raise AttachError(
            f"{called} is offloaded to pinned memory, which cannot be the store's: "
            "fully_shard(..., offload_policy=CPUOffloadPolicy(pin_memory=False))"
        )


def refuse_alone(called: str, parameters: Iterable[torch.Tensor]) -> None:
    """Raises: AttachError: some are FSDP's, and the model that has them was not given."""
    known = {id(one.sharded_param) for one in fsdp_parameters().values()}
    if any(id(one) in known for one in parameters):
        raise AttachError(
            f"{called} trains parameters of a model that fully_shard has sharded: give attach that "
            "model too, all of it"
        )


def refuse_wrapped_whole(called: str, model: nn.Module) -> None:
    """Raises: AttachError: the model, or what is in it, is one of FSDP1."""
    old = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if old is None:
        return
    inside = [one for one in model.modules() if isinstance(one, old)]
    if inside or [one for one in model.parameters() if getattr(one, "_fsdp_flattened", False)]:
        raise AttachError(
            f"{called} is wrapped in FullyShardedDataParallel (FSDP1), which keeps parameters in "
            "flat pieces of its own: shard it with torch.distributed.fsdp.fully_shard (FSDP2) "
            "instead, before the optimizer is made"
        )
