"""A save of two ranks, one of which is killed at a persistence primitive: there is always the
checkpoint before it, or the new one, whole.

    python -m crashtests --kind dcp             a drawn choice, in each domain
    python -m crashtests --kind dcp --size 0    every primitive, of each rank and domain

A folder goes on from kill to kill, so that each save also meets what the one before left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from crashtests import cases
from pmstore._engine.crash_points import kill_at_primitive, primitives_seen
from pmstore.dcp import StoreReader, StoreWriter
from pmstore.testing.forkserver import shared_words

DOMAINS = ("process", "emulated", "file")
WHOLE = torch.arange(300 * 500, dtype=torch.float32).reshape(300, 500)


def content(step: int, rank: int) -> dict[str, Any]:
    return {"own": torch.full((100_000,), float(step * 10 + rank)), "step": step}


def life(folder: str, meet: str, rank: int, step: int, domain: Any, point: int, words: Any) -> None:
    """Of one rank: one save. words: of it, what it acknowledges, and the primitives that it saw."""
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    state: dict[str, Any] = {"of both": WHOLE + step}
    state |= {f"{key} {rank}": value for key, value in content(step, rank).items()}
    dist.barrier()
    kill_at_primitive(point)
    writer = StoreWriter(folder, domain=domain)
    if step % 2:
        dcp.save(state, storage_writer=writer)
    else:
        dcp.async_save(state, storage_writer=writer).result()
    words[0] = step
    words[1] = primitives_seen()


def trial(folder: str, step: int, domain: str, points: tuple[int, int]) -> tuple[list[int], bool]:
    """Two ranks save; one dies at its point, if it has one that the save reaches. Returns what
    each has seen of primitives, and whether somebody has the save's word for it."""
    words = shared_words(4)
    meet = os.path.join(tempfile.mkdtemp(prefix=f"dcp-kills-{os.getpid()}-"), "meet")
    ranks = []
    for rank in (0, 1):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115
                os.dup2(sys.stderr.fileno(), 2)
                life(folder, meet, rank, step, domain, points[rank], words[2 * rank :])
                status = 0
            finally:
                os._exit(status)
        ranks.append(pid)
    until = time.monotonic() + 60
    left = set(ranks)
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            left.discard(pid)
            if status:  # the other one learns it from gloo, or not
                until = min(until, time.monotonic() + 0.3)
        elif time.monotonic() > until:
            for each in left:
                os.kill(each, signal.SIGKILL)
            until += 60
        else:
            time.sleep(0.002)
    if os.path.exists(meet):
        os.unlink(meet)
    os.rmdir(os.path.dirname(meet))
    return [words[1], words[3]], step in (words[0], words[2])


def shown(folder: str) -> int:
    """The step of the checkpoint that is there; 0: none.

    Raises: AssertionError: it is not whole.
    """
    try:
        if not StoreReader.numbers(folder):
            return 0
    except FileNotFoundError:
        return 0
    state: dict[str, Any] = {"of both": torch.zeros_like(WHOLE)}
    for rank in (0, 1):
        state |= {f"{key} {rank}": value for key, value in content(-1, rank).items()}
    dcp.load(state, storage_reader=StoreReader(folder))
    step = int(state["step 0"])
    assert torch.equal(state["of both"], WHOLE + step)
    for rank in (0, 1):
        for key, value in content(step, rank).items():
            found = state[f"{key} {rank}"]
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(value)), (key, rank, step)
    return step


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--domain", nargs="*", default=DOMAINS)
    asked.add_argument("--kills", type=int, help="so many, drawn; 0: at each primitive")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--folder", default=None, help="that stores are made in")
    given = asked.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rng = random.Random(given.seed)
    total = kept = 0
    for domain in given.domain:
        with tempfile.TemporaryDirectory(prefix="dcp-kills-", dir=given.folder) as place:
            folder = str(Path(place, "c"))
            step = 0
            for _ in range(4):  # then room is used again, and what a save does is the same
                step += 1
                seen, _ = trial(folder, step, domain, (0, 0))
                assert shown(folder) == step
            there = step
            kills = [(rank, at) for rank in (0, 1) for at in range(1, max(seen) + 40)]
            if given.kills:
                kills = rng.sample(kills, given.kills // len(given.domain))
            for rank, at in kills:
                step += 1
                points = (at, 0) if rank == 0 else (0, at)
                _, said = trial(folder, step, domain, points)
                now = shown(folder)
                assert now in (there, step), (domain, rank, at, there, step, now)
                assert now == step or not said, (domain, rank, at, "acknowledged, and not there")
                total += 1
                kept += now == there
                there = now
            step += 1
            trial(folder, step, domain, (0, 0))
            assert shown(folder) == step
            print(f"{domain}: {len(kills)} kills, a save has {seen} primitives", flush=True)
    print(f"{total} kills: {kept} times the old checkpoint, {total - kept} times the new one")
    return 0


def _draw(seed: int, _: int) -> tuple[str, tuple[str, int]]:
    domain, kills = cases.turn(DOMAINS, seed)
    return f"saves in domain {domain}, kills {kills}", (domain, kills)


def _found(drawn: tuple[str, int], kills: int, _: None) -> cases.Found:
    words = ["--domain", drawn[0], "--seed", str(drawn[1]), "--kills", str(kills)]
    return cases.program("-m", "tests.dcp.dcp_kills", *words)


CASES = cases.Kind(18, "kills", lambda: len(DOMAINS), _draw, _found)


if __name__ == "__main__":
    sys.exit(main())
