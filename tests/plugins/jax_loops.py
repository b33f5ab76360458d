"""What the fork server runs: JAX is imported in it, and first used in the children, as it has
threads from then on."""

from __future__ import annotations

from collections.abc import Callable

from examples.jax_loop import main


def loop(ack: Callable[[int], None], path: str, steps: int) -> None:
    main(path, steps)
