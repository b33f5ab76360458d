"""Training programs of Lightning, which a fork server runs: see test_lightning_kills.py."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

# which the first optimizer of a process imports: here once, in the fork server
import torch._dynamo
import torchmetrics
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from pmstore.integrations.lightning import PmstoreCallback, PmstoreCheckpointIO
from pmstore.testing import kill_at_primitive, primitives_seen
from pmstore.torch import Job

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

FEATURES = 6
X = torch.randn(40, FEATURES, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X.sum(1, keepdim=True))

_steps = 0
_kill: tuple[str, int] = ("", 0)


def here(place: str) -> None:
    """Dies at the chosen passing of the chosen place."""
    global _steps
    if place == _kill[0]:
        _steps += 1
        if _steps == _kill[1]:
            os.kill(os.getpid(), signal.SIGKILL)


class Net(L.LightningModule):
    """Dropout, batch statistics, and a validation that draws."""

    def __init__(self, **schedule: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)
        )
        self.schedule = schedule

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            here("step")
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        here("validation")
        inputs, targets = batch
        self.log("error", nn.functional.mse_loss(self.net(inputs) + torch.randn(1) / 9, targets))

    def on_train_start(self) -> None:
        self.noise = torch.randn(3)  # a hook that is called at each start, and draws

    def on_train_epoch_end(self) -> None:
        here("epoch end")
        torch.randn(1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        if not self.schedule:
            return optimizer
        schedule = dict(self.schedule)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {**schedule, "scheduler": schedule.pop("make")(optimizer)},
        }


class Half(Net):
    """Averages, metrics, and what hooks add to a checkpoint."""

    def __init__(self) -> None:
        super().__init__(make=partial(lr_scheduler.StepLR, step_size=2), interval="step")
        self.metric = torchmetrics.MeanSquaredError()
        self.seen: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.metric(self.net(batch[0]).detach().float(), batch[1])
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.net[0].weight.sum()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = list(self.seen)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


class Pair(L.LightningModule):
    """Two optimizers, one of which steps every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Linear(FEATURES, FEATURES)
        self.judge = nn.Sequential(nn.Linear(FEATURES, 4), nn.ReLU(), nn.Linear(4, 1))

    def training_step(self, batch: Any, index: int) -> None:
        here("step")
        makes, judges = self.optimizers()
        made = self.maker(batch[0] + torch.randn_like(batch[0]))
        judges.zero_grad()
        loss = self.judge(made.detach()).mean() - self.judge(batch[0]).mean()
        self.manual_backward(loss)
        judges.step()
        if index % 2:
            makes.zero_grad()
            self.manual_backward(-self.judge(made).mean())
            makes.step()
            self.lr_schedulers()[0].step()

    def configure_optimizers(self) -> Any:
        makes = torch.optim.Adam(self.maker.parameters(), 0.01)
        judges = torch.optim.RMSprop(self.judge.parameters(), 0.01)
        return [makes, judges], [lr_scheduler.StepLR(makes, 3), lr_scheduler.StepLR(judges, 3)]


class Bare(Net):
    """Logs nothing: torch.compile cannot compile that."""

    def log(self, *_: Any, **__: Any) -> None:
        pass


class Asks(Net):
    """Its schedule depends on how many steps there will be: Lightning takes the loaders for it
    before the run is attached."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.05, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Rare(Net):
    """Logs some figures in an epoch's first batch alone. Its epochs end after five batches."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        if index == 0:
            self.metric(self.net(batch[0]).detach(), batch[1])
            self.log("metric", self.metric, on_step=True, on_epoch=True, prog_bar=True)
            self.log("first", loss, on_step=False, on_epoch=True)
            self.log("largest", loss, on_epoch=True, reduce_fx=max, prog_bar=True)
        return loss

    def on_train_epoch_start(self) -> None:
        self.log("begun", float(self.current_epoch))

    def on_train_batch_start(self, batch: Any, index: int) -> int | None:
        return -1 if index == 5 else None


class Two(Net):
    """A batch of two loaders."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return super().training_step(batch["a"], index) + super().training_step(batch["b"], index)


class Stream(IterableDataset):
    """Draws what it gives. Nobody knows how long it is."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(9):
            inputs = torch.randn(8, FEATURES) * np.random.rand()
            yield inputs.float(), inputs.float().sum(1, keepdim=True)


class Noisy(Dataset):
    """Draws while a sample is loaded."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return X[index] + torch.randn(FEATURES) / 9, X[index].sum(0, keepdim=True)


class Module(L.LightningDataModule):
    """Counts how often its data were asked for."""

    asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return loader(Noisy())

    def val_dataloader(self) -> Any:
        return loader(DATA, shuffle=False)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.asked = state_dict["asked"] - 1  # the program that goes on asks once more


def loader(data: Any, **settings: Any) -> Any:
    return DataLoader(data, **{"batch_size": 5, "shuffle": True, **settings})


class Losses(L.Callback):
    """A callback with a state."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        here("batch end")
        self.losses.append(float(outputs["loss"]) if outputs else 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = state_dict["losses"]


def _plateau(**rest: Any) -> dict[str, Any]:
    make = partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.5)
    return {"make": make, "monitor": "loss_epoch", **rest}


def program(which: str, folder: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A module, its data, and settings of the Trainer."""
    if which == "net":
        return (
            Net(**_plateau()),
            (loader(DATA), loader(DATA, shuffle=False)),
            {"val_check_interval": 3, "callbacks": [EarlyStopping("error", patience=3)]},
        )
    if which == "half":
        return (
            Half(),
            (loader(DATA),),
            {
                "accumulate_grad_batches": 3,
                "precision": "bf16-mixed",
                "gradient_clip_val": 0.5,
                "callbacks": [EMAWeightAveraging(decay=0.9)],
            },
        )
    if which == "pair":
        return Pair(), (loader(DATA),), {"max_epochs": -1, "max_steps": 21}
    if which == "stream":
        return (
            Net(**_plateau(monitor="error", interval="step", frequency=2, strict=False)),
            (DataLoader(Stream(), batch_size=None), loader(DATA, shuffle=False)),
            {"val_check_interval": 4},
        )
    if which == "rare":
        data = (loader(DATA), loader(DATA, shuffle=False))
        return Rare(), data, {"val_check_interval": 2}
    if which == "two":
        both = {"a": loader(Noisy(), batch_size=8), "b": loader(DATA, drop_last=True)}
        data = CombinedLoader(both, "max_size_cycle")
        return Two(), (data,), {"limit_train_batches": 6}
    if which == "module":
        return Net(), (Module(),), {"reload_dataloaders_every_n_epochs": 1}
    if which == "stateful":
        return Net(), (StatefulDataLoader(DATA, batch_size=5, shuffle=True, num_workers=1),), {}
    if which == "workers":
        return (
            Net(**_plateau(interval="step", monitor="loss")),
            (loader(DATA, num_workers=1),),
            {"overfit_batches": 0, "check_val_every_n_epoch": None},
        )
    if which == "scaled":
        scaler = torch.amp.GradScaler("cpu", init_scale=1e30, growth_interval=2)
        return Net(), (loader(DATA),), {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    if which == "compiled":
        return torch.compile(Bare(), backend="eager"), (loader(DATA),), {}
    if which == "asks":
        return (
            Asks(),
            (Module(),),
            {
                "reload_dataloaders_every_n_epochs": 1,
                "callbacks": [GradientAccumulationScheduler({0: 1, 1: 3})],
            },
        )
    if which == "saving":
        saves = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)
        return (Net(), (loader(DATA),), {"callbacks": [saves], "plugins": [PmstoreCheckpointIO()]})
    raise ValueError(which)


def the_example(ack: Callable[[int], None], store: str) -> None:
    """A life of examples/lightning_run.py. Acknowledges how many primitives it took."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from examples.lightning_run import main

    main(Path(store), 2)
    ack(primitives_seen())


def run(
    ack: Callable[[int], None],
    which: str,
    store: str,
    kill: tuple[str, int] = ("", 0),
    settings: dict[str, Any] | None = None,
    rank: int | None = None,
) -> None:
    """One life of a program. store: kept there, if it ends with .pm. What it ends with is left
    beside it. rank: of two."""
    global _kill
    _kill = (kill[0], kill[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    L.seed_everything(7, verbose=False)
    module, data, given = program(which, store + ".ckpt")
    losses = Losses()
    callbacks = [*given.pop("callbacks", []), losses]
    if store.endswith(".pm"):
        callbacks.append(PmstoreCallback(store, **(settings or {})))
    trainer = L.Trainer(
        **{
            "max_epochs": 3,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": "saving" in which,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": callbacks,
            **given,
            **({} if rank is None else {"devices": 2, "strategy": "ddp"}),
        }
    )
    if kill[0] == "primitive":
        kill_at_primitive(kill[1])
    if isinstance(data[0], L.LightningDataModule):
        trainer.fit(module, datamodule=data[0])
    else:
        trainer.fit(module, *data)
    module = trainer.lightning_module
    end = {
        "module": module.state_dict(),
        "optimizers": [one.state_dict() for one in trainer.optimizers],
        "schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        "losses": losses.losses,
        "metrics": dict(trainer.callback_metrics),
        "logged": dict(trainer.logged_metrics),
        "shown": dict(trainer.progress_bar_metrics),
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "generators": [torch.get_rng_state(), np.random.get_state()[1].copy()],
        "seen": getattr(module, "seen", None),
    }
    torch.save(end, Path(f"{store}{'' if rank is None else rank}.end"))
    ack(trainer.global_step)


def run_ranks(
    ack: Callable[[int], None],
    which: str,
    store: str,
    dies: int = 0,
    kill: tuple[str, int] = ("", 0),
) -> None:
    """The same by two ranks. dies: which of them does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ.update(
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank)
                )
                settings = {"job": Job(timeout=60)}
                run(ack, which, store, kill if rank == dies else ("", 0), settings, rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    first, status = os.wait()
    if status:  # as a launcher does
        os.kill(children[first == children[0]], signal.SIGKILL)
    _, other = os.wait()
    if status or other:
        os.kill(os.getpid(), signal.SIGKILL)
