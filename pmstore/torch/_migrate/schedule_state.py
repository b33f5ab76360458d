"""Hyperparameters and schedulers of a stored run for a program that gives others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from pmstore import Store
from pmstore.torch._migrate.differences import SCHEDULED, Choices
from pmstore.torch._migrate.optimizer_groups import HeldOptimizer
from pmstore.torch.kept_structure import Structure
from pmstore.torch.program import Program

# ---- a stored scheduler's place under other settings, and the rates that follow from both


_BY_PLACE_ALONE = (torch_schedulers.LambdaLR, torch_schedulers.CosineAnnealingWarmRestarts)
"""Their `get_lr` depends on nothing but settings and place, and writes nothing."""


def with_settings(stored: dict[str, Any], given: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    """The stored state with those settings of the given one. "schedulers[1].gamma" is the setting
    of an inner scheduler."""
    made = {key: given[key] if key in keys and key in given else stored[key] for key in stored}
    inner = stored.get("_schedulers")
    if isinstance(inner, (list, tuple)) and len(inner) == len(given.get("_schedulers", ())):
        made["_schedulers"] = [
            with_settings(
                ours,
                theirs,
                {
                    key.removeprefix(prefix)
                    for key in keys
                    if key.startswith(prefix := f"schedulers[{number}].")
                },
            )
            for number, (ours, theirs) in enumerate(zip(inner, given["_schedulers"], strict=True))
        ]
    return made


def with_bases(stored: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The stored state with the base rates of the given one."""
    made = dict(stored)
    if "base_lrs" in stored and "base_lrs" in given:
        made["base_lrs"] = list(given["base_lrs"])
    if "_schedulers" in stored:
        made["_schedulers"] = [
            with_bases(ours, theirs)
            for ours, theirs in zip(stored["_schedulers"], given["_schedulers"], strict=True)
        ]
    return made


def for_groups(
    stored: dict[str, Any], given: dict[str, Any], origins: list[int | None], before: int
) -> dict[str, Any]:
    """The stored state for other parameter groups: what it has one of for each of the `before`
    stored groups is put in the new order; of new groups it is the given. origins: of each group of
    now the stored one."""
    made = {}
    for key, value in stored.items():
        theirs = given.get(key)
        if key == "_schedulers" and isinstance(theirs, (list, tuple)):
            made[key] = [
                for_groups(ours, one, origins, before)
                for ours, one in zip(value, theirs, strict=True)
            ]
        elif (
            isinstance(value, list)
            and isinstance(theirs, list)
            and (len(value), len(theirs)) == (before, len(origins))
        ):
            made[key] = [
                theirs[number] if origin is None else value[origin]
                for number, origin in enumerate(origins)
            ]
        else:
            made[key] = value
    return made


def rates(scheduler: Any, state: dict[str, Any]) -> list[float] | None:
    """The learning rates at the state's place; None: they depend on the rates before. Touches
    nothing."""
    clone = copy.copy(scheduler)
    vars(clone).update({key: one for key, one in state.items() if key not in ("lr_lambdas",)})
    if "_schedulers" in state:
        return None
    closed: Callable[[], Any] | None = getattr(clone, "_get_closed_form_lr", None)
    if closed is None and isinstance(scheduler, _BY_PLACE_ALONE):
        clone._get_lr_called_within_step = True  # else it warns
        closed = clone.get_lr
    return None if closed is None else [float(one) for one in closed()]


def base_of(group: dict[str, Any]) -> float:
    return float(group.get("initial_lr", group.get("lr", 0.0)))


def set_rate(group: dict[str, Any], rate: float) -> None:
    """A rate that is a tensor stays one."""
    held = group.get("lr")
    group["lr"] = torch.full_like(held, rate) if isinstance(held, torch.Tensor) else rate


def scale_rate(group: dict[str, Any], given: dict[str, Any]) -> None:
    """Scales the rate as the base rates are to each other, where no formula says what it is now."""
    old, new = base_of(group), base_of(given)
    set_rate(group, float(group["lr"]) * new / old if old else float(given["lr"]))


# ---- hyperparameters and schedulers


_Groups = list[dict[str, Any]]


def _drives(scheduler: Any, optimizer: Optimizer) -> bool:
    """Whether it writes the optimizer's groups; it may have been given one around it."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    return groups is not None and groups[0] is optimizer.param_groups[0]


class Rates:
    """Writes schedulers' states as they are settled; pending until the next commit."""

    def __init__(self, store: Store, name: str, program: Program, choices: Choices) -> None:
        self._store = store
        self._name = name
        self._choices = choices
        self._schedulers = {
            key: one
            for key, one in program.statefuls.items()
            if one is not None and key.partition("/")[0] == "lr_scheduler"
        }

    def of_groups(
        self,
        piece: str,
        optimizer: Optimizer,
        names: list[list[str]],
        held: HeldOptimizer,
        fresh: bool,
    ) -> _Groups:
        """What the groups' hyperparameters shall be. names: of the groups' parameters now. fresh:
        the optimizer is the program's as it is, but for what a stored scheduler made of it."""
        given: _Groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        origins = [held.group_of(one) for one in names]
        mine = {key: one for key, one in self._schedulers.items() if _drives(one, optimizer)}
        goes_on = any(not self._begins(key) for key in mine)
        groups: _Groups = []
        for own, origin in zip(given, origins, strict=True):
            stored = held.groups[origin] if origin is not None else {}
            if fresh or origin is None:
                kept = {key: stored[key] for key in SCHEDULED if key in stored} if goes_on else {}
                groups.append({**own, **kept})
            else:
                groups.append(dict(stored))
        self._settle(piece, groups, given)
        by_lr = {
            number for number, _ in enumerate(given) if self._choices.takes_rate(piece, number)
        }
        for key, scheduler in mine.items():
            self._schedule(key, scheduler, groups, given, origins, len(held.groups), by_lr)
        for number in by_lr:
            by_hand = self._choices.differs_in_rate(piece, number) and base_of(
                groups[number]
            ) == base_of(given[number])
            if not mine or by_hand:
                groups[number]["lr"] = given[number]["lr"]
            if "initial_lr" in given[number]:
                groups[number]["initial_lr"] = given[number]["initial_lr"]
        return groups

    def finish(self) -> None:
        """Schedulers of none of the optimizers."""
        for key, scheduler in self._schedulers.items():
            self._schedule(key, scheduler, [], [], [], 0, set())
        self._schedulers = {}

    def _begins(self, key: str) -> bool:
        return (
            self._choices.hit("lr_scheduler", "program", key)
            or not Structure(self._store, f"{self._name}/{key}").stored
        )

    def _settle(self, piece: str, groups: _Groups, given: _Groups) -> None:
        """What was chosen but for the rate itself."""
        choices = self._choices
        for one in choices.answered(piece):
            answer = choices.answer(one)
            if one.group is None or one.key == "lr" or answer is None or answer[1] == "store":
                continue
            groups[one.group][one.key] = given[one.group][one.key]
        for number, (group, own) in enumerate(zip(groups, given, strict=True)):
            if "weight_decay" in own and choices.hit("weight_decay", "program", piece, number):
                group["weight_decay"] = own["weight_decay"]

    def _schedule(
        self,
        key: str,
        scheduler: Any,
        groups: _Groups,
        given: _Groups,
        origins: list[int | None],
        before: int,
        by_lr: set[int],
    ) -> None:
        self._schedulers = {one: it for one, it in self._schedulers.items() if one != key}
        part = Structure(self._store, f"{self._name}/{key}")
        theirs = scheduler.state_dict()
        if self._begins(key):
            part.write(theirs)
            for group, own in zip(groups, given, strict=True):
                written = SCHEDULED + (("momentum", "betas") if "max_momentum" in own else ())
                for one in written:
                    if one in own:
                        group[one] = own[one]
                    elif one != "lr":
                        group.pop(one, None)
            return
        state = for_groups(part.read(), theirs, origins, before)
        changed = {
            one.key
            for one in self._choices.answered(key)
            if self._choices.answer(one) == ("lr_scheduler", "settings")
        }
        state = with_settings(state, theirs, changed)
        if by_lr:
            state = with_bases(state, theirs)
        if changed or by_lr:
            now = rates(scheduler, state)
            for number, group in enumerate(groups):
                if now is not None:
                    set_rate(group, now[number])
                elif number in by_lr:
                    scale_rate(group, given[number])
            if "_last_lr" in state and groups:
                state["_last_lr"] = [float(group["lr"]) for group in groups]
        part.write(state)
