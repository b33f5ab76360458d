"""What Lightning's callback refuses, in one process: see test_lightning_bad_input.py."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.tuner import Tuner
from lightning_work import DATA, Net, Pair, loader

import pmstore
from pmstore.integrations.lightning import PmstoreCallback, PmstoreCheckpointIO
from pmstore.scheduler import EveryN, PreemptionGuard
from pmstore.torch import ChangedError, MismatchError


def trainer_of(*callbacks: Any, **settings: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{**quiet, "callbacks": list(callbacks), **settings})


def fit(callback: Any, module: Any = None, data: Any = None, **settings: Any) -> L.Trainer:
    trainer = trainer_of(callback, **settings)
    trainer.fit(Net() if module is None else module, loader(DATA) if data is None else data)
    return trainer


def given_twice(path: str) -> None:
    for callbacks in (
        [PmstoreCallback(path), PmstoreCallback(path + "2")],
        [PmstoreCallback(path)] * 2,
    ):
        with pytest.raises(ValueError, match="twice"):
            trainer_of(*callbacks).fit(Net(), loader(DATA))


def added_late(path: str) -> None:
    class Adds(L.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            trainer.callbacks.append(PmstoreCallback(path))

    with pytest.raises(ValueError, match="after the training had begun"):
        fit(Adds())


def refused(path: str) -> None:
    class Iterates(Net):
        def training_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
            next(dataloader_iter)

    for match, how in (
        ("dataloader_iter", {"module": Iterates()}),
        ("FSDPStrategy", {"strategy": FSDPStrategy(), "devices": 1, "accelerator": "cpu"}),
        ("goes? through|an iterator", {"data": iter([1])}),
        ("reload_dataloaders", {"reload_dataloaders_every_n_epochs": 2}),
    ):
        if "strategy" in how:
            callback, trainer = PmstoreCallback(path), trainer_of()
            trainer.strategy.__class__ = FSDPStrategy  # Lightning has it on accelerators only
            with pytest.raises(ValueError, match=match):
                callback.setup(trainer, Net(), "fit")
            continue
        with pytest.raises(ValueError, match=match):
            fit(PmstoreCallback(path), **how)  # type: ignore[arg-type]
    for other in (
        BackboneFinetuning(),
        LearningRateFinder(),
        ModelPruning("l1_unstructured", amount=0.3),
    ):
        with pytest.raises(ValueError, match=rf"{type(other).__name__} (exchanges|trains)"):
            trainer_of(PmstoreCallback(path), other).fit(Net(), loader(DATA))
    tuned = trainer_of(PmstoreCallback(path))
    with pytest.raises(ValueError, match="Find the value in a program of its own"):
        Tuner(tuned).lr_find(Net(), loader(DATA))
    with pytest.raises(TypeError, match="package builtins"):
        PmstoreCallback(path).setup(object(), Net(), "fit")


def changed(path: str) -> None:
    fit(PmstoreCallback(path), limit_train_batches=8)
    for match, how in (
        ("max_epochs of the Trainer: stored 1, given 2", {"max_epochs": 2}),
        ("max_steps of the Trainer: stored -1, given 5", {"max_steps": 5}),
        ("batch_size of the data loader: stored 5, given 4", {"data": loader(DATA, batch_size=4)}),
        ("length of the data set", {"data": loader([DATA[0]] * 8, batch_size=5)}),
    ):
        with pytest.raises(ChangedError, match=match):
            fit(PmstoreCallback(path), **{"limit_train_batches": 8, **how})  # type: ignore[arg-type]
    with pytest.raises(MismatchError):
        fit(PmstoreCallback(path), Pair(), limit_train_batches=8)

    class Other(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytest.raises(MismatchError, match="AdamW"):
        fit(PmstoreCallback(path), Other(), limit_train_batches=8)
    trainer = fit(PmstoreCallback(path, accept=["max_epochs"]), limit_train_batches=8, max_epochs=2)
    assert trainer.global_step == 16
    with pytest.raises(ValueError, match="no_such"):
        fit(PmstoreCallback(path, accept=["no_such"]))


def checkpoint_given(path: str) -> None:
    trainer = fit(L.Callback())
    trainer.save_checkpoint(path + ".ckpt")
    with pytest.raises(ValueError, match="Leave out ckpt_path"):
        trainer_of(PmstoreCallback(path)).fit(Net(), loader(DATA), ckpt_path=path + ".ckpt")


def ends(path: str) -> None:
    """Fit twice, a stop, an error, other stages, a fast run."""
    callback = PmstoreCallback(path)
    module = Net()
    trainer = trainer_of(callback)
    trainer.fit(module, loader(DATA))
    assert callback.run is callback.store is None
    weights = module.net[0].weight.clone()
    trainer.validate(module, loader(DATA), verbose=False)
    trainer.fit(module, loader(DATA))
    assert torch.equal(module.net[0].weight, weights)
    assert trainer.global_step == 8

    class Stops(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step >= 3

    stopped = trainer_of(PmstoreCallback(path + "2"), Stops(), max_epochs=5)
    stopped.fit(Net(), loader(DATA))
    again = trainer_of(PmstoreCallback(path + "2"), max_epochs=5)
    again.fit(Net(), loader(DATA))
    assert again.global_step == stopped.global_step == 3
    further = trainer_of(PmstoreCallback(path + "2", accept=["should_stop"]), max_epochs=2)
    with pytest.raises(ChangedError, match="max_epochs"):
        further.fit(Net(), loader(DATA))
    further = trainer_of(PmstoreCallback(path + "2", accept=["should_stop"]), max_epochs=5)
    further.fit(Net(), loader(DATA))
    assert further.global_step == 3 + 4 * 8  # an epoch that was stopped is over

    class Fails(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                raise RuntimeError("no more")

    callback = PmstoreCallback(path + "3", policy=None)  # on a disk "auto" commits once a second
    with pytest.raises(RuntimeError, match="no more"):
        trainer_of(callback, Fails()).fit(Net(), loader(DATA))
    assert callback.store is None
    with pmstore.open(path + "3") as store:
        assert store["run/progress"][0] == 3
    trainer_of(PmstoreCallback(path + "4"), fast_dev_run=True).fit(Net(), loader(DATA))
    with pytest.raises(FileNotFoundError):
        pmstore.open(path + "4", "r")
    trainer_of(PmstoreCallback(path + "5"), barebones=True).fit(Net(), loader(DATA))
    assert pmstore.open(path + "5", "r")["run/progress"][0] == 8


def ended_amid(path: str) -> None:
    """An exit of any status and Ctrl-C in a hook take back to the last commit; a notice of the
    guard, and SIGTERM, end a step."""

    class Ends(L.Callback):
        def __init__(self, end: Callable[[], None]) -> None:
            self.end = end

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                self.end()

    def raises(error: BaseException) -> Callable[[], None]:
        def end() -> None:
            raise error

        return end

    def committed(path: str, end: Callable[[], None], **given: Any) -> int:
        kept = PmstoreCallback(path, policy=EveryN(3), opening={"domain": "file"}, **given)
        with pytest.raises(SystemExit):
            trainer_of(Ends(end), kept).fit(Net(), loader(DATA))
        assert kept.store is None
        with pmstore.open(path) as store:
            return int(store["run/progress"][0])

    guard = PreemptionGuard()
    assert committed(path + "1", raises(SystemExit(0))) == 3
    assert committed(path + "2", raises(KeyboardInterrupt())) == 3
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it from then on
    assert committed(path + "3", lambda: os.kill(os.getpid(), signal.SIGTERM)) == 6
    assert committed(path + "4", guard.notify, guard=guard) == 6
    again = trainer_of(PmstoreCallback(path + "4", policy=EveryN(3), opening={"domain": "file"}))
    again.fit(Net(), loader(DATA))
    assert again.global_step == 8


def tiers_and_policy(path: str) -> None:
    """The callback's go to `attach`."""

    class Looks(L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            run = callback.run
            assert run is not None
            committed.append((run.step, run.committed))
            if run.step == 4:
                run.keep("four")

    committed: list[tuple[int, int]] = []
    callback = PmstoreCallback(path, policy=EveryN(3), tiers={"disk": path + ".tier"})
    trainer = fit(callback, callbacks=[Looks(), callback])
    assert trainer.global_step == 8
    # (`keep` acts where its step ends, and commits it)
    assert committed[:6] == [(0, 0), (1, 0), (2, 0), (3, 3), (4, 3), (5, 5)]
    with pmstore.open(path) as store:
        weights = store["run/model/net.0.weight"].clone()
        store.flush("disk", wait=True)
        assert store["run/progress"][0] == 8
    pmstore.restore(path + "2", path + ".tier")
    callback = PmstoreCallback(path + "2", policy=EveryN(3), tiers=["disk"])
    again = fit(callback)
    assert again.global_step == 8
    assert torch.equal(again.lightning_module.net[0].weight, weights)
    with pytest.raises(ValueError, match="nowhere"):
        fit(PmstoreCallback(path + "3", tiers=["nowhere"]))


def goes_on(path: str) -> None:
    """Longer than it was to be: as if it had been so long from the start."""

    class Rates(L.Callback):
        """What it does where an epoch begins belongs to that epoch."""

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * (trainer.current_epoch + 1)

    def trained(epochs: int, *callbacks: Any) -> torch.Tensor:
        torch.manual_seed(3)
        module = Net()
        trainer = trainer_of(Rates(), *callbacks, max_epochs=epochs)
        trainer.fit(module, loader(DATA))
        assert trainer.global_step == 8 * epochs
        return module.net[0].weight.detach().clone()

    weights = trained(4)
    for epochs in (1, 2, 4):
        longer = trained(epochs, PmstoreCallback(path, accept=["max_epochs"]))
    assert torch.equal(longer, weights)


def checkpoints(path: str) -> None:
    """PmstoreCheckpointIO, in the background too."""
    saves = ModelCheckpoint(path + ".d", save_last=True)
    plugin = AsyncCheckpointIO(PmstoreCheckpointIO())
    trainer = trainer_of(saves, plugins=[plugin])
    module = Net()
    trainer.fit(module, loader(DATA))
    read = PmstoreCheckpointIO().load_checkpoint(saves.last_model_path)
    assert read["global_step"] == 8
    for name, tensor in module.state_dict().items():
        assert torch.equal(read["state_dict"][name], tensor)
    other = trainer_of(max_epochs=2, plugins=[PmstoreCheckpointIO()])
    other.fit(Net(), loader(DATA), ckpt_path=saves.last_model_path)
    assert other.global_step == 16

    io = PmstoreCheckpointIO()
    io.save_checkpoint({"hyper_parameters": {"loss": torch.nn.L1Loss(), "n": [1, {2}]}}, path)
    with pytest.raises(Exception, match=r"hyper_parameters\.loss"):
        io.load_checkpoint(path)
    held = io.load_checkpoint(path, weights_only=False)["hyper_parameters"]
    assert isinstance(held["loss"], torch.nn.L1Loss)
    assert held["n"] == [1, {2}]
    io.remove_checkpoint(path)
    io.remove_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(path)
    io.save_checkpoint({"state_dict": module.state_dict()}, path)
    state: Any = io.load_checkpoint(path)["state_dict"]
    assert state._metadata == module.state_dict()._metadata
    with pytest.raises(ValueError, match="s3://"):
        io.save_checkpoint({}, "s3://bucket/x")
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, path, storage_options={})


def check(ack: Callable[[int], None], what: str, path: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    L.seed_everything(7, verbose=False)
    globals()[what](path)
