"""A transaction block that ends a training step."""

from __future__ import annotations

from typing import Literal

import torch

from pmstore.torch._step.losses import check_loss
from pmstore.torch._step.steps import Steps


class RunTransaction:
    """A transaction block that ends a step; `Run.transaction` makes it.

    Attributes:
        loss: of the step, for the policy; may be set inside.
    """

    __slots__ = ("_steps", "loss")

    def __init__(self, steps: Steps, loss: float | torch.Tensor | None) -> None:
        self._steps = steps
        self.loss: float | torch.Tensor | None = loss

    def __enter__(self) -> RunTransaction:
        self._steps.require()
        self._steps.transactions += 1
        return self

    def __exit__(self, kind: object, *_: object) -> Literal[False]:
        steps = self._steps
        steps.transactions -= 1
        if steps.transactions:
            return False
        if kind is not None:
            if steps.attached:
                steps.done.keep("a transaction block was left by an error")
                steps.roll_back()
            return False
        try:
            check_loss(self.loss)
            steps.end(self.loss)  # always commits
        except BaseException:
            # Not committed, or committed and interrupted after it: both ways the last commit is
            # what holds.
            steps.roll_back()
            raise
        return False
