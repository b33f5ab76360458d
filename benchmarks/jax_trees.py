"""What does a durable state cost a JAX program, and how soon is it back? Beside Orbax.
`python -m benchmarks.jax_trees [MEGABYTES] [ROUNDS]`.

Params and two moments of Adam, float32, changed before each round; all ways in each round. pmstore
puts and commits: on the same disk as Orbax, synced; and in memory, where it survives the process.
Orbax: "wait" includes the wait for its asynchronous save, "call" is what the program is kept for.
It is no question of `python -m benchmarks`: JAX has threads, which a process that forks must not
have.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

import pmstore
from pmstore.integrations.jax import get, put


def tree(megabytes: int) -> dict[str, Any]:
    rows = megabytes * 1_000_000 // (3 * 4 * 1000 * 8)
    weights = {f"layer{i}": jnp.ones((rows, 1000)) * i for i in range(8)}
    return {"params": weights, "mu": weights, "nu": weights, "step": jnp.int32(0)}


def main(megabytes: int, rounds: int) -> None:
    change = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state))
    state = tree(megabytes)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        made = jax.block_until_ready(call(*given, **named))
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return made

    def ours(store: pmstore.Store, state: Any) -> None:
        put(store, "state", state)
        store.commit()

    def theirs(orbax: ocp.StandardCheckpointer, target: Path, state: Any) -> None:
        timed("orbax save, call", orbax.save, target, state)
        orbax.wait_until_finished()

    prefix = f"pmstore-bench-jax-{os.getpid()}-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix) as disk,
        tempfile.TemporaryDirectory(prefix=prefix, dir="/dev/shm") as memory,
        pmstore.open(f"{disk}/run.pm", domain="file") as on_disk,
        pmstore.open(f"{memory}/run.pm", domain="process") as in_memory,
        ocp.StandardCheckpointer() as orbax,
    ):
        for at in range(rounds + 1):  # the first warms up
            state = jax.block_until_ready(change(state))
            target = Path(disk) / f"orbax{at}"
            timed("pmstore, disk", ours, on_disk, state)
            timed("orbax save, wait", theirs, orbax, target, state)
            timed("pmstore, memory", ours, in_memory, state)
            read = timed("pmstore get", get, on_disk, "state", like=state)
            timed("orbax restore", orbax.restore, target, state)
            assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), state, read))
            shutil.rmtree(target)
    print(f"{megabytes} MB, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for way, found in seconds.items():
        median, least, most = statistics.median(found[1:]), min(found[1:]), max(found[1:])
        print(f"{way:22s} {median * 1e3:8.1f} ms  ({least * 1e3:.1f} to {most * 1e3:.1f})")


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*(given + [48, 7][len(given) :]))
