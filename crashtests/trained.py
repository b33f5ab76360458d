"""Programs that really train in a store, and record what they do to it.

    trained.py record FOLDER
    trained.py verify FOLDER

A process of its own, with the engine that has the recorder in it (`crashtests.training` runs it).
For each program and domain it leaves in the folder the store before (`.base`), the trace (`.trace`)
and digests of the program's arrays at each commit (`.json`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

# which the first optimizer of a process imports: here once, before the forks
import torch._dynamo

import pmstore
import pmstore.torch
import pmstore.torch.optim
from pmstore._engine import _native

DOMAINS = {"file": 2, "process": 3, "emulated": 4}
BEGINS, ACKNOWLEDGED = 9, 10  # crashtests/native/trace.h

Commit = Callable[[Callable[[], object], list[Any]], None]
"""commit(do, arrays): do() commits; the arrays are what it commits."""


def digest(arrays: list[Any]) -> str:
    content = [torch.as_tensor(a).detach().contiguous().numpy().tobytes() for a in arrays]
    return hashlib.sha256(b"".join(content)).hexdigest()


def update(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(
        model(torch.randn(32, 24)), torch.randint(0, 5, (32,))
    ).backward()
    optimizer.step()


# ---- AdamW, by `attach`: parameters, moments, schedule and generators in one commit a step ----


def adamw_parts() -> tuple[Any, Any, Any]:
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 48), torch.nn.Dropout(0.2), torch.nn.Linear(48, 5)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def adamw_state(model: Any, optimizer: Any) -> list[Any]:
    moments = [
        state[key]
        for state in optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq", "step")
        if key in state
    ]
    return [*model.state_dict().values(), *moments]


def adamw(store: pmstore.Store, steps: int, commit: Commit) -> None:
    model, optimizer, schedule = adamw_parts()
    run = pmstore.torch.attach(store, model=model, optimizer=optimizer, lr_scheduler=schedule)
    for _ in range(steps):
        with run.next_step():
            update(model, optimizer)
            schedule.step()
        commit(lambda: run.commit(), adamw_state(model, optimizer))


def adamw_reopened(store: pmstore.Store) -> list[Any]:
    model, optimizer, schedule = adamw_parts()
    pmstore.torch.attach(store, model=model, optimizer=optimizer, lr_scheduler=schedule)
    return adamw_state(model, optimizer)


# ---- KMeans, plain numpy over the heap ----


def kmeans(store: pmstore.Store, steps: int, commit: Commit) -> None:
    points = store.require("points", (600, 4), "float64")
    centroids, labels = (
        store.require("centroids", (5, 4), "float64"),
        store.require("labels", (600,), "int64"),
    )
    if "step" not in store:
        points[:] = np.random.default_rng(3).normal(size=points.shape)
        centroids[:] = points[:5]
        store["step"] = 0
    for _ in range(steps):
        labels[:] = ((points[:, None] - centroids) ** 2).sum(axis=2).argmin(axis=1)
        for k in range(len(centroids)):
            centroids[k] = points[labels == k].mean(axis=0)
        store["step"] += 1
        commit(store.commit, [centroids, labels])


def kmeans_reopened(store: pmstore.Store) -> list[Any]:
    return [store["centroids"], store["labels"]]


# ---- SGD with momentum, of pmstore.torch.optim: each step computes the whole next state into the
# idle slot, and flips


def sgd_parts() -> tuple[Any, Any]:
    torch.manual_seed(8)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5))
    return model, pmstore.torch.optim.SGD(
        model.parameters(), lr=1e-2, momentum=0.9, weight_decay=1e-3
    )


def sgd_state(model: Any, optimizer: Any) -> list[Any]:
    return [
        *model.state_dict().values(),
        *(state["momentum_buffer"] for state in optimizer.state.values()),
    ]


def sgd(store: pmstore.Store, steps: int, commit: Commit) -> None:
    model, optimizer = sgd_parts()
    run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
    for _ in range(steps):
        with run.next_step():
            update(model, optimizer)
        commit(lambda: run.commit(), sgd_state(model, optimizer))


def sgd_reopened(store: pmstore.Store) -> list[Any]:
    model, optimizer = sgd_parts()
    pmstore.torch.attach(store, model=model, optimizer=optimizer)
    return sgd_state(model, optimizer)


# ---- a Gaussian mixture with full covariances, whose parameters are slots: an EM step is a flip --


def mixture_slots(store: pmstore.Store) -> list[Any]:
    shapes = {"means": (3, 4), "covariances": (3, 4, 4), "weights": (3,)}
    return [store.slots(name, shape, "float64") for name, shape in shapes.items()]


def gmm(store: pmstore.Store, steps: int, commit: Commit) -> None:
    points = np.random.default_rng(4).normal(size=(300, 4)) + np.repeat(
        np.eye(4)[:3] * 4, 100, axis=0
    )
    slots = mixture_slots(store)
    if "step" not in store:
        for slot, first in zip(
            slots, (points[::100], np.stack([np.eye(4)] * 3), np.full(3, 1 / 3)), strict=True
        ):
            slot.next[:] = first
            slot.flip()
        store["step"] = 0
        store.commit()  # before it `next` is refused: the other slots are what is committed
    for _ in range(steps):
        means, covariances, weights = (slot.current for slot in slots)
        away = points[:, None] - means
        distance = np.einsum("nki,kij,nkj->nk", away, np.linalg.inv(covariances), away)
        density = weights * np.exp(-distance / 2) / np.sqrt(np.linalg.det(covariances))
        share = density / density.sum(axis=1, keepdims=True)
        total = share.sum(axis=0)
        slots[0].next[:] = share.T @ points / total[:, None]
        away = points[:, None] - slots[0].next
        slots[1].next[:] = np.einsum("nk,nki,nkj->kij", share, away, away) / total[
            :, None, None
        ] + 1e-6 * np.eye(4)
        slots[2].next[:] = total / len(points)
        for slot in slots:
            slot.flip()
        store["step"] += 1
        commit(store.commit, [slot.current for slot in slots])


def gmm_reopened(store: pmstore.Store) -> list[Any]:
    return [slot.current for slot in mixture_slots(store)]


PROGRAMS: dict[str, Callable[[pmstore.Store, int, Commit], None]] = {
    "adamw": adamw,
    "kmeans": kmeans,
    "sgd": sgd,
    "gmm": gmm,
}
REOPENED: dict[str, Callable[[pmstore.Store], list[Any]]] = {
    "adamw": adamw_reopened,
    "kmeans": kmeans_reopened,
    "sgd": sgd_reopened,
    "gmm": gmm_reopened,
}


# ---- recording ----


@contextlib.contextmanager
def recorder(into: Path, store: Path, domain: str) -> Iterator[Any]:
    engine = ctypes.CDLL(_native.__file__)
    engine.pms_trace_begin(os.fsencode(into), os.fsencode(store), DOMAINS[domain])
    yield engine
    engine.pms_trace_end()


def record(folder: Path, program: str, domain: str) -> None:
    path = folder / f"{program}-{domain}.pm"
    digests: list[str] = []

    def untraced(do: Callable[[], object], arrays: list[Any]) -> None:
        do()
        digests[:] = [digest(arrays)]

    with pmstore.open(path, "x", size="2MiB", domain=domain) as store:  # type: ignore[arg-type]
        store.zeros("keep", 16, "uint32")  # what the oracle's own transaction writes
        PROGRAMS[program](store, 2, untraced)
    shutil.copy(path, path.with_suffix(".base"))
    with recorder(path.with_suffix(".trace"), path, domain) as engine:

        def traced(do: Callable[[], object], arrays: list[Any]) -> None:
            engine.pms_trace_mark(BEGINS, ctypes.c_uint64(len(digests)))
            do()
            engine.pms_trace_mark(ACKNOWLEDGED, ctypes.c_uint64(len(digests)))
            digests.append(digest(arrays))

        with pmstore.open(path, "r+", domain=domain) as store:  # type: ignore[arg-type]
            PROGRAMS[program](store, 4, traced)
    path.with_suffix(".json").write_text(json.dumps(digests))
    path.unlink()


def verify(folder: Path, program: str, domain: str) -> None:
    """Each state of the trace (`crash images --states`) is what the program held when it
    committed."""
    for number, expected in enumerate(
        json.loads((folder / f"{program}-{domain}.json").read_text())
    ):
        if number:  # the first is the store before
            path = folder / f"{program}-{domain}-{number}.pm"
            with pmstore.open(path, "r+", domain=domain, force=True) as store:  # type: ignore[arg-type]
                assert digest(REOPENED[program](store)) == expected, (
                    f"{program} {domain}: state {number} is another"
                )


def main() -> int:
    do, folder = {"record": record, "verify": verify}[sys.argv[1]], Path(sys.argv[2])
    failed = 0
    gc.collect()
    gc.freeze()
    for program in PROGRAMS:
        for domain in DOMAINS:
            child = os.fork()  # torch is loaded once
            if child == 0:
                try:
                    do(folder, program, domain)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            failed += os.waitpid(child, 0)[1] != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
