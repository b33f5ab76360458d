"""The native optimizers: torch's arithmetic, in place and in slots."""

from __future__ import annotations

import copy
import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pmstore
import pmstore.torch
from pmstore.scheduler import EveryN
from pmstore.torch import AttachError, MismatchError, Run, optim

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("AdamW", {"weight_decay": 0.1, "lr": 3e-3, "betas": (0.8, 0.95), "maximize": True}),
    ("AdamW", {"weight_decay": 0, "lr": torch.tensor(1e-2)}),
    ("Adam", {"weight_decay": 0.02}),
    ("Adam", {}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
]
SHAPES = [(33, 7), (1000, 129), (5,), (1,), (), (4, 3, 5, 5)]


def _parameters(seed: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    made[-1].data = made[-1].data.to(memory_format=torch.channels_last)
    return made


def _ulps(ours: torch.Tensor, theirs: torch.Tensor, *operands: torch.Tensor) -> float:
    """The largest difference in units of the last place of what went into it: a sum that cancels
    keeps its operands' error."""
    scale = theirs.abs()
    for operand in operands:
        scale = torch.maximum(scale, operand.abs())
    unit = torch.nextafter(scale, torch.full_like(scale, torch.inf)) - scale
    return float(((ours - theirs).abs() / unit).max()) if ours.numel() else 0.0


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_a_step_is_torchs(name: str, options: dict[str, Any]) -> None:
    ours, theirs = _parameters(1), _parameters(1)
    native = getattr(optim, name)(ours, **options)
    reference = getattr(torch.optim, name)(theirs, fused=True, **options)
    generator = torch.Generator().manual_seed(2)
    for _ in range(10):
        before = [one.detach().clone() for one in theirs]
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator).as_strided(
                mine.shape, mine.stride()
            )
            other.grad = mine.grad.clone()
        native.step()
        reference.step()
        with torch.no_grad():
            for mine, other, old in zip(ours, theirs, before, strict=True):
                assert mine.grad is not None
                moved = float(options.get("lr", 1e-3)) * mine.grad.abs()
                # In the last elements, which fill no vector, torch's fused kernels round SGD's
                # momentum in another way: a unit of it, and one of the parameter.
                whole = mine.numel() // 16 * 16
                flat = [
                    one.detach().as_strided((one.numel(),), (1,))
                    for one in (mine, other, old, moved)
                ]
                assert _ulps(*[one[:whole] for one in flat]) <= 1
                assert _ulps(*[one[whole:] for one in flat]) <= (2 if name == "SGD" else 1)
                for key in native.names(native.param_groups[0]):
                    held = reference.state[other][key]
                    assert (
                        _ulps(
                            native.state[mine][key],
                            held,
                            mine.grad.square() if "sq" in key else mine.grad,
                        )
                        <= 1
                    )
                    native.state[mine][key].copy_(held)
                mine.copy_(other)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_a_thousand_steps(name: str) -> None:
    """No farther from torch's fused kernels than torch's own foreach is, on a problem that does not
    amplify rounding."""
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9} if name == "SGD" else {"lr": 0.01}
    target = torch.linspace(-2, 2, 3000)

    def run(make: Any) -> torch.Tensor:
        w = nn.Parameter(torch.linspace(-1, 1, 3000).cos())
        optimizer = make([w])
        for _ in range(1000):
            w.grad = (w.detach() - target) * 0.3
            optimizer.step()
        return w.detach()

    fused = run(lambda p: getattr(torch.optim, name)(p, fused=True, **options))
    foreach = run(lambda p: getattr(torch.optim, name)(p, foreach=True, **options))
    native = run(lambda p: getattr(optim, name)(p, **options))
    ours, theirs = float((native - fused).abs().max()), float((foreach - fused).abs().max())
    assert ours <= theirs, (ours, theirs)


def test_bfloat16_parameters_have_float32_moments() -> None:
    """As computing in float32 and rounding the parameter at each step, ties to even, nan kept."""
    ours = _parameters(3, torch.bfloat16)
    wide = [nn.Parameter(one.detach().float()) for one in ours]
    native, reference = optim.AdamW(ours, lr=0.01), torch.optim.AdamW(wide, lr=0.01, fused=True)
    for step in range(5):
        for mine, other in zip(ours, wide, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.float()
        native.step()
        reference.step()
        for mine, other in zip(ours, wide, strict=True):
            rounded = other.detach().to(torch.bfloat16)
            # later ones start from rounded parameters
            assert torch.equal(mine.detach(), rounded) or step > 0
            other.data = mine.detach().float()
            assert native.state[mine]["exp_avg"].dtype == torch.float32
    ours[2].grad = torch.full_like(ours[2], torch.nan)
    native.step()
    assert ours[2].isnan().all()


NAMES = ["AdamW", "Adam", "SGD"]


@pytest.mark.parametrize("name", NAMES)
def test_names_and_defaults_are_torchs(name: str) -> None:
    ours, theirs = getattr(optim, name), getattr(torch.optim, name)

    def arguments(made: Any) -> dict[str, Any]:
        return {
            one.name: (one.kind, one.default) for one in inspect.signature(made).parameters.values()
        }

    w = nn.Parameter(torch.ones(3))
    given, expected = arguments(ours), arguments(theirs)
    assert given == {**given, **expected}
    # torch's Adam has it since 2.7
    assert given.keys() - expected.keys() <= {"decoupled_weight_decay"}
    expected = theirs([w]).defaults
    assert ours([w]).defaults == {**ours([w]).defaults, **expected}
    for option in ours.refused:
        with pytest.raises(
            ValueError, match=rf"optim\.{name} has no {option}: use torch\.optim\.{name}"
        ):
            ours([w], **{option: True})
    for option in ("fused", "foreach"):
        ours([w], **{option: True})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_state_dicts_go_both_ways(name: str, dtype: torch.dtype) -> None:
    """To torch's and on, and back and on. (torch rounds state to the parameters' dtype, and
    computes in it.)"""
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9} if name == "SGD" else {"lr": 0.05}
    ours, theirs, again = (_parameters(seed, dtype) for seed in (5, 5, 6))
    native, back = getattr(optim, name)(ours, **options), getattr(optim, name)(again, **options)
    reference = getattr(torch.optim, name)(theirs, **options)

    def step(parameters: list[nn.Parameter], optimizer: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for one in parameters:
            one.grad = torch.empty_like(one).copy_(torch.randn(one.shape, generator=generator))
        optimizer.step()

    def load(
        into: Any, parameters: list[nn.Parameter], of: Any, source: list[nn.Parameter]
    ) -> None:
        into.load_state_dict(copy.deepcopy(of.state_dict()))  # torch keeps the very tensors
        with torch.no_grad():
            for one, other in zip(parameters, source, strict=True):
                one.copy_(other)

    def same(some: list[nn.Parameter], others: list[nn.Parameter]) -> bool:
        near = (
            {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.01}
        )
        return all(torch.allclose(a, b, **near) for a, b in zip(some, others, strict=True))

    for seed in range(3):
        step(ours, native, seed)
    load(reference, theirs, native, ours)
    for seed in (9, 10):
        step(ours, native, seed)
        step(theirs, reference, seed)
        assert same(ours, theirs)
    load(back, again, reference, theirs)
    for key in native.state_names:
        assert back.state[again[1]][key].dtype == torch.float32
    for seed in (11, 12):
        step(again, back, seed)
        step(theirs, reference, seed)
        assert same(again, theirs)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_of_bfloat16_parameters_is_whole(
    store: pmstore.Store, name: str, attached: bool
) -> None:
    """Its moments are float32, and are not rounded when they are loaded: the next step is bit for
    bit the same."""
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9} if name == "SGD" else {"lr": 0.05}
    first, second = (
        [nn.Parameter(torch.linspace(-1, 1, 5000, dtype=torch.bfloat16))] for _ in range(2)
    )
    native, other = getattr(optim, name)(first, **options), getattr(optim, name)(second, **options)
    run = pmstore.torch.attach(store, optimizer=other) if attached else None
    seen: list[Any] = []
    other.register_load_state_dict_post_hook(
        lambda one: seen.append(one.state[second[0]][native.state_names[0]].dtype)
    )

    def step(parameter: nn.Parameter, optimizer: Any, seed: int) -> None:
        parameter.grad = torch.randn(5000, generator=torch.Generator().manual_seed(seed)).bfloat16()
        optimizer.step()

    for seed in range(3):
        step(first[0], native, seed)
    saved = copy.deepcopy(native.state_dict())
    other.load_state_dict(saved)
    second[0].data = first[0].detach().clone()
    for seed in (3, 4):
        step(first[0], native, seed)
        with nullcontext() if run is None else run.next_step():
            step(second[0], other, seed)
    assert torch.equal(first[0], second[0])
    for key, value in native.state[first[0]].items():
        assert torch.equal(other.state[second[0]][key], value), key
    assert seen == [torch.float32]
    assert not other._optimizer_load_state_dict_pre_hooks


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(16, 700),
        nn.BatchNorm1d(700),
        nn.Tanh(),
        nn.Linear(700, 40),
        nn.Linear(40, 16, bias=False),
    )
    model[4].weight = nn.Parameter(model[3].weight[:16, :40].detach().clone())
    return model


def _train(
    model: nn.Sequential, optimizer: Any, steps: int, run: Run | None = None, commit: bool = True
) -> None:
    for step in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return loss

        with nullcontext() if run is None else run.next_step():
            optimizer.step(closure)
            for group in optimizer.param_groups:
                group["lr"] *= 0.99
        if run is not None and commit:
            run.commit()


@pytest.mark.parametrize("every", [1, 3])
def test_in_slots_as_in_place(shm: Path, every: int) -> None:
    """Bit for bit, also where a policy skips commits: then steps go on in place in the new slot."""
    plain, attached = _model(1), _model(1)
    expected, optimizer = (
        optim.AdamW(plain.parameters(), lr=0.01),
        optim.AdamW(attached.parameters(), lr=0.01),
    )
    _train(plain, expected, 12)
    with pmstore.open(shm / "run.pm", size="32MiB") as store:
        run = pmstore.torch.attach(store, model=attached, optimizer=optimizer, policy=EveryN(every))
        before = store.stats().captured_bytes
        _train(attached, optimizer, 12, run, commit=False)
        for (name, ours), theirs in zip(
            attached.state_dict().items(), plain.state_dict().values(), strict=True
        ):
            assert torch.equal(ours, theirs), name
        # batch norm, counters, the course of a young run; not the 300 KB of state
        assert store.stats().captured_bytes - before < 12 * 120_000
        for ours, theirs in zip(attached.parameters(), plain.parameters(), strict=True):
            for key, value in expected.state[theirs].items():
                assert torch.equal(optimizer.state[ours][key], value)
        assert isinstance(store["run/optimizer/slots"], pmstore.Slots)
        assert store.check().problems == ()


def test_roll_back_and_resume(shm: Path) -> None:
    path = shm / "run.pm"
    model = _model(2)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pmstore.open(path, size="32MiB") as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, policy=EveryN(100))
        _train(model, optimizer, 3, run)
        kept = {name: one.clone() for name, one in model.state_dict().items()}
        _train(model, optimizer, 2, run, commit=False)
        run.rollback()
        assert all(torch.equal(one, kept[name]) for name, one in model.state_dict().items())
        _train(model, optimizer, 1, run, commit=False)
        store.rollback()  # and closing without another commit
        run.rollback()
    other = _model(99)
    again = optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=other, optimizer=again)
        assert run.resumed
        assert run.step == 3
        assert all(torch.equal(one, kept[name]) for name, one in other.state_dict().items())
        assert again.state[other[0].weight]["step"] == 3
        run.detach()
        _train(other, again, 1)  # in place from now on
        with pytest.raises(MismatchError, match="momentum of the optimizer"):
            fresh = _model(1)
            pmstore.torch.attach(
                store, model=fresh, optimizer=optim.SGD(fresh.parameters(), lr=0.1)
            )
        with pytest.raises(MismatchError, match="class of the optimizer"):
            fresh = _model(1)
            pmstore.torch.attach(store, model=fresh, optimizer=optim.AdamW(fresh.parameters()))


def test_what_leaves_the_slots_is_taken_in(path: Path) -> None:
    model = _model(3)
    optimizer = optim.AdamW(model.parameters())
    with pmstore.open(path, size="16MiB") as opened:
        run = pmstore.torch.attach(opened, model=model, optimizer=optimizer)
        _train(model, optimizer, 1, run)
        with run.next_step():
            model[0].weight.data = torch.zeros_like(model[0].weight)
        run.commit()
        run.rollback()
        assert model[0].weight.count_nonzero() == 0
        saved = dict(_model(8).state_dict())
        with run.next_step():
            model.load_state_dict(saved, assign=True)
        run.commit()
        assert all(torch.equal(one, saved[name]) for name, one in model.state_dict().items())
        assert any(one is model[0].weight for one in optimizer.param_groups[0]["params"])
        _train(model, optimizer, 1, run)
        source = torch.optim.AdamW(_model(4).parameters())
        for group in source.param_groups:
            for one in group["params"]:
                one.grad = torch.ones_like(one)
        source.step()
        with run.next_step():
            optimizer.load_state_dict(source.state_dict())
        run.commit()
        assert optimizer.state[model[0].weight]["step"] == 1
        assert (
            optimizer.state[model[0].weight]["exp_avg"]
            == optimizer.state[model[0].weight]["exp_avg"].flatten()[0]
        ).all()
        with run.next_step():
            optimizer.state.clear()
        run.commit()
        assert optimizer.state[model[0].weight]["step"] == 0


def test_a_parameter_without_a_gradient_stays(store: pmstore.Store) -> None:
    used, unused = nn.Parameter(torch.ones(20_000)), nn.Parameter(torch.ones(20_000))
    optimizer = optim.AdamW([used, unused], lr=0.1)
    run = pmstore.torch.attach(store, optimizer=optimizer)
    for _ in run.steps(3):
        used.grad = torch.ones_like(used)
        optimizer.step()
        run.commit()
    assert (unused == 1).all()
    assert (used < 1).all()
    assert [int(optimizer.state[one]["step"]) for one in (used, unused)] == [3, 0]
    for _ in run.steps(5):  # none at all
        optimizer.zero_grad()
        optimizer.step()
        run.commit()
    assert (unused == 1).all()


def test_bad_input(store: pmstore.Store) -> None:
    w = nn.Parameter(torch.ones(3))
    for options in ({"amsgrad": True}, {"capturable": True}, {"differentiable": True}):
        with pytest.raises(ValueError, match=r"use torch\.optim\.AdamW"):
            optim.AdamW([w], **options)  # type: ignore[arg-type]
    for make in (
        lambda: optim.AdamW([w], lr=-1),
        lambda: optim.Adam([w], betas=(1.0, 0.9)),
        lambda: optim.Adam([w], eps=float("nan")),
        lambda: optim.SGD([w], momentum=-0.1),
        lambda: optim.SGD([w], nesterov=True),
    ):
        with pytest.raises(ValueError, match=r"Invalid|Nesterov"):
            make()
    with pytest.raises(ValueError, match="dense float32 and bfloat16"):
        optim.SGD([nn.Parameter(torch.ones(3, dtype=torch.float64))])
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(RuntimeError, match="dense gradients only"):
        optim.SGD(embedding.parameters(), lr=1).step()
    assert torch.equal(embedding.weight, before)
    base = torch.zeros(10)
    views = [nn.Parameter(base[:5]), nn.Parameter(base[4:])]
    with pytest.raises(AttachError, match=r"0 of .* and parameter 1 of .* share memory"):
        pmstore.torch.attach(store, optimizer=optim.SGD(views))
    with pytest.raises(AttachError, match="no parameters"):
        pmstore.torch.attach(store, optimizer=optim.SGD([{"params": []}]))
    optimizer = optim.SGD([w])
    run = pmstore.torch.attach(store, optimizer=optimizer)
    with pytest.raises(ValueError, match="add groups before attach"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(AttachError, match="attached already"):
        pmstore.torch.attach(store, optimizer=optimizer, name="again")
    with run.next_step():
        w.grad = torch.full_like(w, np.nan)
        optimizer.step()
    run.rollback()
    assert (w == 1).all()


@pytest.mark.parametrize("where", ["parameters of the store", "detached"])
def test_in_place_over_memory_of_the_store(shm: Path, where: str) -> None:
    """Every core's stores are captured, also while captures share the cores themselves."""
    count = 6_000_000  # large extents: captured in pieces by all cores
    with pmstore.open(shm / "run.pm", size="512MiB") as store:
        if where == "detached":
            w = nn.Parameter(torch.ones(count))
            optimizer = optim.SGD([w], lr=1, momentum=0.9)
            pmstore.torch.attach(store, optimizer=optimizer).detach()
        else:
            w = nn.Parameter(store.tensor("w", (count,), torch.float32).fill_(1))
            optimizer = optim.SGD([w], lr=1, momentum=0.9)
        store.commit()
        for step in range(6):
            before = w.detach().clone()
            w.grad = torch.full_like(w, 0.5 + step)
            optimizer.step()
            assert (w < before).all()
            if step % 2:
                store.commit()
            else:
                store.rollback()
                assert torch.equal(w, before)
