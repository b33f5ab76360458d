"""What the tiles of a drawn program write."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

FEATURES = 6
_LARGE = 1_000_003


class Samples(Dataset[Any]):
    """noisy: each look at one draws numbers from torch's default generator."""

    def __init__(self, count: int, noisy: bool) -> None:
        self.features = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(1))
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        one = self.features[index]
        return one + 0.1 * torch.rand(FEATURES) if self.noisy else one, one.sum().view(1)


class Network(nn.Module):
    """With batch statistics, dropout and a buffer that the program writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(FEATURES, 8)
        self.statistics = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)
        self.above = nn.Linear(8, 1)
        self.register_buffer("marks", torch.zeros(8, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.above(self.dropout(torch.tanh(self.statistics(self.below(x)))))


@dataclass
class Writes:
    """What a program has to write to, and its writes.

    Attributes:
        counts: an array of the store.
        moment: called between writes; the life may end there.
        rank: of this process; ranks: of the job.
        forgets: see `Program`.
    """

    seed: int
    store: Any
    run: Any
    model: Network
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    counts: np.ndarray[Any, Any]
    moment: Callable[[], None]
    rank: int
    ranks: int
    forgets: bool
    _tiles: int = 0

    def tile(self, name: str, most: int) -> random.Random:
        """Up to so many writes, drawn for the tile of that name, and no training. Returns what the
        rest of the tile is drawn by."""
        chance = random.Random(f"{self.seed} {name}")
        for _ in range(chance.randint(0, most)):
            self._write(chance, name)
        if self.forgets:
            self._tiles += 1
            self.counts[7] += self._tiles
        self.moment()
        return chance

    def training_tile(self, name: str, batch: Any = None, update: bool = True) -> random.Random:
        """The same, with training among the writes. update: or gradients are accumulated alone."""
        chance = random.Random(f"{self.seed} {name}")
        before = chance.randint(0, 3)
        for _ in range(before):
            self._write(chance, name)
        self._train(chance, batch, update)
        for _ in range(chance.randint(0, 3 - before)):
            self._write(chance, name)
        self.moment()
        return chance

    def _write(self, chance: random.Random, tile: str) -> None:
        if chance.random() < 0.6:
            self.moment()
        kind, k = chance.choice(_KINDS), chance.randrange(100)
        only = chance.randrange(3)  # in a job some writes are made by one rank alone
        if self.ranks == 1 or only in (self.rank, 2):
            kind(self, k, tile)

    # ---- kinds

    def _mark(self, k: int, tile: str) -> None:
        self.model.marks[k % 8] += k

    def _weight(self, k: int, tile: str) -> None:
        self.model.below.weight.data[0, 0] += 0.001

    def _rate(self, k: int, tile: str) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.99

    def _scheduled(self, k: int, tile: str) -> None:
        self.schedule.step()

    def _array(self, k: int, tile: str) -> None:
        self.counts[k % 8] += k

    def _value(self, k: int, tile: str) -> None:
        self.store["value"] = (self.store.get("value", 1) * 3 + k) % _LARGE

    def _key(self, k: int, tile: str) -> None:
        self.store[f"key {k % 5}"] = k

    def _deletion(self, k: int, tile: str) -> None:
        self.store.pop(f"key {k % 5}", None)

    def _item(self, k: int, tile: str) -> None:
        self.store.list("tiles").append([tile, k])

    def _tensor(self, k: int, tile: str) -> None:
        self.store[f"tensor {k % 3}"] = torch.full((k % 4 + 1,), float(k))

    def _state(self, k: int, tile: str) -> None:
        state = self.run.state
        state["beta"] = (state.get("beta", 1) * 7 + k) % _LARGE
        state.setdefault("tiles", []).append(tile)

    def _log(self, k: int, tile: str) -> None:
        # another number in each tile: those of a head or tail count for the step before
        self.run.log(k=k + crc32(tile.encode()) % 10_000 * 64)

    def _draw(self, k: int, tile: str) -> None:
        """From a default generator."""
        number = (random.random, np.random.rand, lambda: torch.rand(()).item())[k % 3]()
        self.store.list("draws").append(float(number))

    def _evaluation(self, k: int, tile: str) -> None:
        """With a loader of its own, which draws an order."""
        self.model.eval()
        with torch.no_grad():
            for x, _ in DataLoader(Samples(8, False), batch_size=4, shuffle=True):
                self.store.list("draws").append(self.model(x).sum().item())
        self.model.train()

    # ---- training

    def _train(self, chance: random.Random, batch: Any, update: bool) -> None:
        """One update, or two; or gradients that the next update takes with it."""
        times = chance.choice((1, 1, 1, 0, 2)) if update else 0
        x, y = (torch.randn(4, FEATURES), torch.ones(4, 1)) if batch is None else batch
        if len(x) < 2:  # too few for batch statistics
            x, y = torch.cat([x, x]), torch.cat([y, y])
        for _ in range(max(times, 1)):
            loss = functional.mse_loss(self.model(x), y)
            loss.backward()
            self.moment()
            if times:
                self._share()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.run.log(loss=loss)

    def _share(self) -> None:
        if self.ranks > 1:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)


_KINDS: tuple[Callable[[Writes, int, str], None], ...] = (
    Writes._mark,
    Writes._weight,
    Writes._rate,
    Writes._scheduled,
    Writes._array,
    Writes._value,
    Writes._key,
    Writes._deletion,
    Writes._item,
    Writes._tensor,
    Writes._state,
    Writes._log,
    Writes._draw,
    Writes._draw,
    Writes._evaluation,
)
