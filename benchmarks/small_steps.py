"""What the end of a small step costs: of README's loop, whose step takes less than a millisecond.

A plain loop and one over a run's batches take turns in one process, a block of steps each. The end
of a step is `run.log` and the next batch, beside a plain loop's next batch, among other work:
caches are full of the step's own data. "Warm" is an empty step by hand, again and again, with
nothing in between. Beside them, how long torch takes to answer, from loops in C, what a commit has
to ask it about each tensor.
"""

from __future__ import annotations

import random
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from benchmarks import harness

PLAIN, COMMITS = "plain torch", "a run's batches"
NEXT, END, WARM = "plain torch, next batch", "end of step, next batch", "end of step, warm"
ASKED = "what is asked of torch, by loops in C"
README, ALL, MANY = "README's loop", "README's loop, scheduler, scaler, EMA", "500 tensors"
ON_DISK, WIDE_ON_DISK = f"{README}, on a disk", "a wide model, on a disk"
WIDE = 1024  # features of the model whose step takes some ten milliseconds
COLD = (
    "the end of a step is some forty calls in Python, from caches that forward, backward and "
    "update have filled: three to four times what they take one after the other"
)
EPOCHS = 1_000_000
FIRST_SECOND = 1.0
BLOCK = 25


class OwnTime:
    """Seconds that a loop had its turn: what the policy is to know of, which decides by the time
    between two steps."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began: float | None = None

    def __call__(self) -> float:
        return self._seconds + (time.monotonic() - self._began if self._began is not None else 0.0)

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._began = time.monotonic()
        yield
        self._seconds, self._began = self(), None


@dataclass
class Loop:
    """A training loop, a step at a time. ends_us: what the end of each took, with the next
    batch."""

    model: Any
    optimizer: Any
    batches: Iterator[Any]
    loss: Callable[[Any, Any], Any]
    scheduler: Any = None
    scaler: Any = None
    average: Any = None
    run: Any = None
    batch: Any = None
    ends_us: list[float] = field(default_factory=list)
    clock: OwnTime = field(default_factory=OwnTime)

    def steps(self, count: int) -> float:
        """Seconds of so many."""
        began = self.clock()
        with self.clock.turn():
            self._steps(count)
        return self.clock() - began

    def _steps(self, count: int) -> None:
        for _ in range(count):
            inputs, targets = self.batch
            self.optimizer.zero_grad()
            loss = self.loss(self.model(inputs), targets)
            if self.scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            if self.scheduler is not None:
                self.scheduler.step()
            if self.average is not None:
                self.average.update_parameters(self.model)
            ended = time.perf_counter()
            if self.run is not None:
                self.run.log(loss=loss)
            self.batch = next(self.batches)
            self.ends_us.append(1e6 * (time.perf_counter() - ended))


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _loop(case: str, path: Path | None, domain: Any) -> Loop:
    """path: of the store; None: a plain loop."""
    import torch
    from torch import nn

    import pmstore.torch
    from pmstore.scheduler import Auto, CommitScheduler
    from pmstore.torch._step.commit_schedule import LOSS_BUDGET, MAX_LOSS

    torch.manual_seed(0)
    x = torch.randn(1000, 20)
    first, last = nn.Linear(20, 64), nn.Linear(64, 1)
    inner: list[nn.Module] = [nn.ReLU()]
    if case == MANY:
        inner = [nn.Linear(64, 64) for _ in range(248)]
    elif case == WIDE_ON_DISK:
        inner = [nn.Linear(64, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 64)]
    model = nn.Sequential(first, *inner, last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=50, shuffle=True)
    loop = Loop(model, optimizer, iter(()), nn.functional.mse_loss)
    models: Any = model
    if case == ALL:
        loop.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100_000)
        loop.scaler = torch.amp.GradScaler("cpu")
        loop.average = torch.optim.swa_utils.AveragedModel(model)
        models = {"model": model, "average": loop.average}
    if path is None:
        loop.batches = _forever(loader)
        loop.batch = next(loop.batches)
        return loop
    store = pmstore.open(path, domain=domain)
    policy: Any = "auto"
    if domain == "file":  # attach's own rule there, by another clock
        rule = Auto(max_loss=MAX_LOSS, loss_budget=LOSS_BUDGET)
        policy = CommitScheduler(rule, store=store, run="run", clock=loop.clock)
    loop.run = pmstore.torch.attach(
        store,
        model=models,
        optimizer=optimizer,
        lr_scheduler=loop.scheduler,
        scaler=loop.scaler,
        loader=loader,
        policy=policy,
    )
    loop.batches = loop.run.batches(epochs=EPOCHS)
    loop.batch = next(loop.batches)
    return loop


@contextmanager
def _unwatched() -> Iterator[None]:
    """An attached run looks at each step of an optimizer that is not its own, which a plain loop
    of another process does not pay for."""
    from pmstore.torch._step import foreign_trainers

    foreign_trainers._hook.remove()
    try:
        yield
    finally:
        foreign_trainers._hook.place()


def _in_turns(
    loops: dict[str, Loop], budget: harness.Budget, most: int, warm_up: int = 4
) -> dict[str, list[float]]:
    """Microseconds of a step, by block."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    order = random.Random(harness.SEED)
    for i in budget.rounds(most, least=4, warm_up=warm_up):
        if i == 0:
            for loop in loops.values():
                loop.ends_us.clear()
        for name in order.sample(list(loops), len(loops)):
            with _unwatched() if loops[name].run is None else nullcontext():
                seconds = loops[name].steps(BLOCK)
            if i >= 0:
                times[name].append(1e6 * seconds / BLOCK)
    return times


def _least_us(ask: Callable[[], object]) -> float:
    times = []
    for _ in range(200):
        began = time.perf_counter()
        ask()
        times.append(time.perf_counter() - began)
    return 1e6 * min(times)


def _asked_us(loop: Loop) -> float:
    """Where each tensor lies, of parameters, state and buffers. Of each parameter three times which
    gradient it has (before the step, which memory is to be written; after it, what was used; at the
    end, what is new), twice the gradient's version, once a weak reference to it and whether it is
    trained."""
    import torch

    parameters = list(loop.model.parameters())
    state = [one for held in loop.optimizer.state.values() for one in held.values()]
    tensors = [*parameters, *loop.model.buffers(), *state]
    gradients = [one.grad for one in parameters]

    def each(get: Callable[[Any], object], of: list[Any]) -> float:
        return _least_us(lambda: deque(map(get, of), 0))

    return (
        each(torch.Tensor.data_ptr, tensors)
        + 3 * each(attrgetter("grad"), parameters)
        + 2 * each(attrgetter("_version"), gradients)
        + each(attrgetter("requires_grad"), parameters)
        + each(weakref.ref, gradients)
    )


def _warm_us(loop: Loop) -> list[float]:
    loop.steps(1)
    loop.run.end_step()
    times = []
    for _ in range(300):
        began = time.perf_counter()
        with loop.run.next_step():
            pass
        times.append(1e6 * (time.perf_counter() - began))
    return times


def _case(case: str, quick: bool, budget: harness.Budget) -> list[harness.Row]:
    """In memory: every step is committed."""
    with harness.scratch("memory") as folder, ExitStack() as stack:
        loops = {PLAIN: _loop(case, None, None), COMMITS: _loop(case, folder / "run.pm", "process")}
        ours = loops[COMMITS]
        stack.callback(ours.run.store.close)
        times = _in_turns(loops, budget, 20 if quick else 200)
        paired = statistics.median(
            own / plain for plain, own in zip(times[PLAIN], times[COMMITS], strict=True)
        )
        return [
            harness.summarize(PLAIN, case, harness.NONE, times[PLAIN]),
            harness.summarize(COMMITS, case, harness.KILL, times[COMMITS], paired=paired),
            harness.summarize(NEXT, case, harness.NONE, loops[PLAIN].ends_us),
            harness.summarize(END, case, harness.KILL, ours.ends_us),
            harness.summarize(ASKED, case, harness.NONE, [_asked_us(ours)]),
            # last: without batches in between the run's place in the data is no longer the loop's
            harness.summarize(WARM, case, harness.KILL, _warm_us(ours)),
        ]


def _disk(case: str, quick: bool, budget: harness.Budget) -> list[harness.Row]:
    """The policy decides. The whole time counts, with the commits in it, after the first second,
    in which it learns."""
    with harness.scratch("disk") as folder, ExitStack() as stack:
        loops = {PLAIN: _loop(case, None, None), COMMITS: _loop(case, folder / "run.pm", "file")}
        run = loops[COMMITS].run
        stack.callback(run.store.close)
        while loops[COMMITS].clock() < FIRST_SECOND:
            for loop in loops.values():
                loop.steps(BLOCK)
        before = run.stats()
        times = _in_turns(loops, budget, 50 if quick else 2000, warm_up=0)
        stats = run.stats()
        waited = 1e6 * (stats.commit_seconds - before.commit_seconds)
        return [
            harness.summarize(PLAIN, case, harness.NONE, times[PLAIN]),
            harness.summarize(
                COMMITS,
                case,
                harness.POWER,
                times[COMMITS],
                whole=sum(times[COMMITS]) / sum(times[PLAIN]),
                commits=stats.commits - before.commits,
                waited=waited / BLOCK / sum(times[COMMITS]),
            ),
            harness.summarize(NEXT, case, harness.NONE, loops[PLAIN].ends_us),
            harness.summarize(END, case, harness.POWER, loops[COMMITS].ends_us),
        ]


def _targets(rows: list[harness.Row]) -> list[harness.Target]:
    found = []
    for case, bound in ((README, 30), (ALL, 60), (MANY, 100)):
        end, asked = harness.find(rows, case, WARM), harness.find(rows, case, ASKED)
        if end is not None and asked is not None:
            found.append(
                harness.Target(
                    f"{case}: {WARM}, us",
                    end.median_us,
                    bound,
                    reason=f"{ASKED}, takes {asked.median_us:.0f} us",
                )
            )
    for case in (README, ALL):
        ours, batch, end = (harness.find(rows, case, name) for name in (COMMITS, NEXT, END))
        if ours is not None and batch is not None and end is not None:
            found.append(
                harness.Target(
                    f"{case}: a step with its commit / plain torch",
                    ours.extra["paired"],
                    1.05,
                    reason=f"{COLD}: it takes {end.median_us - batch.median_us:.0f} us",
                )
            )
    for case in (ON_DISK, WIDE_ON_DISK):
        disk, batch, end = (harness.find(rows, case, name) for name in (COMMITS, NEXT, END))
        if disk is not None and batch is not None and end is not None:
            found.append(
                harness.Target(
                    f"{case}: all steps / plain torch",
                    disk.extra["whole"],
                    1.03,
                    reason=f"{disk.extra['waited']:.1%} for commits; {COLD}: it takes "
                    f"{end.median_us - batch.median_us:.0f} us, the optimizer's hooks most of the "
                    "rest",
                )
            )
    return found


def main(quick: bool = False, budget: harness.Budget | None = None) -> None:
    import torch

    budget = budget or harness.Budget()
    torch.set_num_threads(1)
    rows = harness.kept()
    measure: dict[str, Callable[..., list[harness.Row]]] = {
        **dict.fromkeys((README, ALL, MANY), _case),
        **dict.fromkeys((ON_DISK, WIDE_ON_DISK), _disk),
    }
    for case, part in budget.deal((case, 1.0) for case in measure):
        found = measure[case](case, quick, part)
        rows += harness.with_ratios(found, PLAIN)
    harness.report(
        "small_steps",
        "Small steps",
        rows,
        ratio_text="of a plain step",
        targets=_targets(rows),
        quick=quick,
    )
