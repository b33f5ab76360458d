"""What users call rules by: "auto", EveryN, EverySeconds; objectives for those who ask."""

from __future__ import annotations

from typing import Any

import pytest

import pmstore.scheduler
from pmstore.scheduler import Auto, CommitScheduler, EveryN, EverySeconds


def scheduler(policy: Any = "auto") -> CommitScheduler:
    return CommitScheduler(policy, targets={"disk": lambda: None})


def test_auto_is_the_rule_with_the_objective_time() -> None:
    for one in (scheduler(), scheduler("auto"), CommitScheduler(targets={"disk": lambda: None})):
        assert isinstance(one.policy, Auto)
        assert one.policy.objective == "time"
    assert scheduler("auto").policy is not scheduler("auto").policy  # each has its own reason


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("time", r"Auto\('time'\)"),
        ("progress", r"Auto\('progress'\)"),
        ("Auto", '"auto", or a rule'),
        (None, '"auto", or a rule'),
        (10, r"EveryN\(100\)"),
        (EveryN, r"make one of it, EveryN\(\.\.\.\)"),
        (Auto, r"make one of it, Auto\(\.\.\.\)"),
    ],
)
def test_no_rule_is_refused_with_one(policy: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        scheduler(policy)


def test_every_seconds_and_every_n_are_public() -> None:
    assert {"Auto", "EveryN", "EverySeconds", "PreemptionGuard"} <= {*pmstore.scheduler.__all__}
    assert isinstance(scheduler(EverySeconds(60)).policy, EverySeconds)
