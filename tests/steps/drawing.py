"""Programs as they are drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

DATA = ("epochs", "batches")
"""Kinds of loops that go over the data."""
POLICIES = ("none", "none", "auto", "every 3", "every 7", "small")


@dataclass(frozen=True)
class Loop:
    """One loop of a program.

    Attributes:
        kind: epochs, batches, steps, or hand (`with run.next_step()`).
        n: how far it goes, counted as the run counts.
        breaks: it may be left by `break`: of epochs that epoch.
        stops: `run.stop` may be called in it.
    """

    kind: str
    n: int
    name: str = ""
    every: int = 1
    ahead: int | None = None
    device: str | None = None
    limit: int | None = None
    breaks: bool = False
    stops: bool = False


@dataclass(frozen=True)
class Program:
    """One drawn program.

    Attributes:
        stages: each is a start of the program that asks for more than the one before.
        samples: of the data, in batches of four. noisy: a sample draws numbers.
        events: tiles end with events, some of them. again: what the program begins again after an
            error: the loop, or all loops.
        optimizer: adam, or slots (of pmstore.torch.optim).
        device: what is mirrored is as on a GPU (tests/fake_cuda.py). Its copies are made at once: a
            program that waits in a page fault keeps the lock that this device needs.
        world: ranks.
        forgets: it counts tiles in a variable of its own, by which the harness is tested.
    """

    seed: int
    stages: tuple[tuple[Loop, ...], ...]
    samples: int
    noisy: bool
    workers: int
    events: bool
    again: str
    optimizer: str
    mirror: bool
    device: bool
    guard: bool
    policy: str
    domain: str
    world: int
    forgets: bool = False

    def __str__(self) -> str:
        loops = ", ".join(f"{one.kind} {one.n}" for one in self.stages[-1])
        more = [
            name for name in ("noisy", "events", "mirror", "device", "guard") if getattr(self, name)
        ]
        more += [f"{self.workers} workers"] * (self.workers > 0) + ["job"] * (self.world > 1)
        what = " ".join([self.optimizer, f"{self.policy!r}", self.domain, *more])
        return f"seed {self.seed} ({loops}; {what})"


def draw(seed: int) -> Program:
    chance = random.Random(f"program {seed}")
    world = 2 if chance.random() < 0.12 else 1
    loops = _loops(chance)
    stages: list[tuple[Loop, ...]] = [loops]
    if chance.random() < 0.3:
        stages.append(_more(loops))
    slots = chance.random() < 0.15
    mirror = not slots and chance.random() < 0.15
    return Program(
        seed=seed,
        stages=tuple(stages),
        samples=4 * chance.randint(2, 4) + chance.randint(0, 2),
        noisy=chance.random() < 0.4,
        workers=2 if world == 1 and chance.random() < 0.06 else 0,
        events=chance.random() < 0.7,
        again=chance.choice(("loop", "loops")),
        optimizer="slots" if slots else "adam",
        mirror=mirror,
        device=mirror and random.Random(f"device {seed}").random() < 0.6,
        guard=chance.random() < 0.3,
        policy=chance.choice(POLICIES),
        domain=chance.choice(("process", "process", "process", "file")),
        world=world,
    )


def _loops(chance: random.Random) -> tuple[Loop, ...]:
    """One to three. The run counts epochs and steps on from loop to loop; one with a name counts
    its own."""
    loops: list[Loop] = []
    epochs = steps = 0
    count = chance.randint(1, 3)
    for number in range(count):
        kinds = ["epochs"] * 4 + ["batches"] * 2 + ["steps"]
        if all(one.kind != "hand" for one in loops):
            kinds.append("hand")
        kind, n = chance.choice(kinds), chance.randint(2, 5)
        name = f"loop {number}" if chance.random() < 0.15 and kind != "hand" else ""
        if kind in DATA:
            if not name:
                n = epochs = epochs + n
            else:
                epochs += n
        elif kind == "steps" and not name:
            n = steps = steps + n
        loop = Loop(kind, n, name, breaks=kind == "epochs" or number + 1 < count)
        loops.append(_with_options(chance, loop) if kind in DATA else loop)
    if all(one.kind != "hand" for one in loops) and chance.random() < 0.4:
        place = chance.randrange(len(loops))
        loops[place] = replace(loops[place], stops=True)
    return tuple(loops)


def _with_options(chance: random.Random, loop: Loop) -> Loop:
    drawn = chance.random()
    if drawn < 0.2:
        loop = replace(loop, ahead=chance.randint(1, 3), breaks=False)
    elif drawn < 0.4:
        loop = replace(loop, every=chance.randint(2, 3))
    if loop.ahead is None and chance.random() < 0.2:
        loop = replace(loop, device="cpu")
    if loop.kind == "epochs" and chance.random() < 0.2:
        loop = replace(loop, limit=2)
    return loop


def _more(loops: tuple[Loop, ...]) -> tuple[Loop, ...]:
    """The same, and the last loop that is not by hand goes on. Behind it none begins (steps by hand
    are all done), so that it would go on at the next start if it were left by break."""
    last = max((i for i, one in enumerate(loops) if one.kind != "hand"), default=None)
    return tuple(
        replace(one, n=one.n + 2, breaks=one.breaks and one.kind == "epochs")
        if number == last
        else one
        for number, one in enumerate(loops)
    )
