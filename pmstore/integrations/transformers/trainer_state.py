"""Keeps what the Trainer holds beside tensors, as plain data in the store."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterable
from typing import Any

from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState, TrainerControl

from pmstore import List, Store
from pmstore.torch.run_errors import AttachError

_OF_THE_PROCESS = (
    "is_local_process_zero",
    "is_world_process_zero",
    "max_steps",
    "num_train_epochs",
)
"""Fields of TrainerState that the Trainer computes at each start."""
_SUMS = (
    *("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step"),
    *("_initial_num_input_tokens_seen", "current_flos"),
)
"""Attributes of the Trainer that the losses it logs are computed from."""
_MOST_LINES = 500
"""Of the log, from its end: whether callbacks have changed them is looked at in each commit."""
_FIELDS = [one.name for one in dataclasses.fields(TrainerState) if one.name != "log_history"]


def trainer_of(callback: object) -> Trainer:
    """Returns the Trainer that calls the callback. The Trainer tells its callbacks of all that it
    has, but not of itself. It alone knows its sums of losses and its other callbacks."""
    frame = sys._getframe(1)
    while frame is not None:
        one = frame.f_locals.get("self")
        if isinstance(one, Trainer) and any(
            each is callback for each in one.callback_handler.callbacks
        ):
            return one
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("a PmstoreTrainerCallback is called by a Trainer only")


class StoredState:
    """Keeps the Trainer's state under three names. `<path>/state`: TrainerState without its log,
    states of callbacks, sums of losses. `<path>/log`: the log, of which new and changed lines are
    written. `<path>/settings`."""

    def __init__(self, store: Store, path: str = "trainer") -> None:
        self._store = store
        self._path = path
        self._settings: dict[str, Any] | None = None  # that were written last
        self._lines: List | None = None  # of the log
        self._last: list[dict[str, Any]] = []  # copies of its last ones: callbacks change lines
        self._rollbacks = -1  # of the store, when these two were

    @property
    def step(self) -> int:
        """The Trainer's global_step of the last commit; 0: there is none."""
        found = self._store.get(f"{self._path}/state")
        return found["trainer"]["global_step"] if found else 0

    @property
    def finished(self) -> bool:
        """Whether the training had come to its end."""
        found = self._store.get(f"{self._path}/state")
        return bool(found and found["finished"])

    @property
    def settings(self) -> dict[str, Any]:
        return self._store.get(f"{self._path}/settings") or {}

    def write(self, trainer: Trainer, settings: dict[str, Any], finished: bool) -> None:
        """Writes the Trainer's state; it is pending until the next commit. settings: that nobody
        changes."""
        state = trainer.state
        fields: dict[str, Any] = {name: getattr(state, name) for name in _FIELDS}
        sums: dict[str, Any] = {name: getattr(trainer, name) for name in _SUMS}
        sums["_tr_loss"] = trainer._tr_loss.item()
        callbacks = [[type(one).__name__, one.state()] for one in _exportable(trainer)]
        fields["stateful_callbacks"] = _by_name(callbacks)
        if self._rollbacks != self._store.rollbacks:
            self._settings, self._lines = None, None
            self._rollbacks = self._store.rollbacks
        self._write_log(state.log_history)
        self._store[f"{self._path}/state"] = {
            "trainer": fields,
            "sums": sums,
            "callbacks": callbacks,
            "finished": finished,
        }
        if self._settings is not settings:
            if self.settings != settings:
                self._store[f"{self._path}/settings"] = settings
            self._settings = settings

    def _write_log(self, lines: list[dict[str, Any]]) -> None:
        if self._lines is None:
            self._lines = self._store.list(f"{self._path}/log")
            self._last = list(self._lines[-_MOST_LINES:])
        log, last = self._lines, self._last
        first = len(log) - len(last)
        if first and lines[first : first + 1] != last[:1]:  # lines before these are gone
            first, last = 0, list(log)
            self._last = last
        now = lines[first:]
        if now == last:
            return
        pairs = enumerate(zip(last, now, strict=False))
        same = next((at for at, (old, new) in pairs if old != new), min(len(last), len(now)))
        if first + same < len(log):
            del log[first + same :]
        try:
            log.extend(now[same:])
        except TypeError as error:
            raise AttachError(
                f"a line of the Trainer's log cannot be kept: {error}. Metrics are numbers, "
                "strings, lists and dicts of them: compute_metrics returns array.tolist()"
            ) from error
        last[same:] = copy.deepcopy(now[same:])
        del last[:-_MOST_LINES]

    def read(self) -> TrainerState:
        """Returns the Trainer's state as of the last commit."""
        fields = copy.deepcopy(self._store[f"{self._path}/state"]["trainer"])
        return TrainerState(**fields, log_history=self._log())

    def _log(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(line) for line in self._store.list(f"{self._path}/log")]

    def put_back(self, trainer: Trainer) -> None:
        """Sets what the Trainer holds to what the last commit holds."""
        found = copy.deepcopy(self._store[f"{self._path}/state"])
        state = trainer.state
        for name, value in found["trainer"].items():
            if name not in _OF_THE_PROCESS:
                setattr(state, name, value)
        state.log_history = self._log()
        for name, value in found["sums"].items():
            if name == "_tr_loss":
                trainer._tr_loss.fill_(value)
            else:
                setattr(trainer, name, value)
        if found["finished"]:  # the Trainer has added the one to the other
            trainer._tr_loss.zero_()
        left = list(_exportable(trainer))
        for kind, held in found["callbacks"]:
            one = next((one for one in left if type(one).__name__ == kind), None)
            if one is not None:
                left.remove(one)
                given = held["args"] if isinstance(one, TrainerControl) else held["attributes"]
                for name, value in given.items():
                    setattr(one, name, value)
        if found["finished"]:  # what had ended it does not end what goes on
            trainer.control.should_training_stop = False


def _exportable(trainer: Trainer) -> Iterable[ExportableState]:
    """Returns the Trainer's callbacks that have a state, and its control."""
    held = [*trainer.callback_handler.callbacks, trainer.control]
    return [one for one in held if isinstance(one, ExportableState)]


def _by_name(callbacks: list[list[Any]]) -> dict[str, Any]:
    """Returns the callbacks' states by name, as TrainerState holds them: several of one class are
    in a list."""
    found: dict[str, Any] = {}
    for kind, state in callbacks:
        if kind not in found:
            found[kind] = state
        elif isinstance(found[kind], list):
            found[kind].append(state)
        else:
            found[kind] = [found[kind], state]
    return found
