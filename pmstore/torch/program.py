"""What a program gives to `attach`: of each kind of piece one, several under keys, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pmstore._base.mapping_protocol import Held
from pmstore._base.text import encode_name
from pmstore.torch._state.fsdp import refuse_wrapped_whole
from pmstore.torch._state.optimizer_state import parameters_of
from pmstore.torch._state.sharded import is_sharded
from pmstore.torch._state.stateful import Stateful, as_stateful, extra_state, is_stateful
from pmstore.torch.keys import called, under
from pmstore.torch.run_errors import AttachError
from pmstore.torch.wrappers import refuse_empty, refuse_scripted, refuse_wrapped, unwrapped

FORMAT = 2
"""Of a run that is written. Versions that know format 1 alone would open a loader's place in
another order: they know nothing of batches held, of a batch that is cut, nor where generators
were found."""
SHARDED_FORMAT = 3
"""Of a run that has DTensors. Versions that know none take a rank's parts for the whole."""
FORMATS = (1, FORMAT, SHARDED_FORMAT)
"""That are read. A resume makes a run's format the newest."""
_EXTRA = "model_extra_state"


@dataclass(frozen=True, slots=True)
class Program:
    """What a program gives to `attach`. A lone model or optimizer has the key ""."""

    models: dict[str, nn.Module]
    """In the order of their keys: which name of a tensor is the first does not depend on the
    program's order."""
    optimizers: dict[str, Optimizer]
    """In the program's order."""
    statefuls: dict[str, Stateful | None]
    """By their paths under the run's name."""
    loader: Iterable[Any] | None
    mirrored: bool

    @classmethod
    def gather(
        cls,
        *,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any,
        scaler: Any,
        stateful: Mapping[str, Any] | None,
        loader: Iterable[Any] | None,
        mirror: bool | None,
    ) -> Program:
        """The arguments of `attach`. Touches none of them.

        Raises: AttachError: a piece is of another kind, or given twice.
        """
        models = _several("model", model, lambda one: isinstance(one, nn.Module), "an nn.Module")
        optimizers = _several(
            "optimizer",
            unwrapped(optimizer),
            lambda one: isinstance(one, Optimizer),
            "a torch.optim.Optimizer",
        )
        models = dict(sorted(models.items()))
        statefuls: dict[str, Stateful | None] = {}
        for what, given in (("lr_scheduler", lr_scheduler), ("scaler", scaler)):
            found = _several(
                what,
                unwrapped(given),
                is_stateful,
                "an object with state_dict() and load_state_dict()",
            )
            statefuls |= {under(what, key): one for key, one in found.items()} or {what: None}
        statefuls |= {under(_EXTRA, key): extra_state(one) for key, one in models.items()}
        statefuls.setdefault(_EXTRA, None)
        statefuls |= {
            f"stateful/{encode_name(key)}": as_stateful(key, one)
            for key, one in (stateful or {}).items()
        }
        for key, one in models.items():
            refuse_wrapped_whole(called("model", key), one)
            refuse_scripted(called("model", key), one)
        for key, optimizer in optimizers.items():
            refuse_wrapped(called("optimizer", key), optimizer)
        for key, one in statefuls.items():
            if one is not None:
                refuse_empty(key, one)
        mirrored = _on_an_accelerator(models, optimizers) if mirror is None else mirror
        return cls(models, optimizers, statefuls, loader, mirrored)

    @property
    def format(self) -> int:
        """The format of the run that is written."""
        return SHARDED_FORMAT if any(map(is_sharded, self.tensors())) else FORMAT

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers, some of them twice."""
        return [
            *(one for model in self.models.values() for one in model.parameters()),
            *(one for model in self.models.values() for one in model.buffers()),
            *(one for optimizer in self.optimizers.values() for one in parameters_of(optimizer)),
        ]

    @property
    def keepers(self) -> list[Stateful]:
        """What has a state of its own, beside models and optimizers."""
        return [
            one
            for path, one in self.statefuls.items()
            if one is not None and not path.startswith(_EXTRA)
        ]

    def given(self) -> dict[str, bool]:
        """Which pieces there are: stored with the run."""
        given = {"model": False, "optimizer": False}
        given |= {under("model", key): True for key in self.models}
        given |= {under("optimizer", key): True for key in self.optimizers}
        given |= {key: stateful is not None for key, stateful in self.statefuls.items()}
        return {**given, "loader": self.loader is not None, "rng": True, "mirror": self.mirrored}


def _several(what: str, given: Any, fits: Callable[[Any], bool], wanted: str) -> dict[str, Any]:
    """Pieces of one kind by their keys: of a list "0", "1", ...; a lone one has the key ""."""
    if given is None or fits(given):
        return {} if given is None else {"": given}
    if isinstance(given, Mapping):
        pieces = dict(given)
    elif isinstance(given, (list, tuple)):
        pieces = {str(number): one for number, one in enumerate(given)}
    else:
        raise AttachError(
            f"{what} is a {type(given).__qualname__}: it must be {wanted}, or a dict or a list of "
            f"such{_way_out(given)}"
        )
    if not pieces:
        raise AttachError(f"{what}={given!r} is empty: leave it out if there is none")
    seen: dict[int, str] = {}
    for key, one in pieces.items():
        if not isinstance(key, str) or not key or "\0" in key:
            raise AttachError(f"{what} has the key {key!r}: keys are names, which are stored")
        if not fits(one):
            raise AttachError(
                f"{what}[{key!r}] is a {type(one).__qualname__}: it must be {wanted}{_way_out(one)}"
            )
        if id(one) in seen:
            raise AttachError(
                f"{what}[{seen[id(one)]!r}] and {what}[{key!r}] are the same object: give it once"
            )
        seen[id(one)] = key
    return pieces


def _way_out(one: Any) -> str:
    if one is None:
        return ". Leave it out if there is none"
    if is_stateful(one) and not isinstance(one, (nn.Module, Optimizer)):
        return ". What has state_dict() and load_state_dict() can go into stateful={...}"
    return ""


def _on_an_accelerator(models: dict[str, nn.Module], optimizers: dict[str, Optimizer]) -> bool:
    """Whether any parameter is."""
    tensors: list[torch.Tensor] = [one for model in models.values() for one in model.parameters()]
    tensors += [one for optimizer in optimizers.values() for one in parameters_of(optimizer)]
    return not {tensor.device.type for tensor in tensors} <= {"cpu", "meta"}


def check_format(store: Held, name: str) -> None:
    """Raises: AttachError: the stored run is of a version that this one cannot read."""
    about = store[f"{name}/about"]
    if about["format"] not in FORMATS:
        raise AttachError(
            f"the stored run {name!r} has format {about['format']}, this version of pmstore reads "
            f"{', '.join(map(str, FORMATS[:-1]))} and {FORMATS[-1]}: use the version that wrote it"
        )
