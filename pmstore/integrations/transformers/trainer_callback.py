"""The callback that keeps a Trainer's training in a store."""

from __future__ import annotations

import atexit
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import ref

import torch
from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pmstore import Store
from pmstore.integrations.transformers.data import TrainerData
from pmstore.integrations.transformers.refusals import compare_settings, refuse, settings_of
from pmstore.integrations.transformers.trainer_checkpoint import export
from pmstore.integrations.transformers.trainer_state import StoredState, trainer_of
from pmstore.opening import open as open_store
from pmstore.scheduler import CommitPolicy, CommitScheduler, PreemptionGuard
from pmstore.torch import Job, Resume, Run, attach
from pmstore.torch.run_errors import AttachError

_STOP = "should_training_stop"
"""A further name among the settings that may be other ones: an end that a callback brought about is
none for the program that is started again."""
_AFTER_LOADING = "_issue_warnings_after_load"
"""What a Trainer calls once it has loaded a checkpoint. It would warn that weights are missing,
which are in the store."""
_LOG = "log"
"""What a Trainer calls with the last line of a training's log, before it loads the best model, from
which the training does not go on."""
_LAST_LINE = frozenset(("train_runtime", "train_loss", "total_flos"))
"""Keys of that line."""
_NEVER = 1 << 120
"""A number of steps behind every training's last. (Without a length there are 2**63 - 1 epochs.)"""


class PmstoreTrainerCallback(TrainerCallback):
    """Keeps a Trainer's training in a store, and goes on with the one that is there.

        callback = PmstoreTrainerCallback("run.pm")
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.folder())

    When the training begins, model, optimizer and learning rate scheduler are attached to the store
    (see `pmstore.torch.attach`): parameters and optimizer state lie in it from then on, until the
    training ends. A step ends where the next one begins: its evaluation and checkpoint are a part
    of it. `policy` says whether it is committed then. A kill, an error and Ctrl-C take back what is
    not.

    Where there are several ranks, each has a store of its own: "run.pm" becomes "run-0.pm",
    "run-1.pm", ... All are at the same step when the training begins (docs/DISTRIBUTED.md).

    Attributes:
        run: the `pmstore.torch.Run`, while the training goes on; else None.
        store: that lies open from `folder` or the training's begin until its end; else None.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        policy: CommitPolicy | CommitScheduler | Literal["auto"] | None = "auto",
        tiers: Mapping[str, Any] | Sequence[str] = (),
        guard: PreemptionGuard | None = None,
        resume: Resume | None = None,
        accept: Sequence[str] = (),
        job: Job | None = None,
        opening: Mapping[str, Any] | None = None,
    ) -> None:
        """Touches nothing yet.

        Args:
            path: of the store.
            policy, guard, resume, job: as for `attach`. job: of several ranks; None: `Job()`, all
                of them.
            tiers: places that the store flushes to: names with a URL, path or `TierConfig` each; or
                names of tiers that the store has.
            accept: names of the Trainer's settings that may differ from the stored ones, such as
                "max_steps". Others are refused. "should_training_stop": a training that a callback
                ended before its last step goes on when it is started again.
            opening: for `pmstore.open`, such as {"size": "8GiB", "domain": "file"}.
        """
        self.run: Run | None = None
        self.store: Store | None = None
        self._stored: StoredState | None = None  # in that store
        self._path = Path(path)
        self._tiers = tiers
        self._attaching: dict[str, Any] = {"policy": policy, "guard": guard, "resume": resume}
        self._job = job or Job()
        self._accept = tuple(accept)
        self._opening = dict(opening or {})
        self._args: TrainingArguments | None = None
        self._trainer: Trainer | None = None
        self._data: TrainerData | None = None
        self._settings: dict[str, Any] = {}
        self._written = 0  # the step that was ended last
        self._before: torch.Tensor | None = None  # sum of losses when the step began
        self._step = ExitStack()  # the step that is open
        self._resuming = False  # until the first step begins
        self._listening = ExitStack()  # to Trainer.log
        self._at_exit = partial(_close, ref(self))

    # ---- before the training

    def folder(self) -> str | None:
        """Returns what to give to `Trainer.train(resume_from_checkpoint=...)`: a folder that tells
        the Trainer which step the store holds. Returns None if the store holds no step: the
        training begins.

        The folder, `<path>.resume`, holds no weights; these stay in the store. It is written anew
        at each call. The store is open from then on, until the training ends, or `close`.

        Raises: AttachError: the callback was not given to a Trainer; what `pmstore.open` raises.
        """
        if self._args is None or self._trainer is None:
            raise AttachError(
                "folder() of a callback that no Trainer was made with (add_callback does not tell "
                "it of its Trainer): give it to Trainer(..., callbacks=[callback])"
            )
        self.close()
        stored = self._open()
        step = _least(stored.step, self._args)
        if step == 0:
            return None
        folder = Path(f"{self._place()}.resume")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        state = stored.read()
        state.global_step = _NEVER if self._ended(stored, state) else step
        state.save_to_json(str(folder / "trainer_state.json"))
        save_file({}, folder / "model.safetensors")
        vars(self._trainer)[_AFTER_LOADING] = lambda load_result: None
        return str(folder)

    def _ended(self, stored: StoredState, state: TrainerState) -> bool:
        """Returns whether nothing of the training is left to do."""
        assert self._args is not None
        if not stored.finished or any(  # given another length since it came to its end
            stored.settings.get(name) != getattr(self._args, name)
            for name in ("max_steps", "num_train_epochs")
        ):
            return False
        if state.global_step >= state.max_steps:
            return True
        if _STOP in self._accept:
            return False
        warnings.warn(
            f"the training in {self._place()} had ended at step {state.global_step} of "
            f"{state.max_steps}, by control.{_STOP}, as EarlyStoppingCallback does: nothing is "
            f"trained. PmstoreTrainerCallback(..., accept=[{_STOP!r}]) goes on with it",
            RuntimeWarning,
            stacklevel=3,
        )
        return True

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        if self._args is not None:
            raise AttachError(
                "a PmstoreTrainerCallback was given twice: each Trainer takes one of its own, once"
            )
        self._args = args
        self._trainer = trainer_of(self)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        train_dataloader: Any = None,
        **rest: Any,
    ) -> None:
        self._args = args
        self._trainer = trainer = trainer_of(self)
        vars(trainer).pop(_AFTER_LOADING, None)
        before = vars(trainer).get(_LOG)
        ours = vars(trainer)[_LOG] = partial(self._before_log, trainer.log)
        self._listening.callback(_give_back, vars(trainer), before, ours)
        try:
            refuse(trainer, self)
            stored = self._stored if self._stored is not None else self._open()
            self._attach(trainer, stored, optimizer, lr_scheduler, train_dataloader)
        except BaseException:
            self.close()
            raise

    def _attach(
        self, trainer: Trainer, stored: StoredState, optimizer: Any, lr_scheduler: Any, loader: Any
    ) -> None:
        assert self.store is not None
        args, state = trainer.args, trainer.state
        ended = state.global_step == _NEVER
        if stored.step and not state.global_step:
            raise AttachError(
                f"the store holds step {stored.step} of this training, and the Trainer would count "
                "from 0 over trained weights: write "
                "trainer.train(resume_from_checkpoint=callback.folder())"
            )
        self._data = data = TrainerData(loader, args.gradient_accumulation_steps)
        self._settings = settings_of(trainer, data)
        accept = [name for name in self._accept if name != _STOP]
        compare_settings(stored.settings, self._settings, accept)
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self.run = attach(
            self.store,
            model=trainer.model,
            optimizer=optimizer,
            lr_scheduler=getattr(lr_scheduler, "scheduler", lr_scheduler),
            scaler=getattr(trainer.accelerator, "scaler", None),
            stateful={"data": data},
            tiers=tuple(self._tiers),
            job=self._job if args.world_size > 1 else None,
            **self._attaching,
        )
        # now, as ranks that were ahead have gone back
        self._written = stored.step or state.global_step
        if stored.step and not ended and state.global_step != stored.step:
            raise AttachError(
                f"the Trainer goes on after step {state.global_step}, and the store holds step "
                f"{stored.step}: write trainer.train(resume_from_checkpoint=callback.folder())"
            )
        if stored.step:
            self._resuming = True
            stored.put_back(trainer)
        else:  # the first step reaches from here on: what the Trainer draws for it is a part of it
            self._step.enter_context(self.run.next_step())

    # ---- the training

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        self._require()
        assert self._data is not None
        if self._resuming:
            self._restore_generators()
        self._data.begin(state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        run = self._require()
        if self._resuming:
            # After the batches were skipped. What was evaluated at the start is of no step.
            self._resuming = False
            self._put_back()
            self._step.enter_context(run.next_step())
        elif state.global_step > self._written:
            self._end_step()
            self._step.enter_context(run.next_step())
        assert self._trainer is not None
        self._before = self._trainer._tr_loss.clone()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        # before it is logged, which makes the sum nothing
        if self.run is not None and self._trainer is not None and self._before is not None:
            self.run.log(loss=self._trainer._tr_loss - self._before)

    def _before_log(
        self, log: Callable[..., None], logs: dict[str, Any], *rest: Any, **more: Any
    ) -> None:
        """Ends the training before the Trainer logs its last line: callbacks change what it logs,
        so that they would not tell of the end."""
        if logs.keys() >= _LAST_LINE:
            self._end()
        log(logs, *rest, **more)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        if self.run is not None and args.load_best_model_at_end and state.best_model_checkpoint:
            raise AttachError(
                "the best model was loaded before the training's last line was logged by "
                "Trainer.log: a program that replaces Trainer.log, or how it trains, goes without "
                "load_best_model_at_end"
            )
        self._end()
        self.close()

    def _end(self) -> None:
        """Leaves the store, with the last step."""
        if self.run is None:
            return
        if self._resuming:  # no step was left to train
            self._put_back()
        else:
            self._end_step(finished=True)
        self._leave()

    def _end_step(self, *, finished: bool = False) -> None:
        """Completes the open step. It ends when the next one begins, or when the store is left."""
        assert self._stored is not None
        assert self._trainer is not None
        assert self._data is not None
        step = self._trainer.state.global_step
        self._data.finish(step)
        self._stored.write(self._trainer, self._settings, finished)
        self._written = step
        self._step.close()

    def _put_back(self) -> None:
        assert self.run is not None
        assert self._stored is not None
        assert self._trainer is not None
        assert self._data is not None
        self.run.rollback()  # where an older pmstore stored the run, the step does not
        self._stored.put_back(self._trainer)
        self._data.put_back()

    def _restore_generators(self) -> None:
        assert self.run is not None
        generators = self.run._steps.pieces.rng
        generators.restore()

    def _require(self) -> Run:
        if self.run is None:
            raise AttachError(
                "a PmstoreTrainerCallback was added after the training had begun: give it to "
                "Trainer(..., callbacks=[callback])"
            )
        return self.run

    # ---- out of the store

    def export(self, n: int | None = None, folder: str | os.PathLike[str] | None = None) -> str:
        """Writes the last commit as a checkpoint of the Trainer's own, which a Trainer without this
        callback resumes from: weights, optimizer, scheduler, generators, its state. Where there are
        several ranks, all of them call it.

        Args:
            n: the step that it is to be of; None: whichever the store holds.
            folder: the checkpoint; None: `checkpoint-<n>` in the Trainer's output_dir.

        Returns: the folder.

        Raises: AttachError: the store holds no step, or another one than n; what `pmstore.open`
            raises.
        """
        if self._trainer is None or self._args is None:
            raise AttachError(
                "export() of a callback that no Trainer was made with: give it to "
                "Trainer(..., callbacks=[callback])"
            )
        with open_store(self._place(), mode="r") as store:
            step = StoredState(store).step
            if step == 0 or n not in (None, step):
                raise AttachError(
                    f"the store holds step {step}, and no step {n}: export() takes the last commit"
                    if step
                    else "the store holds no step yet"
                )
            place = Path(folder or f"{self._args.output_dir}/checkpoint-{step}")
            export(store, self._trainer, place)
        return str(place)

    # ---- the store

    def close(self) -> None:
        """Closes the store at its last commit. What was trained stays in the model.

        The training's end does it, and the program's, whatever ends it; call it after a training
        that raised, to train again in the same process.
        """
        if self._trainer is not None:
            vars(self._trainer).pop(_AFTER_LOADING, None)
        if (store := self._let_go()) is not None:
            store.__exit__(AttachError, None, None)  # any error

    def _leave(self) -> None:
        """Leaves the store in order: pending steps are committed. The model's tensors are private
        copies from then on."""
        if (store := self._let_go()) is not None:
            store.__exit__(None, None, None)

    def _let_go(self) -> Store | None:
        store, self.store, self.run, self._stored = self.store, None, None, None
        self._step = ExitStack()
        self._listening.close()
        atexit.unregister(self._at_exit)
        return store

    def _open(self) -> StoredState:
        self.store = store = open_store(self._place(), **self._opening)
        atexit.register(self._at_exit)  # the Trainer tells of no error
        if isinstance(self._tiers, Mapping):
            for name, tier in self._tiers.items():
                store.add_tier(name, tier)
        self._stored = StoredState(store)
        return self._stored

    def _place(self) -> Path:
        assert self._args is not None
        if self._args.world_size == 1:
            return self._path
        name = f"{self._path.stem}-{self._args.process_index}{self._path.suffix}"
        return self._path.with_name(name)


def _give_back(attributes: dict[str, Any], log: Callable[..., None] | None, ours: object) -> None:
    """Gives a Trainer its own `log` back, unless the program has replaced ours. log: None: it has
    the one of its class."""
    if attributes.get(_LOG) is ours:
        del attributes[_LOG]
        if log is not None:
            attributes[_LOG] = log


def _close(callback: ref[PmstoreTrainerCallback]) -> None:
    """Closes the store at the program's end. It keeps no callback alive: a callback that nothing
    holds has let go of its store, for the next training of the process."""
    if (open_still := callback()) is not None:
        open_still.close()


def _least(step: int, args: TrainingArguments) -> int:
    """Returns the least step of all ranks: ranks that are ahead go back when they are attached."""
    if args.world_size == 1:
        return step
    steps = torch.tensor(step, device=args.device)
    torch.distributed.all_reduce(steps, torch.distributed.ReduceOp.MIN)
    return int(steps)
