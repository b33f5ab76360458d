"""A commit looks at what the last one wrote, and writes what is not the same: whatever a step
changes, however little of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import pmstore
from pmstore._engine._binding import same_bytes
from pmstore.torch import AttachError, attach
from pmstore.torch._random import defaults as rng_memory
from pmstore.torch.optim import AdamW

Optimizer = torch.optim.Optimizer
KINDS = pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW], ids=["torch", "slots"])


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    python, numpy, bits = random.getstate(), np.random.get_state(), np.random.get_bit_generator()
    random.seed(1)
    np.random.seed(1)
    yield
    np.random.set_bit_generator(bits)
    np.random.set_state(numpy)
    random.setstate(python)


def describe(item: Any) -> Any:
    """Type and bits."""
    if isinstance(item, (np.ndarray, torch.Tensor)):
        array = item.detach().contiguous().numpy() if isinstance(item, torch.Tensor) else item
        return array.shape, str(array.dtype), array.tobytes()
    if isinstance(item, dict):
        return {key: describe(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item).__name__, [describe(value) for value in item]
    return type(item).__name__, item.hex() if isinstance(item, float) else item


def everything(model: nn.Module, optimizer: Optimizer) -> Any:
    state = optimizer.state_dict()
    return describe(
        [
            {key: tuple(value.stride()) for key, value in model.named_parameters()},
            dict(model.state_dict()),
            state["state"],
            [
                {key: value for key, value in group.items() if key != "params"}
                for group in state["param_groups"]
            ],
            random.getstate(),
            np.random.get_state(legacy=False),
            torch.get_rng_state(),
        ]
    )


def train(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def set_group(**values: Any) -> Callable[[nn.Module, Optimizer], None]:
    return lambda model, optimizer: optimizer.param_groups[0].update(values)


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    held: dict[str, Any] = optimizer.state[next(model.parameters())]
    return held


def other_state(optimizer: Optimizer) -> dict[Any, Any]:
    """State that is of no parameter has names for keys, of which torch's types know nothing."""
    return cast(dict[Any, Any], optimizer.state)


def draw_gauss(model: nn.Module, optimizer: Optimizer) -> None:
    random.gauss(0, 1)  # the next one takes the number that this one left


def draw_normal(model: nn.Module, optimizer: Optimizer) -> None:
    np.random.standard_normal()


def swap_bits(model: nn.Module, optimizer: Optimizer) -> None:
    generator = np.random.MT19937(5)
    np.random.set_bit_generator(generator)
    np.random.random()


def replace_state(model: nn.Module, optimizer: Optimizer) -> None:
    state_of(model, optimizer)["exp_avg"] = torch.full((4, 4), 7.0)


def move_state(model: nn.Module, optimizer: Optimizer) -> None:
    state_of(model, optimizer)["exp_avg"].data = torch.full((4, 4), 8.0)


def change_in_place(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0].setdefault("list", []).append(1)


def change_state_in_place(model: nn.Module, optimizer: Optimizer) -> None:
    state_of(model, optimizer).setdefault("list", []).append(1)


def change_other_state_in_place(model: nn.Module, optimizer: Optimizer) -> None:
    other_state(optimizer).setdefault("list", []).append(1)


def toggle_other_state(model: nn.Module, optimizer: Optimizer) -> None:
    if other_state(optimizer).pop("note", None) is None:
        other_state(optimizer)["note"] = 42


def load_state(model: nn.Module, optimizer: Optimizer) -> None:
    state = optimizer.state_dict()
    state["state"] = {
        key: {
            name: value + 1 if isinstance(value, torch.Tensor) else value
            for name, value in held.items()
        }
        if isinstance(key, int)  # a parameter
        else held
        for key, held in state["state"].items()
    }
    optimizer.load_state_dict(state)


def move_parameter(model: nn.Module, optimizer: Optimizer) -> None:
    weight = next(model.parameters())
    weight.data = weight.data.clone() + 1


CHANGES: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "python random": lambda model, optimizer: random.random(),
    "python gauss": draw_gauss,
    "numpy random": lambda model, optimizer: np.random.random(),
    "numpy normal": draw_normal,
    "numpy bit generator": swap_bits,
    "torch random": lambda model, optimizer: torch.rand(1),
    "learning rate": set_group(lr=0.5),
    "an int for a float": set_group(lr=1),
    "a float for an int": set_group(weight_decay=0.0),
    "minus zero": set_group(weight_decay=-0.0),
    "a tuple": set_group(betas=(0.5, 0.6)),
    "a new key": set_group(mine="text"),
    "a list in place": change_in_place,
    "a list in the state": change_state_in_place,
    "a plain value in the state": lambda model, optimizer: state_of(model, optimizer).update(
        count=3
    ),
    "a value of no parameter": lambda model, optimizer: other_state(optimizer).update(
        count=other_state(optimizer).get("count", 0) + 1
    ),
    "a list of no parameter": change_other_state_in_place,
    "a value that comes and goes": toggle_other_state,
    "a state tensor": replace_state,
    "a state tensor's memory": move_state,
    "a state loaded": load_state,
    "a parameter's memory": move_parameter,
}


@KINDS
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_changed_is_in_the_commit(
    store: pmstore.Store,
    change: Callable[[nn.Module, Optimizer], Any],
    kind: Callable[..., Optimizer],
) -> None:
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0)
    run = attach(store, model=model, optimizer=optimizer)

    # every change once more: a second draw only takes what the first one left
    for times in range(1, 4):
        with run.next_step():
            train(model, optimizer)
        run.commit()
        with run.next_step():
            pass  # nothing changed since
        run.commit()
        with run.next_step():
            for _ in range(times):
                change(model, optimizer)
        run.commit()
        held = everything(model, optimizer)
        with run.next_step():
            train(model, optimizer)
            for other in CHANGES.values():
                other(model, optimizer)
        assert everything(model, optimizer) != held
        run.rollback()
        assert everything(model, optimizer) == held


class Counting:
    """A stateful object whose state is another one each time that it is asked, and which draws."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"asked": self.asked, "drawn": torch.rand(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


def freeze(model: nn.Module, optimizer: Optimizer) -> None:
    bias: torch.Tensor = next(reversed(list(model.parameters())))
    bias.requires_grad_(not bias.requires_grad)


def set_attribute(model: nn.Module, optimizer: Optimizer) -> None:
    model.note = cast(Any, getattr(model, "note", 0)) + 1


def drop_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()


@KINDS
@pytest.mark.parametrize("asked", [False, True])
def test_several_changes_at_once(
    store: pmstore.Store, asked: bool, kind: Callable[..., Optimizer]
) -> None:
    """A commit writes what has changed, and leaves the rest alone."""
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0)
    counting = Counting()
    run = attach(
        store, model=model, optimizer=optimizer, stateful={"counting": counting} if asked else None
    )
    chance = random.Random(7)
    # what can change and stay the same object is looked at by each commit from then on
    in_place = (change_in_place, change_state_in_place, change_other_state_in_place, swap_bits)
    seen = [one for one in CHANGES.values() if one not in in_place]
    changes = [*seen, freeze, set_attribute, drop_gradients]

    def all_held() -> Any:
        parameters = list(model.parameters())
        return [
            everything(model, optimizer),
            [one.requires_grad for one in parameters],
            [one.grad is None for one in parameters],
            getattr(model, "note", None),
        ]

    for _ in range(30):
        for _ in range(chance.randint(1, 3)):  # the first one behind a roll back writes all
            with run.next_step():
                if chance.random() < 0.7:
                    train(model, optimizer)
                for change in chance.sample(changes, chance.choice([0, 1, 1, 2, 3])):
                    if optimizer.state:
                        change(model, optimizer)
            run.commit()
        held = all_held()
        with run.next_step():
            train(model, optimizer)
            for change in changes:
                change(model, optimizer)
        run.rollback()
        assert all_held() == held


@KINDS
def test_plain_state_comes_goes_and_is_resumed(path: Path, kind: Callable[..., Optimizer]) -> None:
    def resumed(steps: int, change: Callable[[nn.Module, Optimizer], Any]) -> dict[Any, Any]:
        """The plain state after steps, a change and a step, all committed: as another process finds
        it."""
        with pmstore.open(path) as store:
            model = nn.Linear(4, 4)
            optimizer = kind(model.parameters(), lr=0.1)
            run = attach(store, model=model, optimizer=optimizer)
            for what in [train] * steps + [change, train]:
                with run.next_step():
                    what(model, optimizer)
                run.commit()
            run.detach()
        with pmstore.open(path) as store:
            model = nn.Linear(4, 4)
            optimizer = kind(model.parameters(), lr=0.1)
            attach(store, model=model, optimizer=optimizer).detach()
            found = {
                key: value for key, value in other_state(optimizer).items() if isinstance(key, str)
            }
            return found | {
                key: value
                for key, value in state_of(model, optimizer).items()
                if not torch.is_tensor(value)
            }

    assert resumed(2, lambda model, optimizer: other_state(optimizer).update(note=42)) == {
        "note": 42
    }
    assert resumed(2, lambda model, optimizer: state_of(model, optimizer).update(count=3)) == {
        "note": 42,
        "count": 3,
    }
    assert resumed(2, lambda model, optimizer: other_state(optimizer).pop("note")) == {"count": 3}
    assert resumed(2, lambda model, optimizer: state_of(model, optimizer).pop("count")) == {}


@KINDS
def test_state_of_a_tensor_in_no_group_is_refused(
    store: pmstore.Store, kind: Callable[..., Optimizer]
) -> None:
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    run = attach(store, model=model, optimizer=optimizer)
    for _ in range(2):
        with run.next_step():
            train(model, optimizer)
        run.commit()
    stray = torch.zeros(2)
    with run.next_step():
        optimizer.state[stray] = {"count": 1}
    for _ in range(2):
        with pytest.raises(AttachError, match="none of its groups"):
            run.commit()
    del optimizer.state[stray]
    run.commit()


def test_a_state_that_is_set_back_is_another_state(store: pmstore.Store) -> None:
    """numpy's and Python's generators leave a number for the next call, which then draws nothing:
    only that differs."""
    run = attach(store, model=nn.Linear(2, 2))
    with run.next_step():
        np.random.standard_normal()
        random.gauss(0, 1)
        numpy, python = np.random.get_state(), random.getstate()
        following = np.random.standard_normal(), random.gauss(0, 1)
    run.commit()
    with run.next_step():
        np.random.set_state(numpy)
        random.setstate(python)
    run.commit()
    with run.next_step():
        np.random.seed(3)
        random.seed(3)
    run.rollback()
    assert (np.random.standard_normal(), random.gauss(0, 1)) == following


def test_equal_bits_are_an_equal_state() -> None:
    for look, draw, state in (
        (rng_memory.python_state, lambda: random.gauss(0, 1), random.getstate),
        (
            rng_memory.numpy_state,
            np.random.standard_normal,
            lambda: describe(np.random.get_state(legacy=False)),
        ),
        (rng_memory.torch_state, lambda: torch.randn(1), lambda: torch.get_rng_state().tolist()),
        (rng_memory.torch_state, torch.seed, lambda: torch.get_rng_state().tolist()),
    ):
        seen: dict[bytes, str] = {}
        for _ in range(700):  # once around the generator's words
            there = look()
            assert there is not None, (
                "this interpreter's, numpy's or torch's generators lie elsewhere: slower, but no "
                "error for users"
            )
            bits = rng_memory.copied(there)
            assert bits not in seen
            again = look()
            assert again is not None
            assert same_bytes(again, bits)
            seen[bits] = str(state())
            draw()
            changed = look()
            assert changed is not None
            assert not same_bytes(changed, bits)
        assert len(set(seen.values())) == len(seen)


def test_the_number_that_torch_leaves_is_part_of_the_state() -> None:
    """Every other draw takes that alone. To set the state that is there is no change."""
    for _ in range(6):
        bits = rng_memory.copied(rng_memory.torch_state())
        torch.set_rng_state(torch.get_rng_state())
        assert same_bytes(rng_memory.torch_state(), bits)
        torch.randn(1, dtype=torch.float64)
        assert not same_bytes(rng_memory.torch_state(), bits)


@pytest.mark.parametrize("way", ["data", "assign", "transposed"])
def test_a_step_after_a_parameter_left_the_heap(store: pmstore.Store, way: str) -> None:
    """It is taken in by the commit: the step is that of a model that was never attached."""
    torch.manual_seed(0)
    models = nn.Linear(4, 4), nn.Linear(4, 4)
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    run = attach(store, model=models[0], optimizer=optimizers[0])
    for _ in range(3):
        new = torch.randn(4, 4)
        with run.next_step():
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                if way == "assign" and model is models[0]:
                    model.load_state_dict(
                        {"weight": new.clone(), "bias": model.bias.detach().clone()}, assign=True
                    )
                elif way == "transposed":
                    model.weight.data = model.weight.data.t()
                else:
                    model.weight.data = new.clone()
                model(torch.ones(2, 4)).square().sum().backward()
                optimizer.step()
        run.commit()
        # as it is in the heap: products may differ in the last bit
        models[1].weight.data = models[1].weight.data.contiguous()
        assert describe(dict(models[0].state_dict())) == describe(dict(models[1].state_dict()))
        assert describe(store["run/model/weight"]) == describe(models[1].weight)
