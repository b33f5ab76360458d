"""Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019), as torch computes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pmstore._engine.optim import OPTIM_ADAM, OPTIM_ADAMW
from pmstore.torch.optim.base import NativeOptimizer


class Adam(NativeOptimizer):
    """`torch.optim.Adam` with its names and defaults; `weight_decay` is an L2 penalty.

    Parameters float32 or bfloat16 on the CPU, moments float32. lr and betas may be tensors. fused
    and foreach are accepted and mean nothing. Not here, and refused: amsgrad, capturable,
    differentiable, decoupled_weight_decay (that is `AdamW`).
    """

    kind: int = OPTIM_ADAM
    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    # the last: of an AdamW
    refused: tuple[str, ...] = ("amsgrad", "capturable", "differentiable", "decoupled_weight_decay")

    def __init__(
        self,
        params: Iterable[Any],
        lr: Any = 1e-3,
        betas: tuple[Any, Any] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        if not float(lr) >= 0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not eps >= 0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        for index, beta in enumerate(betas):
            if not 0 <= float(beta) < 1:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not weight_decay >= 0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

    def hyper(self, group: dict[str, Any]) -> dict[str, float]:
        return {
            "lr": float(group["lr"]),
            "beta1": float(group["betas"][0]),
            "beta2": float(group["betas"][1]),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "maximize": group["maximize"],
        }


class AdamW(Adam):
    """`torch.optim.AdamW` with its names and defaults: weight decay apart from the moments.
    Otherwise as `Adam`."""

    kind: int = OPTIM_ADAMW
    refused: tuple[str, ...] = ("amsgrad", "capturable", "differentiable")

    def _check_options(self, groups: Iterable[dict[str, Any]]) -> None:
        groups = list(groups)
        super()._check_options(groups)
        if not all(group.get("decoupled_weight_decay", True) for group in groups):
            raise ValueError(
                "pmstore.torch.optim.AdamW keeps weight decay apart from the moments, and this "
                "group or state_dict is an Adam's (decoupled_weight_decay=False), whose decay is "
                "an L2 penalty: use pmstore.torch.optim.Adam"
            )

    def __init__(
        self,
        params: Iterable[Any],
        lr: Any = 1e-3,
        betas: tuple[Any, Any] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
        )
