"""What is left of a run that nothing holds any more: half a step, perhaps."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from pmstore.base.words import counted
from pmstore.objects.guards import Watcher

if TYPE_CHECKING:
    from pmstore.torch._step.steps import Steps  # upward: which holds one


class Unheld:
    """One of the handles of a run, and held by it alone: goes when the run does. A function that
    trains may return in the middle of a step, and what it leaves behind is half of one.

    It is told by what was called since the last step ended. The engine is not asked what was
    written: the collector may come in the middle of its work.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps: Steps | None = steps

    def remove(self) -> None:
        """The run was detached."""
        self._steps = None

    def __del__(self) -> None:
        steps = self._steps
        if steps is not None and steps.attached and steps.begun.called and not steps.rolled_back:
            steps.store._guards.add(_Half(steps, steps.begun.called), keep=True)


class _Half(Watcher):
    """It stays half until the store is rolled back; unless the step has written nothing, and what
    is pending is the finished steps alone."""

    def __init__(self, steps: Steps, why: str) -> None:
        progress = steps.progress
        self._store = ref(steps.store)
        self._rollbacks = steps.store.rollbacks
        self._left = (
            f"the run {steps.name!r} was left in the middle of a training step: {why}, and nothing "
            "holds what attach returned any more"
        )
        self._whole = None if steps.begun.updating else steps.done.whole
        self._finished = progress.finished - progress.committed

    def half(self) -> str:
        store = self._store()
        if store is None or store.rollbacks != self._rollbacks or not store.written():
            return ""
        if self._whole is not None and self._whole.is_pending(store):
            return ""
        return (
            f"{self._left}. Take the half step back with store.rollback(). Hold the run until its "
            "last step has ended, or was taken back by run.rollback(); to evaluate after it, use "
            "model.eval() or torch.no_grad()"
        )

    def lost(self, orderly: bool) -> str:
        if not orderly or not self.half():
            return ""
        finished = self._finished
        among = f", {counted(finished, 'finished step')} among it" if finished else ""
        return (
            f"{self._left}. The store is as of its last commit; what was written since then is "
            f"lost{among}. To keep it, end the last step by run.commit(); to evaluate after it, "
            "use model.eval() or torch.no_grad()"
        )
