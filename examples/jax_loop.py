"""A training loop of JAX and optax that goes on after any stop, bit for bit:

python -m examples.jax_loop run.pm 200      # kill it, and start it again
"""

from __future__ import annotations

import hashlib
import sys

import jax
import jax.numpy as jnp
import optax

import pmstore
from pmstore.integrations.jax import get, put

OPTIMIZER = optax.adamw(optax.cosine_decay_schedule(1e-2, 1000))


def beginning() -> dict:
    key, one, two = jax.random.split(jax.random.key(0), 3)
    weights = {
        "hidden": jax.random.normal(one, (4, 32)) / 2,
        "out": jax.random.normal(two, (32, 1)) / 6,
    }
    return {"params": weights, "opt": OPTIMIZER.init(weights), "key": key, "step": 0}


@jax.jit
def update(state: dict) -> dict:
    """One step; its data are drawn with the key that the state has."""
    key, data = jax.random.split(state["key"])
    x = jax.random.normal(data, (64, 4))

    def loss(params: dict) -> jax.Array:
        guess = jnp.tanh(x @ params["hidden"]) @ params["out"]
        return jnp.mean((guess[:, 0] - jnp.sin(x.sum(axis=1))) ** 2)

    gradients = jax.grad(loss)(state["params"])
    updates, opt = OPTIMIZER.update(gradients, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "key": key, "step": state["step"] + 1}


def main(path: str, steps: int) -> None:
    with pmstore.open(path) as store:
        state = beginning()
        state = get(store, "state", like=state) if "state" in store else state
        print("begins after step", state["step"], flush=True)
        while state["step"] < steps:
            state = update(state)
            put(store, "state", state)
            store.commit()
    weights = b"".join(leaf.tobytes() for leaf in jax.tree.leaves(state["params"]))
    print("weights", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["jax.pm"], int((sys.argv[2:3] or [200])[0]))
