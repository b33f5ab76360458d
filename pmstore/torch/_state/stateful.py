"""Schedulers, scalers and whatever else has a state_dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn
from torch.utils.data import DataLoader

from pmstore import Store
from pmstore.torch._random.search import Generator, as_generator
from pmstore.torch.kept_structure import Structure
from pmstore.torch.run_errors import AttachError


class Stateful(Protocol):
    """An object whose state is data: learning rate schedulers, gradient scalers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class _GeneratorState:
    """A random number generator of the program's own."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._generator.set_state(state_dict["state"])


class _ExtraState:
    """What modules keep beside tensors: `nn.Module.get_extra_state`."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def state_dict(self) -> dict[str, Any]:
        return {name: module.get_extra_state() for name, module in self._modules.items()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        for name, state in state_dict.items():
            self._modules[name].set_extra_state(state)


def extra_state(model: nn.Module) -> Stateful | None:
    """The extra state of a model's modules, None if none has any."""
    plain = nn.Module.get_extra_state
    modules = {
        name: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not plain
    }
    return _ExtraState(modules) if modules else None


def is_stateful(given: Any) -> bool:
    return callable(getattr(given, "state_dict", None)) and callable(
        getattr(given, "load_state_dict", None)
    )


def as_stateful(name: str, given: Any) -> Stateful:
    """A generator, or anything with state_dict and load_state_dict.

    Raises:
        AttachError: it is neither, or a loader.
    """
    if isinstance(given, DataLoader):  # its state counts a batch before the step that trains on it
        raise AttachError(
            f"stateful[{name!r}] is a {type(given).__qualname__}, whose batches are taken before "
            "the step begins that they are trained in: give it as loader=, and iterate "
            "run.epochs() or run.batches()"
        )
    generator = as_generator(given)
    if generator is not None:
        return _GeneratorState(generator)
    if is_stateful(given):
        stateful: Stateful = given
        return stateful
    raise AttachError(
        f"stateful[{name!r}] is a {type(given).__qualname__}: it must be a generator (of torch, "
        "numpy or random), or have state_dict() and load_state_dict()"
    )


class StatefulPart:
    """Keeps an object's state_dict in the store."""

    def __init__(self, store: Store, path: str, stateful: Stateful) -> None:
        self._part = Structure(store, path)
        self._stateful = stateful
        self.watch: None = None

    @property
    def stored(self) -> bool:
        return self._part.stored

    def capture(self) -> None:
        """Pending until the next commit.

        Raises:
            TypeError: the state_dict holds something that is not data.
        """
        self._part.write(self._stateful.state_dict())

    def restore(self) -> None:
        """Loads the stored state, and drops what a gradient scaler remembers of a step that is
        taken back."""
        self._part.forget()
        state = self._part.read()
        if state:  # a disabled scaler's is empty, and refused by its own load_state_dict
            self._stateful.load_state_dict(state)
        optimizers = getattr(self._stateful, "_per_optimizer_states", None)
        if optimizers is not None:
            optimizers.clear()
