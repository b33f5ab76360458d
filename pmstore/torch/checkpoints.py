"""Earlier states of a run: epochs of a tier that are kept, and the way back to them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from pmstore import Store
from pmstore._base.text import OWN_NAMES
from pmstore._base.workers import Patience
from pmstore.errors import TransactionError
from pmstore.objects.replicate import make_alike
from pmstore.opening import open as open_store
from pmstore.tiers._epochs.kept_epochs import Keeping, Reason, Series
from pmstore.tiers._epochs.listing import list_epochs
from pmstore.tiers._flush.flush import Flush
from pmstore.tiers._flush.flusher import Flusher
from pmstore.tiers._places.url import open_places
from pmstore.tiers._restore.restore import restore
from pmstore.tiers.config import TierConfig
from pmstore.torch._migrate.differences import compare
from pmstore.torch._step.state import MARKED, OPEN
from pmstore.torch._step.steps import Steps
from pmstore.torch.run_errors import ChangedError, MismatchError, NotKeptError, records

FOLDER = ".kept"
"""Behind the store's path: where states are kept if no tier is given."""
LEFT_ALONE = OWN_NAMES[:1]
"""Of the store, what a rewind does not touch: its tiers."""


@dataclass(frozen=True, slots=True)
class KeptState:
    """An earlier state of a run, which `Run.rewind` goes back to."""

    step: int
    """Finished steps that it holds."""
    loss: float | None
    """That its commit was given."""
    names: tuple[str, ...]
    """That it was given."""
    values: tuple[tuple[str, float], ...]
    """Figures that it is among the best of, with their values."""
    epoch: int
    """Of the store, and of the tier: `pmstore restore --epoch`."""
    time: float
    """Unix time, for people: when it was kept."""
    place: str
    """The tier, as a URL or path."""
    _config: TierConfig = field(repr=False, compare=False)
    _run: str = field(repr=False)

    def is_called(self, name: int | str) -> bool:
        return name in self.names if isinstance(name, str) else name == self.step

    def __str__(self) -> str:
        told = [f"step {self.step}", *map(repr, self.names)]
        return " ".join([*told, *(f"(best {name}: {value:g})" for name, value in self.values)])


class Keeper:
    """Keeps states of one run, and goes back to them."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self._store = steps, steps.store
        real = Path(os.path.realpath(steps.store.path))
        self._own = TierConfig(f"{real}{FOLDER}", keep=1)
        self._copy = real.with_name(f".{real.name[:200]}.rewinding")
        self._under_way: list[tuple[Flush, Reason]] = []
        with suppress(FileNotFoundError):
            self._copy.unlink()  # of a process that was killed: no other has the store open

    # ---- keeping

    def keep(
        self,
        name: str | None,
        n: int | None,
        best: str | None,
        value: float | None,
        mode: Literal["min", "max"],
        tier: str | None,
    ) -> Flush | None:
        """See `Run.keep`."""
        series, called = self._check(name, n, best, value, mode)
        self._refuse_in_a_block()
        steps = self._steps
        if steps.step.state is OPEN or steps.step.state is MARKED:
            steps.at_end.append(partial(self._keep, series, called, n, value, mode, tier))
            return None
        return self._keep(series, called, n, value, mode, tier)

    def _keep(
        self,
        series: Series,
        called: str,
        n: int | None,
        value: float | None,
        mode: Literal["min", "max"],
        tier: str | None,
    ) -> Flush | None:
        """Keeps the last commit. REQUIRES: no step is open, or run.commit() has ended it."""
        steps, progress = self._steps, self._steps.progress
        if steps.pending is not None:
            steps.pending.wait()
        last = steps.loss
        loss = None if last is None else float(last)
        if series == "best":
            value = loss if value is None and called == "loss" else value
            if value is None:
                raise ValueError(
                    "best='loss' takes the loss that the last step was given: "
                    "run.log(loss=...). (After a resume or a roll back there was none yet.)"
                )
            value = float(value)
            if value != value:
                return None  # nan is not the best of anything
        # nan is no number that could be shown beside others
        loss = None if loss is not None and loss != loss else loss
        reason = Reason(steps.name, series, called, progress.committed, value, loss, time.time())
        keeping = Keeping(reason, n or 1, mode == "min")
        tiers = self._store._open_tiers()
        flusher = tiers.keeper(self._own) if tier is None else tiers.take_up(tier)
        self._under_way = [one for one in self._under_way if not one[0].done]
        if series == "best" and not self._is_among_the_best(flusher, keeping):
            return None
        if steps.job is not None and steps.pending is None:
            steps.job.settle()  # all ranks have it, so that no crash takes back what is kept
        handle = tiers.keep(flusher, keeping)
        self._under_way.append((handle, reason))
        return handle

    @staticmethod
    def _check(
        name: str | None, n: int | None, best: str | None, value: float | None, mode: str
    ) -> tuple[Series, str]:
        if n is not None and (type(n) is not int or n < 1):
            raise ValueError(f"n={n!r}: how many states stay, an int of at least 1")
        for what, given in (("a name", name), ("best", best)):
            if given is not None and (not isinstance(given, str) or not given):
                raise TypeError(f"keep: {what} is a str that is not empty, not {given!r}")
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r}: 'min' or 'max'")
        if best is not None and name is None:
            if value is None and best != "loss":
                raise ValueError(
                    f"best={best!r}: say what it is, run.keep(best={best!r}, value=...); the loss "
                    "alone is known from run.log(loss=...)"
                )
            return "best", best
        if value is not None:
            raise ValueError("value= is of a figure: run.keep(best='accuracy', value=...)")
        if (name is None) == (n is None) or best is not None:
            raise ValueError(
                "keep takes one of: a name, run.keep('before-finetune'); how many of the last, "
                "run.keep(n=3); a figure, run.keep(best='loss')"
            )
        return ("last", "") if name is None else ("named", name)

    def _refuse_in_a_block(self) -> None:
        steps = self._steps
        steps.require()
        if self._store.in_transaction:
            raise TransactionError(
                "keep() and rewind() inside a transaction block: call them after it, of what it "
                "has committed"
            )

    def _is_among_the_best(self, flusher: Flusher, keeping: Keeping) -> bool:
        reasons = [
            *((epoch, reason) for epoch, reason in flusher.kept.reasons()),
            *(
                (flush.epoch, reason)
                for flush, reason in self._under_way
                if flush.tier == flusher.name
            ),
        ]
        held = {epoch: reason for epoch, reason in reasons if reason.key == keeping.reason.key}
        if self._store.epoch in held:
            return False  # this very commit was kept before
        values = [reason.value for reason in held.values() if reason.value is not None]
        assert keeping.reason.value is not None
        beaten = sum(keeping.better(keeping.reason.value, value) for value in values)
        return len(values) - beaten < keeping.count

    # ---- what there is

    def kept(self) -> list[KeptState]:
        """See `Run.kept`."""
        self._steps.require()
        under_way, self._under_way = self._under_way, []
        for flush, _ in under_way:
            flush.wait_over(None)  # what it pushed out has gone
            flush.raise_once()
        found = list(self._states(self._own, True)) if os.path.isdir(self._own.place) else []
        tiers = self._store._open_tiers()
        for name, config in tiers.configs.items():
            if name not in tiers.strange:
                found += self._states(config, False)
        return sorted(found, key=lambda one: (one._run == self._run(one._config), one.epoch))

    def _run(self, config: TierConfig) -> str:
        return config.run or self._store._core.pool.info.uuid.hex()

    def _states(self, config: TierConfig, everybodys: bool) -> Iterator[KeptState]:
        """everybodys: also of stores that lay here before, as this one was restored or compacted
        since."""
        patience = Patience(config.stall_seconds)
        place = open_places(config.place, config.storage_options, patience)
        for info in list_epochs(place):
            reasons = [reason for reason in info.kept if reason.group == self._steps.name]
            mine = everybodys or info.run == self._run(config)
            if not reasons or not mine or config.rank not in info.ranks or info.problem is not None:
                continue
            yield KeptState(
                reasons[0].step,
                reasons[0].loss,
                tuple(reason.name for reason in reasons if reason.series == "named"),
                tuple(
                    (reason.name, reason.value) for reason in reasons if reason.value is not None
                ),
                info.epoch,
                reasons[0].time,
                config.place,
                config,
                info.run,
            )

    # ---- going back

    def rewind(self, to: int | str) -> None:
        """See `Run.rewind`."""
        self._refuse_in_a_block()
        state = self._find(to)
        config = state._config
        with suppress(FileNotFoundError):
            self._copy.unlink()
        try:
            restore(
                self._copy,
                config.place,
                state.epoch,
                run=state._run,
                rank=config.rank,
                storage_options=config.storage_options,
                stall_seconds=config.stall_seconds,
            )
            with open_store(self._copy, "r", lock=True) as wanted:
                self._steps.go_to(lambda: self._make_alike(wanted, state))
            self._steps.loss = state.loss
        finally:
            with suppress(FileNotFoundError):
                self._copy.unlink()

    def _find(self, to: int | str) -> KeptState:
        if type(to) not in (int, str):
            raise TypeError(f"rewind(to={to!r}): a step, or the name of a kept state")
        states = self.kept()
        found = [one for one in states if one.is_called(to)]
        if not found:
            there = "; ".join(map(str, states[-20:])) or "nothing"
            raise NotKeptError(
                f"{self._store.path}: the run {self._steps.name!r} has kept no state {to!r}. "
                f"Kept: {there}. run.keep(...) keeps one"
            )
        return found[-1]

    def _make_alike(self, wanted: Store, state: KeptState) -> None:
        """One transaction: the kept state, or nothing."""
        store, name = self._store, self._steps.name
        pieces, given = store[f"{name}/about"]["pieces"], store.get(f"{name}/given")
        with store._open_mirrors().aside(), store.transaction():
            make_alike(store._core, wanted._core, LEFT_ALONE)
            with records(store.path, name):
                way = "Restore it into a store of its own (pmstore restore --kept)"
                if store[f"{name}/about"]["pieces"] != pieces:
                    raise MismatchError(
                        f"the kept state ({state}) is of a run with other pieces than were given "
                        f"to attach. {way}"
                    )
                self._steps.pieces.check()
                then = store.get(f"{name}/given")
                if given and then and (told := compare(then["settings"], given["settings"], {})):
                    raise ChangedError(
                        f"the kept state ({state}) is of a time when the program gave other "
                        f"settings. {way}, and attach it there",
                        mismatched=map(str, told),
                    )
