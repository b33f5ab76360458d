"""What attach moves into the store, what it refuses, and what commits notice."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training import make_job, mlp, train

import pmstore
import pmstore.torch
from pmstore.scheduler import CommitScheduler, EveryN
from pmstore.torch import AttachError, MismatchError, Resume, TornStepError, attach
from pmstore.torch._state.heap import check_movable
from pmstore.torch._state.mirrored import MirroredModel


def in_heap(store: pmstore.Store, name: str, tensor: torch.Tensor) -> bool:
    stored = store[name]
    return (
        stored.data_ptr() == tensor.data_ptr()
        and stored.shape == tensor.shape
        and torch.equal(stored, tensor)
    )


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()


def test_parameters_and_buffers_keep_identity_value_and_gradient(store: pmstore.Store) -> None:
    model = mlp()
    model(torch.randn(4, 8)).sum().backward()
    model.register_buffer("hidden", torch.arange(3), persistent=False)
    before = {name: (tensor, tensor.detach().clone()) for name, tensor in model.named_parameters()}
    gradients = {name: tensor.grad for name, tensor in model.named_parameters()}
    run = attach(store, model=model)
    assert (run.step, run.resumed, run.attached) == (0, False, True)
    assert repr(run) == "<pmstore.torch.Run 'run', step 0>"
    for name, tensor in model.named_parameters():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])
        assert tensor.grad is gradients[name]
        assert in_heap(store, f"run/model/{name}", tensor)
    for name, tensor in model.named_buffers():
        assert in_heap(store, f"run/model/{name}", tensor)


def test_lazily_made_optimizer_state_lands_in_the_heap(store: pmstore.Store) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    run = attach(store, model=model, optimizer=optimizer)
    assert list(store["run/optimizer"]) == ["rest", "groups", "layout"]
    with run.next_step():
        one_step(model, optimizer)
    for index, parameter in enumerate(model.parameters()):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert in_heap(
                store, f"run/optimizer/state/{index}.{key}", optimizer.state[parameter][key]
            )
    run.commit()
    held = optimizer.state[model[0].weight]["exp_avg"]
    with run.next_step():
        one_step(model, optimizer)
    run.commit()
    assert optimizer.state[model[0].weight]["exp_avg"] is held
    assert float(store["run/optimizer/state/0.step"]) == 2


def test_the_optimizer_declares_what_it_writes(store: pmstore.Store) -> None:
    """No page fault in a step: everything was captured before."""
    model = nn.Linear(600, 600)
    optimizer = torch.optim.AdamW(model.parameters())
    run = attach(store, model=model, optimizer=optimizer)
    for _ in run.steps(3):
        optimizer.zero_grad()
        model(torch.randn(2, 600)).sum().backward()
        before = store.stats().faults
        optimizer.step()
        after = store.stats().faults
        run.commit()
    assert after == before


def test_state_made_before_attach_is_moved(store: pmstore.Store) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, optimizer)
    before = optimizer.state[model[0].weight]["exp_avg"].clone()
    attach(store, model=model, optimizer=optimizer)
    assert in_heap(
        store, "run/optimizer/state/0.exp_avg", optimizer.state[model[0].weight]["exp_avg"]
    )
    assert torch.equal(before, optimizer.state[model[0].weight]["exp_avg"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        whole = torch.zeros(6)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[2:4])
        self.register_buffer("apart_a", torch.zeros(8)[:3])

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.embed(index))
        return result


def test_tied_parameters_and_overlapping_buffers_stay_tied(path: Path) -> None:
    with pmstore.open(path) as store:
        model = Tied()
        run = attach(store, model=model)
        assert model.out.weight is model.embed.weight
        assert "out.weight" not in store["run/model"]
        with run.next_step(), torch.no_grad():
            model.embed.weight.fill_(3)
            model.part.fill_(7)
        assert model.whole.tolist() == [0, 0, 7, 7, 0, 0]
        run.commit()
    with pmstore.open(path) as store:
        model = Tied()
        run = attach(store, model=model)
        assert run.step == 1
        assert model.out.weight is model.embed.weight
        assert bool((model.out.weight == 3).all())
        assert model.whole.tolist() == [0, 0, 7, 7, 0, 0]
        model.part.fill_(8)
        assert model.whole.tolist() == [0, 0, 8, 8, 0, 0]
        run.detach()
        untied = Tied()
        untied.out.weight = nn.Parameter(untied.embed.weight.detach().clone())
        with pytest.raises(
            MismatchError,
            match=r"out\.weight: stored tied to embed\.weight, given as a tensor of its own",
        ):
            attach(store, model=untied)


def test_channels_last_and_slashes_and_empty_tensors(path: Path) -> None:
    def model() -> nn.Module:
        made = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        made.add_module("a/b%", nn.Linear(2, 2))
        made.register_buffer("nothing", torch.empty(0, 3))
        made.register_buffer("scalar", torch.tensor(2.5, dtype=torch.bfloat16))
        made.register_buffer("spread", torch.ones(1, 3).expand(4, 3))
        return made

    with pmstore.open(path) as store:
        first = model()
        attach(store, model=first)
        kept = {name: tensor.detach().clone() for name, tensor in first.state_dict().items()}
    with pmstore.open(path) as store:
        second = model()
        attach(store, model=second)
        assert second.weight.is_contiguous(memory_format=torch.channels_last)
        for name, tensor in second.state_dict().items():
            assert torch.equal(tensor, kept[name])
        assert in_heap(store, "run/model/a%2Fb%25.weight", getattr(second, "a/b%").weight)


def test_a_memory_format_is_kept_where_only_a_stride_of_one_tells_it(path: Path) -> None:
    """Of a convolution over one channel: torch computes in another order by that stride."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)

    x = torch.rand(2, 1, 8, 8)
    plain = model()(x)
    for _ in range(2):
        with pmstore.open(path) as store:
            held = model()
            attach(store, model=held)
            assert held.weight.stride() == model().weight.stride() == (9, 1, 3, 1)
            with torch.no_grad():
                assert held(x).stride() == plain.stride()
                assert torch.equal(held(x), plain)


def test_parameters_outside_the_model(path: Path) -> None:
    for number in range(2):
        with pmstore.open(path) as store:
            model, alone = nn.Linear(2, 2), torch.zeros(3, requires_grad=True)
            optimizer = torch.optim.SGD(
                [{"params": model.parameters()}, {"params": [alone], "lr": 0.5}], lr=0.1
            )
            run = attach(store, model=model, optimizer=optimizer)
            assert in_heap(store, "run/optimizer/parameters/2", alone.detach())
            assert alone.tolist() == [-0.5 * number] * 3
            with run.next_step():
                optimizer.zero_grad()
                (alone.sum() + 0 * model.weight.sum()).backward()
                optimizer.step()


def replace(
    model: nn.Module, other: nn.Module, how: str, values: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gives the model memory of its own, in a way that programs have. Returns the values that it
    then has, by name."""
    if how == "data":
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            ours.data = theirs.data.clone()
        values = {name: values[name] for name, _ in model.named_parameters()}
    elif how == "assign":
        model.load_state_dict(other.state_dict(), assign=True)
    elif how == "setattr":
        model[0].weight = nn.Parameter(values["0.weight"].clone())
        values = {"0.weight": values["0.weight"]}
    elif how == "swap":
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(values["0.weight"].clone()))
        values = {"0.weight": values["0.weight"]}
    else:
        model[0] = other[0]
        values = {"0.weight": values["0.weight"]}
    return values


@pytest.mark.parametrize("how", ["data", "assign", "setattr", "module", "swap"])
def test_a_replaced_parameter_is_taken_back_in(store: pmstore.Store, how: str) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    run = attach(store, model=model, optimizer=optimizer)
    with run.next_step():
        one_step(model, optimizer)
    run.commit()
    other = mlp()
    wanted = {name: tensor.detach().clone() for name, tensor in other.state_dict().items()}
    with run.next_step():
        wanted = replace(model, other, how, wanted)
    run.commit()
    tensors = model.state_dict()
    for name, value in wanted.items():
        assert in_heap(store, f"run/model/{name}", tensors[name])
        assert torch.equal(tensors[name], value)
    # And the optimizer goes on with the parameters that the model has now.
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with run.next_step():
        one_step(model, optimizer)
    run.commit()
    for name, tensor in model.named_parameters():
        assert not torch.equal(tensor, before[name]), name
        assert in_heap(store, f"run/model/{name}", tensor)
    assert all(float(optimizer.state[parameter]["step"]) == 2 for parameter in model.parameters())


@pytest.mark.parametrize("how", ["shape", "dtype", "extra", "gone", "untied"])
def test_a_replacement_that_does_not_fit_is_an_error(store: pmstore.Store, how: str) -> None:
    model: Any = Tied() if how == "untied" else mlp()
    run = attach(store, model=model)
    first = "embed.weight" if how == "untied" else "0.weight"
    before = store[f"run/model/{first}"].clone()
    with run.next_step():
        if how == "shape":
            model[0].weight.data = torch.zeros(5, 8)
        elif how == "dtype":
            model[0].weight.data = model[0].weight.data.double()
        elif how == "extra":
            model.register_buffer("more", torch.zeros(2))
        elif how == "gone":
            del model[4]
        else:
            model.out.weight = nn.Parameter(torch.zeros(5, 4))
    with pytest.raises(MismatchError):
        run.commit()
    assert run.committed == 0
    assert torch.equal(store[f"run/model/{first}"], before)
    with pytest.raises(MismatchError):
        run.detach()  # which would lose the step
    run.rollback()
    run.detach()


def test_a_reassigned_buffer_is_taken_in(store: pmstore.Store) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

        def forward(self) -> None:
            self.seen = self.seen + 1

    model = Counting()
    run = attach(store, model=model)
    for number in run.steps(3):
        model()
        run.commit()
        assert in_heap(store, "run/model/seen", model.seen)
        assert store["run/model/seen"].tolist() == [number + 1, number + 1]


def test_loading_an_optimizer_state_after_attach(store: pmstore.Store) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    run = attach(store, model=model, optimizer=optimizer)
    with run.next_step():
        one_step(model, optimizer)
    run.commit()
    saved = {
        "state": {
            index: {key: value.clone() + 1 for key, value in state.items()}
            for index, state in optimizer.state_dict()["state"].items()
        },
        "param_groups": [{**optimizer.state_dict()["param_groups"][0], "lr": 0.25}],
    }
    with run.next_step():
        optimizer.load_state_dict(saved)
    run.commit()
    assert in_heap(
        store, "run/optimizer/state/0.exp_avg", optimizer.state[model[0].weight]["exp_avg"]
    )
    assert torch.equal(store["run/optimizer/state/0.exp_avg"], saved["state"][0]["exp_avg"])
    assert store["run/optimizer/groups/value"][0]["lr"] == 0.25


def test_state_tensors_that_change_places(store: pmstore.Store) -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = optimizer.state[model.weight]
    state["previous"], state["current"] = torch.full((2, 2), 1.0), torch.full((2, 2), 2.0)
    run = attach(store, model=model, optimizer=optimizer)
    with run.next_step():
        state["previous"], state["current"] = state["current"], state["previous"]
    run.commit()
    assert (float(state["previous"][0, 0]), float(state["current"][0, 0])) == (2, 1)
    assert in_heap(store, "run/optimizer/state/0.previous", state["previous"])
    assert in_heap(store, "run/optimizer/state/0.current", state["current"])
    with run.next_step():
        del state["previous"]
        state["current"] = torch.zeros(7)
    run.commit()
    assert "0.previous" not in store["run/optimizer/state"]
    assert in_heap(store, "run/optimizer/state/0.current", state["current"])


def test_a_parameter_group_added_later(path: Path) -> None:
    def program() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, torch.optim.AdamW(model[0].parameters())

    with pmstore.open(path) as store:
        model, optimizer = program()
        run = attach(store, model=model, optimizer=optimizer)
        with run.next_step():
            one_step(model, optimizer)
        run.commit()
        optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.5})
        run.rollback()
        assert len(optimizer.param_groups) == 1
        with run.next_step():
            optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.5})
            one_step(model, optimizer)
    with pmstore.open(path) as store:
        model, optimizer = program()
        run = attach(store, model=model, optimizer=optimizer)
        assert [*map(id, optimizer.param_groups[1]["params"])] == [*map(id, model[4].parameters())]
        assert optimizer.param_groups[1]["lr"] == 0.5
        assert float(optimizer.state[model[4].weight]["step"]) == 1
        with run.next_step():
            one_step(model, optimizer)
        run.commit()
    for added in (True, False):  # the program gives it by itself, and no longer
        with pmstore.open(path) as store:
            model, optimizer = program()
            if added:
                optimizer.add_param_group({"params": list(model[4].parameters())})
                attach(store, model=model, optimizer=optimizer)
                assert float(optimizer.state[model[4].weight]["step"]) == 2
                continue
            with pytest.raises(MismatchError, match="2 parameter groups are stored, 1 given"):
                attach(store, model=model, optimizer=optimizer)
            attach(store, model=model, optimizer=optimizer, resume=Resume(optimizer="settings"))
            assert len(optimizer.param_groups) == 1


def test_a_group_of_layers_that_are_trained_from_an_epoch_on(path: Path) -> None:
    """Killed anywhere it ends as a run that was not."""

    def life(path: Path, stop: int | None) -> tuple[int, list[torch.Tensor]] | None:
        torch.manual_seed(3)
        model = mlp()
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        optimizer = torch.optim.AdamW(model[4].parameters(), lr=1e-2)
        loader = [(torch.full((2, 8), float(number)),) for number in range(3)]
        with pmstore.open(path) as store:
            run = attach(store, model=model, optimizer=optimizer, loader=loader)
            for epoch in run.epochs(4):
                if epoch == 2 and len(optimizer.param_groups) == 1:
                    model[0].requires_grad_(True)
                    optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
                for (batch,) in epoch:
                    optimizer.zero_grad()
                    model(batch).square().mean().backward()
                    optimizer.step()
                    if run.step + 1 == stop:
                        run.end_step()
                        return None
            return run.step, [one.detach().clone() for one in model.parameters()]

    whole = life(path.with_name("whole.pm"), None)
    assert whole is not None
    assert whole[0] == 12
    for stop in range(1, 13):
        life(path, stop)
    pieces = life(path, None)
    assert pieces is not None
    assert pieces[0] == 12
    assert all(map(torch.equal, pieces[1], whole[1]))


def test_a_model_that_is_not_the_stored_one(path: Path) -> None:
    with pmstore.open(path) as store:
        attach(store, model=nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3)))
    with pmstore.open(path) as store:
        other = nn.Sequential(
            nn.Linear(8, 20), nn.Linear(20, 3, bias=False), nn.BatchNorm1d(3)
        ).double()
        before = {
            name: (tensor.data_ptr(), tensor.clone()) for name, tensor in other.state_dict().items()
        }
        with pytest.raises(MismatchError) as caught:
            attach(store, model=other)
        assert caught.value.missing == ("parameter 1.bias (3,) float32",)
        assert "parameter 2.weight (3,) float64" in caught.value.unexpected
        assert (
            "0.weight: stored parameter (16, 8) float32, given parameter (20, 8) float64"
            in caught.value.mismatched
        )
        for part in ("stored, but not given", "given, but not stored", "different"):
            assert part in str(caught.value)
        for name, tensor in other.state_dict().items():
            assert tensor.data_ptr() == before[name][0]
            assert torch.equal(tensor, before[name][1])


def test_other_pieces_than_stored(path: Path) -> None:
    with pmstore.open(path) as store:
        train(store, make_job(), 1, 1)
    with pmstore.open(path) as store:
        job = make_job()
        with pytest.raises(MismatchError) as caught:
            attach(
                store,
                model=job.model,
                lr_scheduler=torch.optim.lr_scheduler.StepLR(job.optimizer, 1),
            )
        assert caught.value.missing == ("optimizer", "loader")
        assert caught.value.unexpected == ("lr_scheduler",)
        with pytest.raises(MismatchError, match="stored 'AdamW', given 'SGD'"):
            attach(
                store,
                model=job.model,
                optimizer=torch.optim.SGD(job.model.parameters()),
                loader=job.loader,
            )
        shuffled = list(job.model.parameters())[::-1]
        with pytest.raises(MismatchError, match="shapes"):
            attach(
                store,
                model=job.model,
                optimizer=torch.optim.AdamW(shuffled, lr=1e-2),
                loader=job.loader,
            )


def test_what_cannot_be_attached(store: pmstore.Store) -> None:
    with pytest.raises(AttachError, match="meta device and has no data"):
        attach(store, model=nn.Linear(2, 2, device="meta"))
    with pytest.raises(AttachError, match="lazy module"):
        attach(store, model=nn.LazyLinear(2))
    sparse = nn.Module()
    sparse.register_buffer("sparse", torch.zeros(3, 3).to_sparse())
    with pytest.raises(AttachError, match="only dense tensors"):
        attach(store, model=sparse)
    with pytest.raises(AttachError, match="an iterator, which can be gone through once"):
        attach(store, loader=iter([1, 2]))
    with pytest.raises(AttachError, match="cannot be iterated"):
        attach(store, loader=5)  # type: ignore[arg-type]
    with pytest.raises(AttachError, match="name of the run's group"):
        attach(store, name="")
    with store.transaction(), pytest.raises(pmstore.TransactionError, match="call it outside"):
        attach(store, model=nn.Linear(2, 2))
    assert list(store) == []


def test_an_argument_that_attach_does_not_have(store: pmstore.Store) -> None:
    with pytest.raises(
        TypeError, match=r"'scheduler'\. Did you mean 'lr_scheduler'\? It has model"
    ):
        pmstore.torch.attach(store, scheduler=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"no argument 'x'\. It has model, optimizer"):
        pmstore.torch.attach(store, x=None)  # type: ignore[arg-type]


def test_another_device_is_refused(store: pmstore.Store) -> None:
    """Every device that is not the CPU goes the same way; the meta device is the one that is always
    there."""
    model = nn.Linear(2, 2)
    run = attach(store, model=model)
    with run.next_step():
        model.weight = nn.Parameter(torch.zeros(2, 2, device="meta"))
    with pytest.raises(AttachError, match="meta"):
        run.commit()
    run.rollback()
    run.detach()


def test_devices_that_are_refused() -> None:
    """Without such a device: a tensor's stand-in with what is asked of it."""
    tensor = SimpleNamespace(
        device=torch.device("cuda:0"), layout=torch.strided, is_quantized=False, is_nested=False
    )
    with pytest.raises(
        AttachError,
        match=(
            r"weight is on cuda:0: attach takes tensors on cpu \(those of a model on cuda are "
            r"mirror"
        ),
    ):
        check_movable("parameter weight", tensor)  # type: ignore[arg-type]
    check_movable("parameter weight", tensor, MirroredModel.devices)  # type: ignore[arg-type]
    tensor.device = torch.device("mps")
    with pytest.raises(
        AttachError,
        match=r"weight is on mps: attach takes tensors on cpu and cuda\. Move it with \.cpu",
    ):
        check_movable("parameter weight", tensor, MirroredModel.devices)  # type: ignore[arg-type]


def test_attaching_twice(store: pmstore.Store, tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    run = attach(store, model=model, optimizer=optimizer)
    with pytest.raises(AttachError, match="the run 'run' of this store is attached already"):
        attach(store, model=mlp())
    with pmstore.open(tmp_path / "other.pm", size="8MiB") as beside:
        with pytest.raises(AttachError, match="the model is attached already, as 'run'"):
            attach(beside, model=model, name="other")
        with pytest.raises(AttachError, match="the optimizer is attached already"):
            attach(beside, optimizer=optimizer, name="other")
    with run.next_step():
        one_step(model, optimizer)
    run.commit()
    run.detach()
    run = attach(store, model=model, optimizer=optimizer)
    assert (run.step, run.resumed) == (1, True)


def test_a_failed_attach_leaves_nothing(store: pmstore.Store) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"function": print}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    model = mlp()
    pointers = [tensor.data_ptr() for tensor in model.state_dict().values()]
    store["mine"] = 1
    with pytest.raises(TypeError, match=r"cannot store the state at \['function'\]"):
        attach(store, model=model, lr_scheduler=Odd())
    assert list(store) == ["mine"]
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == pointers
    attach(store, model=model)


def test_training_goes_on_after_the_store_is_closed(path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with pmstore.open(path) as store:
        run = attach(store, model=model, optimizer=optimizer)
        with run.next_step():
            one_step(model, optimizer)
        run.commit()
    one_step(model, optimizer)
    assert (run.step, run.attached) == (1, False)
    assert repr(run) == "<pmstore.torch.Run 'run', detached>"
    with pytest.raises(pmstore.ClosedStoreError):
        run.commit()
    with pmstore.open(path) as store:  # the store has the state of its last commit
        again = attach(store, model=model, optimizer=optimizer)
        assert again.step == 1
        assert float(optimizer.state[model[0].weight]["step"]) == 1


def test_a_detached_run(store: pmstore.Store) -> None:
    run = attach(store, model=mlp(), loader=[1, 2])
    run.detach()
    for call in (run.commit, run.rollback, run.next_step, run.batches, partial(run.epochs, 1)):
        with pytest.raises(AttachError, match="was detached"):
            call()


def test_a_policy_decides_and_steps_count(path: Path) -> None:
    asked = []

    class Policy(EveryN):
        def decide(self, scheduler: CommitScheduler) -> int:
            asked.append((scheduler.steps, float(scheduler.loss)))
            return super().decide(scheduler)

    with pmstore.open(path) as store:
        run = attach(store, model=mlp(), policy=Policy(3))
        epoch = store.epoch
        steps = []
        for number in run.steps(7):
            steps.append((run.step, run.committed))
            run.log(loss=torch.tensor(float(number)))
        assert steps == list(zip(range(7), [0, 0, 0, 3, 3, 3, 6], strict=True))
        assert store.epoch == epoch + 4  # the beginning and the end of the loop are two
        assert asked[:2] == [(1, 0.0), (2, 1.0)]
        assert run.stats().steps == 7
        assert run.stats().commits == 4
    with pmstore.open(path) as store:
        assert attach(store, model=mlp(), policy=Policy(3)).step == 7


def test_the_run_alone_commits_an_open_step(path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with pmstore.open(path) as store:
        run = attach(store, model=model, optimizer=optimizer)
        store.commit()
        for written in (False, True):
            with run.next_step():
                if written:
                    one_step(model, optimizer)
                for commit in (store.commit, store.transaction().__enter__):
                    with pytest.raises(pmstore.TransactionError, match="only the run commits it"):
                        commit()
        run.commit()
        store.commit()
        with (
            pytest.raises(pmstore.TransactionError, match=r"outside of a step.*run\.next_step"),
            store.transaction(),
        ):
            one_step(model, optimizer)
        run.rollback()
        with run.next_step():
            one_step(model, optimizer)
        run.rollback()
        store.commit()
    with pmstore.open(path) as store:
        model = mlp()
        assert attach(store, model=model, optimizer=torch.optim.AdamW(model.parameters())).step == 2


def test_a_step_torn_by_detaching(path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with pmstore.open(path) as store:
        run = attach(store, model=model, optimizer=optimizer)
        with run.next_step():
            one_step(model, optimizer)
            run.detach()
    with (
        pmstore.open(path) as store,
        pytest.raises(TornStepError, match="in the middle of a training step"),
    ):
        attach(store, model=mlp(), optimizer=torch.optim.AdamW(model.parameters()))


def test_the_store_rolled_back_behind_the_run(store: pmstore.Store) -> None:
    run = attach(store, model=mlp())
    store["pending"] = 1
    store.rollback()
    with pytest.raises(pmstore.TransactionError, match=r"call run\.rollback\(\) now"):
        run.commit()
    run.rollback()
    with run.next_step():
        pass
    run.commit()
    assert run.step == 1


def test_run_commit_commits_what_else_is_pending(path: Path) -> None:
    with pmstore.open(path) as store:
        run = attach(store, model=mlp())
        with run.next_step():
            store["mine"] = np.arange(3)
        run.commit()
        store.rollback()
        assert store["mine"].tolist() == [0, 1, 2]
        run.rollback()


def test_a_store_open_for_reading(path: Path) -> None:
    with pmstore.open(path) as store:
        attach(store, model=mlp())
    with pmstore.open(path, mode="r") as store:
        with pytest.raises(AttachError, match="open for reading, and a run writes"):
            attach(store, model=mlp())
        model = mlp()
        model.load_state_dict({name: tensor.clone() for name, tensor in store["run/model"].items()})


def test_formats_of_runs(path: Path) -> None:
    """A run of the first format is read, and made the newest, which versions that know the first
    alone refuse; one of a later version is refused."""
    with pmstore.open(path) as store:
        make_job().attach(store)
        about = store["run/about"]
        assert about["format"] == 2
        store["run/about"] = {**about, "format": 1}
    with pmstore.open(path) as store:
        make_job().attach(store)
        assert store["run/about"]["format"] == 2
    with pmstore.open(path) as store:  # it was committed
        assert store["run/about"]["format"] == 2
        store["run/about"] = {**about, "format": 4}
    with pmstore.open(path) as store:
        with pytest.raises(
            AttachError, match="has format 4, this version of pmstore reads 1, 2 and 3"
        ):
            make_job().attach(store)
        assert store["run/about"]["format"] == 4
