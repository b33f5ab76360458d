"""What would be kept in part is refused at attach, with what to give instead; and that is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import BATCHES, assert_same, contents, data

import pmstore
import pmstore.torch
from pmstore.torch import AttachError, ChangedError, Resume

STEPS = 2 * BATCHES + 3


class Metric(nn.Module):
    """A running mean as metrics libraries write it: its state is no buffer, and in no state_dict
    unless it is persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.count = torch.zeros(()), torch.zeros(())
        self.kept = False

    def persistent(self, mode: bool = False) -> None:
        self.kept = mode

    def update(self, value: torch.Tensor) -> None:
        self.total = self.total + value.detach()
        self.count = self.count + 1

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.kept:
            destination[f"{prefix}total"], destination[f"{prefix}count"] = self.total, self.count

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for key in ("total", "count"):
            if prefix + key in state:
                setattr(self, key, state[prefix + key])


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware minimization around another optimizer, which shares its groups."""

    def __init__(self, parameters: Any, base: Any, moves: bool, **settings: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups
        self.moves = moves  # the parameter's memory goes back and forth, not its values

    @torch.no_grad()
    def up(self) -> None:
        every = [one for group in self.param_groups for one in group["params"]]
        norm = torch.stack([one.grad.norm() for one in every]).norm()
        for one in every:
            self.state[one]["here"] = one.data if self.moves else one.clone()
            if self.moves:
                one.data = one.data.clone()
            one.add_(one.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))

    @torch.no_grad()
    def down(self) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if self.moves:
                    one.data = self.state[one]["here"]
                else:
                    one.copy_(self.state[one]["here"])
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> Any:
        raise AssertionError


class Slow(torch.optim.Optimizer):
    """Lookahead: every three steps the weights go back half of the way to slow ones."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        self.number = 0
        self.slow = [one.detach().clone() for one in self._parameters()]

    def _parameters(self) -> list[torch.Tensor]:
        return [one for group in self.param_groups for one in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.number += 1
        if self.number % 3 == 0:
            for slow, fast in zip(self.slow, self._parameters(), strict=True):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]
        for ours, theirs in zip(self.slow, state["slow"], strict=True):
            ours.copy_(theirs)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def loader() -> Any:
    return torch.utils.data.DataLoader(data(), batch_size=6, shuffle=True)


def disturbed_is_undisturbed(
    path: Path, life: Callable[[pmstore.Store, int, int], None]
) -> dict[str, tuple[str, bytes]]:
    """A run in pieces, each in a new program, with a step that is lost at its end."""
    results = []
    for name, stops in (("whole", (STEPS,)), ("pieces", (1, 4, BATCHES, BATCHES + 2, STEPS))):
        for number, stop in enumerate(stops):
            store = pmstore.open(path.with_name(f"{name}.pm"))
            life(store, number, stop)
            store.close()
        with pmstore.open(path.with_name(f"{name}.pm"), mode="r") as store:
            results.append(contents(store))
    assert_same(*results)
    return results[0]


@pytest.mark.parametrize("moves", [False, True])
def test_sharpness_aware_minimization_over_its_base(path: Path, moves: bool) -> None:
    def life(store: pmstore.Store, seed: int, stop: int) -> None:
        model = net(seed)
        sharp = Sharp(model.parameters(), torch.optim.SGD, moves, lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(sharp.base_optimizer, 3)
        give: dict[str, Any] = {"model": model, "lr_scheduler": schedule, "loader": loader()}
        with pytest.raises(AttachError, match=r"optimizer=\.\.\.\.base_optimizer"):
            pmstore.torch.attach(store, **give, optimizer=sharp)
        run = pmstore.torch.attach(store, **give, optimizer=sharp.base_optimizer, policy=None)
        for features, labels, _ in run.batches(epochs=None):
            for half in (sharp.up, sharp.down):
                loss = nn.functional.cross_entropy(model(features), labels)
                sharp.zero_grad()
                loss.backward()
                half()
                if half == sharp.up and run.step == stop:
                    return
            schedule.step()
            run.log(loss=loss)

    disturbed_is_undisturbed(path, life)


def test_lookahead_over_its_base(path: Path) -> None:
    def life(store: pmstore.Store, seed: int, stop: int) -> None:
        model = net(seed)
        slow = Slow(torch.optim.AdamW(model.parameters(), lr=1e-2))
        with pytest.raises(AttachError, match=r"Slow around a AdamW.*\.\.\.\.optimizer"):
            pmstore.torch.attach(store, model=model, optimizer=slow)
        run = pmstore.torch.attach(
            store,
            model=model,
            optimizer=slow.optimizer,
            loader=loader(),
            stateful={"slow": slow},
            policy=None,
        )
        for features, labels, _ in run.batches(epochs=None):
            loss = nn.functional.cross_entropy(model(features), labels)
            slow.zero_grad()
            loss.backward()
            slow.step()
            if run.step == stop:
                return
            run.log(loss=loss)

    disturbed_is_undisturbed(path, life)


def test_optimizers_in_a_collection(store: pmstore.Store) -> None:
    model = net(0)
    both: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    both.others = {"a": torch.optim.SGD(net(1).parameters())}
    with pytest.raises(AttachError, match=r"others\['a'\]"):
        pmstore.torch.attach(store, model=model, optimizer=both)
    assert "run" not in store


def test_metrics(path: Path) -> None:
    def life(store: pmstore.Store, seed: int, stop: int) -> None:
        model, mean = net(seed), nn.ModuleDict({"mean": Metric()})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for metric, told in ((mean["mean"], r"persistent\(True\)"), (mean, "empty")):
            with pytest.raises(AttachError, match=told):
                pmstore.torch.attach(store, model=model, stateful={"mean": metric})
        mean["mean"].persistent(True)
        run = pmstore.torch.attach(
            store,
            model=model,
            optimizer=optimizer,
            loader=loader(),
            stateful={"mean": mean},
            policy=None,
        )
        means = store.require("means", (STEPS,), "float64")
        for features, labels, _ in run.batches(epochs=None):
            loss = nn.functional.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean["mean"].update(loss)
            if run.step == stop:
                return
            means[run.step] = float(mean["mean"].total / mean["mean"].count)
            run.log(loss=loss)

    disturbed_is_undisturbed(path, life)


class Filled:
    """Its state_dict is empty, and later is not."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def state_dict(self) -> dict[str, int]:
        return self.held

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.held = state


@pytest.mark.parametrize("where", ["lr_scheduler", "scaler", "stateful"])
def test_what_has_no_state_is_refused(store: pmstore.Store, where: str) -> None:
    empty: Any = {"stateful": {"it": Filled()}}.get(where, Filled())
    with pytest.raises(AttachError, match="Leave it out if it has no state"):
        pmstore.torch.attach(store, model=net(0), **{where: empty})
    with pytest.raises(AttachError, match="a CrossEntropyLoss whose state_dict"):
        pmstore.torch.attach(store, model=net(0), stateful={"loss": nn.CrossEntropyLoss()})
    assert "run" not in store


def test_a_disabled_scaler_has_no_state_and_is_enabled_by_choice(path: Path) -> None:
    for enabled in (False, False, True):
        with pmstore.open(path) as store:
            model = net(0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=4.0)
            give: dict[str, Any] = {"model": model, "optimizer": optimizer, "scaler": scaler}
            if enabled:
                with pytest.raises(ChangedError, match="enabled of the scaler: stored False"):
                    pmstore.torch.attach(store, **give)
                run = pmstore.torch.attach(store, **give, resume=Resume(pieces="program"))
                assert scaler.get_scale() == 4.0
            else:
                run = pmstore.torch.attach(store, **give)
            run.commit()
