"""What the native optimizers share: checked parameters, the table of addresses a step needs, and
the two ways to take one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim import Optimizer

from pmstore._engine.optim import optim_step

# struct pms_optim_tensor of native/optim/optim.h
TABLE = np.dtype(
    [
        ("param", "u8"),
        ("param_out", "u8"),
        ("grad", "u8"),
        ("state", "u8", 2),
        ("state_out", "u8", 2),
        ("step", "u8"),
        ("step_out", "u8"),
        ("count", "u8"),
        ("bfloat16", "i4"),
        ("reserved", "i4"),
    ]
)
DTYPES = (torch.float32, torch.bfloat16)
STREAM_BYTES = 8 << 20  # outputs larger than this leave no use for the caches


class Slotted(Protocol):
    """Where an attached optimizer's parameters and state are (`pmstore.torch._state.slotted`)."""

    def begin(self) -> tuple[np.ndarray[Any, Any], bool]:
        """The table of this step, without gradients, and whether it goes into the other slot."""

    def finish(self) -> None:
        """The other slot is written: names it, and binds parameters and state to it."""


def refuse(name: str, **options: Any) -> None:
    """Raises ValueError for options of torch's that these optimizers do not have."""
    for option, given in options.items():
        if given:
            raise ValueError(
                f"pmstore.torch.optim.{name} has no {option}: use torch.optim.{name}(..., "
                f"{option}={given!r}), which attach takes too"
            )


class NativeOptimizer(Optimizer):
    """An optimizer whose step is one native call for each group.

    state_names: of the float32 tensors kept for each parameter, at most two. Beside them `step`,
        float32, without dimensions.
    refused: options of torch's that it does not have, wherever they come from: a group, a loaded
        state_dict, an assignment.
    """

    kind: int
    state_names: tuple[str, ...] = ()
    refused: tuple[str, ...] = ("differentiable",)

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self.slotted: Slotted | None = None
        self._check_options([defaults])
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises: ValueError for a parameter that is not float32 or bfloat16 on the CPU, an option
        that is refused, or an optimizer that is attached."""
        if self.slotted is not None:
            raise ValueError(
                "the optimizer is attached, and its slots have no room for more parameters: add "
                "groups before attach"
            )
        self._check_options([param_group])
        super().add_param_group(param_group)
        for parameter in param_group["params"]:
            if (
                parameter.dtype not in DTYPES
                or parameter.device.type != "cpu"
                or parameter.layout is not torch.strided
            ):
                del self.param_groups[-1]
                raise ValueError(
                    "pmstore.torch.optim takes dense float32 and bfloat16 parameters on the CPU, "
                    f"not {parameter.dtype} on {parameter.device}, {parameter.layout}: use "
                    "torch.optim for these, which attach takes too"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as torch's does, but what is float32 stays so: torch rounds state to the
        parameters' dtype.

        Raises: ValueError for an option that is refused; nothing was loaded.
        """
        given: list[dict[str, Any]] = []  # what is loaded, after the program's own hooks

        def look(_: Optimizer, state_dict: dict[str, Any]) -> None:
            self._check_options(state_dict["param_groups"])
            given.append(state_dict)

        hooks = [
            self.register_load_state_dict_pre_hook(look),
            self.register_load_state_dict_post_hook(
                lambda _: self._keep_float32(given[-1]), prepend=True
            ),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _keep_float32(self, given: dict[str, Any]) -> None:
        numbers = [number for group in given["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            held = given["state"].get(number, {})
            for name in self.state_names:
                if isinstance(held.get(name), torch.Tensor):
                    self.state[parameter][name] = held[name].to(parameter.device, torch.float32)

    def _check_options(self, groups: Iterable[dict[str, Any]]) -> None:
        for group in groups:
            refuse(
                type(self).__name__,
                **{option: group[option] for option in self.refused if option in group},
            )

    def hyper(self, group: dict[str, Any]) -> dict[str, float]:
        """The fields of struct pms_optim_hyper for a group."""
        raise NotImplementedError

    def names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The state tensors that a group has."""
        return self.state_names

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "slotted"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("slotted", None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Parameters without a gradient stay as they are.

        Raises: RuntimeError for a sparse gradient, or one of another dtype or device; ValueError
            for an option that is refused, or state that does not fit; nothing was changed.
        """
        self._check_options(self.param_groups)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients = [_gradient(parameter) for parameter in parameters]
        elsewhere = False
        if self.slotted is None:
            table = self.table()
        else:
            table, elsewhere = self.slotted.begin()
        table["grad"] = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
        self._run(table, elsewhere)
        if elsewhere and self.slotted is not None:
            self.slotted.finish()
        return loss

    def _run(self, table: np.ndarray[Any, Any], elsewhere: bool) -> None:
        first = 0
        for group in self.param_groups:
            part = table[first : first + len(group["params"])]
            first += len(part)
            stream = (
                elsewhere
                and int(part["count"].sum()) * 4 * (1 + len(self.names(group))) >= STREAM_BYTES
            )
            if len(part) and (elsewhere or part["grad"].any()):
                optim_step(
                    part.ctypes.data,
                    len(part),
                    {"kind": self.kind, "stream": stream, **self.hyper(group)},
                )

    def table(self) -> np.ndarray[Any, Any]:
        """The addresses of parameters and state where they are, for a step in place. Makes state
        that is missing."""
        rows = []
        for group in self.param_groups:
            names = self.names(group)
            for parameter in group["params"]:
                state = self.complete(parameter, names)
                held = [state[name].data_ptr() for name in names] + [0] * (2 - len(names))
                here, step = parameter.data_ptr(), state["step"].data_ptr()
                bfloat16 = parameter.dtype == torch.bfloat16
                rows.append((here, here, 0, held, held, step, step, parameter.numel(), bfloat16, 0))
        return np.array(
            [(a, b, c, tuple(d), tuple(e), *rest) for a, b, c, d, e, *rest in rows], TABLE
        )

    def complete(self, parameter: torch.Tensor, names: tuple[str, ...]) -> dict[str, Any]:
        """A parameter's state, with zeros for what is missing; what another optimizer kept in
        another form is converted."""
        state: dict[str, Any] = self.state[parameter]
        for name in names:
            here = state.get(name)
            if isinstance(here, torch.Tensor) and here.shape != parameter.shape:
                raise ValueError(
                    f"the optimizer's {name} has shape {tuple(here.shape)}, its parameter "
                    f"{tuple(parameter.shape)}"
                )
        known = any(isinstance(state.get(name), torch.Tensor) for name in names)
        for name in names:
            here = state.get(name)
            if not isinstance(here, torch.Tensor):
                state[name] = torch.zeros_like(
                    parameter, dtype=torch.float32, memory_format=torch.preserve_format
                )
            elif here.dtype != torch.float32 or here.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=torch.float32).copy_(here)
        step = state.get("step")
        if not isinstance(step, torch.Tensor) or step.dtype != torch.float32:
            state["step"] = torch.tensor(
                float(known if step is None else step), dtype=torch.float32, device="cpu"
            )
        return state


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient as the kernels read it: the parameter's dtype and strides."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            "pmstore.torch.optim takes dense gradients only: use torch.optim.SparseAdam, or "
            "sparse=False in the layer"
        )
    if gradient.dtype != parameter.dtype or not gradient.is_cpu:
        raise RuntimeError(
            f"the gradient of a {parameter.dtype} parameter is {gradient.dtype} on "
            f"{gradient.device}"
        )
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return gradient
