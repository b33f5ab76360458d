"""What the fork server runs and the kill tests kill: a store whose every array tells the step it is
of, flushed as it goes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import pmstore

LENGTH = 40_000


def one_step(store: pmstore.Store, step: int) -> None:
    """Everything of a step but what is of every tenth alone, so that some chunks stay as they
    are: most of them though they are stored to."""
    store["hot"][:] = step
    if step % 10 == 0 or step % 3:
        store["cold"][:] = step - step % 10
    store["new"] = np.full(100 + step % 3000, step)
    store["step"] = step


def check(store: pmstore.Store) -> int:
    """The step that all of the store is of."""
    assert store.check().problems == ()
    step = store["step"]
    assert store["hot"].tolist() == [step] * LENGTH
    assert set(store["cold"].tolist()) == {step - step % 10}
    assert store["new"].tolist() == [step] * (100 + step % 3000)
    return int(step)


def run(
    ack: Callable[[int], None], path: str, url: str, domain: str, limit: int, keep: int
) -> None:
    """Acknowledges a step when the epoch that holds it is in the tier."""
    with pmstore.open(path, domain=domain, size="4MiB") as store:  # type: ignore[arg-type]
        if "step" not in store:
            with store.transaction():
                store.zeros("hot", LENGTH)
                store.zeros("cold", LENGTH * 4)
                store.add_tier("t", pmstore.TierConfig(url, keep=keep, chunk_bytes=16384))
                one_step(store, 0)
        step = check(store)
        for step in range(step + 1, step + 1 + limit):  # noqa: B020
            with store.transaction():
                one_step(store, step)
            handle = store.flush("t")
            store["hot"][:] = -1  # while it flushes
            store.rollback()
            if step % 2:
                handle.wait()
                ack(step)


def restore(ack: Callable[[int], None], path: str, url: str) -> None:
    pmstore.restore(path, url)
    ack(1)
