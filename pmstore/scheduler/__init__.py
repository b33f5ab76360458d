"""When to commit, and to which target: see `CommitScheduler`, and docs/SCHEDULER.md for the theory
and the measurements."""

from pmstore.scheduler.cost import CostModel
from pmstore.scheduler.hazard import HazardModel
from pmstore.scheduler.known import Known
from pmstore.scheduler.loss_fit import LossFit
from pmstore.scheduler.policies import (
    COCI,
    CheckFreq,
    CommitPolicy,
    ConvergenceAware,
    Daly,
    EveryN,
    EverySeconds,
    EveryStep,
    Objective,
    OneTarget,
    Young,
)
from pmstore.scheduler.preemption import PreemptionGuard
from pmstore.scheduler.scheduler import CommitScheduler
from pmstore.scheduler.target import Decision, Target
from pmstore.scheduler.termination import TerminationModel
from pmstore.scheduler.timer import IterationTimer

__all__ = [
    "COCI",
    "CheckFreq",
    "CommitPolicy",
    "CommitScheduler",
    "ConvergenceAware",
    "CostModel",
    "Daly",
    "Decision",
    "EveryN",
    "EverySeconds",
    "EveryStep",
    "HazardModel",
    "IterationTimer",
    "Known",
    "LossFit",
    "Objective",
    "OneTarget",
    "PreemptionGuard",
    "Target",
    "TerminationModel",
    "Young",
]
