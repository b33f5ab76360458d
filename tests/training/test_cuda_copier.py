"""The copier for CUDA, with host memory for a GPU (tests/fake_cuda.py): what it asks of CUDA, in
which order, and what it does when CUDA refuses."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch

import pmstore
import pmstore.torch
from pmstore.errors import MirrorError
from pmstore.mirror import pending_commit
from pmstore.mirror.copier import CudaCopier, Piece
from pmstore.mirror.pinned_memory import PinnedBlocks

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
LARGE, SMALL = 100_000, 5  # a block of its own; a part of a page


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.Runtime:
    return fake_cuda.install(monkeypatch.setattr)


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(LARGE), torch.zeros(SMALL, dtype=torch.bfloat16)


@pytest.fixture
def mirrored(
    gpu: fake_cuda.Runtime, shm: Path, tensors: tuple[torch.Tensor, ...]
) -> Iterator[pmstore.Store]:
    with pmstore.open(shm / "mirrored.pm", size="16MiB", domain="process") as store:
        for name, tensor in zip(("large", "small"), tensors, strict=True):
            store.mirror(name, tensor)
        yield store


def step(store: pmstore.Store, tensors: tuple[torch.Tensor, ...], number: int) -> None:
    """One that is committed while the program goes on."""
    for tensor in tensors:
        tensor.fill_(number)
    store["step"] = number
    pending = store.commit(wait=False)
    pending.fence()
    for tensor in tensors:
        tensor.fill_(-number)
    pending.wait()
    for name in ("large", "small"):
        assert (store.slots(name).current == number).all()


def test_copies_that_come_later(
    gpu: fake_cuda.Runtime, mirrored: pmstore.Store, tensors: tuple[torch.Tensor, ...]
) -> None:
    for number in range(1, 6):
        step(mirrored, tensors, number)
        mirrored.rollback()
        assert all((tensor == number).all() for tensor in tensors)
    assert len(gpu.pinned) == 2  # both slots of the large one; the small one shares its pages
    mirrored.close()
    assert not gpu.pinned


def test_behind_the_work_of_the_current_stream(
    gpu: fake_cuda.Runtime, mirrored: pmstore.Store, tensors: tuple[torch.Tensor, ...]
) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        for number in range(1, 6):
            torch.cuda._sleep(10**7)  # 10 ms
            step(mirrored, tensors, number)


@pytest.mark.parametrize("error", [1, 712, 801])
def test_pages_that_cannot_be_pinned(
    gpu: fake_cuda.Runtime, mirrored: pmstore.Store, tensors: tuple[torch.Tensor, ...], error: int
) -> None:
    """They are staged; and the program's next kernel does not raise what CUDA said about them."""
    gpu.refuses = error
    for number in range(1, 5):
        step(mirrored, tensors, number)
    assert gpu.error == 0
    assert not gpu.pinned
    gpu.refuses = 0
    for number in range(5, 8):
        step(mirrored, tensors, number)
    # what somebody else had pinned may be free later; pages of a kind that cannot be, not
    assert len(gpu.pinned) == (2 if error == 712 else 0)


def test_two_devices_pin_a_block_once(gpu: fake_cuda.Runtime) -> None:
    pinned = PinnedBlocks()
    block = torch.zeros(1 << 16, dtype=torch.uint8)
    assert pinned.pin(block, torch.device("cpu"))
    assert pinned.pin(block, torch.device("cpu"))
    assert gpu.error == 0


def test_slots_made_anew_are_not_pinned_for_ever(
    gpu: fake_cuda.Runtime, mirrored: pmstore.Store, tensors: tuple[torch.Tensor, ...]
) -> None:
    for number in range(1, 5):
        step(mirrored, tensors, number)
    before = set(gpu.pinned)
    del mirrored["large"]
    mirrored.commit()
    assert not gpu.pinned
    tensor = torch.ones(2 * LARGE)
    mirrored.mirror("large", tensor)
    for _ in range(4):
        mirrored.commit()
    assert len(gpu.pinned) == 2
    assert set(gpu.pinned.values()) == {8 * LARGE}
    assert before


def test_a_run(monkeypatch: pytest.MonkeyPatch, shm: Path) -> None:
    """Its state becomes more in the first step, and is pinned then; it resumes bit for bit."""
    gpu = fake_cuda.install(monkeypatch.setattr, late=False)

    def life(path: Path, until: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        with pmstore.open(path, size="64MiB", domain="process") as store:
            run = pmstore.torch.attach(store, model=model, optimizer=optimizer, mirror=True)
            for _ in run.steps(until):
                optimizer.zero_grad()
                model(torch.randn(16, 64)).square().mean().backward()
                optimizer.step()
            assert len(gpu.pinned) == 2
        assert not gpu.pinned
        return {key: one.clone() for key, one in model.state_dict().items()}

    whole = life(shm / "whole.pm", 12)
    life(shm / "parts.pm", 7)
    parts = life(shm / "parts.pm", 12)
    assert all(torch.equal(one, parts[key]) for key, one in whole.items())


def test_a_device_that_fails_while_the_store_closes(
    gpu: fake_cuda.Runtime,
    mirrored: pmstore.Store,
    tensors: tuple[torch.Tensor, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(1, 5):
        step(mirrored, tensors, number)

    def dead(self: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(fake_cuda.Stream, "synchronize", dead)
    mirrored.close()
    assert not gpu.pinned


def test_copies_that_cannot_be_started(
    gpu: fake_cuda.Runtime, mirrored: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as broken:
        broken.setattr(fake_cuda.Stream, "wait_stream", dead)
        with pytest.raises(MirrorError, match="illegal memory access"):
            mirrored.commit()
    mirrored.commit()


def test_a_fork_child_asks_cuda_for_nothing(
    gpu: fake_cuda.Runtime, mirrored: pmstore.Store, tensors: tuple[torch.Tensor, ...]
) -> None:
    """It has no device: whoever asks there raises."""
    for number in range(1, 5):
        step(mirrored, tensors, number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+: fork with threads
        pid = os.fork()
    if not pid:
        before = len(gpu.pinned)
        mirrored.close()
        os._exit(0 if len(gpu.pinned) == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    step(mirrored, tensors, 5)


def test_the_word_comes_behind_an_event(gpu: fake_cuda.Runtime) -> None:
    """What the host sees of the copies when it sees the word: what an event promises."""
    order: list[str] = []

    class Seen(fake_cuda.Event):
        def record(self, stream: Any = None) -> None:
            order.append("event")
            super().record(stream)

    copier = CudaCopier(torch.device("cpu"), None)
    copy = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        order.append("word" if source is copier._one else "copy")
        return copy(self, source, non_blocking)

    with pytest.MonkeyPatch.context() as seen:
        seen.setattr(torch.cuda, "Event", Seen)
        seen.setattr(torch.Tensor, "copy_", copy_)
        copies, batch = copier.start([Piece(torch.ones(3), 0, 0, None)])
    assert order == ["copy", "event", "word"]
    batch.synchronize()
    assert len(copies) == 1


def test_small_tensors_cross_together(gpu: fake_cuda.Runtime, shm: Path) -> None:
    """A model's biases are one copy: each that is started holds the program."""
    tensors = [torch.full((1 + n % 7,), float(n), dtype=DTYPES[n % 3]) for n in range(200)]
    tensors += [torch.full((LARGE,), 7.0), torch.empty(0)]
    copied: list[int] = []
    copy = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied.append(len(self))
        return copy(self, source, non_blocking)

    with pmstore.open(shm / "many.pm", size="16MiB", domain="process") as store:
        for n, tensor in enumerate(tensors):
            store.mirror(f"{n}", tensor)
        with pytest.MonkeyPatch.context() as seen:
            seen.setattr(torch.Tensor, "copy_", copy_)
            store.commit()
        for n, tensor in enumerate(tensors):
            assert torch.equal(torch.as_tensor(store.slots(f"{n}").current), tensor), n
    assert len(copied) == 3  # the large one, the small ones, the word


def test_small_tensors_of_many_megabytes(gpu: fake_cuda.Runtime, shm: Path) -> None:
    """They are joined by a few megabytes at a time: a device has no room for all of them."""
    tensors = [torch.full((15_000,), float(n)) for n in range(150)]
    with pmstore.open(shm / "many.pm", size="64MiB", domain="process") as store:
        for n, tensor in enumerate(tensors):
            store.mirror(f"{n}", tensor)
        store.commit()
        assert all(
            (torch.as_tensor(store.slots(f"{n}").current) == n).all() for n in range(len(tensors))
        )


def test_a_graph_that_is_captured(
    gpu: fake_cuda.Runtime, mirrored: pmstore.Store, tensors: tuple[torch.Tensor, ...]
) -> None:
    step(mirrored, tensors, 1)
    gpu.capturing = True
    with pytest.raises(MirrorError, match=r"commit before torch\.cuda\.graph"):
        mirrored.commit()
    gpu.capturing = False
    step(mirrored, tensors, 2)


def test_a_device_that_is_not_late_is_asked_nothing(
    gpu: fake_cuda.Runtime, mirrored: pmstore.Store, tensors: tuple[torch.Tensor, ...]
) -> None:
    """CUDA takes the question amiss while a graph is captured."""
    for number in range(1, 5):
        step(mirrored, tensors, number)
    assert "cudaEventQuery" not in {what for what, _ in gpu.calls}


def test_no_thread_makes_a_context_on_another_device(
    gpu: fake_cuda.Runtime,
    mirrored: pmstore.Store,
    tensors: tuple[torch.Tensor, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device that is current in a new thread is 0, wherever the model is."""
    monkeypatch.setattr(pending_commit, "_LATE_SECONDS", 0.001)
    tensors[0].fill_(3)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(2 * 10**8)  # 0.2 s
        mirrored.commit()
    for number in range(1, 4):
        step(mirrored, tensors, number)
    mirrored.close()
    asked = {what for what, _ in gpu.calls}
    assert asked == {"cudaEventQuery", "cudaHostRegister", "cudaHostUnregister"}
    assert {device for _, device in gpu.calls} == {torch.device("cpu")}
