"""The program that a drawing describes, as it runs on pmstore and on plain torch."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from programs import plain
from torch.utils.data import DataLoader

import pmstore
import pmstore.torch
from pmstore.scheduler import Auto, EveryN, PreemptionGuard
from pmstore.torch import RolledBackError

from .drawing import Loop, Program
from .writes import Network, Samples, Writes

State = dict[str, Any]
TIMEOUT_SECONDS = 30.0
_POLICIES: dict[str, Any] = {
    "none": None,
    "auto": "auto",
    "every 3": EveryN(3),
    "every 7": EveryN(7),
    "small": Auto(max_loss=0.02),
}
_KEYS = [f"key {k}" for k in range(5)] + [f"tensor {k}" for k in range(3)] + ["value"]


class Caught(Exception):
    """Raised in a tile, and caught by the program outside its loops."""


@dataclass
class Rank:
    """The process that the program runs in.

    Attributes:
        folder: of its stores and files.
        moment: see `Writes`. tell: a logger.
    """

    folder: str
    number: int
    moment: Callable[[], None]
    tell: Callable[..., None]


def on_pmstore(program: Program, stage: int, rank: Rank) -> State:
    """One start of the program."""
    given = _objects(program, rank)
    more: dict[str, Any] = {}
    if program.world > 1:
        more["job"] = pmstore.torch.Job("world", TIMEOUT_SECONDS)
    if program.guard:
        more["guard"] = PreemptionGuard()
    if program.mirror:
        more["mirror"] = True
    with pmstore.open(f"{rank.folder}/run{rank.number}.pm", domain=program.domain) as store:
        policy = _POLICIES[program.policy]
        run = pmstore.torch.attach(store, **given, policy=policy, **more)
        run.log_to(rank.tell, name="told")
        training = _Training(program, rank, store, run, given)
        training.set_up()
        training.go(program.stages[stage])
        return training.state()


def on_plain_torch(program: Program, rank: Rank) -> list[State]:
    """All starts, one after the other, of which each goes on where the one before ended."""
    given = _objects(program, rank)
    store, run, states = plain.Store(), plain.Run(given["loader"]), []
    training = _Training(program, rank, store, run, given, plain=True)
    training.set_up()
    for loops in program.stages:
        run.again()
        training.go(loops)
        states.append(deepcopy(training.state()))
    return states


def _objects(program: Program, rank: Rank) -> dict[str, Any]:
    """What attach is given."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = Network()
    torch.manual_seed(rank.number)
    optimizer: torch.optim.Optimizer
    if program.optimizer == "slots":
        optimizer = pmstore.torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    data = Samples(program.samples, program.noisy)
    return {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9),
        "loader": DataLoader(data, batch_size=4, shuffle=True, num_workers=program.workers),
    }


@dataclass
class _Training:
    """The program from its attach on.

    Attributes:
        plain: nothing is ever taken back, so that no tile is done twice.
    """

    program: Program
    rank: Rank
    store: Any
    run: Any
    given: dict[str, Any]
    plain: bool = False
    _done: set[str] = field(default_factory=set)  # tiles before loops, and events of this process

    def set_up(self) -> None:
        if "counts" not in self.store:
            self.store["counts"] = np.zeros(8, np.int64)
        self.store["settings"] = {"samples": self.program.samples}
        if self.program.stages[0][0].kind != "hand":  # nothing takes back what is drawn before that
            draws = random.random(), np.random.rand(2), torch.rand(3)
            assert len(draws) == 3
        self.rank.moment()
        model, optimizer, schedule = (
            self.given[name] for name in ("model", "optimizer", "lr_scheduler")
        )
        self.writes = Writes(
            self.program.seed,
            self.store,
            self.run,
            model,
            optimizer,
            schedule,
            self.store["counts"],
            self.rank.moment,
            self.rank.number,
            self.program.world,
            self.program.forgets,
        )

    def go(self, loops: Iterable[Loop]) -> None:
        """All loops. After an error that it catches, and where the run was taken back to a place to
        which Python cannot be sent, it begins the loop again, or all of them."""
        if self.program.again == "loops":
            return self._until_over(lambda: self._all(loops))
        self._all(loops)
        return None

    def _all(self, loops: Iterable[Loop]) -> None:
        for number, loop in enumerate(loops):
            if loop.kind != "hand":  # of which it is not seen that it is over
                self._before(number)
            one = _LOOPS[loop.kind]
            if self.program.again == "loops":
                one(self, loop)
            else:
                self._until_over(lambda one=one, loop=loop: one(self, loop))

    def _until_over(self, part: Callable[[], None]) -> None:
        while True:
            try:
                return part()
            except Caught:
                with suppress(RolledBackError):
                    self.run.rollback()
            except RolledBackError:
                pass

    def _before(self, number: int) -> None:
        tile = f"before {number}"
        if tile not in self._done:
            self.writes.tile(tile, 3)
            if self.plain:
                self._done.add(tile)

    # ---- loops

    def _epochs(self, loop: Loop) -> None:
        run, options = self.run, _options(loop)
        for epoch in run.epochs(loop.n, batches=loop.limit, name=loop.name, **options):
            tile = f"{loop.name} head {int(epoch)}"
            self._event(self.writes.tile(tile, 3), tile, loop, "head")
            left = self._bodies(epoch, loop)
            tile = f"{loop.name} tail {int(epoch)}"
            self._event(self.writes.tile(tile, 3), tile, loop, "left" if left else "tail")

    def _batches(self, loop: Loop) -> None:
        self._bodies(self.run.batches(epochs=loop.n, name=loop.name, **_options(loop)), loop)

    def _bodies(self, batches: Iterable[Any], loop: Loop) -> bool:
        """Returns whether they were left by `break`: then what follows is of that batch's step, and
        a commit there would not hold the break."""
        if loop.ahead:
            self._bodies_by_hand(batches, loop)
            return False
        run = self.run
        for batch in batches:
            tile = f"body {run.data_epoch} {run.batch}"
            chance = self.writes.training_tile(tile, batch, update=run.last_in_step)
            if self._event(chance, tile, loop, "body") == "break":
                return True
        return False

    def _bodies_by_hand(self, batches: Iterable[Any], loop: Loop) -> None:
        assert loop.ahead
        for batch in _held(batches, loop.ahead):
            with self.run.next_step():
                event = self._by_hand(loop, batch)
            if event != "commit":
                self.writes.tile(f"after {self.run.step}", 2)
            if self.run.stopping:
                break

    def _steps(self, loop: Loop) -> None:
        for number in self.run.steps(loop.n, name=loop.name):
            tile = f"{loop.name} step {number}"
            if self._event(self.writes.training_tile(tile), tile, loop, "body") == "break":
                break

    def _hand(self, loop: Loop) -> None:
        store = self.store
        while store.get("hand", 0) < loop.n:
            with self.run.next_step():
                store["hand"] = store.get("hand", 0) + 1
                event = self._by_hand(loop)
            if event != "commit":
                self.writes.tile(f"after {self.run.step}", 2)

    def _by_hand(self, loop: Loop, batch: Any = None) -> str:
        tile = f"by hand {self.run.step}"
        return self._event(self.writes.training_tile(tile, batch), tile, loop, "by hand")

    # ---- events

    def _event(self, chance: random.Random, tile: str, loop: Loop, place: str) -> str:
        """After the writes of a tile. Returns its name, or ""."""
        if not self.program.events or chance.random() > 0.2:
            return ""
        names = ["error", "roll back", "caught", "keep"]
        commits = place not in ("head", "left") and not (place == "tail" and loop.ahead)
        names += ["commit"] * commits
        names += ["mark"] * (place not in ("head", "tail", "left"))
        names += ["break"] * (loop.breaks and place == "body")
        names += ["stop", "stop", "stop and error"] * loop.stops
        name = chance.choice(names)
        if name in ("error", "roll back", "stop and error"):
            return self._taken_back(name, tile)
        _EVENTS[name](self, tile)
        return name

    def _taken_back(self, name: str, tile: str) -> str:
        """Once in a process: the tile is done again. On plain torch it was done."""
        if self.plain or tile in self._done:
            return ""
        self._done.add(tile)
        if name == "stop and error":
            self.run.stop()
        if name != "roll back":
            raise Caught
        self.run.rollback()
        return name

    def _caught(self, tile: str) -> None:
        """What was done before an error that the program catches at once was done."""
        try:
            self.writes.counts[1] += 1
            raise ValueError(tile)
        except ValueError:
            self.writes.counts[2] += 1

    def _mark(self, tile: str) -> None:
        self.run.end_step()
        self.writes.counts[0] += 1

    def _break(self, tile: str) -> None:
        self.run.end_step()

    def _commit(self, tile: str) -> None:
        self.run.commit()

    def _stop(self, tile: str) -> None:
        self.run.stop()

    def _keep(self, tile: str) -> None:
        self.run.keep(tile)

    # ---- at its end

    def state(self) -> State:
        """All that it holds, to be compared bit for bit."""
        store, model = self.store, self.given["model"]
        self.run.commit()  # ends a step that is still open
        self.rank.moment()
        return {
            "model": model.state_dict(),
            "gradients": [one.grad for one in model.parameters()],
            "optimizer": self.given["optimizer"].state_dict(),
            "schedule": self.given["lr_scheduler"].state_dict(),
            "counts": np.array(self.writes.counts),
            "lists": {name: list(store.list(name)) for name in ("tiles", "draws")},
            "keys": {name: store.get(name) for name in _KEYS},
            "state": dict(self.run.state),
            "log": {name: self._history(name) for name in ("k", "loss")},
            "step": self.run.step,
            "random": random.getstate(),
            "numpy": np.random.get_state()[1:3],
            "torch": torch.get_rng_state(),
        }

    def _history(self, name: str) -> Any:
        try:
            return self.run.history(name)
        except KeyError:
            return None


_LOOPS: dict[str, Callable[[_Training, Loop], None]] = {
    "epochs": _Training._epochs,
    "batches": _Training._batches,
    "steps": _Training._steps,
    "hand": _Training._hand,
}
_EVENTS: dict[str, Callable[[_Training, str], None]] = {
    "caught": _Training._caught,
    "keep": _Training._keep,
    "commit": _Training._commit,
    "mark": _Training._mark,
    "break": _Training._break,
    "stop": _Training._stop,
}


def _options(loop: Loop) -> dict[str, Any]:
    return {"every": loop.every, "ahead": loop.ahead, "device": loop.device}


def _held(batches: Iterable[Any], most: int) -> Iterator[Any]:
    """Copies of batches, so many of them ahead."""
    held: deque[Any] = deque()
    for batch in batches:
        held.append([one.clone() for one in batch])
        if len(held) > most:
            yield held.popleft()
    while held:
        yield held.popleft()
