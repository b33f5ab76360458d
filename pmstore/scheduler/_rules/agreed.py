"""The rule of a scheduler whose commits are agreed on with others."""

from __future__ import annotations

from pmstore.scheduler._rules.outlook import NEVER, CommitPolicy, Outlook


class Agreed:
    """Commits at steps that all ranks of a job have agreed on, and at no others. It stands in the
    place of the rule that says what this rank wants (`CommitScheduler.foresee` asks that one);
    costs, risks and decisions are accounted for as ever.

    Attributes:
        policy: that it stands for.
    """

    reason = "agreed by all ranks"

    def __init__(self, policy: CommitPolicy) -> None:
        self.policy = policy
        self._step = 0
        self._target = NEVER

    def agree(self, step: int, target: int) -> None:
        """Has the rule commit to that target at the end of that step (of the scheduler's count).
        What was agreed on before no longer holds."""
        self._step, self._target = step, target

    def decide(self, outlook: Outlook, /) -> int:
        return self._target if outlook.steps == self._step else NEVER
