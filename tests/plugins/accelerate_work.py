"""Loops with Accelerate, as children that may be killed: see test_accelerate_kills."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# which the first optimizer of a process imports: here once, in the fork server
import torch._dynamo
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import pmstore
import pmstore.torch
from pmstore.integrations.accelerate import register
from pmstore.scheduler import EveryN
from pmstore.torch import AttachError

Ack = Callable[[int], None]
EPOCHS = 3


class Noisy(Dataset[Any]):
    """Each sample is drawn anew whenever it is loaded: one step before it is trained on."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(5, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.randn(5), x.sum()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(9))


class Loop:
    """A program: everything is prepared."""

    def __init__(self, seedable: bool, workers: int = 0, **loading: Any) -> None:
        loading = {"use_seedable_sampler": seedable, **loading}
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=3,
            dataloader_config=DataLoaderConfiguration(**loading),
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )

    def attach(self, store: pmstore.Store, **given: Any) -> pmstore.torch.Run:
        return pmstore.torch.attach(
            store,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.schedule,
            loader=self.loader,
            **given,
        )

    def step(self, batch: Any) -> bool:
        """Returns whether it was the last of its data epoch, as Accelerate sees it."""
        with self.accelerator.accumulate(self.model):
            x, y = batch
            loss = ((self.model(x)[:, 0] - y) ** 2).mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return bool(self.accelerator.gradient_state.end_of_dataloader)

    def found(self, folder: str, ends: list[Any]) -> None:
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        result = {"model": digest.hexdigest(), "ends": ends, "next": torch.rand(1).item()}
        Path(folder, "found.json").write_text(json.dumps(result))


def plain(ack: Ack, folder: str, seedable: bool, workers: int) -> None:
    torch.set_num_threads(1)
    loop = Loop(seedable, workers)
    loop.found(folder, [loop.step(batch) for _ in range(EPOCHS) for batch in loop.loader])


def kept(ack: Ack, folder: str, seedable: bool, workers: int, kill_at_step: int = -1) -> None:
    torch.set_num_threads(1)
    loop = Loop(seedable, workers)
    with pmstore.open(f"{folder}/run.pm", size="4MiB") as store:
        run = loop.attach(store)
        register(loop.accelerator, run)
        ends = store.list("ends")
        for batch in run.batches(epochs=EPOCHS):
            ends.append(loop.step(batch))
            if run.step == kill_at_step:
                os.kill(os.getpid(), signal.SIGKILL)
        told = [bool(end) for end in ends]
    loop.found(folder, told)


def beside(ack: Ack, folder: str, seedable: bool, kill_at_step: int = -1) -> None:
    """A second loader that is shuffled, at the end of each epoch."""
    torch.set_num_threads(1)
    loop = Loop(seedable)
    second = loop.accelerator.prepare(DataLoader(range(8), batch_size=2, shuffle=True))
    with pmstore.open(f"{folder}/run.pm", size="4MiB") as store:
        run = loop.attach(store)
        register(loop.accelerator, run)
        orders = store.list("orders")
        for epoch in run.epochs(EPOCHS):
            for batch in epoch:
                loop.step(batch)
                if run.step == kill_at_step:
                    os.kill(os.getpid(), signal.SIGKILL)
            orders.append([one.tolist() for one in second])
        told = [*orders]
    loop.found(folder, told)


def hooks(ack: Ack, folder: str) -> None:
    """save_state commits and writes no weights; load_state goes back to it."""
    torch.set_num_threads(1)
    loop = Loop(True)
    state = f"{folder}/state"
    with pmstore.open(f"{folder}/run.pm", size="4MiB") as store:
        run = loop.attach(store, policy=EveryN(100))
        with pytest.raises(AttachError, match="not saved with"):
            os.mkdir(f"{folder}/empty")
            registered = register(loop.accelerator, run)
            loop.accelerator.load_state(f"{folder}/empty")
        with pytest.raises(AttachError, match="a run is registered"):
            register(loop.accelerator, run)
        batches = run.batches(epochs=2)
        for _ in range(4):
            loop.step(next(batches))
        loop.accelerator.save_state(state)  # ends the step
        assert (run.step, run.committed) == (4, 4)
        names = set(os.listdir(state))
        assert "pmstore.json" in names
        assert "optimizer.bin" in names  # Accelerate's own
        assert not any("model" in name for name in names)
        loop.accelerator.save_state(state)  # nothing is left to commit
        assert run.step == 4
        saved = [one.detach().clone() for one in loop.model.parameters()]
        for _ in range(3):
            loop.step(next(batches))
        assert not all(map(torch.equal, saved, loop.model.parameters()))
        loop.accelerator.load_state(state)
        assert all(map(torch.equal, saved, loop.model.parameters()))
        loop.step(next(batches))
        run.commit()
        with pytest.raises(AttachError, match=r"of step 4 .* last commit is step 5"):
            loop.accelerator.load_state(state)
        registered.remove()
        loop.accelerator.save_state(state)
        assert any("model" in name for name in os.listdir(state))


def refused(ack: Ack, folder: str) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    data = DataLoader(Noisy(), batch_size=4)
    dispatching = Loop(True, dispatch_batches=True).loader
    stateful = Loop(True, use_stateful_dataloader=True).loader
    from accelerate import skip_first_batches

    loaders = {
        "dispatch_batches=False": dispatching,
        "use_stateful_dataloader": stateful,
        "skips batches": skip_first_batches(Loop(True).loader, 2),
        "DataLoaderDispatcher": accelerator.prepare(DataLoader(Stream(), batch_size=2)),
    }
    assert type(accelerator.prepare(data)).__name__ == "DataLoaderShard"
    model = nn.Linear(5, 1)
    with pmstore.open(f"{folder}/run.pm", size="4MiB") as store:
        for told, loader in loaders.items():
            with pytest.raises(AttachError, match=told):
                pmstore.torch.attach(store, model=model, loader=loader)
        other = accelerator.prepare(nn.Linear(2, 2))
        run = pmstore.torch.attach(store, model=model)
        register(accelerator, run)
        with pytest.raises(AttachError, match="was not given to attach"):
            accelerator.save_state(f"{folder}/state")
        assert other is not None
        run.detach()
        with pytest.raises(AttachError, match="attached to an open store"):
            register(accelerator, run)


def amid_accumulation(ack: Ack, folder: str) -> None:
    """Without register a run that goes on amid an accumulation would step at other batches."""
    torch.set_num_threads(1)
    for resumes in (False, True):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            loop = Loop(True)
            with pmstore.open(f"{folder}/run.pm", size="4MiB") as store:
                run = loop.attach(store)
                if resumes:
                    with pytest.raises(AttachError, match=r"register\(accelerator, run\)"):
                        next(run.batches())
                    os._exit(0)
                for batch in run.batches():
                    loop.step(batch)
                    if run.committed == 2:
                        os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def the_example(ack: Ack, folder: str) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from examples import accelerate_loop

    accelerate_loop.train(folder, 1)
    accelerate_loop.train(folder, 1)
    with pmstore.open(f"{folder}/accelerate.pm", mode="r") as store:
        assert store["run/progress"][0] == 20
