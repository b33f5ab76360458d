"""Schedulers, scalers and whatever else has a state_dict."""

from __future__ import annotations

from typing import Any, Protocol

from pmstore import Store
from pmstore.torch.part import Part

__all__ = ["Stateful", "StatefulPart"]


class Stateful(Protocol):
    """An object whose state is data: learning rate schedulers, gradient scalers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class StatefulPart:
    """Keeps an object's state_dict in the store."""

    def __init__(self, store: Store, path: str, stateful: Stateful) -> None:
        self._part = Part(store, path)
        self._stateful = stateful

    def write(self) -> None:
        """Pending until the next commit.

        Raises:
            TypeError: the state_dict holds something that is not data.
        """
        self._part.write(self._stateful.state_dict())

    def restore(self) -> None:
        """Loads the stored state, and drops what a gradient scaler remembers of a step that is taken back."""
        self._part.forget()
        state = self._part.read()
        if state:  # a disabled scaler's is empty, and refused by its own load_state_dict
            self._stateful.load_state_dict(state)
        optimizers = getattr(self._stateful, "_per_optimizer_states", None)
        if optimizers is not None:
            optimizers.clear()
