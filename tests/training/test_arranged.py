"""An optimizer's groups in another order than they were stored in: a commit keeps it, a roll back
undoes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pmstore
from pmstore.torch import MismatchError, attach
from pmstore.torch.optim import AdamW
from pmstore.torch.run import Run


class Job:
    def __init__(self, shapes: list[int], kind: Any, named: int = 9) -> None:
        torch.set_num_threads(1)
        self.parameters = [nn.Parameter(torch.arange(n) + 10.0 * n) for n in shapes]
        self.module = nn.Module()
        for number, one in enumerate(self.parameters[:named]):
            self.module.register_parameter(f"p{number}", one)
        self.optimizer: Any = kind(
            [
                {"params": [one], "lr": 0.1 * (number + 1)}
                for number, one in enumerate(self.parameters)
            ]
        )

    def attach(self, store: pmstore.Store, *, mirror: bool = False) -> Run:
        self.run = attach(store, model=self.module, optimizer=self.optimizer, mirror=mirror)
        return self.run

    def step(self) -> None:
        """One that is committed."""
        with self.run.next_step():
            self.update()
        self.run.commit()

    def update(self) -> None:
        for number, one in enumerate(self.parameters):
            one.grad = torch.full_like(one, number + 1.0)
        self.optimizer.step()

    def held(self) -> list[Any]:
        groups, state = self.optimizer.param_groups, self.optimizer.state
        numbers = {id(one): number for number, one in enumerate(self.parameters)}
        return [
            [(group["lr"], [numbers[id(one)] for one in group["params"]]) for group in groups],
            [one.tolist() for one in self.parameters],
            [
                {key: torch.as_tensor(value).tolist() for key, value in state[one].items()}
                for one in self.parameters
            ],
        ]


def reverse(job: Job) -> None:
    job.optimizer.param_groups.reverse()


def drop_one(job: Job) -> None:
    del job.optimizer.state[job.optimizer.param_groups.pop()["params"][0]]


def join(job: Job) -> None:
    groups = job.optimizer.param_groups
    groups[1]["params"] += groups.pop(0)["params"]


CHANGES: list[Callable[[Job], None]] = [reverse, drop_one, join]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shapes", [[3, 3], [3, 4, 3]])
@pytest.mark.parametrize("named", [9, 1])
@pytest.mark.parametrize("kind", [torch.optim.Adam, AdamW, "mirrored"])
def test_a_roll_back_brings_the_groups_back(
    tmp_path: Path, change: Callable[[Job], None], shapes: list[int], named: int, kind: Any
) -> None:
    with pmstore.open(tmp_path / "a.pm", size=8 << 20) as store:
        job = Job(shapes, torch.optim.Adam if kind == "mirrored" else kind, named)
        run = job.attach(store, mirror=kind == "mirrored")
        job.step()
        before = job.held()
        with run.next_step():
            change(job)
        run.rollback()
        assert job.held() == before
        job.step()
        before = job.held()
        if kind is not AdamW:  # which looks before a step
            with run.next_step():
                change(job)
                job.update()
            run.rollback()
            assert job.held() == before
        job.step()


@pytest.mark.parametrize("mirror", [False, True])
def test_another_order_is_committed(tmp_path: Path, mirror: bool) -> None:
    path = tmp_path / "a.pm"
    with pmstore.open(path, size=8 << 20) as store:
        job = Job([3, 3], torch.optim.Adam)
        run = job.attach(store, mirror=mirror)
        job.step()
        with run.next_step():
            job.optimizer.param_groups.reverse()
            job.update()
        run.commit()
        held = job.held()
        with run.next_step():
            job.update()
        run.rollback()
        assert job.held() == held
    with pmstore.open(path) as store:
        with pytest.raises(MismatchError, match="come in another order"):
            Job([3, 3], torch.optim.Adam).attach(store, mirror=mirror)
        job = Job([3, 3], torch.optim.Adam)
        job.optimizer.param_groups.reverse()
        job.attach(store, mirror=mirror)
        assert job.held() == held


@pytest.mark.parametrize("kind", [torch.optim.Adam, AdamW])
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_known_by_their_places_stay(
    tmp_path: Path, kind: Any, change: Callable[[Job], None]
) -> None:
    with pmstore.open(tmp_path / "a.pm", size=8 << 20) as store:
        job = Job([3, 3], kind, 1)
        run = job.attach(store)
        job.step()
        before = job.held()
        with run.next_step():
            change(job)
        with pytest.raises(MismatchError, match="known by their places"):
            run.commit()
        run.rollback()
        assert job.held() == before


def test_added_parameters_vanish_with_their_state(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "a.pm", size=8 << 20) as store:
        job = Job([3, 3], torch.optim.Adam, 1)
        run = job.attach(store)
        job.step()
        before = job.held()
        added = nn.Parameter(torch.ones(2))
        with run.next_step():
            job.optimizer.add_param_group({"params": [added]})
            added.grad = torch.ones(2)
            job.update()
        run.rollback()
        assert job.held() == before
        assert added not in job.optimizer.state
        job.step()
