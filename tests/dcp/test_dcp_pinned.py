"""async_save of what an attached run has in its heap: the last commit is pinned, not copied."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_common import QUIET, bits, equal, load
from torch.distributed.checkpoint.state_dict import get_state_dict

import pmstore
import pmstore.torch.optim
from pmstore.dcp import StoreWriter
from pmstore.dcp._format import copies as copying
from pmstore.dcp._write.committed_tensors import pin

pytestmark = pytest.mark.filterwarnings(QUIET)


def clones(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: clones(each) for key, each in value.items()}
    return [clones(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("domain", ["process", "file"])
@pytest.mark.parametrize("optim", [torch.optim.AdamW, pmstore.torch.optim.AdamW])
def test_run(shm: Path, domain: str, optim: Callable[..., torch.optim.Optimizer]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 7))
    writer = StoreWriter(shm / "c", domain=domain)  # type: ignore[arg-type]
    with pmstore.open(shm / "run.pm", domain=domain) as store:  # type: ignore[arg-type]
        optimizer = optim(model.parameters(), lr=0.1)
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer)

        def step(commit: bool = True) -> None:
            with run.next_step():
                optimizer.zero_grad()
                model(torch.randn(4, 300)).sum().backward()
                optimizer.step()
            if commit:
                run.commit()

        def pinned(state: dict[str, Any]) -> int:
            """Bytes that are not copied while the program waits."""
            tensors = [*state["model"].values()]
            tensors += [
                each
                for name in state["optim"]["state"].values()
                for each in name.values()
                if isinstance(each, torch.Tensor) and each.dim()
            ]
            pins, left = pin([(tensor, torch.empty_like(tensor)) for tensor in tensors])
            for each in pins:
                each.close()
            return sum(map(copying.size_of, tensors)) - sum(copying.size_of(t) for t, _ in left)

        for number in range(6):
            step()
            if number == 3:
                step(commit=False)  # so that something differs
            if number == 4:
                with torch.no_grad():
                    model[0].bias.add_(1)
            whole = get_state_dict(model, optimizer)
            state = {"model": whole[0], "optim": whole[1]}
            expected = clones(state)
            assert bool(pinned(state)) == (number not in (3, 4)), number
            future = dcp.async_save(state, checkpoint_id=shm / "c", storage_writer=writer)
            if number == 3:
                run.commit()
            step()  # while it is saved
            step()
            future.result()
            assert equal(load(shm / "c", expected), expected)
            assert bits(model[0].weight) != bits(expected["model"]["0.weight"])
    writer.close()


def test_idle_slots_are_copied(shm: Path) -> None:
    """Nobody captures what is written to them, so no snapshot knows it."""
    writer = StoreWriter(shm / "c")
    with pmstore.open(shm / "s.pm") as store:
        slots = store.slots("w", 50_000, torch.float32)
        store.commit()
        idle = slots.next
        idle.fill_(7)
        dcp.save({"x": idle}, checkpoint_id=shm / "c", storage_writer=writer)
        for _ in range(2):
            future = dcp.async_save({"x": idle}, checkpoint_id=shm / "c", storage_writer=writer)
            idle.fill_(8)
            future.result()
            expected = {"x": torch.full((50_000,), 7.0)}
            assert equal(load(shm / "c", expected), expected)
            idle.fill_(7)
        slots.flip()
        store.commit()
        future = dcp.async_save(
            {"x": slots.current}, checkpoint_id=shm / "c", storage_writer=writer
        )
        slots.next.fill_(9)
        slots.flip()
        store.commit()
        slots.next.fill_(9)
        store.commit()
        future.result()
        assert equal(load(shm / "c", expected), expected)


def test_what_was_removed_is_copied(shm: Path) -> None:
    writer = StoreWriter(shm / "c")
    with pmstore.open(shm / "s.pm") as store:
        x = store.tensor("x", 50_000)
        store.commit()
        del store["x"]
        store.commit()
        x.fill_(3)
        future = dcp.async_save({"x": x}, checkpoint_id=shm / "c", storage_writer=writer)
        x.fill_(4)
        future.result()
    expected = {"x": torch.full((50_000,), 3.0)}
    assert equal(load(shm / "c", expected), expected)


def test_what_is_staged_and_never_saved_keeps_no_commit_waiting(shm: Path) -> None:
    """A hang, once: the pin stayed, and commits waited for room beside it."""
    with pmstore.open(shm / "run.pm") as store:
        model = torch.nn.Linear(256, 256)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
        writer = StoreWriter(shm / "checkpoints")
        kept = []
        for _ in range(4):
            kept.append(writer.stage({"model": model.state_dict()}))
            if len(kept) > 1:
                kept.clear()  # let go of, not saved
            with run.next_step():
                model(torch.ones(1, 256)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            run.commit()  # returns, beside a pin and after it
            kept.clear()
        writer.close()


@pytest.mark.parametrize("how", ["dropped", "failed"])
def test_nothing_stays_pinned_when_nobody_saves(
    shm: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits would wait for ever for what nobody copies."""
    with pmstore.open(shm / "run.pm", size="64MiB") as store:
        store["small"], store["large"] = torch.zeros(100_000), torch.zeros(3_000_000)
        store.commit()
        writer = StoreWriter(shm / "c")
        state = {"small": store["small"], "foreign": torch.zeros(10)}
        if how == "failed":

            def fail(*arguments: Any) -> None:
                raise KeyboardInterrupt

            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                patched.setattr(copying, "copy", fail)
                writer.stage(state)
        else:
            writer.stage(state)
        gc.collect()
        assert not writer._staging._pins  # type: ignore[union-attr]
        for number in range(3):
            store["small"].fill_(number)
            store["large"].fill_(number)
            store.commit()


@pytest.mark.parametrize(
    "look",
    [
        lambda staged: staged.copy(),
        lambda staged: staged | {},
        lambda staged: {} | staged,
        lambda staged: {**staged},
        lambda staged: {name: staged.get(name) for name in ("x", "y")},
        lambda staged: {name: staged.setdefault(name) for name in ("x", "y")},
        lambda staged: {name: staged.pop(name) for name in ("x", "y")},
        lambda staged: dict([staged.popitem(), staged.popitem()]),
        copy.copy,
        copy.deepcopy,
    ],
)
def test_whatever_looks_into_what_is_staged(
    shm: Path, look: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """By a program's own stager. What is pinned has no memory of its own before."""
    expected = {"x": torch.arange(50_000.0), "y": torch.arange(7)}
    writer = StoreWriter(shm / "c")
    with pmstore.open(shm / "s.pm") as store:
        for name, value in expected.items():
            store[name] = value
        store.commit()
        found = look(writer.stage({name: store[name] for name in expected}))
        for name in expected:
            store[name].zero_()
        assert equal(dict(sorted(found.items())), expected)
