"""Data-parallel training as people write it, and other jobs whose ranks go in step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from programs.data import batches, mlp, numbers
from programs.registry import State
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

import pmstore
import pmstore.torch
import pmstore.torch.optim
from pmstore.scheduler import Auto, EveryN, PreemptionGuard

from .registry import JOB, job

mse = nn.functional.mse_loss
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
    "native-adamw": lambda parameters: pmstore.torch.optim.AdamW(parameters, lr=1e-2),
    "native-sgd": lambda parameters: pmstore.torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


def parts(size: int = 10) -> tuple[Any, DistributedSampler[Any]]:
    """A loader of this rank's part, and its sampler."""
    sampler = DistributedSampler(numbers(240), shuffle=True, seed=3)
    return batches(numbers(240), size=size, sampler=sampler), sampler


def mine() -> nn.Sequential:
    """The same model at all ranks; what each draws afterwards is its own."""
    torch.manual_seed(7)
    model = mlp()
    torch.manual_seed(100 + dist.get_rank())
    return model


def ddp(net: nn.Module) -> DistributedDataParallel:
    """Without unused parameters to find, DDP puts its gradients into other buckets after the first
    step of a process. From three ranks on another order of sums makes other bits."""
    return DistributedDataParallel(net, find_unused_parameters=dist.get_world_size() > 2)


@job(*OPTIMIZERS, worlds=(2, 3), quick=True)
def data_parallel(folder: str, kind: str) -> State:
    """DDP with batch norm; the loop over the epochs tells the sampler."""
    rank, (loader, sampler) = dist.get_rank(), parts()
    model = ddp(mine())
    optimizer = OPTIMIZERS[kind](model.parameters())
    with pmstore.open(f"{folder}/run{rank}.pm") as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader, **JOB)
        losses = store.list("losses")
        for epoch in run.epochs(3):
            sampler.set_epoch(epoch)
            for x, y in epoch:
                loss = mse(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


SHARDED: dict[str, Any] = {
    **OPTIMIZERS,
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
}


@job("adamw", "sgd", "adamw-fused", worlds=(2, 3), alike=(), quick=True)
def fully_sharded(folder: str, kind: str) -> State:
    """FSDP2: parts of uneven size, and one with fewer rows than there are ranks."""
    rank, (loader, sampler) = dist.get_rank(), parts()
    net = mine()
    for layer in net:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(net)
    optimizer = SHARDED[kind](net.parameters())
    with pmstore.open(f"{folder}/run{rank}.pm") as store:
        run = pmstore.torch.attach(store, model=net, optimizer=optimizer, loader=loader, **JOB)
        losses = store.list("losses")
        for epoch in run.epochs(3):
            sampler.set_epoch(epoch)
            for x, y in epoch:
                loss = mse(net(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                run.log(loss=loss)
        return {"model": net, "optimizer": optimizer, "losses": list(losses)}


@job("adamw", "native-sgd", worlds=(2, 4))
def accumulation(folder: str, kind: str) -> State:
    """Three batches a step, two of them without a message; attached before DDP is made."""
    rank, (loader, _) = dist.get_rank(), parts(size=4)
    net = mine()
    optimizer = OPTIMIZERS[kind](net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    with pmstore.open(f"{folder}/run{rank}.pm") as store:
        run = pmstore.torch.attach(
            store, model=net, optimizer=optimizer, loader=loader, lr_scheduler=schedule, **JOB
        )
        model = ddp(net)
        losses = store.list("losses")
        for x, y in run.batches(epochs=3 if dist.get_world_size() == 2 else 4, every=3):
            if not run.last_in_step:
                with model.no_sync():
                    (mse(model(x), y) / 3).backward()
                continue
            loss = mse(model(x), y) / 3
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": net, "optimizer": optimizer, "losses": list(losses)}


RULES: dict[str, Any] = {
    "seventh": lambda: EveryN(7),
    "bounded": lambda: Auto(max_loss=0.02),  # as attach's for a disk; a short job reaches it
    "measuring": Auto,  # at each rank something else
}


@job(
    *("seventh-adamw", "seventh-native-adamw", "bounded-adamw"),
    *("measuring-adamw", "measuring-native-sgd"),
    worlds=(2, 3),
)
def policy(folder: str, kind: str) -> State:
    """Rules that leave steps pending."""
    rank, (loader, _), (rule, _, kind) = dist.get_rank(), parts(), kind.partition("-")
    model = ddp(mine())
    optimizer = OPTIMIZERS[kind](model.parameters())
    with pmstore.open(f"{folder}/run{rank}.pm") as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=loader, policy=RULES[rule](), **JOB
        )
        losses = store.list("losses")
        for x, y in run.batches(epochs=5):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@job("adamw", "sgd", worlds=(2, 3))
def mirrored(folder: str, kind: str) -> State:
    """Tensors that stay where they are; a commit goes on while the next step is computed."""
    rank, (loader, _) = dist.get_rank(), parts()
    model = ddp(mine())
    optimizer = OPTIMIZERS[kind](model.parameters())
    with pmstore.open(f"{folder}/run{rank}.pm") as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=loader, mirror=True, **JOB
        )
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer}


@job("adamw", "native-adamw", worlds=(2, 4), alike=("model",))
def local_sgd(folder: str, kind: str) -> State:
    """Four steps by itself, then the mean of all; a commit then."""
    rank, (loader, _) = dist.get_rank(), parts(size=5)
    model = mine()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with pmstore.open(f"{folder}/run{rank}.pm") as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=loader, policy=EveryN(1000), **JOB
        )
        for x, y in run.batches(epochs=4):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            if run.batch % 4 == 3:
                with torch.no_grad():
                    for parameter in model.parameters():
                        dist.all_reduce(parameter)
                        parameter /= dist.get_world_size()
                run.commit()
        return {"model": model, "optimizer": optimizer}


@job("adamw", "native-sgd", worlds=(2, 3))
def agreeing(folder: str, kind: str) -> State:
    """Every fifth commit returns when all ranks have it."""
    rank, (loader, _) = dist.get_rank(), parts()
    model = ddp(mine())
    optimizer = OPTIMIZERS[kind](model.parameters())
    with pmstore.open(f"{folder}/run{rank}.pm") as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader, **JOB)
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            if run.step % 5 == 4:
                run.commit(agree=True)
        return {"model": model, "optimizer": optimizer}


@job("adamw", "native-adamw", worlds=(2, 4), alike=(), quick=True)
def apart(folder: str, kind: str) -> State:
    """Each rank trains a model of its own: nothing but the commits keeps them in step."""
    rank, loader = dist.get_rank(), batches()
    torch.manual_seed(40 + rank)
    model = mlp()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with pmstore.open(f"{folder}/run{rank}.pm") as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader, **JOB)
        losses = store.list("losses")
        for x, y in run.batches(epochs=4):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@job("native-sgd", worlds=(2,))
def taken_back(folder: str, kind: str) -> State:
    """Steps that all ranks take back, and do again."""
    rank, (loader, _), tried = dist.get_rank(), parts(), set()
    model = ddp(mine())
    optimizer = OPTIMIZERS[kind](model.parameters())
    with pmstore.open(f"{folder}/run{rank}.pm") as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader, **JOB)
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if run.step % 6 == 3 and run.step not in tried:
                tried.add(run.step)
                run.rollback()
                continue
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@job("adamw", worlds=(2, 3), guarded=True)
def stoppable(folder: str, kind: str) -> State:
    """Told to stop at one rank, all finish the step and end."""
    rank, (loader, _) = dist.get_rank(), parts()
    model = ddp(mine())
    optimizer = OPTIMIZERS[kind](model.parameters())
    with pmstore.open(f"{folder}/run{rank}.pm") as store:
        run = pmstore.torch.attach(
            store,
            model=model,
            optimizer=optimizer,
            loader=loader,
            policy=EveryN(5),
            guard=PreemptionGuard(),
            **JOB,
        )
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer}


@job(faulty=True)
def alone(folder: str) -> State:
    """No rank knows of the others' commits: killed between two of them, they go on apart."""
    rank, (loader, _) = dist.get_rank(), parts()
    model = ddp(mine())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(f"{folder}/run{rank}.pm") as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer}
