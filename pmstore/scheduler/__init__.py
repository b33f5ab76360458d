"""When to commit, and to which target: see `CommitScheduler`, and docs/SCHEDULER.md for the theory
and the measurements."""

import sys
from typing import TYPE_CHECKING, NoReturn

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

_BASELINES = "from pmstore_lab.simulation.baselines import {0}: a baseline to compare with"
_MOVED = {
    "ConvergenceAware": 'it is called Auto, and policy="auto" is Auto()',
    "EveryStep": "write EveryN(1), or leave attach's policy= out",
    **{name: _BASELINES.format(name) for name in ("COCI", "CheckFreq", "Daly", "Young")},
}

if not TYPE_CHECKING:  # which would take every name for one of ours

    def __getattr__(name: str) -> NoReturn:
        if name not in _MOVED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        told = f"pmstore.scheduler has no {name}: {_MOVED[name]}"
        # `from pmstore.scheduler import ...`, which would make its own words of an AttributeError
        if sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
            raise ImportError(told)
        raise AttributeError(told)  # so that hasattr says no
