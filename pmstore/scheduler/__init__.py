"""When to commit, and to which target: see `CommitScheduler`, and docs/SCHEDULER.md for the theory
and the measurements."""

from pmstore.scheduler.agreed import Agreed
from pmstore.scheduler.cost import CostModel
from pmstore.scheduler.foresight import Wish
from pmstore.scheduler.hazard import HazardModel
from pmstore.scheduler.known import Known
from pmstore.scheduler.loss_fit import LossFit
from pmstore.scheduler.policies import (
    Auto,
    CommitPolicy,
    EveryN,
    EverySeconds,
    Objective,
    OneTarget,
    rule_of,
)
from pmstore.scheduler.preemption import PreemptionGuard
from pmstore.scheduler.scheduler import CommitScheduler
from pmstore.scheduler.target import Decision, Target
from pmstore.scheduler.termination import TerminationModel
from pmstore.scheduler.timer import IterationTimer
from pmstore.scheduler.words import policy_digest, policy_words

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
    "PreemptionGuard",
    "Target",
    "TerminationModel",
    "Wish",
    "policy_digest",
    "policy_words",
    "rule_of",
]
