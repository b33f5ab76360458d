"""AdamW with ~450 MB of state and a commit on every step (domain process): added time per step, in memcpys of the state."""

from __future__ import annotations

import time

import torch

import pmstore
import pmstore.torch
from benchmarks.harness import Method, Row, measure, report, scratch

WIDTH, LAYERS, BATCH = 2048, 9, 16


def _model(width: int, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


class Trainer:
    """One model, one optimizer; `step` trains on a fixed batch."""

    def __init__(self, width: int, layers: int) -> None:
        self.model = _model(width, layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self.batch = torch.randn(BATCH, width)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        moments = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        return [p.data for p in self.model.parameters()] + moments


def main(quick: bool = False) -> None:
    layers = 2 if quick else LAYERS
    plain, stored = Trainer(WIDTH, layers), Trainer(WIDTH, layers)
    plain.step()
    size = sum(t.nbytes for t in plain.state())
    source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    with scratch("memory") as folder, pmstore.open(folder / "run.pm", size=3 * size, domain="process") as store:
        run = pmstore.torch.attach(store, model=stored.model, optimizer=stored.optimizer)
        stored.step()
        run.commit()

        def committed() -> None:
            stored.step()
            run.commit()

        last = [0.0]

        def between() -> float:
            """The second of two steps without a commit: everything it writes has been captured."""
            stored.step()
            start = time.perf_counter()
            stored.step()
            seconds = time.perf_counter() - start
            run.commit()
            last[0] = seconds
            return seconds

        methods = [
            Method("memcpy of the state, one core", "none", lambda: bytes_copy(target, source)),
            Method("step, ordinary memory", "none", plain.step),
            Method("step + commit", "kill-safe", committed),
            Method("step between commits", "none", between),
        ]
        rows = measure(f"{size / 1e6:.0f} MB of state", methods, 5 if quick else 15, methods[0].name, 3)
        median = {r.method: r.median_us for r in rows}
        copy, step = median[methods[0].name], median[methods[1].name]
        added = median[methods[2].name] - step
        rows.append(Row("added by the commit", rows[0].case, added, added, added, "kill-safe", added / copy, 1.5))
        slow = median[methods[3].name]
        rows.append(Row("step between commits / ordinary", rows[0].case, slow, slow, slow, "none", slow / step, 1.03))
    report("adamw", "AdamW, a commit on every step", rows)


def bytes_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """A memcpy by one core: numpy does not use threads."""
    target.numpy()[:] = source.numpy()
