"""Plain values of a program that are kept and taken back with its steps."""

from __future__ import annotations

from typing import Any

from pmstore import Store
from pmstore.torch._state.part import Part


class RunState:
    """The values of one run, which lie under `<run>/state`.

    Attributes:
        values: as the program has them: the same dict for as long as the run lives.
        stored: the store has some.
    """

    def __init__(self, store: Store, run: str) -> None:
        self.values: dict[str, Any] = {}
        self._part = Part(store, f"{run}/state")
        self.stored: bool = False

    def write(self) -> None:
        """Writes what changed; pending until the next commit.

        Raises: TypeError: a value is not plain data.
        """
        self._part.write(self.values)
        self.stored = True

    def restore(self) -> None:
        """The values become those of the last commit."""
        self._part.forget()
        self.stored = self._part.stored
        values = self._part.read() if self.stored else {}
        self.values.clear()
        self.values.update(values)
