"""Stochastic gradient descent with momentum, as torch computes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pmstore._engine.optim import OPTIM_SGD
from pmstore.torch.optim.base import NativeOptimizer


class SGD(NativeOptimizer):
    """`torch.optim.SGD` with its names and defaults.

    Parameters float32 or bfloat16 on the CPU, the momentum buffer float32. fused and foreach are
    accepted and mean nothing. Not here, and refused: differentiable.
    """

    kind: int = OPTIM_SGD
    state_names: tuple[str, ...] = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: Any = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if not float(lr) >= 0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not momentum >= 0:
            raise ValueError(f"Invalid momentum value: {momentum}")
        if not weight_decay >= 0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.state_names if group["momentum"] else ()

    def hyper(self, group: dict[str, Any]) -> dict[str, float]:
        return {
            "lr": float(group["lr"]),
            "momentum": group["momentum"],
            "dampening": group["dampening"],
            "weight_decay": group["weight_decay"],
            "nesterov": group["nesterov"],
            "maximize": group["maximize"],
        }
