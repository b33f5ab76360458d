"""A commit holds what the device's streams held when it began, whatever they are given after the
fence."""

from __future__ import annotations

import time

import torch

import pmstore
from tools.gpu_check.device import Settings
from tools.gpu_check.outcome import Outcome, require

_DELAY = 0.05  # seconds of work that the stream has to do before the step's values are there
_FIRST = 3  # commits: the first one is staged, two more pin the slots
_LARGE, _SMALL = 1 << 20, 5  # elements: a slot with pages of its own; a part of a page


def check(settings: Settings, outcome: Outcome) -> None:
    path = settings.folder / "streams.pm"
    last = _FIRST + settings.rounds
    with pmstore.open(path) as store, settings.side_stream():
        large = torch.zeros(_LARGE, device=settings.device)
        small = torch.zeros(_SMALL, device=settings.device, dtype=torch.bfloat16)
        store.mirror("large", large)
        store.mirror("small", small)
        longest = 0.0
        for step in range(1, last + 1):
            settings.delay(_DELAY)
            large.fill_(step)
            small.fill_(step)
            store["step"] = step
            start = time.perf_counter()
            pending = store.commit(wait=False)
            pending.fence()
            held = time.perf_counter() - start
            if step > _FIRST:
                longest = max(longest, held)
            large.fill_(-step)
            small.fill_(-step)
            pending.wait()
            for name in ("large", "small"):
                got = store.slots(name).current
                require(
                    bool((got == step).all()),
                    f"the commit of step {step} holds {got.unique().tolist()[:5]} of {name!r}",
                )
            store.rollback()
            require(
                bool((large == step).all()) and bool((small == step).all()),
                f"a roll back to step {step} left other values on the device",
            )
        if settings.cuda:
            outcome.figures["longest commit(wait=False) and fence, behind 50 ms of work, ms"] = (
                1e3 * longest
            )
            require(longest < _DELAY, "commit(wait=False) waited for the work before it")
        else:
            outcome.left_out.append("the order of streams: host memory has none")
    with pmstore.open(path, mode="r") as store:
        require(store["step"] == last, "the last commit is not the last one in the file")
        for name in ("large", "small"):
            require(bool((store.slots(name).current == last).all()), f"{name!r} in the file")
