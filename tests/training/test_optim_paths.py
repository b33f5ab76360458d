"""The native optimizers in company: instruction sets, options by group, schedulers, scalers,
wrappers of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pythons
import torch
from test_optim import KINDS
from torch import nn

import pmstore
import pmstore.torch
from pmstore._engine.optim import optim_limit, optim_step
from pmstore.torch import AttachError, optim

PORTABLE, AVX2, AVX512 = range(3)
COUNT = 4096 + 1024 + 32 + 7  # blocks, whole vectors, and a tail


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    yield optim_limit
    optim_limit(AVX512)


def _steps(
    name: str, options: dict[str, Any], dtype: torch.dtype, stream: bool
) -> list[torch.Tensor]:
    """Three steps, each from one set of tensors into another; all that they wrote."""
    generator = torch.Generator().manual_seed(7)
    parameter = nn.Parameter(torch.randn(COUNT, generator=generator).to(dtype))
    optimizer = getattr(optim, name)([parameter], **options)
    names = optimizer.names(optimizer.param_groups[0])
    written: list[torch.Tensor] = []
    for _ in range(3):
        gradient = torch.randn(COUNT, generator=generator).to(dtype)
        table = optimizer.table()
        made = (
            torch.full_like(parameter, torch.nan),
            *(torch.full((COUNT,), torch.nan) for _ in names),
        )
        table["grad"] = gradient.data_ptr()
        table["param_out"] = made[0].data_ptr()
        table["state_out"][0, : len(names)] = [one.data_ptr() for one in made[1:]]
        hyper = {
            "kind": optimizer.kind,
            "stream": stream,
            **optimizer.hyper(optimizer.param_groups[0]),
        }
        optim_step(table.ctypes.data, 1, hyper)
        parameter.data = made[0].detach()
        optimizer.state[parameter].update(zip(names, made[1:], strict=True))
        written += made
    return written


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), KINDS)
def test_every_instruction_set_gives_the_same_bits(
    name: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    stream: bool,
    limit: Callable[[int], None],
) -> None:
    limit(PORTABLE)
    expected = _steps(name, options, dtype, stream)
    for one in (AVX2, AVX512):
        limit(one)
        for ours, theirs in zip(_steps(name, options, dtype, stream), expected, strict=True):
            assert torch.equal(ours, theirs)


def _twins(count: int = 3) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Of whole vectors: in the tail of an array torch's own kernels round in another way than
    before it."""
    values = [torch.randn(64, 16, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    return [nn.Parameter(v.clone()) for v in values], [nn.Parameter(v.clone()) for v in values]


def _gradients(step: int, *lists: list[nn.Parameter]) -> None:
    for parameters in lists:
        generator = torch.Generator().manual_seed(step)
        for one in parameters:
            one.grad = torch.randn(one.shape, generator=generator)


def _same(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_each_group_has_options_of_its_own(store: pmstore.Store, name: str, attached: bool) -> None:
    ours, theirs = _twins()
    if name == "SGD":
        options: list[dict[str, Any]] = [
            {"lr": 0.1, "momentum": 0.9, "nesterov": True},
            {"lr": 0.2, "momentum": 0, "weight_decay": 0.1},
            {"lr": 0.05, "momentum": 0.5, "dampening": 0.2, "maximize": True},
        ]
    else:
        options = [
            {"lr": 0.1, "betas": (0.7, 0.9)},
            {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.2},
            {"lr": 0.05, "maximize": True, "weight_decay": 0},
        ]
    native = getattr(optim, name)(
        [{"params": [p], **o} for p, o in zip(ours, options, strict=True)]
    )
    reference = getattr(torch.optim, name)(
        [{"params": [p], **o} for p, o in zip(theirs, options, strict=True)], fused=True
    )
    run = pmstore.torch.attach(store, optimizer=native) if attached else None
    for step in range(6) if run is None else run.steps(6):
        _gradients(step, ours, theirs)
        if step == 3:
            for group in (*native.param_groups, *reference.param_groups):
                group["lr"] *= 0.5
        native.step()
        reference.step()
    assert _same(ours, theirs)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle, betas or momentum too": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, 0.1, total_steps=30
    ),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.3),
    "warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
}


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_learning_rate_schedulers(store: pmstore.Store, kind: str, name: str) -> None:
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9} if name == "SGD" else {"lr": 0.05}
    ours, theirs = _twins()
    native, reference = (
        getattr(optim, name)(ours, **options),
        getattr(torch.optim, name)(theirs, fused=True, **options),
    )
    schedules = SCHEDULERS[kind](native), SCHEDULERS[kind](reference)
    run = pmstore.torch.attach(store, optimizer=native, lr_scheduler=schedules[0])
    for step in run.steps(12):
        _gradients(step, ours, theirs)
        native.step()
        reference.step()
        for one in schedules:
            one.step(*([1.0] if kind == "plateau" else []))
    assert native.param_groups[0]["lr"] == reference.param_groups[0]["lr"] != 0.05
    assert _same(ours, theirs)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_gradient_scaler_and_clipping(store: pmstore.Store, clip: Callable[..., Any]) -> None:
    """As torch's optimizer under the same scaler; a step whose gradients overflow is left out, and
    commits nothing of it."""
    ours, theirs = _twins()
    native, reference = optim.AdamW(ours, lr=0.05), torch.optim.AdamW(theirs, lr=0.05, fused=False)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    run = pmstore.torch.attach(store, optimizer=native, scaler=scalers[0])
    for step in run.steps(8):
        before = [one.detach().clone() for one in ours]
        for parameters, optimizer, scaler in (
            (ours, native, scalers[0]),
            (theirs, reference, scalers[1]),
        ):
            optimizer.zero_grad()
            loss = torch.stack([(one - step).square().mean() for one in parameters]).sum()
            scaler.scale(loss * (torch.inf if step == 4 else 1)).backward()
            scaler.unscale_(optimizer)
            clip(parameters, 0.01)
            scaler.step(optimizer)
            scaler.update()
        assert (step == 4) == all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert _same(ours, theirs)


# ---- what alternating storage means for those who hold parameters ----


class Tied(nn.Module):
    """One weight in two places, and one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.again = self.first
        self.out = nn.Linear(16, 16, bias=False)
        self.out.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.again(self.first(x)).tanh())
        return out


def _train(model: nn.Module, forward: Any, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        forward(x).square().mean().backward()
        optimizer.step()


def _wrap_ddp(model: nn.Module, tmp: Path) -> Any:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp}/rendezvous", rank=0, world_size=1
    )
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


@pytest.mark.parametrize("wrapper", ["none", "compiled", "ddp"])
def test_wrapped_and_tied_modules(store: pmstore.Store, tmp_path: Path, wrapper: str) -> None:
    """Compiled code and DDP's buckets go by the parameters, not by their addresses: bit for bit as
    without slots."""
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(Tied())
        optimizers.append(optim.AdamW(models[-1].parameters(), lr=0.05))
    run = pmstore.torch.attach(store, model=models[1], optimizer=optimizers[1])
    forward: Any = models[1]
    try:
        if wrapper == "compiled":
            forward = torch.compile(models[1], backend="aot_eager")
        elif wrapper == "ddp":
            forward = _wrap_ddp(models[1], tmp_path)
        _train(models[0], models[0], optimizers[0], range(5))
        _train(models[1], forward, optimizers[1], run.steps(5))
    finally:
        if wrapper == "ddp":
            torch.distributed.destroy_process_group()
    for (name, ours), theirs in zip(
        models[1].state_dict().items(), models[0].state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert models[1].out.weight is models[1].first.weight


RANK = """
import os
import sys

import torch
from torch import nn

import pmstore
import pmstore.torch

rank, folder = int(sys.argv[1]), sys.argv[2]
meeting = f"file://{folder}/rendezvous"
torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)


def train(store):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 16))
    optimizer = pmstore.torch.optim.AdamW(model.parameters(), lr=0.05)
    steps = range(5)
    if store is not None:
        steps = pmstore.torch.attach(store, model=model, optimizer=optimizer).steps(5)
    forward = nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, bucket_cap_mb=0.01
    )
    for step in steps:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + rank))
        optimizer.zero_grad()
        forward(x).square().mean().backward()
        optimizer.step()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


without = train(None)
with pmstore.open(f"{folder}/{rank}.pm", size="8MiB") as store:
    assert torch.equal(train(store), without)
other = without.clone()
torch.distributed.broadcast(other, 0)
assert torch.equal(other, without)
torch.distributed.destroy_process_group()
os._exit(0)  # gloo's threads may drop tensors while the interpreter ends, which aborts (torch 2.13)
"""


def test_two_ranks(shm: Path) -> None:
    """Gradients that are averaged in buckets: the same bits with slots as without, on both
    ranks."""
    ranks = [pythons.start(["-c", RANK, str(rank), str(shm)]) for rank in range(2)]
    try:
        said = [rank.communicate(300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(30)
    assert [rank.returncode for rank in ranks] == [0, 0], said


def test_views_of_parameters(store: pmstore.Store) -> None:
    """A view made before a step shows the version before it; after one more, what the slot holds
    then. A clone stays."""
    w = nn.Parameter(torch.zeros(20_000))
    optimizer = optim.SGD([w], lr=1)
    run = pmstore.torch.attach(store, optimizer=optimizer)
    identity = id(w)
    view, alias = w.detach(), w.data[:5]
    for step in (1, 2):
        with run.next_step():
            w.grad = torch.full_like(w, -1)
            optimizer.step()
        run.commit()
        assert (w == step).all()
        assert (view == alias[0]).all()
        assert view[0] == (0 if step == 1 else 2)  # two slots: after two steps the same one again
    assert id(w) == identity
    assert optimizer.param_groups[0]["params"][0] is w
    assert w.is_leaf


def test_one_parameter_in_two_optimizers(store: pmstore.Store, tmp_path: Path) -> None:
    w = nn.Parameter(torch.ones(20_000))
    first, second = optim.SGD([w], lr=1), optim.AdamW([w])
    pmstore.torch.attach(store, optimizer=first)
    with pmstore.open(tmp_path / "other.pm", size="8MiB") as beside:
        for other in (second, torch.optim.AdamW([w])):
            with pytest.raises(
                AttachError, match="is attached already, with another model or optimizer, as 'run'"
            ):
                pmstore.torch.attach(beside, optimizer=other)
        assert list(beside) == []
    assert (w == 1).all()


def test_gradients_of_another_form(store: pmstore.Store) -> None:
    """Expanded, transposed, nan: as torch takes them."""
    w = nn.Parameter(torch.ones(200, 100))
    optimizer = optim.SGD([w], lr=1)
    run = pmstore.torch.attach(store, optimizer=optimizer)
    with run.next_step():
        w.grad = torch.tensor(0.5).expand(200, 100)
        optimizer.step()
    run.commit()
    assert (w == 0.5).all()
    with run.next_step():
        w.grad = torch.arange(20_000.0).reshape(100, 200).t()
        optimizer.step()
    run.rollback()
    assert (w == 0.5).all()
    with run.next_step():
        w.grad = torch.full_like(w, np.nan)
        optimizer.step()
    assert w.isnan().all()
    run.rollback()
    assert (w == 0.5).all()


def test_a_step_that_cannot_be_taken_loses_nothing(path: Path) -> None:
    """A sparse gradient among others, and a closed store: an error, and everything as it was."""
    store = pmstore.open(path)
    embedding, linear = nn.Embedding(5000, 2, sparse=True), nn.Linear(2, 1)
    model = nn.Sequential(embedding, linear)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
    with run.next_step():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    run.commit()
    kept = {name: one.clone() for name, one in model.state_dict().items()}

    def unchanged() -> bool:
        return all(torch.equal(one, kept[name]) for name, one in model.state_dict().items())

    with run.next_step():
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(RuntimeError, match="dense gradients only"):
            optimizer.step()
        assert unchanged()
        assert all(state["step"] == 1 for state in optimizer.state.values())
        with pytest.raises(pmstore.TransactionError, match="half an update"):
            run.commit()
        run.rollback()
    run.commit()
    assert unchanged()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    store.close()
    with pytest.raises(pmstore.ClosedStoreError):
        optimizer.step()
    assert unchanged()


def test_state_without_a_place_is_refused(store: pmstore.Store) -> None:
    """What the slots have no room for is never dropped, nor left out of the arithmetic, in
    silence."""
    w = nn.Parameter(torch.ones(200, 100))
    optimizer = optim.SGD([w], lr=1)
    optimizer.state[w]["mine"] = torch.ones(3)
    with pytest.raises(AttachError, match="holds a tensor under 'mine'"):
        pmstore.torch.attach(store, optimizer=optimizer)
    assert list(store) == []
    optimizer.state.clear()
    run = pmstore.torch.attach(store, optimizer=optimizer)

    def steps() -> None:
        with run.next_step():
            w.grad = torch.ones_like(w)
            optimizer.step()
        run.commit()

    steps()
    for action in (optimizer.step, run.commit):
        with run.next_step():
            optimizer.state[w]["mine"] = torch.ones(3)
            with pytest.raises(AttachError, match="holds a tensor under 'mine'"):
                action()
            assert (w == 0).all()
            run.rollback()  # there was none at the last commit
        assert "mine" not in optimizer.state[w]
    momentum = torch.optim.SGD([nn.Parameter(torch.ones(200, 100))], lr=1, momentum=0.5)
    momentum.param_groups[0]["params"][0].grad = torch.ones(200, 100)
    momentum.step()
    for action in (optimizer.step, run.commit):
        with pytest.raises(AttachError, match="attached without momentum_buffer"), run.next_step():
            optimizer.load_state_dict(momentum.state_dict())
            w.grad = torch.ones_like(w)
            action()
        assert optimizer.param_groups[0]["momentum"] == 0
    steps()
    assert (w == -1).all()


def test_momentum_that_is_switched_off_is_refused(store: pmstore.Store) -> None:
    w = nn.Parameter(torch.ones(200, 100))
    optimizer = optim.SGD([w], lr=1, momentum=0.5)
    run = pmstore.torch.attach(store, optimizer=optimizer)
    with run.next_step():
        w.grad = torch.ones_like(w)
        optimizer.step()
    run.commit()
    for action in (optimizer.step, run.commit):
        with pytest.raises(AttachError, match="attached with momentum_buffer"), run.next_step():
            w.grad = torch.ones_like(w)
            optimizer.param_groups[0]["momentum"] = 0
            action()
        assert optimizer.param_groups[0]["momentum"] == 0.5
    with run.next_step():
        w.grad = torch.ones_like(w)
        optimizer.step()
    run.commit()
    assert (w == -1.5).all()


@pytest.mark.parametrize("attached", [False, True])
def test_options_are_refused_wherever_they_come_from(store: pmstore.Store, attached: bool) -> None:
    w = nn.Parameter(torch.ones(200, 100))
    optimizer = optim.AdamW([w], lr=0.1)
    run = pmstore.torch.attach(store, optimizer=optimizer) if attached else None
    step: Any = nullcontext if run is None else run.next_step
    theirs = nn.Parameter(torch.ones(200, 100))
    other = torch.optim.AdamW([theirs], amsgrad=True)
    theirs.grad = torch.ones(200, 100)
    other.step()

    def refused(match: str, held: dict[str, Any], **values: Any) -> None:
        with pytest.raises(ValueError, match=match), step():
            w.grad = torch.ones(200, 100)
            held.update(values)
            try:
                optimizer.step()
            finally:
                assert (w == 1).all()

    with pytest.raises(ValueError, match="has no amsgrad"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1
    refused("has no amsgrad", optimizer.param_groups[0], amsgrad=True)
    with pytest.raises(ValueError, match="has no amsgrad"):
        optim.AdamW([{"params": [w], "amsgrad": True}])
    # what torch's Adam would take over
    with pytest.raises(ValueError, match="has no decoupled_weight_decay"):
        optim.Adam([nn.Parameter(torch.ones(3))]).load_state_dict(
            torch.optim.AdamW([nn.Parameter(torch.ones(3))]).state_dict()
        )
    optimizer.param_groups[0]["amsgrad"] = False
    adam = torch.optim.Adam([nn.Parameter(torch.ones(200, 100))], weight_decay=0.1)
    if "decoupled_weight_decay" in adam.param_groups[0]:  # torch >= 2.7 says whose it is
        with pytest.raises(ValueError, match="is an Adam's"):
            optimizer.load_state_dict(adam.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.load_state_dict(
            torch.optim.AdamW([nn.Parameter(torch.ones(200, 100))], lr=0.1).state_dict()
        )
        refused("is an Adam's", optimizer.param_groups[0], decoupled_weight_decay=False)
        optimizer.param_groups[0]["decoupled_weight_decay"] = True
    shape = r"exp_avg has shape \(100,\), its parameter \(200, 100\)"
    refused(shape, optimizer.state[w], exp_avg=torch.ones(100))  # that would be broadcast
    if run is not None:
        with run.next_step():
            w.grad = torch.ones(200, 100)
            optimizer.step()
        run.commit()
        assert (w < 1).all()
