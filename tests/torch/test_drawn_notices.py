"""A notice at a drawn instruction of the program or of pmstore: the run stops with status 0 and
loses no finished step, and what goes on from there is bit for bit the run that was never told."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pmstore
from pmstore.scheduler import EveryN, PreemptionGuard
from pmstore.torch import Run, attach

EPOCHS, BATCHES = 2, 4
NEVER = EveryN(1 << 40)  # so that finished steps wait for a commit


class Notice:
    """SIGTERM at that instruction, counted in this file and in pmstore; 0: never."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.count = 0

    def __enter__(self) -> Notice:
        sys.settrace(self._frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _frame(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("pmstore.") and name != __name__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            self.count += 1
            if self.count == self.at:
                signal.raise_signal(signal.SIGTERM)
        return self._instruction


class Job:
    """A small training job. Its forward writes nothing but torch's generator."""

    def __init__(self, store: pmstore.Store, *, scaled: bool = False, workers: int = 0) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=3, enabled=scaled)
        data = TensorDataset(torch.arange(16 * BATCHES, dtype=torch.float32).reshape(-1, 4))
        loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
        self.run: Run = attach(
            store,
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.scaler if scaled else None,
            loader=loader,
            policy=NEVER,
            guard=PreemptionGuard(),
        )

    def step(self, batch: Any) -> Iterator[None]:
        """In pieces, between which something else may happen."""
        self.optimizer.zero_grad()
        loss = self.model(batch[0]).square().mean()
        yield
        if self.run.step == 2:  # an overflow: the scaler leaves the update out
            loss = loss * float("inf") if self.scaler.is_enabled() else loss
        self.scaler.scale(loss).backward()
        yield
        self.scaler.step(self.optimizer)
        self.scaler.update()
        yield
        self.run.end_step(loss.detach())

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(3, 4)).sum().item()
        self.model.train()

    def train(self) -> None:
        for batch in self.run.batches(epochs=EPOCHS):
            for _ in self.step(batch):
                pass
            if self.run.step % BATCHES == 0:
                self.evaluate()

    async def train_beside_others(self) -> None:
        others = [asyncio.create_task(self._other()) for _ in range(2)]
        for batch in self.run.batches(epochs=EPOCHS):
            for _ in self.step(batch):
                await asyncio.sleep(0)
            if self.run.step % BATCHES == 0:
                self.evaluate()
        for other in others:
            other.cancel()

    async def _other(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.run.metrics()


Go = Callable[[Job], None]
KINDS: dict[str, tuple[dict[str, Any], Go]] = {
    "plain": ({}, Job.train),
    "scaled": ({"scaled": True}, Job.train),
    "in an event loop": ({}, lambda job: asyncio.run(job.train_beside_others())),
    "with workers": ({"workers": 2}, Job.train),
}


def life(path: Path, kind: str, at: int = 0) -> tuple[int, int]:
    """Instructions of a process, and the steps that it leaves committed: all that it finished."""
    more, go = KINDS[kind]
    code: object = 0
    with Notice(at) as notice:
        try:
            with pmstore.open(path, size="4MiB") as store:
                job = Job(store, **more)
                go(job)
        except SystemExit as end:
            code = end.code
    assert code == 0
    with pmstore.open(path, mode="r") as left:
        steps = int(left["run/progress"][0])
    assert steps == job.run.step
    return notice.count, steps


def content(path: Path) -> dict[str, bytes]:
    """Tensors and generators of the run."""
    with pmstore.open(path, mode="r") as store:
        return {
            f"{group}/{name}": np.asarray(value).tobytes()
            for group in ("run/model", "run/optimizer", "run/rng")
            if group in store
            for name, value in _leaves(store[group])
        }


def _leaves(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in group.items():
        if isinstance(value, type(group)):
            yield from _leaves(value, f"{before}{name}/")
        elif hasattr(value, "shape"):
            yield f"{before}{name}", value


@pytest.mark.parametrize(("kind", "draws"), [*zip(KINDS, (5, 5, 5, 2), strict=True)])
def test_a_notice_at_a_drawn_instruction(tmp_path: Path, kind: str, draws: int) -> None:
    whole = tmp_path / "whole.pm"
    instructions, steps = life(whole, kind)
    assert steps == EPOCHS * BATCHES
    random = np.random.default_rng(7)
    stopped = []
    for draw in range(draws):
        path = tmp_path / f"{draw}.pm"
        stopped.append(life(path, kind, int(random.integers(instructions)))[1])
        assert life(path, kind)[1] == steps
        assert content(path) == content(whole)
    assert min(stopped) < steps, stopped  # some were stopped on the way
