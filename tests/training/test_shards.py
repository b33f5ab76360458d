"""Models and optimizers whose tensors are DTensors: each rank's part lies in its store. Kills at
random moments: the jobs `fully-sharded` of tests/jobs."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import launch  # type: ignore[import-not-found, unused-ignore]
from safetensors import safe_open
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pmstore
import pmstore.dcp
import pmstore.torch
import pmstore.torch.optim
from pmstore.errors import PmstoreError
from pmstore.exchange import export_run, import_run
from pmstore.torch import AttachError, Run
from pmstore.torch._state.fsdp import reshard
from pmstore.torch._state.layout import decode_place
from pmstore.torch._state.optimizer_state import read_layout, state_block
from pmstore.torch._state.sharded import chunk, local

STEPS = 6


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, list[Any]]]:
    """By two ranks, which run all these programs: to start them takes longer than they do."""
    with tempfile.TemporaryDirectory(
        prefix=f"pmstore-test-{os.getpid()}-", dir="/dev/shm"
    ) as folder:
        yield launch(PROGRAMS, Path(folder), 2)


# ---- what the ranks train


def net(wide: int = 7) -> nn.Module:
    """Uneven parts, a part of no rows (over two ranks), and an even one."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, wide), nn.Tanh(), nn.Linear(wide, 1), nn.Linear(1, 4))


def fsdp(model: nn.Module, **more: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model:  # type: ignore[attr-defined]
        if list(layer.parameters()):
            fully_shard(layer, **more)
    return fully_shard(model, **more)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "for-loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def batch(number: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * number + rank))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, **data: Any) -> Any:
    optimizer.zero_grad()
    loss = model(batch(number, **data)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Of this rank's parts."""
    reshard([model])  # else some may be whole
    tensors = [*model.parameters(), *model.buffers()]
    state = [
        value
        for one in model.parameters()
        for value in optimizer.state.get(one, {}).values()
        if isinstance(value, torch.Tensor)
    ]
    return [local(one).detach().tolist() for one in (*tensors, *state)]


def opened(folder: Path, name: str = "") -> pmstore.Store:
    return pmstore.open(folder / f"run{name}{dist.get_rank()}.pm", size="4MB")


def attach(
    store: pmstore.Store, model: nn.Module, optimizer: Any, group: Any = "world", **more: Any
) -> Run:
    job = pmstore.torch.Job(group, timeout=60.0)
    return pmstore.torch.attach(store, model=model, optimizer=optimizer, job=job, **more)


def all_in(store: pmstore.Store, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether all that the rank trains lies in the store's memory."""
    reshard([model])
    memory = [local(one) for one in _tensors(store["run"])]
    spans = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in memory]
    parts = [local(one) for one in model.parameters()]
    for state in optimizer.state.values():
        parts += [local(one) for one in state.values() if isinstance(one, torch.Tensor)]
    return all(
        not one.numel() or any(first <= one.data_ptr() < after for first, after in spans)
        for one in parts
    )


def _tensors(group: Any) -> Iterator[torch.Tensor]:
    for item in group.values():
        if isinstance(item, torch.Tensor):
            yield item
        elif hasattr(item, "keys") and not isinstance(item, dict):
            yield from _tensors(item)


# ---- FSDP2


def _resumed(folder: Path, rank: int, results: dict[str, Any]) -> None:
    """Every optimizer, resumed after three of six steps, has the bits of a run without a store."""
    for kind, make in OPTIMIZERS.items():
        model = fsdp(net())
        optimizer = make(model.parameters())
        for number in range(STEPS):
            update(model, optimizer, number)
        whole = bits(model, optimizer)
        for until in (STEPS // 2, STEPS):
            model = fsdp(net())
            optimizer = make(model.parameters())
            with opened(folder, kind) as store:
                run = attach(store, model, optimizer)
                assert run.resumed == (until == STEPS)
                for number in run.steps(until):
                    update(model, optimizer, number)
                assert all_in(store, model, optimizer)
                ended = bits(model, optimizer)
        results[kind] = ended == whole


def test_fully_sharded_models_resume(found: dict[str, list[Any]]) -> None:
    assert found["_resumed"] == [dict.fromkeys(OPTIMIZERS, True)] * 2


def _trained(folder: Path, rank: int, results: dict[str, Any]) -> None:
    """Each way to shard and to train, resumed after each of its steps, has the bits of a run
    without a store."""
    for name, way in {**WAYS, "mirrored": whole}.items():
        mirror = {"mirror": True} if name == "mirrored" else {}
        model, optimizer, step = way()
        for number in range(STEPS):
            step(number)
        wanted = bits(model, optimizer)
        for until in (1, 2, STEPS - 1, STEPS):
            model, optimizer, step = way()
            with opened(folder, name) as store:
                run = attach(store, model, optimizer, **mirror)
                for number in run.steps(until):
                    step(number)
                if not mirror:
                    assert all_in(store, model, optimizer), name
                found = bits(model, optimizer)
        results[name] = found == wanted


def test_all_ways_to_shard_resume(found: dict[str, list[Any]]) -> None:
    assert found["_trained"] == [dict.fromkeys([*WAYS, "mirrored"], True)] * 2


Way = tuple[nn.Module, torch.optim.Optimizer, Callable[[int], Any]]


def whole() -> Way:
    """FSDP2, nothing else."""
    model = fsdp(net())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return model, optimizer, lambda number: update(model, optimizer, number)


def mesh(*shape: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])


class Distributed(nn.Module):
    """Parameters and a buffer by distribute_tensor, uneven, and over a mesh of two dimensions."""

    def __init__(self) -> None:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        super().__init__()
        torch.manual_seed(2)
        one, two = mesh(2), mesh(2, 1)
        placed = distribute_tensor
        self.rows = nn.Parameter(placed(torch.randn(5, 3), one, [Shard(0)]))
        self.columns = nn.Parameter(placed(torch.randn(3, 3), one, [Shard(1)]))
        self.all = nn.Parameter(placed(torch.randn(3), one, [Replicate()]))
        self.both = nn.Parameter(placed(torch.randn(4, 4), two, [Shard(1), Shard(0)]))
        self.register_buffer("mean", placed(torch.zeros(3), one, [Shard(0)]))
        self.mean: torch.Tensor

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.add_(
                self.all.detach().redistribute(self.mean.device_mesh, self.mean.placements)
            )  # type: ignore[attr-defined]
        product = (self.rows @ self.columns + self.all).full_tensor()  # type: ignore[attr-defined]
        return data @ product + self.both.full_tensor().sum()  # type: ignore[attr-defined, no-any-return]


def distributed() -> Way:
    model = Distributed()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return model, optimizer, lambda number: update(model, optimizer, number)


def tensor_parallel() -> Way:
    """parallelize_module, and tensors that are whole beside it."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.BatchNorm1d(4))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh(2), plan)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return model, optimizer, lambda number: update(model, optimizer, number, rank=0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.last = nn.Linear(5, 5)
        self.last.weight = self.first.weight

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(data).tanh())  # type: ignore[no-any-return]


def tied() -> Way:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(4)
    model = fully_shard(Tied())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return model, optimizer, lambda number: update(model, optimizer, number)


def mixed() -> Way:
    """Computed in another dtype; and a layer that is not trained."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    made = net()
    made.get_submodule("0").requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fsdp(made, mp_policy=policy)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return model, optimizer, lambda number: update(model, optimizer, number)


def accumulated() -> Way:
    """Commits in the middle of an accumulation: gradients are state."""
    model = fsdp(net())
    optimizer = OPTIMIZERS["sgd"](model.parameters())

    def step(number: int) -> Any:
        loss = model(batch(number)).square().mean()
        loss.backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def accumulated_on() -> Way:
    """What an optimizer has used is added to: FSDP writes into a gradient's part, and torch counts
    that at the part alone."""
    model = fsdp(net())
    optimizer = OPTIMIZERS["sgd"](model.parameters())

    def step(number: int) -> Any:
        loss = update(model, optimizer, number)
        model(batch(number + 20)).square().mean().backward()
        optimizer.step()
        model(batch(number + 30)).square().mean().backward()
        return loss

    def go_on(number: int) -> Any:
        if number:
            optimizer.step()
        return step(number)

    return model, optimizer, go_on


def accumulated_distributed() -> Way:
    """As before; gradients lie in another way than their parameters."""
    model = Distributed()
    optimizer = OPTIMIZERS["adamw"](model.parameters())

    def step(number: int) -> Any:
        loss = model(batch(number)).square().mean()
        loss.backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def looked_at() -> Way:
    """Evaluated between the steps: FSDP keeps whole parameters of the root then."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(net())
    optimizer = OPTIMIZERS["adamw"](model.parameters())

    def step(number: int) -> Any:
        loss = update(model, optimizer, number)
        model.eval()
        with torch.no_grad():
            model(batch(number))
        model.train()
        return loss

    return model, optimizer, step


def assigned() -> Way:
    """Loaded with assign=True, which puts tensors of their own into the model."""
    model = fsdp(net())
    optimizer = OPTIMIZERS["adamw"](model.parameters())

    def step(number: int) -> Any:
        if number == 1:
            state = {key: one.clone() for key, one in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
            for group in optimizer.param_groups:
                old = group["params"]
                group["params"] = list(model.parameters())
                for before, after in zip(old, group["params"], strict=True):
                    optimizer.state[after] = optimizer.state.pop(before, {})
        return update(model, optimizer, number)

    return model, optimizer, step


WAYS: dict[str, Callable[[], Way]] = {
    one.__name__: one
    for one in (
        *(distributed, tensor_parallel, tied, mixed, looked_at, assigned),
        *(accumulated, accumulated_on, accumulated_distributed),
    )
}
# ---- taken back, kept, read


def _rolled_back(folder: Path, rank: int, results: dict[str, Any]) -> None:
    """Half a step, a whole one, and one after which FSDP kept whole parameters."""
    model, optimizer, step = whole()
    for number in range(STEPS):
        step(number)
    wanted = bits(model, optimizer)
    model, optimizer, step = looked_at()
    with opened(folder) as store:
        run = attach(store, model, optimizer)
        run.rollback()
        for number in range(STEPS):
            with run.next_step():
                model(batch(number + 50)).sum().backward()
                run.rollback()
            with run.next_step():
                step(number + 50)
            run.rollback()
            if number == 3:
                model.load_state_dict(
                    {key: one.clone() for key, one in model.state_dict().items()}, assign=True
                )
                run.rollback()
            with run.next_step():
                step(number)
            run.commit()
            if number == 1:
                run.keep("early")
        results["bits"] = bits(model, optimizer) == wanted
        results["kept"] = [one.step for one in run.kept()]
        assert all_in(store, model, optimizer)


def test_steps_are_taken_back(found: dict[str, list[Any]]) -> None:
    assert found["_rolled_back"] == [{"bits": True, "kept": [2]}] * 2


def _rewound(folder: Path, rank: int, results: dict[str, Any]) -> None:
    """Without a job each rank goes back by itself; all do."""
    model, optimizer, step = whole()
    with opened(folder) as store:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that the ranks are not told to it
            run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
        for number in range(2):
            with run.next_step():
                step(number)
            run.commit()
        run.keep("here")
        wanted = bits(model, optimizer)
        for number in range(2):
            with run.next_step():
                step(number)
            run.commit()
        run.rewind(to="here")
        results["bits"] = bits(model, optimizer) == wanted and run.step == 2
        with run.next_step():
            once = float(step(5))
        run.rewind(to="here")
        with run.next_step():
            results["again"] = float(step(5)) == once
            run.rollback()


def test_a_run_goes_back_to_a_kept_state(found: dict[str, list[Any]]) -> None:
    assert found["_rewound"] == [{"bits": True, "again": True}] * 2


def _recorded(folder: Path, rank: int, results: dict[str, Any]) -> None:
    """What a program without these ranks finds in a store."""
    model, optimizer, step = whole()
    with opened(folder) as store:
        run = attach(store, model, optimizer)
        with run.next_step():
            step(0)
        run.commit()
        wholes = {
            name: one.full_tensor().tolist()  # type: ignore[operator]
            for name, one in model.named_parameters()
        }
        moments = {
            str(index): optimizer.state[one]["exp_avg"].full_tensor().tolist()
            for index, one in enumerate(model.parameters())
        }
        results["format"] = store["run/about"]["format"]
    results.update(wholes=wholes, moments=moments)
    results["path"] = str(folder / f"run{rank}.pm")
    results["places"], results["blocks"] = {}, {}
    with pmstore.open(folder / f"run{rank}.pm", mode="r") as store:
        for name, raw in store["run/model_layout"].items():
            place = decode_place(raw)
            block = store[f"run/model/{name}"]
            part = block if place.view is None else block.as_strided(*place.view)
            results["places"][name] = (*chunk(place.shard), part.tolist())
        _, tensors, _, shards = read_layout(store, "run/optimizer")
        for index, key in tensors:
            if key == "exp_avg":
                block = state_block(index, key)
                part = store[f"run/optimizer/{block}"].tolist()
                results["blocks"][str(index)] = (*chunk(shards[block]), part)


def test_parts_can_be_put_together_without_the_ranks(found: dict[str, list[Any]]) -> None:
    ranks = found["_recorded"]
    assert {rank["format"] for rank in ranks} == {3}
    for stored, wanted in (("places", "wholes"), ("blocks", "moments")):
        for name, value in ranks[0][wanted].items():
            put = torch.full_like(torch.tensor(value), torch.nan)
            for rank in ranks:
                offsets, sizes, part = rank[stored][name]
                at = tuple(
                    slice(first, first + size) for first, size in zip(offsets, sizes, strict=True)
                )
                put[at] = torch.tensor(part).reshape(sizes)
            assert put.tolist() == value


def _exported(folder: Path, rank: int, results: dict[str, Any]) -> None:
    """To safetensors, whole and in parts, and from there into models that are sharded otherwise."""
    from torch.distributed.tensor import Shard, distribute_tensor

    model, optimizer, step = whole()
    with opened(folder) as store:
        run = attach(store, model, optimizer)
        with run.next_step():
            step(0)
        run.commit()
        wanted = [one.full_tensor().tolist() for one in model.parameters()]  # type: ignore[operator]
    dist.barrier()
    if rank == 0:
        export_run(folder / "run*.pm", folder / "whole.safetensors", optimizer=True)
        export_run(folder / "run*.pm", folder / "part.safetensors", parts=True)
        export_run(folder / "run0.pm", folder / "lone.safetensors", parts=True)
    dist.barrier()
    parts = sorted(folder.glob("part*.safetensors"))
    results["files"] = [one.name for one in parts]
    with safe_open(folder / "whole.safetensors", "pt") as file:
        results["keys"] = sorted(file.keys())
        results["moments"] = [
            list(file.get_tensor(f"optim.state.{name}.exp_avg").shape)
            for name, _ in model.named_parameters()
        ]
    for number, files in enumerate(([folder / "whole.safetensors"], parts)):
        plain = net()
        import_run(files, plain)
        results[f"plain {number}"] = [one.tolist() for one in plain.parameters()] == wanted
        other = net()
        for module in other.modules():
            for key, one in list(module.named_parameters(recurse=False)):
                placed = distribute_tensor(torch.zeros_like(one), mesh(2), [Shard(one.dim() - 1)])
                module.register_parameter(key, nn.Parameter(placed))
        import_run(files, other)
        results[f"columns {number}"] = [
            one.full_tensor().tolist()  # type: ignore[operator]
            for one in other.parameters()
        ] == wanted
    again = fsdp(net())
    with torch.no_grad():
        again(batch(0))  # whole parameters are in its root
    import_run(parts, again)
    results["sharded"] = [
        one.full_tensor().tolist()  # type: ignore[operator]
        for one in again.parameters()
    ] == wanted
    for name, files in (("lone", [folder / "lone.safetensors"]), ("half", parts[:1])):
        try:
            import_run(files, net())
        except PmstoreError as error:
            results[name] = str(error)


def test_parts_go_through_safetensors(found: dict[str, list[Any]]) -> None:
    for rank in found["_exported"]:
        assert rank["files"] == [
            "part-00000-of-00002.safetensors",
            "part-00001-of-00002.safetensors",
        ]
        assert rank["moments"] == [list(one.shape) for one in net().parameters()]
        assert "0.weight" in rank["keys"]
        done = ("plain 0", "plain 1", "columns 0", "columns 1", "sharded")
        assert [rank[name] for name in done] == [True] * 5
        assert "give the files of all ranks" in rank["lone"]
        assert "give the files of all ranks" in rank["half"]


def _resharded(folder: Path, rank: int, results: dict[str, Any]) -> None:
    """A new run from the stores of one that was sharded in another way."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.tensor import Shard, distribute_tensor

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        other = net()
        for module in other.modules():
            for key, one in list(module.named_parameters(recurse=False)):
                placed = distribute_tensor(torch.zeros_like(one), mesh(2), [Shard(one.dim() - 1)])
                module.register_parameter(key, nn.Parameter(placed))
        return other, OPTIMIZERS["adamw"](other.parameters())

    def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        state = [optimizer.state[one]["exp_avg"] for one in model.parameters()]
        return [one.full_tensor().tolist() for one in (*model.parameters(), *state)]  # type: ignore[operator]

    model, optimizer, step = whole()
    with opened(folder, "old") as store:
        run = attach(store, model, optimizer)
        with run.next_step():
            step(0)
        run.commit()
        wanted = held(model, optimizer)
    dist.barrier()
    model, optimizer = made()
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, storage_reader=pmstore.dcp.StoreReader.of_run(str(folder / "runold*.pm")))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    results["loaded"] = held(model, optimizer) == wanted
    with opened(folder, "new") as store:
        run = attach(store, model, optimizer)
        results["began"] = not run.resumed and held(model, optimizer) == wanted
        for one in model.parameters():
            one.grad = one.detach().clone()
        with run.next_step():
            optimizer.step()
        run.commit()
        wanted = held(model, optimizer)
        results["inside"] = all_in(store, model, optimizer)
    model, optimizer = made()
    with opened(folder, "new") as store:
        run = attach(store, model, optimizer)
        results["resumed"] = run.resumed and held(model, optimizer) == wanted


def test_a_new_run_begins_from_stores_of_other_shards(found: dict[str, list[Any]]) -> None:
    done = ("loaded", "began", "inside", "resumed")
    assert found["_resharded"] == [dict.fromkeys(done, True)] * 2


# ---- refused


def _refused(folder: Path, rank: int, results: dict[str, Any]) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    def said(name: str, make: Callable[[], Any], group: Any = "world") -> None:
        with opened(folder, name) as store:
            try:
                model, optimizer = make()
                attach(store, model, optimizer, group)
            except PmstoreError as error:
                results[name] = [type(error).__name__, str(error)]

    def adamw(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters())

    def placed(model: nn.Module, *placements: Any, shape: tuple[int, ...] = (2,)) -> Any:
        over = mesh(*shape)
        for module in model.modules():
            for key, one in list(module.named_parameters(recurse=False)):
                made = nn.Parameter(distribute_tensor(one.detach(), over, placements))
                module.register_parameter(key, made)
        return model, adamw(model)

    said("resharded", lambda: placed(net(), Shard(0)))
    said("resharded", lambda: placed(net(), Replicate()))
    said("meshed", lambda: placed(net(), Shard(0)))
    said("meshed", lambda: placed(net(), Shard(0), Replicate(), shape=(2, 1)))
    groups = [dist.new_group([one]) for one in range(2)]
    alone = DeviceMesh("cpu", [rank])
    said("world", lambda: (made := fsdp(net()), adamw(made)))
    said("world", lambda: (made := fsdp(net(), mesh=alone), adamw(made)), groups[rank])
    said("whole", lambda: placed(net(), Shard(0)))
    said("whole", lambda: (made := net(), adamw(made)))

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            part = DTensor.from_local(torch.ones(2), mesh(2), [Partial()], run_check=False)
            self.register_buffer("sum", part)
            self.weight = nn.Parameter(torch.ones(2))

    said("partial", lambda: (made := Sum(), adamw(made)))
    old = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(old)  # all of it needs an accelerator
    old._modules["_fsdp_wrapped_module"] = net()
    said("fsdp1", lambda: (old, adamw(net())))
    said(
        "slots",
        lambda: (made := fsdp(net()), pmstore.torch.optim.AdamW(made.parameters(), lr=1e-2)),
    )

    with opened(folder, "unreduced") as store:
        model = fully_shard(net())
        optimizer = adamw(model)
        run = attach(store, model, optimizer)
        model.set_requires_gradient_sync(False)  # type: ignore[attr-defined]
        try:
            with run.next_step():
                model(batch(0)).sum().backward()
                run.commit()
        except PmstoreError as error:
            results["unreduced"] = [type(error).__name__, str(error)]
        # the error has taken the step back, those gradients too: leaving the store commits


SAID = {
    "resharded": ("MismatchError", r"0\.weight: stored .*Shard\(0\).*, given .*Replicate"),
    "meshed": ("MismatchError", r"stored .* over a mesh \(2,\) of a, .* given .* mesh \(2, 1\)"),
    "whole": ("MismatchError", "of_run(.|\n)*stored .*Shard(.|\n)*, given \\(7, 5\\) float32"),
    "world": ("MismatchError", r"of_run(.|\n)*over a mesh \(2,\).* given .* over a mesh \(1,\)"),
    "partial": ("AttachError", "buffer sum is a DTensor that is still to be added up"),
    "fsdp1": ("AttachError", "fully_shard \\(FSDP2\\) instead"),
    "slots": ("AttachError", "trains DTensors, and AdamW of pmstore.torch.optim"),
    "unreduced": ("AttachError", "set_requires_gradient_sync"),
}


@pytest.mark.parametrize("what", SAID)
def test_what_cannot_be_kept_is_refused(found: dict[str, list[Any]], what: str) -> None:
    kind, text = SAID[what]
    for rank in found["_refused"]:
        assert rank[what][0] == kind, rank[what]
        assert re.search(text, rank[what][1]), rank[what]


# ---- meshes of two dimensions


def replicated() -> Way:
    """HSDP: two replicas, each over two ranks."""
    model = fsdp(net(), mesh=mesh(2, 2))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return model, optimizer, lambda number: update(model, optimizer, number)


def fully_sharded_and_parallel() -> Way:
    """Rows are cut twice: first for the tensor parallel ranks, then by FSDP."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
    both = mesh(2, 2)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, both["b"], plan)
    fully_shard(model, mesh=both["a"])
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    data = dist.get_rank() // 2
    return model, optimizer, lambda number: update(model, optimizer, number, rank=data)


def four() -> Way:
    """More ranks than rows."""
    return whole()


FOUR = (replicated, fully_sharded_and_parallel, four)


def _of_four(folder: Path, rank: int, results: dict[str, Any]) -> None:
    for way in FOUR:
        model, optimizer, step = way()
        for number in range(3):
            step(number)
        wanted = bits(model, optimizer)
        for until in (2, 3):
            model, optimizer, step = way()
            with opened(folder, way.__name__) as store:
                run = attach(store, model, optimizer)
                for number in run.steps(until):
                    step(number)
                ended = bits(model, optimizer)
                inside = all_in(store, model, optimizer)
        strided = any("strided" in str(raw) for raw in _layouts(folder, way.__name__, rank))
        values = [one.full_tensor().tolist() for one in model.parameters()]  # type: ignore[operator]
        dist.barrier()
        if rank == 0:
            export_run(folder / f"run{way.__name__}?.pm", folder / f"{way.__name__}.safetensors")
        dist.barrier()
        with safe_open(folder / f"{way.__name__}.safetensors", "pt") as file:
            put = [file.get_tensor(name).tolist() for name, _ in model.named_parameters()]
        results[way.__name__] = [ended == wanted, inside, put == values, strided]


def _layouts(folder: Path, name: str, rank: int) -> list[Any]:
    with pmstore.open(folder / f"run{name}{rank}.pm", mode="r") as store:
        return list(store["run/model_layout"].values())


def _of_a_part(folder: Path, rank: int, results: dict[str, Any]) -> None:
    """A group of two of the four ranks that train together."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    both = mesh(2, 2)
    ways: dict[str, tuple[nn.Module, Any]] = {
        "DistributedDataParallel": (DistributedDataParallel(net()), pairs[rank // 2]),
        r"a mesh of shape \(2, 2\)": (fsdp(net(), mesh=both), both["b"].get_group()),
    }
    for number, (what, (model, group)) in enumerate(ways.items()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with opened(folder, f"part{number}") as store:
            with pytest.raises(AttachError, match=rf"{what} trains the ranks 0, 1, 2, 3 together"):
                attach(store, model, optimizer, group)
            assert "run" not in store
            attach(store, model, optimizer).detach()
    results["refused"] = True


def test_meshes_of_two_dimensions(shm: Path) -> None:
    found = launch([_of_four, _of_a_part], shm, 4)
    for rank in found["_of_four"]:
        for way in FOUR:
            strided = way is fully_sharded_and_parallel
            assert rank[way.__name__] == [True, True, True, strided], way.__name__
    assert found["_of_a_part"] == [{"refused": True}] * 4


PROGRAMS = [_resharded, _resumed, _trained, _rolled_back, _rewound, _recorded, _exported, _refused]
