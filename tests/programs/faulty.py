"""Programs that lose something when they are stopped, by which the harness is tested."""

from __future__ import annotations

import torch
from torch import nn

import pmstore
import pmstore.torch

from .data import batches, mlp
from .registry import State, program


@program(faulty=True)
def forgetful(path: str) -> State:
    """A count that is not in the store weighs the losses."""
    model, seen = mlp(), 0
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        for x, y in run.batches(epochs=2):
            seen += 1
            loss = nn.functional.mse_loss(model(x), y) / seen
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        return {"model": model}


@program(faulty=True)
def hasty(path: str) -> State:
    """Ends with status 1, not 0, when it is told to stop; other stops do it no harm."""
    with pmstore.open(path) as store:
        try:
            for step in range(store.get("step", 0), 20):
                total = store.get("total", 0) + step
                with store.transaction():
                    store["total"], store["step"] = total, step + 1
        except SystemExit:
            raise SystemExit(1) from None
        return {"total": store["total"]}
