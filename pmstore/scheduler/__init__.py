"""Decides when to commit, and to which target: see `CommitScheduler`, and docs/SCHEDULER.md for the
theory and the measurements."""

from pmstore.scheduler._models.cost import CostModel
from pmstore.scheduler._models.hazard import HazardModel
from pmstore.scheduler._models.loss_fit import LossFit
from pmstore.scheduler._models.termination import TerminationModel
from pmstore.scheduler._models.timer import IterationTimer
from pmstore.scheduler._notices.guard import PreemptionGuard
from pmstore.scheduler._rules.agreed import Agreed
from pmstore.scheduler._rules.auto import Auto, Objective
from pmstore.scheduler._rules.outlook import CommitPolicy, Outlook
from pmstore.scheduler._rules.rule_text import policy_digest, policy_words
from pmstore.scheduler._rules.rules import EveryN, EverySeconds, OneTarget, rule_of
from pmstore.scheduler.foresight import Wish
from pmstore.scheduler.known import Known
from pmstore.scheduler.scheduler import CommitScheduler
from pmstore.scheduler.target import Decision, Target

__all__ = [
    "Agreed",
    "Auto",
    "CommitPolicy",
    "CommitScheduler",
    "CostModel",
    "Decision",
    "EveryN",
    "EverySeconds",
    "HazardModel",
    "IterationTimer",
    "Known",
    "LossFit",
    "Objective",
    "OneTarget",
    "Outlook",
    "PreemptionGuard",
    "Target",
    "TerminationModel",
    "Wish",
    "policy_digest",
    "policy_words",
    "rule_of",
]
