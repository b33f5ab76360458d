"""What a program has changed in torch for its whole process: the default device, the dispatcher's
kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pmstore
import pmstore.torch
from pmstore import pymm
from pmstore.objects import collectives, core


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """New tensors are made on another device: "meta" stands for "cuda"."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def test_tensors_of_a_store_are_the_cpu_s(path: Path, elsewhere: None) -> None:
    ones = torch.ones(10, device="cpu")
    with pmstore.open(path) as store:
        store["t"], store["empty"], store["p"] = ones, ones[:0], torch.nn.Parameter(ones)
        made = store.tensor("made", 10)
        made += 1
        pair = store.slots("pair", 3, torch.float32)
        pair.next.fill_(1)
        pair.flip()
    with pmstore.open(path) as store:
        for name in ("t", "made", "p"):
            assert store[name].device.type == "cpu"
            assert torch.equal(store[name].detach(), ones)
        assert store["empty"].device.type == "cpu"
        assert store["pair"].current.tolist() == [1, 1, 1]


def test_what_is_received_is_captured(path: Path, elsewhere: None) -> None:
    with pmstore.open(path) as store:
        received = store.tensor("t", 5000)
        store.commit()
        before = store.stats().captured_bytes
        collectives._capture([received], core.is_captured)
        assert core.is_captured(received.data_ptr())
        assert store.stats().captured_bytes - before >= 20_000
        assert not received.any()


def test_pymm(elsewhere: None) -> None:
    for given in ((2,), [0.0, 0.0], torch.zeros(2, device="cpu")):
        assert pymm.torch_tensor(given)._data.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_attached_training(path: Path, elsewhere: None, name: str) -> None:
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {"lr": 0.1}
    for step in range(2):
        model = torch.nn.Linear(5, 3, device="cpu")
        optimizer = getattr(pmstore.torch.optim, name)(model.parameters(), **options)
        with pmstore.open(path) as store:
            run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
            assert run.step == step
            with run.next_step():
                optimizer.zero_grad()
                model(torch.ones(2, 5, device="cpu")).sum().backward()
                optimizer.step()
            run.commit()
            assert all(
                value.device.type == "cpu"
                for state in optimizer.state.values()
                for value in state.values()
            )


KERNELS = """
import sys
import torch
import pmstore
from pmstore.objects import collectives

names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
registered = lambda: {name for name in names if has_kernel(name, "AutogradCPU")}
calls = 0
if sys.argv[2] == "taken":
    library = torch.library.Library("c10d", "IMPL")
    library.impl("broadcast_", lambda *arguments: None, "AutogradCPU")
elif sys.argv[2] == "refused":
    def impl(self, *arguments, original=torch.library.Library.impl, **options):
        global calls
        calls += 1
        if calls == 3:
            raise RuntimeError("already a kernel registered")
        original(self, *arguments, **options)

    torch.library.Library.impl = impl
else:
    torch._C._dispatch_get_registrations_for_dispatch_key = None
before = registered() if sys.argv[2] != "renamed" else set()
with pmstore.open(sys.argv[1]) as store:
    for name in "ab":
        store[name] = torch.ones(3)
        assert store[name].sum() == 3
assert collectives._library is None
assert registered() == before, registered()
assert calls == 3 * (sys.argv[2] == "refused")
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("how", ["taken", "refused", "renamed"])
def test_without_the_layer_tensors_are_loaded(path: Path, how: str) -> None:
    """Another library has kernels where those of the layer over the collectives would be, or torch
    has no such place."""
    command = [sys.executable, "-W", "error", "-c", KERNELS, str(path), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
