"""Runs that go on as other ones: something of the program changes from phase to phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pmstore
import pmstore.torch
from pmstore.torch import Resume

from .data import batches, mlp
from .registry import State, program

mse = nn.functional.mse_loss


def phase_of(kind: str, number: int) -> dict[str, Any]:
    """What the program gives to attach in its phases 0, 1 and 2."""
    model: nn.Module = mlp(10, 1, 16 + 4 * number if kind == "width" else 16)
    if kind == "layers":
        model = nn.ModuleDict({"trunk": mlp(10, 8), "head": nn.Linear(8, 1)})
        model.update({f"more{one}": nn.Linear(8, 8) for one in range(number)})
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda ps: torch.optim.Adam(ps, 1e-2),
        lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9),
        lambda ps: torch.optim.RMSprop(ps, 1e-3),
    ]
    optimizer = kinds[number if kind == "optimizer" else 0](model.parameters())
    if kind == "rate":
        optimizer.param_groups[0]["lr"] = (1e-2, 3e-3, 3e-2)[number]
    size = (10, 20, 5)[number] if kind == "batch-size" else 10
    given = {"model": model, "optimizer": optimizer, "loader": batches(size=size)}
    if kind == "schedule" and number:
        schedules = [torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.CosineAnnealingLR]
        given["lr_scheduler"] = schedules[number - 1](optimizer, 10)
    return given


CHOICES = {
    "batch-size": Resume(batch_size="samples"),
    "rate": Resume(lr="program"),
    "optimizer": Resume(optimizer="program"),
    "schedule": Resume(lr_scheduler="program", pieces="program", lr="program"),
    "layers": Resume(model="partial"),
}


@program(*CHOICES, plain="the generators go on where the last phase ended")
def phases(path: str, kind: str) -> State:
    """Three phases, each with a program that is a little different: it is attached again."""
    with pmstore.open(path) as store:
        losses = store.list("losses")
        for number in range(min(store.get("phase", 0), 2), 3):
            torch.manual_seed(number)
            given = phase_of(kind, number)
            run = pmstore.torch.attach(store, **given, resume=CHOICES[kind])
            model, optimizer = given["model"], given["optimizer"]
            schedule = given.get("lr_scheduler")
            for x, y in run.batches(epochs=None if store.get("phase", 0) <= number else 0):
                if kind == "layers":
                    seen = model["trunk"](x)
                    for one in range(number):
                        seen = torch.relu(model[f"more{one}"](seen))
                    loss = mse(model["head"](seen), y)
                else:
                    loss = mse(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                losses.append((loss.item(), optimizer.param_groups[0]["lr"], len(x)))
                run.log(loss=loss)
                if run.step == 14 * number + 13:
                    store["phase"] = number + 1
                    run.commit()
                    break
            run.detach()
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program(plain="goes back to an earlier state")
def kept(path: str) -> State:
    """States are kept on the way; once the run goes back to one, and on with half the rate."""
    model, loader = mlp(), batches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            if run.step % 6 == 0:
                run.keep(n=2)
            if run.step == 10 and "again" not in store:
                run.keep("ten")
            if run.step == 20 and "again" not in store:
                run.rewind(to="ten")
                for group in optimizer.param_groups:
                    group["lr"] = 0.05
                store["again"] = losses[-1]
                continue
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
            run.keep(best="loss")
        told = {"again": store["again"] if run.step == 36 else 0.0, "losses": list(losses)}
        return {"model": model, "optimizer": optimizer, **told}


@program(memory=True)
def held(path: str) -> State:
    """Every fifth step is taken back after its commit, and done again: with the same bits, so that
    it does not matter whether a process does it, or is killed before."""
    model, loader, tried = mlp(), batches(), set()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with pmstore.open(path, hold=True) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
            run.commit()
            if run.step % 5 == 0 and run.step not in tried:
                tried.add(run.step)
                run.rewind(steps=1)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}
