"""What users call rules by: "auto", EveryN, EverySeconds; objectives for those who ask."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import pmstore.scheduler
from pmstore.scheduler import Auto, CommitScheduler, EveryN, EverySeconds
from pmstore_lab.simulation import baselines


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


@pytest.mark.parametrize("name", ["COCI", "CheckFreq", "Daly", "EveryStep", "Young"])
def test_baselines_are_beside_the_simulation(name: str) -> None:
    assert isinstance(getattr(baselines, name), type)
    assert name not in pmstore.scheduler.__all__
    where = r"EveryN\(1\)" if name == "EveryStep" else "from pmstore_lab.simulation.baselines"
    with pytest.raises(ImportError, match=f"{name}.*{where}"):
        exec(f"from pmstore.scheduler import {name}")
    assert not hasattr(pmstore.scheduler, name)
    with pytest.raises(AttributeError, match=where):
        getattr(pmstore.scheduler, name)


def test_the_old_name_of_the_rule_says_the_new_one() -> None:
    with pytest.raises(AttributeError, match='Auto, and policy="auto"'):
        importlib.import_module("pmstore.scheduler").ConvergenceAware
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from pmstore.scheduler import Nothing  # type: ignore[attr-defined]  # noqa: F401
    assert not hasattr(pmstore.scheduler, "Nothing")


def test_every_seconds_and_every_n_are_public() -> None:
    assert {"Auto", "EveryN", "EverySeconds", "PreemptionGuard"} <= {*pmstore.scheduler.__all__}
    assert isinstance(scheduler(EverySeconds(60)).policy, EverySeconds)
