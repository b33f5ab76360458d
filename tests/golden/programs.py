"""The programs whose stores are kept: of each kind one, that begins its run or goes on with it.

A store in memory is killed with half a step pending, one on a disk with commits in its journal.
What the programs compute does not depend on how wide a machine's vectors are: no sum has more than
two terms whose order a library could choose. (A machine without fused multiply-add, so before AVX2,
rounds otherwise.)
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import pmstore
import pmstore.portable
import pmstore.torch
import pmstore.torch.optim
from golden.life import Life, draws
from pmstore.scheduler import EveryN

EPOCHS = 3
SIZE = "1MiB"
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """live: begins or goes on, in a folder. kill_in: the step of the first life that it does not
    survive. memory: whether the store lies in memory. kept: what of the folder is kept. ranks:
    processes that live it together, each in a folder of its own; 0: one, without a process group.
    """

    live: Callable[[Path, Life], None]
    kill_in: int = 9
    memory: bool = True
    kept: str = "run.pm"
    ranks: int = 0


class Net(nn.Module):
    """Parameters, buffers, and numbers of the default generator."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3, dtype=dtype))
        self.shift = nn.Parameter(torch.randn(3, dtype=torch.float32))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.75).add_(x[0].detach() * 0.25)
            self.seen += 1
        y = x * self.scale + self.shift
        return y.where(torch.rand(y.shape) < 0.75, y * 0.5)


class Metric:
    """Of the program's own; its state is a dict of plain values."""

    def __init__(self) -> None:
        self.last: list[float] = []

    def add(self, loss: torch.Tensor) -> None:
        self.last = [*self.last[-3:], loss.item()]

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last, "count": len(self.last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = list(state["last"])


def opened(home: Path, *, hold: bool = False) -> pmstore.Store:
    """force: a store in memory that was killed is refused once the machine has restarted."""
    return pmstore.open(home / "run.pm", size=SIZE, hold=hold, force=True)


def seed() -> None:
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)


def data(generator: torch.Generator | None = None) -> DataLoader[Any]:
    """Eleven samples: the last batch of an epoch is a short one."""
    numbers = torch.arange(66, dtype=torch.float64).reshape(2, 11, 3) / 64
    samples = TensorDataset(numbers[0], numbers[1].flip(0))
    return DataLoader(samples, batch_size=2, shuffle=True, generator=generator)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    x = x + 0.01 * float(np.random.random()) + 0.001 * random.random()
    total = (model(x) - y).square().sum(0)
    return total[0] + total[1] + total[2]  # type: ignore[no-any-return]


def state(model: nn.Module, *optimizers: torch.optim.Optimizer, **others: Any) -> dict[str, Any]:
    """What does not depend on the version of torch."""
    return {
        "model": model.state_dict(),
        "gradients": {name: one.grad for name, one in model.named_parameters()},
        "optimizers": [
            {"state": one.state_dict()["state"], "lr": [group["lr"] for group in one.param_groups]}
            for one in optimizers
        ],
        **others,
    }


def at_end(generator: torch.Generator) -> dict[str, Any]:
    return {"draws": draws(), "of the loader": torch.rand(3, generator=generator)}


# ---- runs


def plain(home: Path, life: Life) -> None:
    """A model, Adam, a scheduler, a shuffled loader with a generator, stateful objects."""
    seed()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, foreach=False)
    schedule = StepLR(optimizer, step_size=4, gamma=0.5)
    shuffle = torch.Generator().manual_seed(4)
    noise = torch.Generator().manual_seed(5)
    metric = Metric()
    with opened(home) as store:
        run = pmstore.torch.attach(
            store,
            model=model,
            optimizer=optimizer,
            lr_scheduler=schedule,
            loader=data(shuffle),
            stateful={"noise": noise, "metric": metric},
            policy=None,
        )
        life.begin(
            state(model, optimizer, step=run.step, schedule=schedule.last_epoch, metric=metric)
        )
        for batch in run.batches(epochs=EPOCHS):
            loss = loss_of(model, batch) + 0.01 * torch.rand((), generator=noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            metric.add(loss)
            run.log(loss=loss)
            life.trained(loss.item())
        own = {"noise": torch.rand(3, generator=noise), **at_end(shuffle)}
        life.end(
            state(
                model,
                optimizer,
                step=run.step,
                schedule=schedule.last_epoch,
                metric=metric,
                own=own,
            )
        )


def several(home: Path, life: Life) -> None:
    """Two models and optimizers, one with momentum; gradients that live on from step to step; every
    third step is committed."""
    seed()
    models = {"first": Net(), "second": Net()}
    optimizers = {
        "first": torch.optim.SGD(models["first"].parameters(), lr=0.02, momentum=0.9),
        "second": torch.optim.Adam(
            models["second"].parameters(), lr=0.05, amsgrad=True, foreach=False
        ),
    }
    shuffle = torch.Generator().manual_seed(4)
    both = nn.ModuleDict(models)
    with opened(home) as store:
        run = pmstore.torch.attach(
            store, model=models, optimizer=optimizers, loader=data(shuffle), policy=EveryN(3)
        )
        life.begin(state(both, *optimizers.values(), step=run.step))
        for batch in run.batches(epochs=EPOCHS):
            loss = loss_of(models["first"], batch) + loss_of(models["second"], batch)
            loss.backward()
            for optimizer in optimizers.values():
                optimizer.step()
            for parameter in both.parameters():
                parameter.grad.mul_(0.5)  # type: ignore[union-attr]
            run.log(loss=loss)
            life.trained(loss.item())
        life.end(state(both, *optimizers.values(), step=run.step, own=at_end(shuffle)))


def slots(home: Path, life: Life) -> None:
    """Parameters and moments in slots."""
    seed()
    models = {"first": Net(torch.float32), "second": Net(torch.float32)}
    optimizers = {
        "first": pmstore.torch.optim.AdamW(models["first"].parameters(), lr=0.05),
        "second": pmstore.torch.optim.SGD(models["second"].parameters(), lr=0.02, momentum=0.9),
    }
    shuffle = torch.Generator().manual_seed(4)
    both = nn.ModuleDict(models)
    with opened(home) as store:
        run = pmstore.torch.attach(
            store, model=models, optimizer=optimizers, loader=data(shuffle), policy=None
        )
        life.begin(state(both, *optimizers.values(), step=run.step))
        for batch in run.batches(epochs=EPOCHS):
            loss = loss_of(models["first"], batch) + loss_of(models["second"], batch)
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers.values():
                optimizer.step()
            run.log(loss=loss)
            life.trained(loss.item())
        life.end(state(both, *optimizers.values(), step=run.step, own=at_end(shuffle)))


def _one_model(
    home: Path,
    life: Life,
    *,
    hold: bool = False,
    tier: bool = False,
    sharded: bool = False,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> None:
    """A model, SGD with momentum, a loader. hold: the commit before the last is gone back to. tier:
    each step is flushed."""
    seed()
    model = Net(dtype)
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, foreach=False)
    shuffle = torch.Generator().manual_seed(4)
    with opened(home, hold=hold) as store:
        if tier:
            store.add_tier("disk", pmstore.TierConfig(home / "tier", keep=3))
        run = pmstore.torch.attach(
            store,
            model=model,
            optimizer=optimizer,
            loader=data(shuffle),
            policy=None,
            tiers=["disk"] if tier else [],
            **options,
        )
        if hold and run.resumed:
            run.rewind(steps=1)
        life.begin(state(model, optimizer, step=run.step))
        for batch in run.batches(epochs=EPOCHS):
            store.drain()
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            life.trained(loss.item())
        life.end(state(model, optimizer, step=run.step, own=at_end(shuffle)))


def mirrored(home: Path, life: Life) -> None:
    """Tensors that stay where they are."""
    _one_model(home, life, mirror=True)


def held(home: Path, life: Life) -> None:
    """A store that holds the commit before the last."""
    _one_model(home, life, hold=True)


def tier(home: Path, life: Life) -> None:
    """What a tier has of a run: three epochs."""
    if (home / "tier").exists() and not (home / "run.pm").exists():
        pmstore.restore(home / "run.pm", home / "tier")
    _one_model(home, life, tier=True)


def sharded(home: Path, life: Life) -> None:
    """DTensors, in a job of one rank."""
    _one_model(home, life, sharded=True, dtype=torch.float32, process_group="world")


def job(home: Path, life: Life) -> None:
    """A rank of two."""
    life.before_kill = dist.barrier
    _one_model(home, life, process_group="world")


def dump(home: Path, life: Life) -> None:
    """A store that was carried from one file to another."""
    if (home / "run.dump").exists():
        with (home / "run.dump").open("rb") as stream:
            pmstore.portable.load(stream, home / "run.pm")
    plain(home, life)


# ---- without a run


def checkpoint(home: Path, life: Life) -> None:
    """Two saves of torch.distributed.checkpoint, and what goes on from the last."""
    from torch.distributed import checkpoint as dcp

    from pmstore.dcp import StoreReader, StoreWriter

    seed()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, foreach=False)
    batches = list(data(torch.Generator().manual_seed(4)))
    folder = home / "saves"

    def train(batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def everything() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
            "torch": torch.get_rng_state(),
        }

    train(batches[0])  # the optimizer has its state
    if folder.exists():
        kept = everything()
        dcp.load(kept, storage_reader=StoreReader(folder))
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        torch.set_rng_state(kept["torch"])
        version, _, *more = np.random.get_state()
        np.random.set_state((version, kept["numpy"], *more))
        life.begin({"numbers": StoreReader.numbers(folder), **state(model, optimizer)})
    for batch in batches[1:]:
        loss = train(batch)
        dcp.save(everything(), checkpoint_id=folder, storage_writer=StoreWriter(folder, keep=2))
        life.trained(loss.item())
    life.end({**state(model, optimizer), "draws": draws()})


def values(home: Path, life: Life) -> None:
    """Arrays, values, groups, lists, slots and tensors, without a run."""
    with opened(home) as store:
        life.begin(_everything(store))
        for number in range(store.get("number", 0), 12):
            with store.transaction():
                store["number"] = number + 1
                store.require("array", (5, 3), "float32")[number % 5] += number
                store.require("group/deep/array", (), "int64")[...] += 3
                store["group/value"] = {"a": [1, 2.5, None, True, b"\0", "\u00e9", 1 << 70]}
                store[f"names/{number % 3}"] = np.arange(number, dtype="uint16")
                store.list("list").append({"number": number})
                current = store.slots("slots", (4,), "float64")
                np.add(current.current, number, out=current.next)
                current.flip()
                tensor = store.require("tensor", (3,), torch.bfloat16)
                tensor += 1
                life.trained(float(number))
        life.end(_everything(store))


def _everything(group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in sorted(group):
        value = group[name]
        if isinstance(value, pmstore.Group):
            found[name] = _everything(value)
        elif isinstance(value, pmstore.List):
            found[name] = list(value)
        elif isinstance(value, pmstore.Slots):
            found[name] = np.array(value.current)
        else:
            found[name] = value
    return found


KINDS = {
    "plain": Kind(plain, memory=False),
    "first_format": Kind(plain),
    "several": Kind(several),
    "slots": Kind(slots),
    "slots_on_disk": Kind(slots, memory=False),
    "mirrored": Kind(mirrored),
    "held": Kind(held, memory=False),
    "tier": Kind(tier, memory=False, kept="tier"),
    "sharded": Kind(sharded, ranks=1),
    "job": Kind(job, ranks=2),
    "dump": Kind(dump, memory=False, kept="run.dump"),
    "checkpoint": Kind(checkpoint, kill_in=3, memory=False, kept="saves"),
    "values": Kind(values, kill_in=6, memory=False),
}
"""By the name of the files."""


def live(_: Callable[[int], None], name: str, home: str, kill_in: int) -> None:
    """A life in a folder. Each rank leaves what it found in `found.json` of its folder."""
    torch.set_num_threads(1)
    kind = KINDS[name]
    if kind.ranks == 0:
        _live_alone(kind, Path(home), kill_in)
        return
    ranks = []
    for rank in range(kind.ranks):
        if (pid := os.fork()) == 0:
            _live_together(kind, Path(home), rank, kill_in)
        ranks.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    assert statuses == [-9 if kill_in else 0] * kind.ranks, statuses


def _live_alone(kind: Kind, home: Path, kill_in: int) -> None:
    life = Life(kill_in)
    kind.live(home, life)
    (home / "found.json").write_text(json.dumps(life.found()))


def _live_together(kind: Kind, home: Path, rank: int, kill_in: int) -> None:
    code = 1
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{home}/rendezvous", rank=rank, world_size=kind.ranks
        )
        own = home / f"rank-{rank}"
        own.mkdir(exist_ok=True)
        _live_alone(kind, own, kill_in)
        dist.barrier()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)
