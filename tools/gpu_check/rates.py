"""What mirroring costs: the rate of copies into the store, how long a commit holds the program, how
much slower a step is, and the first commit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import pmstore
import pmstore.torch
from tools.gpu_check.device import Settings
from tools.gpu_check.outcome import Aim, Outcome

_STEPS = 10  # of a training, timed together


def copies(settings: Settings, outcome: Outcome) -> None:
    """The mirrors of a commit, beside a plain copy of as much into pinned memory."""
    settings.needs(3 * settings.nbytes)
    source = torch.ones(settings.nbytes, dtype=torch.uint8, device=settings.device)
    target = torch.empty(settings.nbytes, dtype=torch.uint8, pin_memory=settings.cuda)
    if not settings.cuda:
        outcome.left_out.append("the rate of a bus: this is a copy within host memory")
    plain, ours, held = [], [], []
    with pmstore.open(settings.folder / "rates.pm", size=4 * settings.nbytes) as store:
        store.mirror("state", source)
        for _ in range(3):  # both slots are there, and pinned
            store.commit()
        for _ in range(settings.rounds):
            plain.append(settings.seconds(lambda: target.copy_(source, non_blocking=True)))
            ours.append(settings.seconds(store.commit))
            settings.synchronize()
            start = time.perf_counter()
            pending = store.commit(wait=False)
            held.append(time.perf_counter() - start)
            pending.wait()
    rate = settings.nbytes / 1e9
    outcome.figures |= {
        "bytes": settings.nbytes,
        "plain copy, GB/s": rate / statistics.median(plain),
        "commit, GB/s": rate / statistics.median(ours),
        "commit(wait=False) holds the program, ms": 1e3 * statistics.median(held),
    }
    if settings.cuda:
        outcome.aims += [
            Aim(
                "rate of a commit / plain pinned copy",
                statistics.median(plain) / statistics.median(ours),
                0.95,
                at_least=True,
            ),
            Aim(f"commit(wait=False) of {rate:.3g} GB, ms", 1e3 * statistics.median(held), 1.0),
        ]


def _training(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Three floats a parameter are state; a step has about 40 operations for each of them."""
    width = max(64, int((settings.nbytes / 12 / 4) ** 0.5))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    model.to(settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    features = torch.randn(width, width, device=settings.device)

    def step() -> None:
        optimizer.zero_grad()
        model(features).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def steps(settings: Settings, outcome: Outcome) -> None:
    """Steps of a training that commits each of them, beside the same that commits none."""
    settings.needs(4 * settings.nbytes)
    _, _, plain = _training(settings)
    model, optimizer, mirrored = _training(settings)
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    with pmstore.open(settings.folder / "steps.pm", size=4 * settings.nbytes) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, mirror=True, policy=None
        )

        def ours() -> None:
            with run.next_step():  # begins with the commit of the one before
                mirrored()

        for _ in range(4):
            plain()
            ours()
        for _ in range(settings.rounds):
            for name, step in (("plain", plain), ("ours", ours)):
                took = settings.seconds(lambda step=step: [step() for _ in range(_STEPS)])  # type: ignore[misc]
                times[name].append(took / _STEPS)
    slower = statistics.median(times["ours"]) / statistics.median(times["plain"])
    outcome.figures |= {
        "plain step, ms": 1e3 * statistics.median(times["plain"]),
        "step with a commit, ms": 1e3 * statistics.median(times["ours"]),
        "slower": slower,
    }
    if settings.cuda:
        outcome.aims.append(Aim("step with a commit / plain step", slower, 1.03))
    else:
        outcome.left_out.append("what copies beside the device's work cost: it is the same memory")


def first(settings: Settings, outcome: Outcome) -> None:
    """The first commit after an attach, of all the state, beside a copy of the same tensors into
    new memory of the host. It makes memory, too, and pins nothing yet."""
    settings.needs(4 * settings.nbytes)
    plain, ours, attaches = [], [], []
    for life in range(3):
        model, optimizer, step = _training(settings)
        step()
        tensors = [*model.parameters(), *_averages(optimizer)]
        plain.append(settings.seconds(lambda some=tensors: [one.cpu() for one in some]))  # type: ignore[misc]
        path = settings.folder / f"first-{life}.pm"
        with pmstore.open(path, size=4 * settings.nbytes) as store:
            start = time.perf_counter()
            run = pmstore.torch.attach(
                store, model=model, optimizer=optimizer, mirror=True, policy=None
            )
            settings.synchronize()
            attaches.append(time.perf_counter() - start)
            with torch.no_grad():
                for one in tensors:
                    one.add_(1)
            ours.append(settings.seconds(run.commit))
        path.unlink()
    slower = statistics.median(ours) / statistics.median(plain)
    outcome.figures |= {
        "attach, ms": 1e3 * statistics.median(attaches),
        "first commit, ms": 1e3 * statistics.median(ours),
        "a copy into new memory, ms": 1e3 * statistics.median(plain),
    }
    if settings.cuda:
        outcome.aims.append(Aim("first commit / a copy into new memory", slower, 2.0))
    else:
        outcome.left_out.append("the first commit beside a copy: here .cpu() copies nothing")


def _averages(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for state in optimizer.state.values() for one in state.values()]
