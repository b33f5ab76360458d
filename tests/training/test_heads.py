"""What stands before a loop, between two, in an epoch before its first batch, and behind the last
loop: it draws what it drew before when it is done again, and its objects stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pmstore
from pmstore.errors import TransactionError
from pmstore.scheduler import EveryN
from pmstore.torch import AttachError, Resume, Run, attach


class Kill(Exception):
    """The end of a life: the store goes back to its last commit."""


class Counted:
    """A loader that says where it is: five batches an epoch."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)

    def __iter__(self) -> Any:
        while self.batch < 5:
            self.batch += 1
            yield torch.full((1, 2), float(10 * self.epoch + self.batch))
        self.epoch, self.batch = self.epoch + 1, 0


class Life:
    """One start of a program. die: called behind each update, with the run."""

    def __init__(self, store: pmstore.Store, die: Callable[[Run], bool], **given: Any) -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        self.store = store
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self._die = die
        given = {"model": self.model, "optimizer": self.optimizer} | given
        self.run: Run = attach(store, **given)

    def update(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).sum().backward()
        self.optimizer.step()
        if self._die(self.run):
            raise Kill


Program = Callable[[Life], Any]


def live(path: Path, program: Program, at: int | None = None, **given: Any) -> Any:
    """What the program returns; None: it was killed in the step after so many."""
    with suppress(Kill), pmstore.open(path, size="8MiB") as store:
        return program(Life(store, lambda run: run.step == at, **given))
    return None


@pytest.fixture
def path(shm: Path) -> Path:
    return shm / "run.pm"


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def drawing(life: Life) -> dict[str, Any]:
    """Draws in each head, in steps, between loops and behind them."""
    run, heads = life.run, [draw()]
    losses = run.state.setdefault("losses", [])
    best = run.state.setdefault("best", {"seen": [0.0]})
    total = run.state.setdefault("total", np.zeros(2))
    for epoch in run.epochs(3):
        heads.append(draw())
        for batch in epoch:
            life.update(batch + heads[-1][2])
            losses.append(draw())
            best["seen"][0] += 1
            total[0] += losses[-1][0]
    heads.append(draw())
    for _ in run.steps(4):
        life.update(torch.full((1, 2), heads[-1][1]))
        losses.append(draw())
    heads.append(draw())
    return {
        "heads": heads[-2:],
        "first": heads[0],
        "losses": losses,
        "best": best,
        "total": total.tolist(),
        "weights": life.model.weight.tolist(),
    }


@pytest.mark.parametrize("policy", [None, EveryN(3)])
@pytest.mark.parametrize("at", [0, 1, 3, 4, 5, 11, 12, 13, 15])
def test_what_is_done_again_draws_the_same(shm: Path, at: int, policy: EveryN | None) -> None:
    data = [torch.full((1, 2), float(number)) for number in range(4)]
    whole = live(shm / "whole.pm", drawing, loader=data, policy=policy)
    assert live(shm / "parts.pm", drawing, at, loader=data, policy=policy) is None
    for _ in range(2):  # once more after its end
        assert live(shm / "parts.pm", drawing, loader=data, policy=policy) == whole


def test_what_stands_behind_the_last_loop_is_kept_whole(path: Path) -> None:
    def program(life: Life) -> tuple[Any, ...]:
        run = life.run
        for _ in run.steps(2):
            life.update(torch.ones(1, 2))
        with torch.no_grad():
            life.model.weight.mul_(0.5)
        run.state["ends"] = run.state.get("ends", 0) + 1
        return life.model.weight.tolist(), run.state["ends"]

    ends = [live(path, program) for _ in range(3)]
    assert [count for _, count in ends] == [1, 2, 3]
    halves = [weight[0][0] for weight, _ in ends]
    assert halves[1:] == [halves[0] / 2, halves[0] / 4]

    def committed(life: Life) -> None:
        for _ in life.run.steps(2):
            pass
        life.run.state["more"] = 1
        with pytest.raises(TransactionError, match="outside of a step"):
            life.run.commit()

    live(path, committed)


# ---- a loader that says where it is


def numbers(life: Life, n: int, **options: Any) -> list[float]:
    run = life.run
    for epoch in run.epochs(n, **options):
        life.store["in"] = int(epoch)
        if epoch == life.store.get("stops"):
            run.stop()
        for batch in epoch:
            life.update(batch)
            run.log(seen=batch[0, 0])
        if epoch == life.store.get("dies"):
            raise Kill
    found: list[float] = run.history("seen")[1].tolist()
    return found


def test_killed_in_a_tail_behind_a_limit(path: Path) -> None:
    def program(life: Life) -> list[float]:
        return numbers(life, 4, batches=2)

    def dies(life: Life) -> None:
        life.store["dies"] = 1
        program(life)

    whole = live(path.with_name("whole.pm"), program, loader=Counted())
    assert live(path, dies, loader=Counted()) is None

    def goes_on(life: Life) -> list[float]:
        life.store["dies"] = -1
        life.store.commit()
        return program(life)

    assert live(path, goes_on, loader=Counted()) == whole


def test_stopped_in_the_head_of_a_resumed_process(path: Path) -> None:
    def until(n: int, stops: int) -> Program:
        def program(life: Life) -> list[float]:
            life.store["stops"] = stops
            life.store.commit()
            return numbers(life, n)

        return program

    first = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert live(path, until(1, -1), loader=Counted()) == first
    assert live(path, until(3, 1), loader=Counted()) == first
    more = [20.0 + one for one in first]
    assert live(path, until(4, -1), loader=Counted())[:10] == first + [one - 10 for one in more]


def test_a_head_that_is_left_by_a_stop_is_done_once(path: Path) -> None:
    def until(n: int, stops: int) -> Program:
        def program(life: Life) -> list[int]:
            heads: list[int] = life.run.state.setdefault("heads", [])
            for epoch in life.run.epochs(n):
                heads.append(int(epoch))
                if epoch == stops:
                    life.run.stop()
                    break
                for batch in epoch:
                    life.update(batch)
            return list(heads)

        return program

    data = [torch.ones(1, 2)] * 2
    assert live(path, until(3, 1), loader=data) == [0, 1]
    assert live(path, until(4, -1), loader=data) == [0, 1, 2, 3]


# ---- loops that count


def test_a_loop_that_is_used_up_is_so_at_each_start(path: Path) -> None:
    def program(life: Life) -> None:
        for n in (3, 2):
            for _ in life.run.steps(n):
                life.update(torch.ones(1, 2))

    for _ in range(2):
        with pytest.raises(RuntimeError, match="has used it up"):
            live(path, program)


def test_named_loops_over_data_count_for_themselves(path: Path) -> None:
    def until(n: int) -> Program:
        def program(life: Life) -> list[str]:
            tails: list[str] = life.run.state.setdefault("tails", [])
            for name, most in (("a", n), ("b", 2)):
                for epoch in life.run.epochs(most, name=name):
                    for batch in epoch:
                        life.update(batch)
                    tails.append(f"{name}{int(epoch)}")
            return list(tails)

        return program

    data = [torch.ones(1, 2)] * 2
    assert live(path, until(2), at=5, loader=data) is None
    with pytest.raises(RuntimeError, match="a later loop has begun"):
        live(path, until(4), loader=data)
    edited = Resume(loops="program")
    assert live(path, until(2), loader=data, resume=edited) == ["a0", "a1", "b0", "b1"]


def test_a_loop_that_goes_on_has_another_end(path: Path) -> None:
    def until(n: int) -> Program:
        def program(life: Life) -> list[float]:
            for _ in life.run.steps(n):
                life.update(torch.ones(1, 2))
                draw()
                if life.run.step + 1 == life.store.get("dies"):
                    life.run.commit()
                    raise Kill
            return draw()

        return program

    whole = live(path.with_name("whole.pm"), until(6))
    assert live(path, until(4)) != whole

    def dies(life: Life) -> None:
        life.store["dies"] = 6
        life.store.commit()
        until(6)(life)

    assert live(path, dies) is None  # behind the last step, before the loop's end
    assert live(path, until(6)) == whole


def test_heads_of_an_edited_program_draw_the_same_at_each_start(path: Path) -> None:
    def program(life: Life) -> list[float]:
        drawn = draw()
        for _ in life.run.steps(6):
            life.update(torch.ones(1, 2))
        return drawn

    def edited(life: Life) -> list[float]:
        drawn = draw()
        life.store["drawn"] = drawn
        for _ in life.run.steps(4, name="other"):
            life.update(torch.ones(1, 2))
            draw()
        assert drawn == life.store["drawn"]  # of its first start
        return drawn

    first = live(path, program)
    assert live(path, edited, at=8, resume=Resume(loops="program")) is None
    for _ in range(2):
        assert live(path, edited) == live(path, edited) != first


# ---- detaching


@pytest.mark.parametrize("by", ["optimizer", "hand"])
def test_finished_steps_are_kept_by_detach(path: Path, by: str) -> None:
    def program(life: Life) -> tuple[int, dict[str, Any], bool]:
        run, weight = life.run, life.model.weight
        same = "weight" not in life.store or torch.equal(weight, life.store["weight"])
        began = run.step, dict(run.state), same
        for _ in range(3):
            with run.next_step():
                if by == "optimizer":
                    life.update(torch.ones(1, 2))
                else:
                    weight.data.add_(1)
                run.state["n"] = run.state.get("n", 0) + 1
        life.store["weight"] = weight.detach().clone()
        run.detach()
        return began

    assert live(path, program, policy=EveryN(100)) == (0, {}, True)
    assert live(path, program, policy=EveryN(100)) == (3, {"n": 3}, True)


# ---- one run of a store at a time


def test_a_second_run_waits_for_the_first(path: Path) -> None:
    with pmstore.open(path, size="8MiB") as store:
        first = attach(store, model=nn.Linear(1, 1), name="first")
        with pytest.raises(AttachError, match="'first' of this store is attached already"):
            attach(store, model=nn.Linear(1, 1), name="second")
        first.detach()
        attach(store, model=nn.Linear(1, 1), name="second")
