"""Keeps what a Trainer holds beside model, optimizers and schedulers, as objects with a
`state_dict`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric

from pmstore.torch.run_errors import ChangedError
from pmstore.torch.settings import plain, same

_SETTINGS = (
    "max_epochs",
    "max_steps",
    "accumulate_grad_batches",
    "precision",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "limit_val_batches",
    "overfit_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "reload_dataloaders_every_n_epochs",
    "world_size",
)
"""Settings of the Trainer that the steps, or their number, depend on."""
_STOP = "should_stop"
"""A further name among those that may be other ones: an end that `trainer.should_stop` brought
about is none for the program that is started again."""
_BY_EPOCH = ("accumulate_grad_batches", "gradient_clip_val")
"""Settings of the Trainer that callbacks such as GradientAccumulationScheduler change where an
epoch begins."""


class Settings:
    """Keeps the settings that the Trainer was given."""

    def __init__(self, trainer: Any, accept: tuple[str, ...]) -> None:
        """Reads the Trainer's settings. accept: settings that may be other ones than those stored.

        Raises: ValueError: there is no such setting.
        """
        names = (*_SETTINGS, _STOP)
        unknown = [name for name in accept if name not in names]
        if unknown:
            raise ValueError(
                f"accept={list(accept)!r}: {unknown[0]!r} is none of {', '.join(names)}"
            )
        self._given = {name: plain(getattr(trainer, name)) for name in _SETTINGS}
        self._accept = accept

    def state_dict(self) -> dict[str, Any]:
        return self._given

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        changed = [
            f"{name} of the Trainer: stored {state_dict[name]!r}, given {self._given[name]!r}. "
            f"accept={[name]!r}"
            for name in state_dict
            if name in self._given
            and name not in self._accept
            and not same(state_dict[name], self._given[name])
        ]
        if changed:
            raise ChangedError(
                "the Trainer is given other settings than when the run was made: give it those "
                "stored, or say which may change by PmstoreCallback(..., accept=[...])",
                mismatched=changed,
            )


class Loops:
    """Keeps how far the Trainer is, as its loops count."""

    def __init__(self, trainer: Any, accept: tuple[str, ...]) -> None:
        self._trainer = trainer
        self._may_stop = _STOP not in accept
        self._given = self._by_epoch()
        self._changed: dict[str, Any] = {}  # settings that callbacks had changed in the stored run
        self.begun: bool = False  # if not, there is nothing to go on with
        self.within: bool = False  # the stored run was within an epoch

    def _by_epoch(self) -> dict[str, Any]:
        return {name: getattr(self._trainer, name) for name in _BY_EPOCH}

    def state_dict(self) -> dict[str, Any]:
        loop = self._trainer.fit_loop
        epochs = loop.epoch_progress.current
        loaders, loop._combined_loader = loop._combined_loader, None  # `loader.py` keeps these
        state: dict[str, Any] = {}
        try:
            _add_state(loop, "", state)
        finally:
            loop._combined_loader = loaders
        return {
            "begun": self.begun,
            "within": epochs.started > epochs.processed,
            "fit_loop": state,
            "should_stop": bool(self._trainer.should_stop),
            "changed": {
                name: value
                for name, value in self._by_epoch().items()
                if value != self._given[name]
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.begun, self.within = state_dict["begun"], state_dict["within"]
        if self.begun:
            self._trainer.fit_loop.load_state_dict(state_dict["fit_loop"])
            self._trainer.should_stop = state_dict["should_stop"] and self._may_stop
            self._changed = state_dict.get("changed", {})

    def change(self) -> None:
        """Sets the Trainer's settings to those that callbacks had given it for the stored epoch.
        (Such a callback looks at what it was given at the start, and changes nothing in
        mid-epoch.)"""
        for name, value in self._changed.items():
            setattr(self._trainer, name, value)

    def go_on(self) -> None:
        """Ends the Trainer's restart: from now on it leaves nothing out, and does nothing
        otherwise."""
        loop = self._trainer.fit_loop
        for one in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
            one.on_iteration_done()


def _add_state(loop: Any, prefix: str, state: dict[str, Any]) -> None:
    """Adds what `loop.state_dict()` returns. That copies each number as if it were an object, which
    takes five times as long."""
    if type(loop).state_dict is not _Loop.state_dict:
        loop.state_dict(state, prefix)
        return
    state[f"{prefix}state_dict"] = loop.on_save_checkpoint()
    for name, one in vars(loop).items():
        if isinstance(one, _BaseProgress):
            state[prefix + name] = _numbers_of(one)
        elif isinstance(one, _Loop):
            _add_state(one, f"{prefix}{name}.", state)


def _numbers_of(progress: _BaseProgress) -> dict[str, Any]:
    return {
        name: _numbers_of(one) if isinstance(one, _BaseProgress) else one
        for name, one in vars(progress).items()
    }


class Callbacks:
    """Keeps the state of the Trainer's other callbacks, and of the module's and the data module's
    hooks."""

    def __init__(self, trainer: Any, own: Callback) -> None:
        self._trainer = trainer
        self._own = own
        self._warned = False

    def _others(self) -> dict[str, Callback]:
        return {one.state_key: one for one in self._trainer.callbacks if one is not self._own}

    def state_dict(self) -> dict[str, Any]:
        states = {key: one.state_dict() for key, one in self._others().items()}
        return {
            "callbacks": {key: state for key, state in states.items() if state},
            "saved": self._saved(),
            "datamodule": self._datamodule_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        others = self._others()
        for key, state in state_dict["callbacks"].items():
            if key in others:
                others[key].load_state_dict(state)
            elif not self._warned:
                self._warned = True
                warnings.warn(
                    f"the stored run has a state of the callback {key}, which the Trainer is not "
                    "given now",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._load(state_dict["saved"])
        if state_dict["datamodule"] and self._trainer.datamodule is not None:
            self._trainer.datamodule.load_state_dict(state_dict["datamodule"])

    # ---- what hooks add to a checkpoint

    def _hooks(self, name: str, base: type) -> list[Any]:
        """Returns the callbacks that have that hook. Averaged weights are kept as a model, not
        here."""
        plain_hook = getattr(base, name)
        return [
            one
            for one in self._others().values()
            if getattr(type(one), name, plain_hook) is not plain_hook
            and not isinstance(one, WeightAveraging)
        ]

    def _checkpoint(self) -> dict[str, Any]:
        """Returns a checkpoint with the entries that hooks may expect to find."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": trainer.lightning_module.state_dict(),
            "loops": {},
            "callbacks": {},
            "optimizer_states": [],
            "lr_schedulers": [],
        }

    def _saved(self) -> dict[str, Any]:
        module = self._trainer.lightning_module
        callbacks = self._hooks("on_save_checkpoint", Callback)
        of_module = type(module).on_save_checkpoint is not LightningModule.on_save_checkpoint
        if not callbacks and not of_module:
            return {}
        checkpoint = self._checkpoint()
        given = set(checkpoint)
        for one in callbacks:
            one.on_save_checkpoint(self._trainer, module, checkpoint)
        if of_module:
            module.on_save_checkpoint(checkpoint)
        return {key: value for key, value in checkpoint.items() if key not in given}

    def _load(self, saved: dict[str, Any]) -> None:
        module = self._trainer.lightning_module
        if not saved:
            return
        checkpoint = {**self._checkpoint(), **saved}
        if type(module).on_load_checkpoint is not LightningModule.on_load_checkpoint:
            module.on_load_checkpoint(checkpoint)
        for one in self._hooks("on_load_checkpoint", Callback):
            one.on_load_checkpoint(self._trainer, module, checkpoint)

    def _datamodule_state(self) -> dict[str, Any]:
        module = self._trainer.datamodule
        if module is None or type(module).state_dict is LightningDataModule.state_dict:
            return {}
        return dict(module.state_dict())


class Metrics:
    """Keeps what was logged: the newest figures, by which schedulers and callbacks go, and what the
    Trainer has gathered since the epoch began. It keeps torchmetrics' metrics in the module too."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._logged = trainer._logger_connector
        self._stored: dict[str, Any] | None = None  # not yet given to the Trainer: `go_on`

    def _metrics(self) -> dict[str, Metric]:
        modules = self._trainer.lightning_module.named_modules()
        return {name: one for name, one in modules if isinstance(one, Metric)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "newest": {name: dict(newest) for name, newest in self._newest().items()},
            "epoch": self._epoch() if self._stored is None else self._stored,
            "metrics": {
                name: {"state": _state_of(one), "updates": one._update_count}
                for name, one in self._metrics().items()
            },
        }

    def _newest(self) -> dict[str, dict[str, Any]]:
        """Returns the Trainer's own figures. What is gathered is not in them yet."""
        return {
            "callback": self._logged._callback_metrics,
            "logged": self._logged._logged_metrics,
            "bar": self._logged._progress_bar_metrics,
        }

    def _results(self) -> dict[str, _ResultMetric]:
        results: dict[str, _ResultMetric] = self._trainer.fit_loop.epoch_loop._results
        return results

    def _epoch(self) -> dict[str, Any]:
        """Returns what was gathered since the epoch began, by the hook that logged it and its
        name; and by which hook, and whether in the first batch, as what is logged next depends on
        it."""
        return {
            "results": {
                key: _gathered(one) for key, one in self._results().items() if not one.has_reset
            },
            "hook": self._logged._current_fx,
            "first": self._logged._first_loop_iter,
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        for name, newest in self._newest().items():
            newest.clear()
            newest.update(state_dict["newest"][name])
        self._stored = state_dict["epoch"]
        for name, one in self._metrics().items():
            if name in state_dict["metrics"]:
                stored = state_dict["metrics"][name]
                for key, value in stored["state"].items():
                    setattr(one, key, value)
                one._update_count, one._computed = stored["updates"], None

    def go_on(self, *, within: bool) -> None:
        """Gives the Trainer what was gathered in the stored epoch, if that is under way. It takes
        the place of what hooks have logged at this start."""
        stored, self._stored = self._stored, None
        if not within or stored is None:
            return
        results = self._results()
        results.clear()
        for key, gathered in stored["results"].items():
            results[key] = self._made(gathered)
        self._logged._current_fx, self._logged._first_loop_iter = stored["hook"], stored["first"]

    def _made(self, gathered: dict[str, Any]) -> _ResultMetric:
        meta = _Metadata(**gathered["logged"], reduce_fx=_REDUCE[tuple(gathered["reduce"])])
        reduce = self._trainer.strategy.reduce  # as LightningModule.log gives it
        meta.sync = _Sync(fn=reduce, _should=gathered["sync"], rank_zero_only=gathered["rank_zero"])
        is_tensor = gathered["value"] is not None
        one = _ResultMetric(meta, is_tensor)
        if is_tensor:
            one.value = gathered["value"]
            if gathered["batches"] is not None:
                one.cumulated_batch_size = gathered["batches"]
        else:
            one.value = self._trainer.lightning_module.get_submodule(meta.metric_attribute)
        one._forward_cache, one._update_count = gathered["newest"], gathered["updates"]
        return one.to(self._trainer.strategy.root_device)


_LOGGED = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
"""Of what `LightningModule.log` was called with, what is data."""
_REDUCE: dict[tuple[str, ...], Callable[..., Any]] = {
    ("torch", "mean"): torch.mean,
    ("torch", "sum"): torch.sum,
    ("torch", "max"): torch.max,
    ("torch", "min"): torch.min,
    ("builtins", "max"): max,
    ("builtins", "min"): min,
    ("builtins", "sum"): sum,
}
"""All that Lightning takes."""


def _gathered(one: _ResultMetric) -> dict[str, Any]:
    """Returns what `Metrics` keeps of a figure that is gathered. Raises: ValueError."""
    meta, newest = one.meta, one._forward_cache
    if meta.sync.group is not None:
        raise ValueError(
            f"self.log({meta.name!r}, sync_dist_group=...): a group of ranks cannot be kept. Leave "
            "it out, or reduce the value over the group before it is logged"
        )
    (reduce,) = (names for names, one in _REDUCE.items() if one is meta.reduce_fx)
    return {
        "logged": {key: getattr(meta, key) for key in _LOGGED},
        "reduce": [*reduce],
        "sync": meta.sync.should,
        "rank_zero": meta.sync.rank_zero_only,
        "value": one.value.detach() if one.is_tensor else None,
        "batches": getattr(one, "cumulated_batch_size", None),
        "newest": newest.detach() if isinstance(newest, torch.Tensor) else newest,
        "updates": one._update_count,
    }


def _state_of(metric: Metric) -> dict[str, Any]:
    return {
        key: [one.detach() for one in value] if isinstance(value, list) else value.detach()
        for key, value in metric.metric_state.items()
    }
