"""Optimizers, schedules of the learning rate, and what is done around a step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler

import pmstore
import pmstore.torch
import pmstore.torch.optim
from pmstore.scheduler import Auto, EveryN, PreemptionGuard

from .data import batches, classes, mlp, numbers
from .registry import State, program

mse = nn.functional.mse_loss
cross_entropy = nn.functional.cross_entropy


@program(quick=True)
def quickstart(path: str) -> State:
    """The program of the README."""
    model, loader = mlp(), batches()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 1e-2, momentum=0.9, nesterov=True),
    "amsgrad": lambda ps: torch.optim.Adam(ps, 1e-2, amsgrad=True),
    "fused": lambda ps: torch.optim.AdamW(ps, 1e-2, fused=True),
    "tensor-lr": lambda ps: torch.optim.Adam(ps, torch.tensor(1e-2)),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 1e-3, momentum=0.5, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 1e-2),
    "nadam": lambda ps: torch.optim.NAdam(ps, 1e-3),
    "radam": lambda ps: torch.optim.RAdam(ps, 1e-2),
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "asgd": lambda ps: torch.optim.ASGD(ps, 1e-2),
    "rprop": lambda ps: torch.optim.Rprop(ps, 1e-3),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, 1e-2),
}


@program(*OPTIMIZERS)
def optimizer(path: str, kind: str) -> State:
    model, loader = mlp(), batches()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=2):
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program("adamw", "sgd", quick=["adamw"], plain="pmstore's own arithmetic, torch's fused kernels'")
def native_optimizer(path: str, kind: str) -> State:
    """Parameters and moments in slots."""
    model, loader = mlp(), batches()
    if kind == "adamw":
        optimizer: torch.optim.Optimizer = pmstore.torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = pmstore.torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 36)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=loader, lr_scheduler=schedule
        )
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def lbfgs(path: str) -> State:
    """The closure runs the model several times a step."""
    model, loader = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1)), batches()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.3, max_iter=3, history_size=4)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=2):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = mse(model(x), y)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda one: lr_scheduler.StepLR(one, 5, 0.5),
    "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, 24),
    "one-cycle": lambda one: lr_scheduler.OneCycleLR(one, 0.1, total_steps=24),
    "lambda": lambda one: lr_scheduler.LambdaLR(one, lambda step: 0.9**step),
    "restarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 5, 2),
    "cyclic": lambda one: lr_scheduler.CyclicLR(one, 1e-3, 1e-1, 4, cycle_momentum=True),
    "sequential": lambda one: lr_scheduler.SequentialLR(
        one,
        [lr_scheduler.LinearLR(one, total_iters=5), lr_scheduler.CosineAnnealingLR(one, 19)],
        [5],
    ),
    "chained": lambda one: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(one, 0.1, 4), lr_scheduler.ExponentialLR(one, 0.9)]
    ),
}


@program(*SCHEDULES)
def schedule(path: str, kind: str) -> State:
    model, loader = mlp(), batches()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    schedule = SCHEDULES[kind](optimizer)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=loader, lr_scheduler=schedule
        )
        losses = store.list("losses")
        for x, y in run.batches(epochs=2):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append([loss.item(), schedule.get_last_lr()[0]])
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "s": schedule, "losses": list(losses)}


@program()
def plateau(path: str) -> State:
    """Looks at data that are not trained on, and lowers the rate when nothing gets better."""
    model, loader = mlp(), batches()
    held = numbers(40)[:]
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=loader, lr_scheduler=schedule
        )
        seen = store.list("seen")
        for x, y in run.batches(epochs=3):
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            optimizer.step()
            if run.batch % 4 == 3:
                model.eval()
                with torch.no_grad():
                    missed = mse(model(held[0]), held[1]).item()
                model.train()
                schedule.step(missed)
                seen.append((missed, optimizer.param_groups[0]["lr"]))
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "s": schedule, "seen": list(seen)}


@program(quick=True)
def accumulation(path: str) -> State:
    """Three batches a step; the schedule moves with the steps."""
    model, loader = mlp(), batches(size=5)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = lr_scheduler.StepLR(optimizer, 4)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=loader, lr_scheduler=schedule
        )
        losses = store.list("losses")
        total = 0.0
        for x, y in run.batches(epochs=3, every=3):
            loss = mse(model(x), y) / 3
            loss.backward()
            total += loss.item()
            if run.last_in_step:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                losses.append(total)
                run.log(loss=total)
                total = 0.0
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def accumulation_over_steps(path: str) -> State:
    """Every batch is a step of the run, whose gradients the next ones go on with."""
    model, loader = mlp(), batches(size=5)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=2):
            loss = mse(model(x), y) / 3
            loss.backward()
            if run.batch % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program("norm", "value")
def clipping(path: str, kind: str) -> State:
    model, loader = mlp(), batches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        norms = store.list("norms")
        for x, y in run.batches(epochs=2):
            loss = mse(model(x), y)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            if kind == "norm":
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            else:
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "norms": list(norms)}


@program("on", "off", quick=["on"])
def mixed_precision(path: str, kind: str) -> State:
    """Autocast to bfloat16, and a scaler that grows."""
    model, loader = mlp(), batches()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3, enabled=kind == "on")
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=loader, scaler=scaler
        )
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = mse(model(x).float(), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if y.sum() > 4:
                model[0].weight.grad[0, 0] = math.inf  # the step is left out, the scale lowered
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)
            if kind == "on" or model[0].weight.grad.isfinite().all():
                scaler.step(optimizer)
            scaler.update()
            losses.append((loss.item(), scaler.get_scale()))
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "sc": scaler, "losses": list(losses)}


@program()
def param_groups(path: str) -> State:
    """No decay for norms and biases; another rate for the head; the rate set by hand."""
    model, loader = mlp(), batches()
    matrices = [one for one in model[:4].parameters() if one.ndim > 1]
    others = [one for one in model[:4].parameters() if one.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
            {"params": model[4].parameters(), "lr": 3e-3, "betas": (0.8, 0.9)},
        ],
        lr=1e-2,
    )
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            for group in optimizer.param_groups:
                group["lr"] *= 0.97
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def by_hand(path: str) -> State:
    """Each step is a block, and the batches are drawn in it."""
    model, data = mlp(), numbers()[:]
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
        losses, seen = store.list("losses"), store.require("seen", (120,), "int64")
        while len(losses) < 36:
            with run.next_step():
                chosen = torch.randint(0, 120, (10,))
                loss = mse(model(data[0][chosen]), data[1][chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                np.add.at(seen, chosen.numpy(), 1)
                losses.append(loss.item())
                run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses), "n": seen.copy()}


@program("every-n", "auto", "bounded")
def policy(path: str, kind: str) -> State:
    """Not every step commits: a resume does some of them again."""
    model, loader = mlp(), batches()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rule = {
        "every-n": {"policy": EveryN(4)},
        "auto": {"policy": Auto()},
        "bounded": {"policy": Auto(max_loss=0.01)},
    }[kind]
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader, **rule)
        losses = store.list("losses")
        for x, y in run.batches(epochs=4):
            x = x + 0.01 * random.random() + 0.01 * float(np.random.rand())
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program(plain="goes back to the last commit")
def nan_guard(path: str) -> State:
    """A loss that is no number takes the step back, and the next try is made with half the rate."""
    model, loader = mlp(), batches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=loader, policy=None
        )
        losses, rate = store.list("losses"), 0.1
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            if run.step % 7 == 5 and rate == 0.1:
                loss = loss * math.nan
            optimizer.zero_grad()
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            losses.append(loss.item())
            if not math.isfinite(loss.item()):
                run.rollback()
                rate = 0.05
                continue
            rate = 0.1
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def label_smoothing(path: str) -> State:
    """Classes with weights, mixed-up samples drawn by numpy, and accuracy in an array."""
    model, loader = mlp(10, 3), batches(classes())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)
    weights = torch.tensor([1.0, 2.0, 0.5])
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        right = store.require("right", (36,), "float32")
        for x, y in run.batches(epochs=3):
            share = float(np.random.beta(0.4, 0.4))
            order = torch.from_numpy(np.random.permutation(len(x)))
            out = model(share * x + (1 - share) * x[order])
            loss = share * cross_entropy(out, y, weights, label_smoothing=0.1)
            loss = loss + (1 - share) * cross_entropy(out, y[order], weights, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right[run.step] = (out.argmax(1) == y).float().mean().item()
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "right": right.copy()}


@program()
def preemption(path: str) -> State:
    """A SIGTERM ends the step and the loop."""
    model, loader = mlp(), batches()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with PreemptionGuard(notice_seconds=5.0) as guard, pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=loader, guard=guard
        )
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}
