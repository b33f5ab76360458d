"""What the fork server runs and the kill tests kill. Imported by the server: keep its imports few."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

import pmstore

LENGTH = 3000


def check(store: pmstore.Store, acknowledged: int, epoch_of_step: bool = True) -> int:
    """The invariant of `steps`: everything is of one step, which is the acknowledged one or the next. Returns it."""
    assert store.check().problems == ()
    if "step" not in store:
        assert acknowledged < 0
        return -1
    step = store["step"]
    assert acknowledged <= step <= acknowledged + 1 or acknowledged < 0
    assert store["dense"].tolist() == [step] * LENGTH
    assert store["list"] == list(range(step % 50))
    assert store["g/rebuilt"].tolist() == [step] * (1 + step % 700)
    sparse = store["sparse"]
    assert sparse[(step * 977) % len(sparse)] == step
    assert sorted(store["names"]) == sorted(str(i) for i in range(max(0, step - 5), step + 1))
    return int(step)


def steps(ack: Callable[[int], None], path: str, domain: str, limit: int, seed: int) -> None:
    """Opens (and recovers) the store, checks it, and commits step after step: arrays, values, new and removed names."""
    rng = random.Random(seed)
    store = pmstore.open(path, domain=domain, size="1MiB")  # type: ignore[arg-type]
    if "step" not in store:
        with store.transaction():
            store.zeros("dense", LENGTH)
            store.zeros("sparse", 40_000)
            store["sparse"][0] = 0
            store["list"] = []
            store["g/rebuilt"] = np.zeros(1)
            store["names/0"] = 0
            store["step"] = 0
    step = check(store, -1)
    ack(step)
    dense, sparse = store["dense"], store["sparse"]
    while step < limit:
        step += 1
        how = rng.randrange(4)
        if how == 3:  # a block that fails first: it must leave no trace
            try:
                with store.transaction():
                    dense[:] = -1
                    store["list"] = "half"
                    del store["names"]
                    raise InterruptedError
            except InterruptedError:
                pass
        if how == 0:
            one_step(store, dense, sparse, step)
            store.commit()
        else:
            with store.transaction(writes=[dense] if how == 1 else ()):
                one_step(store, dense, sparse, step)
        ack(step)
    store.close()


def one_step(store: pmstore.Store, dense: np.ndarray, sparse: np.ndarray, step: int) -> None:  # type: ignore[type-arg]
    dense += 1
    sparse[(step * 977) % len(sparse)] = step
    store["g/rebuilt"] = np.full(1 + step % 700, step)
    store["list"] = list(range(step % 50))
    store[f"names/{step}"] = step
    if step > 5:
        del store[f"names/{step - 6}"]
    store["step"] = step


def check_slots(store: pmstore.Store, acknowledged: int) -> int:
    """The invariant of `slots`: both pairs, the array and the value are of one step. Returns it."""
    assert store.check().problems == ()
    if "step" not in store:
        assert acknowledged < 0
        return -1
    step = int(store["step"])
    assert acknowledged <= step <= acknowledged + 1 or acknowledged < 0
    assert (store["large"].current == step).all()
    assert (store["g/small"].current == -step).all()
    assert (store["beside"] == step).all()
    return step


def acknowledging(ack: Callable[[int], None]) -> None:
    """Does nothing but acknowledge step 7, until it is killed."""
    while True:
        ack(7)


def slots(ack: Callable[[int], None], path: str, domain: str, limit: int, seed: int) -> None:
    """Flips of a large and a small pair together with captured writes; roll backs, writes in place, scribbling in between."""
    rng = random.Random(seed)
    store = pmstore.open(path, domain=domain, size="4MiB")  # type: ignore[arg-type]
    if "step" not in store:
        with store.transaction():
            store.slots("large", 20_000)
            store.slots("g/small", 100)
            store.zeros("beside", LENGTH)
            store["step"] = 0
    step = check_slots(store, -1)
    ack(step)
    large, small, beside = store["large"], store["g/small"], store["beside"]
    while step < limit:
        step += 1
        how = rng.randrange(4)
        if how == 0:
            large.next[:] = np.nan  # scratch, never flipped
            store.commit()
        if how == 1:
            try:
                with store.transaction():
                    large.next[:] = small.next[:] = beside[:] = np.nan
                    large.flip()
                    small.flip()
                    raise InterruptedError
            except InterruptedError:
                pass
        with store.transaction():
            small.target[:] = -step
            small.flip()
            if how == 2:
                large.current[:] += 1  # captured like any array
            else:
                np.add(large.current, 0.5, out=large.next)
                large.flip()
                large.target[:] += 0.5
            beside += 1
            store["step"] = step
        ack(step)
    store.close()
