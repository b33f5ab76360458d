"""What a Trainer's callback refuses, and what it exports: children of test_trainer_checks, which
has one process import the library for all of them."""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_work import Kill, Masked, Plain, found, make
from transformers import TrainerCallback

import pmstore
from pmstore.integrations.transformers import PmstoreTrainerCallback
from pmstore.integrations.transformers.trainer_state import StoredState
from pmstore.scheduler import EveryN, PreemptionGuard
from pmstore.torch import AttachError, ChangedError, Job

Ack = Callable[[int], None]
SMALL = {"size": "8MiB"}
SHORT: dict[str, Any] = {"max_steps": 5, "logging_steps": 2}


def begun(folder: str, **more: Any) -> Any:
    """A trainer with a callback, and what it resumes from."""
    callback = PmstoreTrainerCallback(Path(folder, "run.pm"), opening=SMALL)
    trainer = make(SHORT, Path(folder), [callback], **more)
    return trainer, callback


def stop(folder: str, at: int = 3, **more: Any) -> None:
    """Trains in a child that dies after so many steps."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        trainer, callback = begun(folder, **more)
        trainer.add_callback(Kill(at))
        trainer.train(resume_from_checkpoint=callback.folder())
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9


def without_the_folder(ack: Ack, folder: str) -> None:
    torch.set_num_threads(1)
    stop(folder)
    trainer, callback = begun(folder)
    with pytest.raises(AttachError, match=r"holds step 2 .*resume_from_checkpoint=callback.folder"):
        trainer.train()
    assert callback.run is None
    assert callback.store is None
    trainer, callback = begun(folder)
    with pytest.raises(ValueError, match="Can't find"):
        trainer.train(resume_from_checkpoint=str(folder))
    trainer, callback = begun(folder)
    assert callback.folder() == f"{folder}/run.pm.resume"
    callback.close()
    trainer.train(resume_from_checkpoint=callback.folder())
    assert trainer.state.global_step == 5


def changed_settings(ack: Ack, folder: str) -> None:
    torch.set_num_threads(1)
    stop(folder)
    for changed, told in (
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size: stored 4, given 2"),
        ({"max_steps": 6}, "max_steps: stored 5, given 6"),
        ({"seed": 4}, "seed: stored 3, given 4"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps: stored 1, given 2"),
        ({"data": shorter}, "length of the data set: stored 26, given 20"),
        ({"optim": "sgd"}, "class.*AdamW.*SGD"),
        ({"learning_rate": 0.5}, "given 0.5"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
    ):
        trainer, callback = begun(folder, **changed)
        with pytest.raises((ChangedError, AttachError), match=told):
            trainer.train(resume_from_checkpoint=callback.folder())
        assert callback.store is None
    callback = PmstoreTrainerCallback(Path(folder, "run.pm"), accept=["max_steps"])
    trainer = make(SHORT, Path(folder), [callback], max_steps=8)
    trainer.train(resume_from_checkpoint=callback.folder())
    assert trainer.state.global_step == 8
    with pytest.raises(AttachError, match="none of the settings"):
        callback = PmstoreTrainerCallback(Path(folder, "run.pm"), accept=["speed"])
        trainer = make(SHORT, Path(folder), [callback], max_steps=8)
        trainer.train(resume_from_checkpoint=callback.folder())


def shorter() -> list[Any]:
    from trainer_work import language

    return language()[:20]


def given_wrongly(ack: Ack, folder: str) -> None:
    torch.set_num_threads(1)
    callback = PmstoreTrainerCallback(Path(folder, "run.pm"), opening=SMALL)
    with pytest.raises(AttachError, match="no Trainer"):
        callback.folder()
    with pytest.raises(AttachError, match="no Trainer"):
        callback.export()
    with pytest.raises(AttachError, match="given twice"):
        make(SHORT, Path(folder), [callback, callback])
    with pytest.raises(AttachError, match="given twice"):
        make(SHORT, Path(folder), [callback])
    two = [PmstoreTrainerCallback(Path(folder, f"{name}.pm"), opening=SMALL) for name in "ab"]
    trainer = make(SHORT, Path(folder), list(two))
    with pytest.raises(AttachError, match="two PmstoreTrainerCallbacks"):
        trainer.train()

    class Late(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == 2:
                trainer.add_callback(PmstoreTrainerCallback(Path(folder, "c.pm")))

    trainer = make(SHORT, Path(folder), [Late()])
    with pytest.raises(AttachError, match="after the training had begun"):
        trainer.train()
    for given, told in (
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
    ):
        fresh = Path(folder, "fresh.pm")
        trainer = make(SHORT, Path(folder), [PmstoreTrainerCallback(fresh)], **given)
        with pytest.raises(AttachError, match=told):
            trainer.train()


def streams_that_draw(ack: Ack, folder: str) -> None:
    from trainer_work import Stream

    torch.set_num_threads(1)
    trainer, _ = begun(folder, data=Stream, collator=lambda: Masked(False))
    with pytest.raises(AttachError, match="dataloader_num_workers=1"):
        trainer.train()
    trainer, _ = begun(f"{folder}/..", data=lambda: Stream(False), max_steps=20)
    with pytest.raises(AttachError, match=r"came to its end after step 7.*repeat"):
        trainer.train()


def exports(ack: Ack, folder: str) -> None:
    """A Trainer without the callback goes on from what was exported as the one that was never
    stopped."""
    torch.set_num_threads(1)
    for at in (4, 8):  # in a data epoch; before the first step of one
        place = Path(folder, str(at))
        place.mkdir()
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            whole = make({"logging_steps": 1}, place, [])
            result = found(whole, whole.train().training_loss)
            Path(place, "whole.json").write_text(json.dumps(result))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            callback = PmstoreTrainerCallback(place / "run.pm", opening=SMALL)
            make({"logging_steps": 1}, place, [callback, Kill(at)]).train()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
        callback = PmstoreTrainerCallback(place / "run.pm")
        make({"logging_steps": 1}, place, [callback])
        with pytest.raises(AttachError, match=f"holds step {at - 1}, and no step 77"):
            callback.export(77)
        checkpoint = callback.export(at - 1)
        assert checkpoint == str(place / "out" / f"checkpoint-{at - 1}")
        plain = make({"logging_steps": 1}, place, [])
        plain.train(resume_from_checkpoint=checkpoint)
        given = json.loads((place / "whole.json").read_text())
        came = found(plain, 0.0)
        for name in ("model", "optimizer", "steps", "scheduler", "flos"):
            assert came[name] == given[name], name
        assert came["log"][:-1] == given["log"][:-1]


class Raise(TrainerCallback):
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == 2:
            raise OSError("as meant")


def an_exception(ack: Ack, folder: str) -> None:
    """A training that raised can be begun again in the same process."""
    torch.set_num_threads(1)
    trainer, callback = begun(folder)
    raising = Raise()
    trainer.add_callback(raising)
    with pytest.raises(OSError, match="as meant"):
        trainer.train(resume_from_checkpoint=callback.folder())
    trainer.remove_callback(raising)
    trainer.train(resume_from_checkpoint=callback.folder())
    assert trainer.state.global_step == 5


def an_exception_of_one_that_is_gone(ack: Ack, folder: str) -> None:
    """As a notebook's cell that is run again: nothing holds what raised, nor its store."""
    torch.set_num_threads(1)

    def train(*others: TrainerCallback) -> int:
        callback = PmstoreTrainerCallback(Path(folder, "run.pm"), opening=SMALL)
        trainer = make({**SHORT, "model": Plain}, Path(folder), [callback, *others])
        trainer.train(resume_from_checkpoint=callback.folder())
        return int(trainer.state.global_step)

    with pytest.raises(OSError, match="as meant"):
        train(Raise())
    gc.collect()
    assert train() == 5


class Stop(TrainerCallback):
    """Ends the training, in one way or another."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == 3 and self.error is not None:
            raise self.error

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        control.should_training_stop |= state.global_step == 3 and self.error is None


def goes_on_after_its_end(ack: Ack, folder: str) -> None:
    """Longer than it was to be, or than a callback let it be."""
    torch.set_num_threads(1)

    def trained(name: str, steps: int, *others: TrainerCallback, **given: Any) -> Any:
        callback = PmstoreTrainerCallback(Path(folder, name), opening=SMALL, **given)
        trainer = make(SHORT, Path(folder), [callback, *others], max_steps=steps)
        trainer.train(resume_from_checkpoint=callback.folder())
        return trainer

    assert trained("long.pm", 5).state.global_step == 5
    assert trained("long.pm", 9, accept=["max_steps"]).state.global_step == 9
    assert trained("stopped.pm", 9, Stop()).state.global_step == 3
    with pytest.warns(RuntimeWarning, match="had ended at step 3 of 9"):
        assert trained("stopped.pm", 9).state.global_step == 3
    further = trained("stopped.pm", 9, accept=["should_training_stop"])
    whole = trained("whole.pm", 9)
    for name in ("model", "optimizer", "steps", "scheduler", "flos"):
        assert found(further, 0.0)[name] == found(whole, 0.0)[name], name


def ended_by_an_error(ack: Ack, folder: str) -> None:
    """Taken back to the last commit, whatever ends the program."""
    path = Path(folder, "run.pm")
    for number, error in enumerate((SystemExit(3), KeyboardInterrupt())):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            kept = PmstoreTrainerCallback(path, policy=EveryN(2), opening=SMALL)
            trainer = make({**SHORT, "model": Plain}, Path(folder), [kept, Stop(error)])
            try:
                trainer.train(resume_from_checkpoint=kept.folder())
            except BaseException:
                atexit._run_exitfuncs()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pmstore.open(path) as store:
            assert store["run/progress"][0] == 2, number


class Notify(TrainerCallback):
    def __init__(self, guard: PreemptionGuard) -> None:
        self.guard = guard

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.guard.notify()


def told_to_stop(ack: Ack, folder: str) -> None:
    """The step under way is kept, with its evaluation; the program ends with status 0."""
    torch.set_num_threads(1)
    guard = PreemptionGuard()
    kept = PmstoreTrainerCallback(
        Path(folder, "run.pm"), policy=EveryN(9), guard=guard, opening=SMALL
    )
    evaluates = {"eval_strategy": "steps", "eval_steps": 3}
    trainer = make(SHORT, Path(folder), [kept, Notify(guard)], **evaluates)
    with pytest.raises(SystemExit) as end:
        trainer.train(resume_from_checkpoint=kept.folder())
    assert not end.value.code
    kept.close()
    with pmstore.open(Path(folder, "run.pm"), "r") as store:
        assert store["run/progress"][0] == 3
        assert any("eval_loss" in line for line in store["trainer/log"])


def losses(ack: Ack, folder: str) -> None:
    """Each step has the loss that the Trainer would log for it alone."""
    torch.set_num_threads(1)
    found: list[float | None] = []

    class Looks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            found.append(callback.run.metrics().get("loss"))

    callback = PmstoreTrainerCallback(Path(folder, "run.pm"), opening=SMALL)
    more = {"logging_steps": 1, "gradient_accumulation_steps": 2}
    trainer = make({**SHORT, **more}, Path(folder), [callback, Looks()])
    trainer.train(resume_from_checkpoint=callback.folder())
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert found[1:] == logged[:-1]


class Before(TrainerCallback):
    """Dies where a step begins, before the one that it follows is committed at this rank."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


RANKS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "logging_steps": 2,
    "num_train_epochs": 3,
    "ddp_find_unused_parameters": False,
}


def pair(folder: Path, name: str, callback: bool, *killers: tuple[int, TrainerCallback]) -> bool:
    """Two ranks of a training. Returns whether both came to its end; writes what they found.
    killers: callbacks of a rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
                os.environ.update({key: str(value) for key, value in places.items()})
                os.environ["MASTER_ADDR"] = "127.0.0.1"
                job = Job(timeout=60)
                kept = PmstoreTrainerCallback(folder / "run.pm", opening=SMALL, job=job)
                callbacks = [one for of, one in killers if of == rank]
                callbacks += [kept] if callback else []
                trainer = make(RANKS, folder, callbacks)
                before = kept.folder() if callback else None
                result = found(trainer, trainer.train(resume_from_checkpoint=before).training_loss)
                (folder / f"{name}-{rank}.json").write_text(json.dumps(result))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children] == [0, 0]


def two_ranks(ack: Ack, folder: str) -> None:
    """One dies; the other raises; both are started again: as if nothing had happened."""
    place = Path(folder)
    assert pair(place, "plain", False)
    assert not pair(place, "killed", True, (1, Kill(2)))
    assert not pair(place, "killed", True, (1, Before(3)))  # the other one has committed it
    assert not pair(place, "killed", True, (0, Before(5)))
    assert pair(place, "whole", True)
    for rank in (0, 1):
        plain = json.loads((place / f"plain-{rank}.json").read_text())
        assert json.loads((place / f"whole-{rank}.json").read_text()) == plain
        assert plain["steps"] == 6
    assert pair(place, "again", True)  # nothing is left to do
    assert (place / "again-0.json").read_text() == (place / "whole-0.json").read_text()


def the_example(ack: Ack, folder: str) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from examples import trainer

    trainer.train(folder, 1)
    trainer.train(folder, 1)
    assert Path(folder, "trainer-output/checkpoint-32/model.safetensors").exists()


class Marks(TrainerCallback):
    """Changes what was logged: all lines of an evaluation, when there is a better one; the figures
    that callbacks are told."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any
    ) -> None:
        assert logs is not None
        if logs.pop("total_flos", None) is None:
            logs["total_flos"] = state.total_flos

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        lines = [line for line in state.log_history if "eval_loss" in line]
        best = min(lines, key=lambda line: line["eval_loss"])
        for line in lines:
            line["best"] = line is best


def log_changed_in_place(ack: Ack, folder: str) -> None:
    """Lines that callbacks change after steps that were committed come back as they were."""
    torch.set_num_threads(1)
    more = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.3, "max_steps": 9}

    def trained(name: str, kill_at: int = 0) -> Any:
        path = Path(folder, f"{name}.pm")
        callback = PmstoreTrainerCallback(path, opening=SMALL)
        trainer = make({**SHORT, **more}, Path(folder), [Marks(), callback, Kill(kill_at)])
        trainer.train(resume_from_checkpoint=callback.folder())
        return found(trainer, 0.0)

    whole = trained("whole")
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        trained("killed", 8)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    assert trained("killed") == whole
    assert trained("killed") == whole  # nothing is left to do


def a_model_that_is_made_anew(ack: Ack, folder: str) -> None:
    """A plain module of `model_init`, which the Trainer calls again when the training begins."""
    torch.set_num_threads(1)

    def trained(*others: TrainerCallback) -> Any:
        callback = PmstoreTrainerCallback(Path(folder, "run.pm"), opening=SMALL)
        with_it = {"model": lambda: None, "model_init": Plain}
        trainer = make({**SHORT, **with_it}, Path(folder), [callback, *others])
        trainer.train(resume_from_checkpoint=callback.folder())
        return trainer

    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        trained(Kill(3))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    trainer = trained()
    assert trainer.state.global_step == 5
    assert "_issue_warnings_after_load" not in vars(trainer)


class Notes(TrainerCallback):
    """Adds a line to the log behind each."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.steps += 1

    def on_log(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        state.log_history.append({"note": 1.0})


class Clears(Notes):
    """Leaves nothing of the log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        state.log_history.clear()
        if "eval_loss" not in logs:
            logs.clear()


class Ends(Notes):
    """Has each line of the log look like a training's last."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        for line in (logs, state.log_history[-1]):
            line.update(dict.fromkeys(("train_loss", "total_flos", "train_runtime"), 1.0))


def callbacks_that_change_the_log(ack: Ack, folder: str) -> None:
    """They hide no end of the training, and bring none about. Its last step is kept, whether the
    best model is loaded or not, and a second start has nothing left to do."""
    torch.set_num_threads(1)
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    best = {**SHORT, **best, "eval_steps": 2, "save_steps": 2}
    bits: set[tuple[str, bytes]] = set()
    for kind in (Notes, Clears, Ends):
        for name, settings in (("last", SHORT), ("best", best)):
            for steps in (5, 0):
                path = Path(folder, f"{kind.__name__}-{name}.pm")
                notes, callback = kind(), PmstoreTrainerCallback(path, opening=SMALL)
                trainer = make(settings, Path(folder), [notes, callback])
                trainer.train(resume_from_checkpoint=callback.folder())
                assert notes.steps == steps
                assert trainer.state.global_step == 5
                assert "log" not in vars(trainer)
                with pmstore.open(path, "r") as store:
                    assert store["run/progress"][0] == 5
                    weights = store["run/model/model.embed_tokens.weight"]
                    bits.add((name, weights.numpy().tobytes()))
                    if name == "last":  # a roll back would take it back in memory, too
                        assert torch.equal(weights, trainer.model.model.embed_tokens.weight)
    assert len(bits) == 2  # evaluations draw numbers


class Silences(TrainerCallback):
    """Replaces `Trainer.log` in mid-training."""

    trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        vars(self.trainer)["log"] = lambda *_, **__: None


def a_log_that_is_replaced(ack: Ack, folder: str) -> None:
    """The training ends at `on_train_end`, unless the best model has been loaded by then."""
    torch.set_num_threads(1)

    def trained(name: str, **more: Any) -> Any:
        silences = Silences()
        callback = PmstoreTrainerCallback(Path(folder, name), opening=SMALL)
        trainer = make({**SHORT, **more}, Path(folder), [silences, callback])
        silences.trainer = trainer
        try:
            trainer.train(resume_from_checkpoint=callback.folder())
        finally:
            callback.close()
        return trainer

    trainer = trained("last.pm")
    assert "log" in vars(trainer)  # the program's
    with pmstore.open(Path(folder, "last.pm"), "r") as store:
        assert store["run/progress"][0] == 5
        weights = store["run/model/model.embed_tokens.weight"]
        assert torch.equal(weights, trainer.model.model.embed_tokens.weight)
    assert trained("last.pm").state.global_step == 5
    best = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    with pytest.raises(AttachError, match="best model was loaded before"):
        trained("best.pm", load_best_model_at_end=True, **best)
    with pmstore.open(Path(folder, "best.pm"), "r") as store:
        assert store["run/progress"][0] == 4


class Arrays(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        state.log_history[-1]["f1"] = np.ones(3)


def metrics_that_are_arrays(ack: Ack, folder: str) -> None:
    torch.set_num_threads(1)
    callback = PmstoreTrainerCallback(Path(folder, "a.pm"), opening=SMALL)
    with pytest.raises(AttachError, match=r"ndarray.* returns array.tolist\(\)"):
        make(SHORT, Path(folder), [Arrays(), callback]).train()
    callback.close()


def logs_that_are_cut(ack: Ack, folder: str) -> None:
    """What is stored is the log as it is, of more lines than are looked at, too."""
    lines = [{"loss": number / 7, "step": number} for number in range(1000)]
    grown = [lines[:10], lines[:700], lines[:701]]
    cut = [lines[:600], lines[500:600], lines[50:600], [], lines[:5], lines[600:605]]
    rolled = [lines[:600], lines[1:601], lines[2:602], lines[:90], lines[:89]]
    changed = [lines[:89], [{"loss": 0.0, "step": 0}, *lines[1:89]], lines[:300] + lines[700:]]
    with pmstore.open(Path(folder, "log.pm"), size="64MiB") as store:
        for name, logs in {"a": grown, "b": cut, "c": rolled, "d": changed}.items():
            stored = StoredState(store, name)
            for log in logs:
                stored._write_log(log)
                assert stored._log() == log
