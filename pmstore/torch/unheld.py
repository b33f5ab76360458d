"""What is left of a run that nothing holds any more: half a step, perhaps."""

from __future__ import annotations

from weakref import ref

from pmstore import Store
from pmstore.objects.guards import Watcher
from pmstore.torch.begun import Begun


class Unheld:
    """One of the handles of a run, and held by it alone: goes when the run does. A function that
    trains may return in the middle of a step, and what it leaves behind is half of one.

    It is told by what was called since the last step ended. The engine is not asked: the collector
    may come in the middle of its work.
    """

    def __init__(self, store: Store, run: str, begun: Begun) -> None:
        self._store = store
        self._run = run
        self._begun: Begun | None = begun

    def remove(self) -> None:
        """The run was detached."""
        self._begun = None

    def __del__(self) -> None:
        begun = self._begun
        if begun is not None and begun.called and not self._store.closed:
            self._store._guards.add(_Half(self._store, self._run, begun.called), keep=True)


class _Half(Watcher):
    """It stays half until the store is rolled back."""

    def __init__(self, store: Store, run: str, why: str) -> None:
        self._store = ref(store)
        self._rollbacks = store.rollbacks
        self._left = f"the run {run!r} was left in the middle of a training step"
        self._why = f"{why}, and nothing holds what attach returned any more"

    def half(self) -> str:
        store = self._store()
        if store is None or store.rollbacks != self._rollbacks or not store.written():
            return ""
        return (
            f"{self._left}: {self._why}. Take the half step back with store.rollback(); a run is "
            "held until its last step has ended, or was taken back by run.rollback()"
        )

    def lost(self, orderly: bool) -> str:
        if not orderly or not self.half():
            return ""
        return (
            f"{self._left}: {self._why}. The store is as of its last commit; what was written "
            "since then is lost"
        )
