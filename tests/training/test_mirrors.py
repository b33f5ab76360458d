"""Device mirrors. Host memory is a device like any other here; CUDA's tests run where there is a
GPU."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pmstore
from pmstore._engine.landing import LandCopy, Landing
from pmstore.errors import MirrorError, NameExistsError, TransactionError
from pmstore.mirror.copier import Batch, HostCopier, Piece, copier_for, staging
from pmstore.mirror.pending_commit import PendingCommit
from pmstore.testing import ForkServer

KILLS = int(os.environ.get("PMSTORE_MIRROR_KILLS", "12"))
LARGE, SMALL = 100_000, 5  # a block of its own; a part of a page


@pytest.fixture
def opened(shm: Path, disk: Path, domain: str) -> Iterator[Callable[[], pmstore.Store]]:
    """Opens the same store again and again."""
    path = (disk if domain == "file" else shm) / "mirrors.pm"
    stores: list[pmstore.Store] = []

    def open_() -> pmstore.Store:
        stores.append(pmstore.open(path, size="16MiB", domain=domain))  # type: ignore[arg-type]
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


class Late:
    """Copies that a thread makes later, through staging memory, as an accelerator would; they fail
    if they are told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: Exception | None = None

    def start(self, pieces: Sequence[Piece]) -> tuple[list[LandCopy], Batch]:
        word = np.zeros(1, np.int64)
        staged = [torch.empty_like(piece.tensor) for piece in pieces]
        copies = [
            LandCopy(
                one.data, one.at, one.nbytes, stage.data_ptr(), word.__array_interface__["data"][0]
            )
            for one, stage in zip(pieces, staged, strict=True)
        ]
        for one, stage in zip(pieces, staged, strict=True):
            # as of now, whatever the program does to it: what a stream's order gives
            stage.copy_(one.tensor)
        return copies, LateBatch(self, word, staged)

    def close(self) -> None:
        pass


class LateBatch:
    may_fail = True

    def __init__(
        self, copier: Late, word: np.ndarray[Any, Any], staged: list[torch.Tensor]
    ) -> None:
        self._copier, self._word, self._staged = copier, word, staged
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._copier.go.wait()
        if self._copier.error is None:
            self._word[0] = 1

    def fence(self) -> bool:
        return True

    def check(self) -> None:
        if self._copier.error is not None:
            raise self._copier.error

    def synchronize(self) -> None:
        self._thread.join()
        self.check()

    def release(self) -> None:
        self._thread.join()
        self._staged = []


def late(store: pmstore.Store) -> Late:
    """The store's mirrors are copied by it from now on."""
    made = Late()
    store._open_mirrors()._copiers[torch.device("cpu")] = made
    return made


def fill(tensors: Sequence[Any], value: float) -> None:
    for tensor in tensors:
        tensor[...] = value


def test_every_commit_holds_the_tensors(opened: Callable[[], pmstore.Store]) -> None:
    with opened() as store:
        large, small, empty = (
            torch.zeros(LARGE),
            torch.zeros(SMALL, dtype=torch.int64),
            torch.zeros(0),
        )
        for name, tensor in (("large", large), ("small", small), ("a/empty", empty)):
            assert not store.mirror(name, tensor).resumed
        array = store.zeros("array", 3)
        tensors = (large, small, array)

        fill(tensors, 1)
        store.commit()
        fill(tensors, 2)
        with store.transaction():
            fill(tensors, 3)
            with store.transaction():
                fill(tensors, 4)
        assert [int(one[-1]) for one in tensors] == [4, 4, 4]
        fill(tensors, 5)
        store.rollback()
        assert [int(one[-1]) for one in tensors] == [4, 4, 4]

        fill(tensors, 6)
        with pytest.raises(ZeroDivisionError), store.transaction():  # undoes exactly the block
            fill(tensors, 7)
            raise ZeroDivisionError
        assert [int(one[-1]) for one in tensors] == [6, 6, 6]
        assert all((one == 6).all() for one in tensors)
        assert torch.equal(store.slots("large").current, large)
        assert store.check().problems == ()
        fill(tensors, 8)
    with opened() as store:
        large, small = torch.zeros(LARGE), torch.zeros(SMALL, dtype=torch.int64)
        assert store.mirror("large", large).resumed
        assert store.mirror("small", small).resumed
        assert (large == 8).all()
        assert (small == 8).all()
        assert (store["array"] == 8).all()


def test_a_commit_without_waiting(opened: Callable[[], pmstore.Store]) -> None:
    """What is written after it has begun is of the next transaction, by whatever way it is
    written."""
    with opened() as store:
        large, small = torch.zeros(LARGE), torch.zeros(SMALL)
        store.mirror("large", large)
        store.mirror("small", small)
        array = store.zeros("array", 3)
        pages = store.tensor("pages", (LARGE,), torch.float32)
        store["value"] = 0
        store.commit()
        for step in range(1, 12):
            fill((large, small, array, pages), step)
            store["value"] = step
            epoch = store.epoch
            pending = store.commit(wait=False)
            pending.fence()
            fill((large, small, array, pages), -1)  # faults wait
            store["value"] = -1  # and calls
            assert pending.done
            pending.wait()
            assert store.epoch == epoch + 1
            store.rollback()
            assert [float(one[-1]) for one in (large, small, array, pages)] == [step] * 4
            assert all((one == step).all() for one in (large, small, array, pages))
            assert store["value"] == step
        assert store.check().problems == ()


def test_the_program_goes_on_meanwhile(opened: Callable[[], pmstore.Store]) -> None:
    with opened() as store:
        tensor = torch.ones(LARGE)
        store.mirror("w", tensor)
        pages = store.tensor("pages", (LARGE,), torch.float32)
        store.commit()
        copier = late(store)
        pages.fill_(1)
        pending = store.commit(wait=False)
        pending.fence()
        tensor.fill_(2)  # the next step
        assert not pending.done
        assert float(pages.sum()) == LARGE  # reading does not wait
        with pytest.raises(TimeoutError, match="goes on"):
            pending.wait(0.01)
        order: list[str] = []
        # torch gives up the GIL
        writer = threading.Thread(target=lambda: (pages.fill_(2), order.append("written")))
        writer.start()
        time.sleep(0.05)
        order.append("landed")
        copier.go.set()
        pending.wait()
        writer.join()
        assert order == ["landed", "written"]
        assert (store.slots("w").current == 1).all()
        store.rollback()
        assert (tensor == 1).all()
        assert (pages == 1).all()


def test_one_commit_after_another(opened: Callable[[], pmstore.Store]) -> None:
    with opened() as store:
        tensor = torch.zeros(LARGE)
        store.mirror("w", tensor)
        for step in range(20):
            tensor.fill_(step)
            pending = store.commit(wait=False)
            pending.fence()
        assert store.epoch == 20
        pending.wait()
        assert (store.slots("w").current == 19).all()
        previous = store.slots("w").previous
        assert previous is not None
        assert (previous == 18).all()


@pytest.mark.parametrize("how", ["fails", "is late", "fails at the start"])
def test_a_copy_that_fails(opened: Callable[[], pmstore.Store], how: str) -> None:
    """Nothing happened: what was pending is pending still, and the next commit holds it."""
    with opened() as store:
        large, small = torch.ones(LARGE), torch.ones(SMALL)
        store.mirror("large", large)
        store.mirror("small", small)
        store["value"] = 1
        store.commit()
        copier = late(store)
        fill((large, small), 2)
        store["value"] = 2
        epoch = store.epoch
        if how == "fails at the start":
            copier.start = lambda pieces: 1 / 0  # type: ignore[method-assign, assignment, return-value]
            with pytest.raises(MirrorError, match="division"):
                store.commit()
        elif how == "fails":
            copier.error = RuntimeError("the device is gone")
            copier.go.set()
            with pytest.raises(MirrorError, match="a copy from the device failed") as caught:
                store.commit()
            assert caught.value.__cause__ is copier.error
        else:
            mirrors = store._open_mirrors()
            mirrors.timeout_seconds = 0.05
            pending = store.commit(wait=False)
            while not pending.done:  # the copy comes when the commit has been given up
                time.sleep(0.01)
            copier.go.set()
            with pytest.raises(MirrorError, match="in time"):
                pending.wait()
            mirrors.timeout_seconds = None
        assert store.epoch == epoch
        assert (store.slots("large").current == 1).all()
        assert (store.slots("small").current == 1).all()
        assert store["value"] == 2
        store._open_mirrors()._copiers[torch.device("cpu")] = HostCopier()
        store.commit()
        assert store.epoch == epoch + 1
        assert (store.slots("large").current == 2).all()
        store.rollback()
        assert store["value"] == 2
        assert store.check().problems == ()


def test_an_error_that_nobody_was_told_of(store: pmstore.Store) -> None:
    tensor = torch.ones(LARGE)
    store.mirror("w", tensor)
    store["value"] = 1
    store.commit()
    copier = late(store)
    copier.error = RuntimeError("the device is gone")
    copier.go.set()
    store["value"] = 2
    store.commit(wait=False)
    with pytest.raises(MirrorError):
        store.commit()
    store.commit(wait=False)
    with pytest.raises(MirrorError), store.transaction():
        raise AssertionError("not entered")
    copier.error = None
    store.commit()
    copier.error = RuntimeError("the device is gone")
    store["value"] = 3
    with pytest.raises(MirrorError), store.transaction():
        raise AssertionError("not entered, for what was pending before could not be committed")
    assert store["value"] == 3
    store.rollback()
    assert store["value"] == 2
    copier.error = None


def test_a_block_whose_copies_fail_is_rolled_back(store: pmstore.Store) -> None:
    tensor = torch.ones(LARGE)
    store.mirror("w", tensor)
    copier = late(store)
    copier.go.set()
    with pytest.raises(MirrorError), store.transaction():
        tensor.fill_(2)
        store["value"] = 2
        copier.error = RuntimeError("the device is gone")
    assert "value" not in store
    assert (tensor == 1).all()
    copier.error = None
    with store.transaction():
        tensor.fill_(3)
    assert (store.slots("w").current == 3).all()


def test_leaving_the_store(path: Path) -> None:
    with pytest.raises(MirrorError), pmstore.open(path, size="8MiB") as store:
        store.mirror("w", torch.ones(LARGE))
        store["value"] = 1
        store.commit()
        store["value"] = 2
        copier = late(store)
        copier.error = RuntimeError("the device is gone")
        copier.go.set()
    with pmstore.open(path) as store:
        assert store["value"] == 1
        tensor = torch.zeros(LARGE)
        store.mirror("w", tensor)
        assert (tensor == 1).all()
        tensor.fill_(2)
        pending = store.commit(wait=False)
        store.close()  # finishes it
        assert pending.done
        pending.wait()
    with pmstore.open(path) as store:
        assert (store.slots("w").current == 2).all()


def test_mirrors_made_and_removed(store: pmstore.Store) -> None:
    tensor, other = torch.ones(LARGE), torch.ones(SMALL)
    store.mirror("w", tensor)
    store.rollback()  # it was not committed
    assert "w" not in store
    assert (tensor == 1).all()
    store.commit()
    store.mirror("w", tensor)
    store.mirror("other", other)
    store.commit()
    del store["w"]
    tensor.fill_(2)
    other.fill_(2)
    store.commit()
    assert "w" not in store
    assert (store.slots("other").current == 2).all()
    mirror = store.mirror("w", tensor)
    assert mirror.tensor is tensor
    assert mirror.name == "w"
    assert "'w'" in repr(mirror)
    assert "<td>cpu</td>" in mirror._repr_html_()
    store.commit()
    assert (store.slots("w").current == 2).all()
    del store["w"]
    tensor.fill_(3)
    store.rollback()  # it is there again
    assert (tensor == 2).all()
    store.commit()
    assert (store.slots("w").current == 2).all()


def test_a_snapshot_reads_its_own_version(store: pmstore.Store, shm: Path) -> None:
    tensor = torch.zeros(1_000_000)
    store.mirror("w", tensor)
    store.add_tier("t", pmstore.TierConfig(f"file://{shm}/tier", max_rate="40MB"))
    for step in range(1, 4):
        tensor.fill_(step)
        store["step"] = step
        store.commit()
        flush = store.flush("t")
        for more in range(4):
            tensor.fill_(100 * step + more)
            store.commit(wait=False).fence()
        flush.wait()
        pmstore.restore(shm / f"back{step}", f"file://{shm}/tier", epoch=flush.epoch)
        with pmstore.open(shm / f"back{step}", "r") as back:
            assert back["step"] == step
            assert (back.slots("w").current == step).all()


def test_noise_of_a_failed_commit_is_no_version(
    store: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even after a commit that has nothing for the mirror, as after a roll back of a run."""
    tensor = torch.full((1000,), 1.0)
    mirror = store.mirror("w", tensor)
    for value in (2.0, 3.0):
        store.commit()
        tensor.fill_(value)
    store.commit()
    slots = store["w"]
    previous = slots.previous
    assert previous is not None
    assert previous[0] == 2.0
    never = np.zeros(1, np.uint64)

    def late(pool: Any, copies: Sequence[LandCopy], flips: Any, timeout: float) -> Landing:
        last = copies[0]._replace(word=never.ctypes.data)
        return Landing(pool, [*copies, last], flips, 0.05)

    tensor.fill_(99.0)
    with monkeypatch.context() as patch:
        patch.setattr("pmstore.mirror.mirrors.Landing", late)
        with pytest.raises(MirrorError, match="in time"):
            store.commit()
    store.rollback()
    mirror.parts = ()
    store["x"] = 1
    store.commit()
    assert slots.current[0] == 3.0
    assert slots.previous is None


def test_slots_that_go_while_a_commit_is_prepared(
    store: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.ones(1000)
    store.mirror("w", tensor)
    store.commit()

    def removed(*arguments: Any) -> Landing:
        landing = Landing(*arguments)
        del store["w"]
        return landing

    with monkeypatch.context() as patch:
        patch.setattr("pmstore.mirror.mirrors.Landing", removed)
        with pytest.raises(MirrorError, match=r"have gone since .* commit again"):
            store.commit()
    store.commit()
    assert "w" not in store


def test_without_mirrors_too(opened: Callable[[], pmstore.Store]) -> None:
    """`commit(wait=False)` of a store that mirrors nothing: the sync is what it does not wait
    for."""
    with opened() as store:
        array = store.zeros("array", LARGE)
        epoch = store.epoch
        for step in range(1, 6):
            array[:] = step
            pending = store.commit(wait=False)
            array[:] = -1
            pending.wait()
            store.rollback()
            assert (array == step).all()
        assert store.epoch == epoch + 5
        store.commit(wait=False).wait()  # nothing to commit
        assert store.epoch == epoch + 5


def test_bad_input(store: pmstore.Store) -> None:
    with pytest.raises(TypeError, match="torch tensor"):
        store.mirror("w", np.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(MirrorError, match="meta"):
        store.mirror("w", torch.zeros(3, device="meta"))
    with pytest.raises(MirrorError, match="mps"):
        copier_for(torch.device("mps"), None)
    with pytest.raises(MirrorError, match="contiguous"):
        store.mirror("w", torch.zeros(3, 4).t())
    with pytest.raises(MirrorError, match="dense"):
        store.mirror("w", torch.zeros(3, 4).to_sparse())
    for lazy in (torch.ones(3, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(3))):
        with pytest.raises(MirrorError, match="resolve_conj"):
            store.mirror("w", lazy)
    assert "w" not in store
    store["taken"] = 1
    with pytest.raises(NameExistsError):
        store.mirror("taken", torch.zeros(3))
    store.mirror("w", torch.zeros(3))
    with pytest.raises(NameExistsError, match="shape"):
        store.mirror("w", torch.zeros(4))
    with pytest.raises(NameExistsError, match="dtype"):
        store.mirror("w", torch.zeros(3, dtype=torch.float64))
    with store.transaction(), pytest.raises(TransactionError):
        store.commit(wait=False)
    with pytest.raises(TransactionError, match="flipped by commits"), store.transaction():
        store.slots("w").flip()
    store.commit()


def test_a_closed_store(path: Path) -> None:
    store = pmstore.open(path, size="8MiB")
    store.mirror("w", torch.zeros(3))
    store.close()
    with pytest.raises(pmstore.ClosedStoreError):
        store.mirror("v", torch.zeros(3))
    with pytest.raises(pmstore.ClosedStoreError):
        store.commit(wait=False)


def test_blocks_of_two_threads(store: pmstore.Store) -> None:
    """Each commits the tensor as it is when its own block is entered, and when it is left."""
    tensor = torch.zeros(LARGE)
    store.mirror("w", tensor)
    store.commit()
    told: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                with store.transaction():
                    tensor.add_(1)
        except BaseException as error:
            told.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == []
    assert (tensor == 40).all()
    assert (store.slots("w").current == 40).all()


def test_other_threads(store: pmstore.Store) -> None:
    """A block of another thread is in the way, as of any commit; and blocks wait for a commit under
    way."""
    tensor = torch.zeros(LARGE)
    store.mirror("w", tensor)
    store.commit()
    inside, leave = threading.Event(), threading.Event()

    def block() -> None:
        with store.transaction():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=block)
    thread.start()
    inside.wait()
    with pytest.raises(TransactionError, match="another thread"):
        store.commit(wait=False)
    leave.set()
    thread.join()
    tensor.fill_(1)
    pending = store.commit(wait=False)
    pending.fence()
    tensor.fill_(2)
    with store.transaction():
        assert pending.done
    assert (store.slots("w").current == 2).all()


def test_next_while_another_thread_commits(
    store: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that flips between the look at the pair and the opening of its idle slot: what it
    has named is not opened."""
    tensor = torch.zeros(LARGE)
    store.mirror("w", tensor)
    store.commit()
    slots, mirrors = store.slots("w"), store._open_mirrors()
    assert not (slots.current == 1).any()
    tensor.fill_(1)
    store.commit()
    tensor.fill_(2)
    pending = PendingCommit(*mirrors._prepare())

    def flipped(*_: object) -> bool:
        monkeypatch.undo()
        pending.start(False)
        pending.wait()
        return False

    monkeypatch.setattr(type(slots), "_flipped", flipped)
    slots.next.fill_(7)
    assert (slots.current == 2).all()
    store.rollback()
    assert (slots.current == 2).all()
    assert (tensor == 2).all()


def test_two_threads_commit(store: pmstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the second begin when the first is over: a device may write into the idle slot from
    then on."""
    tensor = torch.zeros(LARGE)
    store.mirror("w", tensor)
    store.commit()
    store.commit()
    mirrors = store._open_mirrors()
    prepare, events, second = mirrors._prepare, [], threading.Event()

    def seen() -> Any:
        pair = store._core.pool.slot_find(0, b"w")
        assert pair is not None
        events.append(pair.data[1 - pair.current])
        if len(events) == 1:
            thread.start()
            second.wait(0.3)  # without order it prepares now
        else:
            second.set()
        return prepare()

    monkeypatch.setattr(mirrors, "_prepare", seen)
    thread = threading.Thread(target=store.commit)
    store.commit()
    thread.join()
    assert len(set(events)) == 2
    assert store.epoch == 4


# ---- killed ----


def work(ack: Callable[[int], None], path: str, domain: str) -> None:
    """Commits that nobody waits for, each followed by writes that must not be in it. Runs in a
    child of the fork server."""
    with pmstore.open(path, size="8MiB", domain=domain) as store:  # type: ignore[arg-type]
        large, small = torch.zeros(LARGE), torch.zeros(SMALL)
        store.mirror("large", large)
        store.mirror("small", small)
        array = store.require("array", 3, "float64")
        for step in range(store.get("step", 0) + 1, 1_000_000):
            fill((large, small, array), step)
            store["step"] = step
            pending = store.commit(wait=False)
            pending.fence()
            fill((large, small), -step)
            if step % 3 == 0:
                fill((array,), -step)
            pending.wait()
            ack(step)


def test_kills(server: ForkServer, shm: Path, disk: Path, domain: str) -> None:
    """At any instruction, and at the engine's writes: never half a mirror, never without the rest
    of its commit."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown if it fails
    chance = random.Random(seed)
    path = (disk if domain == "file" else shm) / "killed.pm"
    last = 0
    for turn in range(KILLS):
        how: dict[str, Any] = (
            {"kill_at": chance.randrange(1, 1200)}
            if turn % 3
            else {"delay_seconds": chance.uniform(0.01, 0.15)}
        )
        run = server.run("test_mirrors:work", [str(path), domain], **how)
        assert run.killed
        last = max(last, run.acknowledged)
        if not path.exists():
            continue
        with pmstore.open(path, domain=domain) as store:  # type: ignore[arg-type]
            assert store.check().problems == ()
            step = store.get("step", 0)
            assert step >= last
            if step:
                assert (store["array"] == step).all()
                for name in ("large", "small"):
                    assert (store.slots(name).current == step).all()
            last = step
    assert last > 0


# ---- where there is a GPU ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_staging_memory_is_pageable_where_none_can_be_pinned(dtype: torch.dtype) -> None:
    source = torch.arange(30).to(dtype)
    made = staging(source)
    made.copy_(source, non_blocking=True)
    assert made.is_pinned() == torch.cuda.is_available()
    if not made.is_pinned():  # else it is there later
        assert torch.equal(made, source)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@cuda
def test_cuda_round_trip(opened: Callable[[], pmstore.Store]) -> None:
    with opened() as store:
        large = torch.zeros(LARGE, device="cuda")
        small = torch.zeros(SMALL, device="cuda", dtype=torch.bfloat16)
        store.mirror("large", large)
        store.mirror("small", small)
        for step in range(1, 6):
            fill((large, small), step)
            store["step"] = step
            pending = store.commit(wait=False)
            pending.fence()
            fill((large, small), -1)
            pending.wait()
            assert (store.slots("large").current == step).all()
            assert (store.slots("small").current == step).all()
            store.rollback()
            assert bool((large == step).all())
    with opened() as store:
        large = torch.zeros(LARGE, device="cuda")
        assert store.mirror("large", large).resumed
        assert bool((large == 5).all())


@cuda
def test_cuda_copies_are_ordered_behind_the_step_before(store: pmstore.Store) -> None:
    """The copy waits for what the stream was given before, and what it is given after the fence
    waits for the copy."""
    tensor = torch.zeros(1_000_000, device="cuda")
    store.mirror("w", tensor)
    work = torch.randn(2048, 2048, device="cuda")
    for step in range(1, 10):
        for _ in range(20):
            work = work @ work / 64
        tensor.fill_(step)
        pending = store.commit(wait=False)
        pending.fence()
        tensor.fill_(-step)
        pending.wait()
        assert (store.slots("w").current == step).all()


@cuda
def test_cuda_slots_are_pinned_where_they_can_be(store: pmstore.Store) -> None:
    tensor = torch.ones(1_000_000, device="cuda")
    store.mirror("w", tensor)
    for _ in range(3):
        store.commit()
    pinned: Any = store._open_mirrors()._pinned
    assert len(pinned) == 2  # domain process, on tmpfs: both slots
    store.close()
    assert not len(pinned)
