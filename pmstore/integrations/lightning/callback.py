"""Keeps a Trainer's run in a store, as a callback."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pmstore import Store
from pmstore.integrations.lightning import trainer_parts
from pmstore.integrations.lightning.loader import PlacedLoader
from pmstore.integrations.lightning.stateful_parts import Callbacks, Loops, Metrics, Settings
from pmstore.opening import open as open_store
from pmstore.scheduler import CommitPolicy, CommitScheduler, PreemptionGuard
from pmstore.tiers.config import TierConfig
from pmstore.torch import Job, Resume, Run, attach
from pmstore.torch._random import defaults as rng


class PmstoreCallback(Callback):
    """Keeps a Trainer's training in a store, so that the same program, killed at any moment and
    started again, goes on after the last step, bit for bit.

        trainer = Trainer(max_epochs=10, callbacks=[PmstoreCallback("run.pm")])
        trainer.fit(model, loader)

    A step reaches up to where the Trainer asks for the batch after it: what follows an update (a
    validation, schedulers, the end of an epoch) is kept or taken back with it. Where gradients are
    accumulated it holds all batches of an update. The end of the training is committed too: started
    again, the program does not train, and has the trained model.

    Kept are the module, its optimizers, schedulers and torchmetrics; the precision plugin's scaler;
    how far the Trainer is, and what was logged; the place in the training data and all generators
    that its order depends on; `state_dict` of the other callbacks and of the data module, models
    that callbacks hold (WeightAveraging), and what `on_save_checkpoint` of the module and of
    callbacks adds.

    With several ranks each has a store: `{rank}` in the path is its number; without it, `-0`
    and so on are put before the suffix. See docs/INTEGRATIONS.md.

    Attributes:
        store, run: of the training under way; None at other times.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        policy: CommitPolicy | CommitScheduler | Literal["auto"] | None = "auto",
        tiers: Sequence[str] | Mapping[str, TierConfig | str | os.PathLike[str]] = (),
        guard: PreemptionGuard | None = None,
        name: str = "run",
        mirror: bool | None = None,
        resume: Resume | None = None,
        accept: Sequence[str] = (),
        job: Job | None = None,
        opening: Mapping[str, Any] | None = None,
    ) -> None:
        """Takes what is given to the store and the run; opens nothing yet.

        path: of the store; it is made if there is none, and closed when `fit` ends.
        policy, guard, name, mirror, resume, job: see `pmstore.torch.attach`. job: of several ranks;
            None: `Job()`, all of them.
        tiers: names of tiers of the store to flush to; or a dict, which adds them to the store
            first, `{"disk": "/mnt/run"}` (see `Store.add_tier`).
        accept: settings of the Trainer that may be other ones than those stored, such as
            ["max_epochs"] to train on after the end. "should_stop": also after an end that
            `trainer.should_stop` brought about, as EarlyStopping and a limit of time do.
        opening: for `pmstore.open`, such as {"size": "8GiB", "domain": "file"}.

        Errors are raised by `Trainer.fit`, before the first step: ValueError, for what cannot be
        kept; those of `attach` and `pmstore.open`. ChangedError names settings of the Trainer and
        its loaders that are not those stored. MismatchError: another model or optimizer.
        """
        self.store: Store | None = None
        self.run: Run | None = None
        self._path = os.fspath(path)
        self._tiers = tiers
        self._given: dict[str, Any] = {
            "policy": policy,
            "guard": guard,
            "name": name,
            "mirror": mirror,
            "resume": resume,
        }
        self._accept = tuple(accept)
        self._job = job or Job()
        self._opening = dict(opening or {})
        self._trainer: Any = None
        self._resumes = False

    # ---- the Trainer begins

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        trainer_parts.refuse(trainer, pl_module, self)
        if stage != "fit":
            return
        self._trainer = None
        if trainer.fast_dev_run:
            rank_zero_info("fast_dev_run: PmstoreCallback keeps nothing")
            return
        self._trainer = trainer
        # The last one: what others do at an end is kept, too. (Not in place: the list is being gone
        # through.)
        trainer.callbacks = [*(one for one in trainer.callbacks if one is not self), self]
        self._loaders: list[PlacedLoader] = []
        self._places: list[dict[str, Any]] = []  # of loaders that are not there yet
        self._resumes = self._stepped = self._started = False
        self._generators: dict[str, Any] | None = None  # as of the last commit, while it resumes
        self._step = ExitStack()
        self._place_loaders(trainer)

    def _place_loaders(self, trainer: Any) -> None:
        """Has the Trainer's strategy, which may wrap loaders, give those for training a place that
        is kept."""
        strategy: Any = trainer.strategy
        inner = type(strategy).process_dataloader

        def process_dataloader(loader: object) -> object:
            loader = inner(strategy, loader)
            return self._placed(loader) if trainer.training else loader

        strategy.process_dataloader = process_dataloader
        started = type(strategy).on_train_start

        def on_train_start() -> None:
            """Runs when all that is called at each start has been called."""
            started(strategy)
            if self._resumes:
                self._loops.change()
            if self._resumes and not self._loops.within:
                self._take_back()  # not later: what hooks do where an epoch begins belongs to it

        strategy.on_train_start = on_train_start

    def _placed(self, loader: Any) -> PlacedLoader:
        """Wraps one of the loaders for training. They come in the order of the Trainer's."""
        if self._loaders and self._loaders[0].looped:  # it takes its loaders anew
            self._close_loaders()
            if not self._resumes or self._started:  # else `configure_optimizers` took them
                self._places = []
        index = len(self._loaders)
        placed = PlacedLoader(loader, lambda begins: self._asked(index, begins))
        self._loaders.append(placed)
        if index and not all(one.sized for one in self._loaders):
            raise ValueError(
                "of several data loaders for training one has no length, so that it is not known "
                "which batches a step was of: give all of them a length, or use one loader"
            )
        if index < len(self._places):
            placed.go_to(self._places[index], within=self._loops.within)
        return placed

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        if self._trainer is None:
            return
        if trainer.ckpt_path is not None:
            raise ValueError(
                f"fit(ckpt_path={str(trainer.ckpt_path)!r}) and PmstoreCallback: the store says "
                "where the training is. Leave out ckpt_path; to begin with the weights of a "
                "checkpoint, load them into the module before fit"
            )
        if trainer.reload_dataloaders_every_n_epochs > 1:
            raise ValueError(
                f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}: a "
                "Trainer that is started again counts these epochs anew. Use 1, or 0"
            )
        self.store = open_store(self._path_of(trainer), **self._opening).__enter__()
        self._loops, self._metrics = Loops(trainer, self._accept), Metrics(trainer)
        self.run = attach(
            self.store,
            model=trainer_parts.models_of(trainer, pl_module),
            optimizer=trainer_parts.optimizers_of(trainer, pl_module),
            lr_scheduler=trainer_parts.schedulers_of(trainer),
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            stateful={
                "settings": Settings(trainer, self._accept),
                "loops": self._loops,
                "callbacks": Callbacks(trainer, self),
                "metrics": self._metrics,
                "loaders": _Loaders(self),
            },
            tiers=self._add_tiers(self.store),
            job=self._job if trainer.world_size > 1 else None,
            **self._given,
        )
        self._resumes = self.run.resumed and self._loops.begun
        if self._resumes:
            self._generators = rng.capture()
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
        else:  # the first step reaches from here on: what the Trainer draws for it is a part of it
            self._step.enter_context(self.run.next_step())
        for one in trainer.optimizers:
            one.register_step_post_hook(self._step_made)

    def _path_of(self, trainer: Any) -> str:
        if trainer.world_size == 1 or "{rank}" in self._path:
            return self._path.replace("{rank}", str(trainer.global_rank))
        path = Path(self._path)
        return str(path.with_name(f"{path.stem}-{trainer.global_rank}{path.suffix}"))

    def _add_tiers(self, store: Store) -> list[str]:
        if isinstance(self._tiers, Mapping):
            for name, tier in self._tiers.items():
                store.add_tier(name, tier)
        return list(self._tiers)

    # ---- steps

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self._started = True

    def on_train_batch_start(
        self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.run is None and not trainer.fast_dev_run:
            raise ValueError(
                "PmstoreCallback was added after the training had begun: give it to "
                "Trainer(callbacks=[...])"
            )

    def _step_made(self, *_: Any) -> None:
        self._stepped = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.run is None:
            return
        if (loss := trainer_parts.loss_of(outputs)) is not None:
            self.run.log(loss=loss)
        self._stepped = self._stepped or not trainer.optimizers

    @contextmanager
    def _asked(self, index: int, begins: bool) -> Iterator[None]:
        """Wraps each request of the Trainer to a loader: for a batch, or to begin a loop over
        it."""
        if self._resumes and not self._started:
            # The Trainer begins loops while it sets up, and takes a batch ahead, as it did before.
            assert self._generators is not None
            rng.restore(self._generators)
            yield
            self._generators = rng.capture()
            return
        if index == 0 and not begins and self._between():
            if self._resumes:
                self._go_on()
            elif self._stepped and self.run is not None:
                self._end()
                self._step.enter_context(self.run.next_step())
        yield

    def _between(self) -> bool:
        """Returns whether all of a step is done, and nothing of the next one."""
        if self._trainer is None or not (self._started and self._trainer.training):
            return False
        loop = self._trainer.fit_loop
        batches, epochs = loop.epoch_loop.batch_progress.current, loop.epoch_progress.current
        within: bool = epochs.started > epochs.processed
        return within and bool(batches.ready == batches.completed)

    def _go_on(self) -> None:
        """Makes everything as it was when the stored run was here, whatever was done since the
        start: by hooks that are called at each start, and by the Trainer where it makes up for a
        step that it takes for unfinished."""
        if self._loops.within:
            self._take_back()
        self._metrics.go_on(within=self._loops.within)
        self._loops.go_on()
        self._resumes, self._generators, self._stepped = False, None, False

    def _take_back(self) -> None:
        """Takes back what was done since the start, and begins the next step."""
        assert self.run is not None
        self.run.rollback()  # where an older pmstore stored the run, the step does not
        self._step.enter_context(self.run.next_step())
        if self._generators is not None:
            rng.restore(self._generators)

    def _end(self) -> None:
        """Completes the open step. It ends when the next one begins, or when the store is left."""
        self._loops.begun, self._stepped = True, False
        self._step.close()

    # ---- the Trainer ends

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if self.run is not None:
            self._end()
            self._leave(None)

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Leaves the store after a training that did not begin."""
        if self.run is None:
            return
        self.run.rollback()  # what hooks did at this start
        if self._resumes and self._generators is not None:
            how = (
                ' by trainer.should_stop. accept=["should_stop"] goes on with it'
                if trainer.should_stop
                else ""
            )
            where = self.run.store.path
            rank_zero_info(f"the training in {where} had ended{how}: nothing was trained")
            rng.restore(self._generators)
        self._leave(None)

    def on_exception(
        self, trainer: Any, pl_module: LightningModule, exception: BaseException
    ) -> None:
        told = isinstance(exception, SIGTERMException) and self.run is not None
        if told and self._between() and self._stepped:
            self._end()
            self._leave(None)
        self._leave(exception)

    def _leave(self, exception: BaseException | None) -> None:
        trainer = self._trainer
        if trainer is None:
            return
        store, self.store, self.run = self.store, None, None
        kind = None if exception is None else type(exception)
        try:
            if store is not None:
                store.__exit__(kind, exception, None)
        finally:
            self._close_loaders()
            del trainer.strategy.process_dataloader, trainer.strategy.on_train_start
            self._trainer = None

    def _close_loaders(self) -> None:
        for one in self._loaders:
            one.close()
        self._loaders.clear()

    # ---- the places of the loaders

    def _go_to(self, places: list[dict[str, Any]]) -> None:
        if self._started or not self._loops.begun:
            return  # the loaders are there already; or no step was stored
        self._places = places
        for one, place in zip(self._loaders, places, strict=False):
            one.go_to(place, within=self._loops.within)


class _Loaders:
    """Keeps the places of a callback's loaders."""

    def __init__(self, callback: PmstoreCallback) -> None:
        self._callback = callback

    def state_dict(self) -> dict[str, Any]:
        trainer = self._callback._trainer
        assert trainer is not None
        trained = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        return {"loaders": [one.place(trained) for one in self._callback._loaders]}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._callback._go_to(state_dict["loaders"])
