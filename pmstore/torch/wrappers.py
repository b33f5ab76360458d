"""What a program gives, taken out of what wraps it; objects that would be kept in part are refused,
with what to give instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.jit import ScriptModule
from torch.optim import Optimizer

from pmstore.torch.run_errors import AttachError

# ---- what Accelerate wraps around optimizers and schedulers


_INSIDE = {"AcceleratedOptimizer": "optimizer", "AcceleratedScheduler": "scheduler"}


def unwrapped(given: Any) -> Any:
    """The optimizers and schedulers themselves, of one or of a dict or list of such. What
    `accelerator.prepare` returns goes on calling them."""
    if isinstance(given, dict):
        return {key: unwrapped(one) for key, one in given.items()}
    if isinstance(given, (list, tuple)):
        return [unwrapped(one) for one in given]
    kind = type(given)
    if kind.__module__.partition(".")[0] == "accelerate" and kind.__name__ in _INSIDE:
        return getattr(given, _INSIDE[kind.__name__])
    return given


# ---- objects that would be kept in part


def refuse_wrapped(name: str, optimizer: Optimizer) -> None:
    """An optimizer around another one keeps its state in two places, and steps the inner one.

    Raises: AttachError: it is one.
    """
    for attribute, inner in inner_optimizers(optimizer):
        if inner is optimizer:
            continue
        own = type(optimizer).__qualname__
        raise AttachError(
            f"{name} is a {own} around a {type(inner).__qualname__}, whose state is in its "
            f"{attribute}, and would be lost. Give that one: optimizer=....{attribute} (the "
            f"program goes on calling the {own}). If the {own} has state of its own that outlives "
            f"a step, as Lookahead's slow weights, give it too: stateful={{...: ...}}"
        )


def inner_optimizers(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Optimizers that are attributes of it, or in a collection that is one."""
    for attribute, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            yield attribute, value
        elif attribute in ("param_groups", "state", "defaults"):
            continue
        elif isinstance(value, (list, tuple)):
            yield from (
                (f"{attribute}[{number}]", one)
                for number, one in enumerate(value)
                if isinstance(one, Optimizer)
            )
        elif isinstance(value, Mapping):
            yield from (
                (f"{attribute}[{key!r}]", one)
                for key, one in value.items()
                if isinstance(one, Optimizer)
            )


def refuse_scripted(name: str, model: nn.Module) -> None:
    """Raises: AttachError: a module of it has its tensors in C++, where nobody sees other ones."""
    for place, one in model.named_modules():
        if isinstance(one, ScriptModule):
            called = f"{name}{f' has {place!r}, which' if place else ''}"
            raise AttachError(
                f"{called} is a module of torch.jit. Give attach the module that it was made of: "
                "it has the same parameters and buffers, and the program goes on calling the one "
                "of torch.jit. One that is not trained, such as a teacher from a file, is held "
                "outside of the model"
            )


def refuse_empty(name: str, stateful: Any) -> None:
    """What has no state now would be restored as what it is made as: silently, if it gets some.

    Raises: AttachError: its state_dict() is empty. A gradient scaler that is disabled has none and
        never gets one.
    """
    enabled = getattr(stateful, "is_enabled", None)
    if stateful.state_dict() or (callable(enabled) and not enabled()):
        return
    kind = type(stateful).__qualname__
    if callable(getattr(stateful, "persistent", None)):
        raise AttachError(
            f"{name} is a {kind} whose state_dict() is empty until its state is made persistent: "
            f"call its persistent(True) before attach"
        )
    raise AttachError(
        f"{name} is a {kind} whose state_dict() is empty: nothing of it would be kept. Leave it "
        "out if it has no state. If it gets some later, its state_dict() must have the keys from "
        "the start"
    )
