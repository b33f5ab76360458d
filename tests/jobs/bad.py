"""Jobs that are wrong, or whose ranks are: what each rank then gets, as it says itself."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from programs.data import batches, mlp
from torch import nn

import pmstore
import pmstore.torch
import pmstore.torch.optim
from pmstore.scheduler import EveryN, EverySeconds, PreemptionGuard
from pmstore.torch import Job, program

CASES: dict[str, Callable[[Rank], object]] = {}
HELD = 20
"""The step in which ranks that train for a test wait until it lets them go (`Try.go`)."""


@dataclass
class Rank:
    """One rank of a job that does not go as it should.

    timeout: what it gives attach, in seconds.
    """

    number: int
    folder: Path
    timeout: float
    run: Any = None
    """What attach returned last."""
    _committed: int = 0

    @property
    def path(self) -> Path:
        return self.folder / f"run{self.number}.pm"

    def first(self) -> bool:
        return self.number == 0

    def note(self, word: object) -> None:
        """A line that outlives a SIGKILL."""
        with (self.folder / f"journal{self.number}").open("a") as file:
            file.write(f"{word}\n")

    def train(
        self,
        until: int,
        *,
        model: nn.Module | None = None,
        optimizer: Callable[[Iterable[Any]], Any] | None = None,
        each: Callable[[int], bool | None] = lambda step: None,
        seconds: float = 0.0,
        **attach: Any,
    ) -> None:
        """Trains a model of its own until so many steps are committed. Nothing but pmstore knows of
        the other ranks.

        each: is called at the end of each step: False: it has ended the step, or taken it back.
            seconds: that a step takes at least.
        """
        torch.manual_seed(40 + self.number)
        net = mlp() if model is None else model
        made = (optimizer or (lambda ps: torch.optim.AdamW(ps, 1e-2)))(net.parameters())
        group = attach.pop("process_group", "world")
        given = attach if group is None else {"job": Job(group, self.timeout), **attach}
        with pmstore.open(self.path, domain="process") as store:
            run = self.run = pmstore.torch.attach(
                store, model=net, optimizer=made, loader=batches(), **given
            )
            self.note(f"joined {run.step}")
            if run.step >= until:
                return
            for x, y in run.batches(epochs=None):
                self._note_committed()
                loss = nn.functional.mse_loss(net(x), y)
                made.zero_grad()
                loss.backward()
                made.step()
                time.sleep(seconds)
                ended = each(run.step) is False
                if not ended:
                    run.log(loss=loss)
                    if run.step + 1 == until:
                        run.end_step()
                        break
                elif run.step >= until:
                    break
        self.note(f"committed {run.step}")

    def _note_committed(self) -> None:
        """What the ends of steps have committed."""
        if self.run.committed > self._committed:
            self._committed = self.run.committed
            self.note(f"committed {self._committed}")


def attempt(case: str, folder: str, timeout: float) -> None:
    """What each rank runs. Leaves `outcome{rank}`: the classes of what it raised, what that says,
    and after how many seconds."""
    torch.set_num_threads(1)
    rank = Rank(int(os.environ["RANK"]), Path(folder), timeout)
    began = time.monotonic()
    kinds, said = [], ""
    name, _, count = case.partition(":")
    try:
        if name != "not_initialised":
            seconds = timeout if name == "trains_together" else 60  # of the program's own messages
            dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
        began = time.monotonic()
        CASES[name](rank, *([int(count)] if count else []))
    except BaseException as error:
        traceback.print_exc()
        kinds, said = [one.__name__ for one in type(error).__mro__], str(error)
    told = {"kinds": kinds, "said": said, "seconds": time.monotonic() - began}
    (rank.folder / f"outcome{rank.number}.new").write_text(json.dumps(told))
    os.rename(rank.folder / f"outcome{rank.number}.new", rank.folder / f"outcome{rank.number}")
    sys.stderr.flush()
    os._exit(0)


def case(function: Callable[..., object]) -> Callable[..., object]:
    CASES[function.__name__] = function
    return function


# ---- as it should be


@case
def trains(rank: Rank, until: int) -> None:
    rank.train(until)


def _held(rank: Rank, step: int) -> None:
    while step == HELD and not (rank.folder / "go").exists():
        time.sleep(0.005)


@case
def trains_held(rank: Rank, until: int) -> None:
    """Slowly, so that what the test does comes anywhere in a step."""
    rank.train(until, each=partial(_held, rank), seconds=0.05)


@case
def trains_guarded(rank: Rank, until: int) -> None:
    """SIGTERM ends the step."""
    given = {"policy": EveryN(4), "guard": PreemptionGuard()}
    rank.train(until, each=partial(_held, rank), seconds=0.05, **given)


@case
def trains_together(rank: Rank, until: int) -> None:
    """With collectives of its own in each step."""

    def each(step: int) -> None:
        _held(rank, step)
        dist.all_reduce(torch.ones(3))

    rank.train(until, each=each, seconds=0.05)


@case
def trains_alone(rank: Rank, until: int) -> None:
    """Without a job."""
    rank.train(until + rank.number, process_group=None)


@case
def agrees_alone(rank: Rank) -> None:
    """One rank asks for what all have, the others do not."""

    def each(step: int) -> bool:
        rank.run.commit(agree=rank.first() and step % 3 == 2)
        return False

    rank.train(8, each=each)
    assert rank.run.agreed_step == 8, rank.run.agreed_step


# ---- groups


@case
def not_initialised(rank: Rank) -> None:
    rank.train(8)


@case
def without_gloo(rank: Rank) -> None:
    dist.is_gloo_available = lambda: False
    dist.distributed_c10d.is_gloo_available = dist.is_gloo_available
    dist.distributed_c10d._GLOO_AVAILABLE = False
    rank.train(8)


@case
def not_in_the_group(rank: Rank) -> None:
    """A group of rank 0 alone, given at both. Rank 0 is a job of one."""
    group = dist.new_group([0])
    rank.train(2, process_group=group)


@case
def no_group(rank: Rank) -> None:
    rank.train(8, process_group="everybody")


@case
def bad_timeout(rank: Rank) -> None:
    rank.timeout = -1
    rank.train(8)


# ---- ranks that are not alike


@case
def other_models(rank: Rank) -> None:
    rank.train(12, model=mlp(width=16 + 4 * rank.number))


@case
def other_optimizers(rank: Rank) -> None:
    sgd = None if rank.first() else lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9)
    rank.train(12, optimizer=sgd)


@case
def native_at_one(rank: Rank) -> None:
    native = None if rank.first() else lambda ps: pmstore.torch.optim.AdamW(ps, lr=1e-2)
    rank.train(12, optimizer=native)


@case
def other_policies(rank: Rank) -> None:
    rank.train(12, policy=EveryN(5 + rank.number))


@case
def policy_at_one(rank: Rank) -> None:
    rank.train(12, policy=None if rank.first() else EverySeconds(20.0))


@case
def other_versions(rank: Rank) -> None:
    if not rank.first():
        _say_everywhere("VERSION", pmstore.__version__, "0.0.1")
    rank.train(12)


def _say_everywhere(name: str, known: object, value: object) -> None:
    """In the modules of this rank that know another value of that name."""
    for module in list(sys.modules.values()):
        ours = getattr(module, "__name__", "").startswith("pmstore")
        if ours and getattr(module, name, None) == known:
            setattr(module, name, value)


@case
def other_formats(rank: Rank) -> None:
    """Another version's format of runs."""
    if not rank.first():
        _say_everywhere("FORMAT", program.FORMAT, program.SHARDED_FORMAT + 1)
    rank.train(12)


@case
def other_names(rank: Rank) -> None:
    rank.train(12, name=f"run-{rank.number}")


@case
def mirror_at_one(rank: Rank) -> None:
    rank.train(12, mirror=not rank.first())


@case
def other_rates(rank: Rank) -> None:
    """Of a run that is there: a change at one rank."""
    rate = 1e-2 if rank.first() else 5e-2
    rank.train(12, optimizer=lambda ps: torch.optim.AdamW(ps, rate))


# ---- ranks that do not do the same


@case
def rollback_at_one(rank: Rank) -> None:
    def each(step: int) -> bool:
        back = step == 4 and not rank.first() and rank.run.stats().rollbacks == 0
        if back:
            rank.run.rollback()
        return not back

    rank.train(12, each=each)


@case
def commits_at_one(rank: Rank) -> None:
    """A step that the policy leaves pending."""

    def each(step: int) -> bool:
        alone = step == 4 and not rank.first()
        if alone:
            rank.run.commit()
        return not alone

    rank.train(12, each=each, policy=EveryN(100))


@case
def ends_early(rank: Rank) -> None:
    rank.train(12 if rank.first() else 6)


@case
def attach_at_one(rank: Rank) -> None:
    if rank.first():
        rank.train(12)
    time.sleep(1.5 * rank.timeout)


@case
def without_a_job_at_one(rank: Rank) -> None:
    """The others' attach names the group, this one's does not."""
    if rank.first():
        rank.train(12)
    else:
        rank.train(12, process_group=None)
        time.sleep(1.5 * rank.timeout)


@case
def late_to_join(rank: Rank) -> None:
    time.sleep(0 if rank.first() else 1.7 * rank.timeout)
    rank.train(12)


@case
def late_in_a_step(rank: Rank) -> None:
    def each(step: int) -> None:
        time.sleep(1.7 * rank.timeout if step == 5 and not rank.first() else 0)

    rank.train(12, each=each)


@case
def dies_in_a_step(rank: Rank) -> None:
    def each(step: int) -> None:
        if step == 5 and not rank.first():
            os.kill(os.getpid(), signal.SIGKILL)

    rank.train(12, each=each)


@case
def raises_in_a_step(rank: Rank) -> None:
    def each(step: int) -> None:
        if step == 5 and not rank.first():
            raise KeyError("the program's own")

    rank.train(12, each=each)


@case
def commits_the_store(rank: Rank) -> None:
    """Not by the run: pending writes go with the next step."""

    def each(step: int) -> None:
        if step == 5:
            rank.run.store["seen"] = step
            rank.run.store.commit()

    rank.train(12, each=each)


@case
def transaction_of_the_store(rank: Rank) -> None:
    def each(step: int) -> None:
        if step == 5:
            with rank.run.store.transaction():
                rank.run.store["seen"] = step

    rank.train(12, each=each)


@case
def rewinds(rank: Rank) -> None:
    def each(step: int) -> None:
        if step == 5:
            rank.run.rewind(steps=1)

    rank.train(12, each=each)
