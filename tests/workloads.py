"""What the fork server runs and the kill tests kill. Imported by the server: keep its imports
few."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

import numpy as np

import pmstore

LENGTH = 3000


def check(store: pmstore.Store, acknowledged: int) -> int:
    """The invariant of `steps`: everything is of one step, which is the acknowledged one or the
    next. Returns it."""
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
    """Opens (and recovers) the store, checks it, and commits step after step: arrays, values, new
    and removed names."""
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


def check_large(store: pmstore.Store, acknowledged: int) -> int:
    assert store.check().problems == ()
    if "large" not in store:
        assert acknowledged < 0
        return -1
    large = store["large"]
    step = int(large[0])
    assert acknowledged <= step <= acknowledged + 1 or acknowledged < 0
    assert (large == step).all()
    return step


def large(ack: Callable[[int], None], path: str, domain: str, limit: int, seed: int) -> None:
    """Opens the store, reads all of a large array, and writes it whole: the first time after each
    open its pages are the file's in domain `file`. By faults of two threads or declared, with
    children forked and roll backs in between."""
    rng = random.Random(seed)
    store = pmstore.open(path, domain=domain, size="16MiB")  # type: ignore[arg-type]
    if "large" not in store:
        store["large"] = np.zeros(400_000)
        store.commit()
    step = check_large(store, -1)
    ack(step)
    array = store["large"]
    while step < limit:
        step += 1
        if rng.random() < 0.3:
            array[rng.randrange(len(array)) :] = -1
            store.rollback()
        if rng.random() < 0.2:
            child = os.fork()
            if child == 0:
                os._exit(int((array != step - 1).any()))
            assert os.waitpid(child, 0)[1] == 0
        if rng.random() < 0.5:
            with store.transaction(writes=[array]):
                array[:] = step
        else:
            half = threading.Thread(target=array[: len(array) // 2].fill, args=(step,))
            half.start()
            array[len(array) // 2 :] = step
            half.join()
            store.commit()
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
    """Flips of a large and a small pair together with captured writes; roll backs, writes in place,
    scribbling in between."""
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
