"""A version held for a job of several ranks: in doubt, and all doors by which it could go."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import pmstore
from pmstore import InDoubtError
from pmstore._engine.constants import HELD_FOR_JOB, HELD_FOR_STORE, HELD_NOT
from pmstore._engine.pool import Pool
from pmstore.commands.application import app


@pytest.fixture(params=["process", "file"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Of a store in that domain: the one that is made where it is."""
    if request.param == "file":
        yield tmp_path / "run.pm"
        return
    path = Path(f"/dev/shm/pms-hold-job-{os.getpid()}.pm")
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


def command(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def pool_of(store: pmstore.Store) -> Pool:
    return store._core.pool


def in_doubt(path: Path, **options: Any) -> pmstore.Store:
    """Open, at step 2; the version at step 1 is held for a job, since another open."""
    with pmstore.open(path, "w", size="4MiB") as store:
        store.zeros("w", 50_000)[:] = 1
        store.slots("s", 20_000).next[:] = 1
        store.slots("s").flip()
        store["step"] = 1
    store = pmstore.open(path)
    pool_of(store).hold_for_job()
    store["w"][:] = 2
    store.slots("s").next[:] = 2
    store.slots("s").flip()
    store["step"] = 2
    store.commit()
    store.close()
    return pmstore.open(path, **options)


def is_untouched(path: Path) -> bool:
    """As `in_doubt` made it, and step 1 can still be had."""
    with pmstore.open(path) as store:
        assert pool_of(store).in_doubt
        assert pool_of(store).holds() == HELD_FOR_JOB
        two = [store["step"], store["w"][7], store.slots("s").current[7], len(store)]
        pool_of(store).back()
        one = [store["step"], store["w"][7], store.slots("s").current[7], len(store)]
        assert not store.check().problems
    return two == [2, 2, 2, 3] and one == [1, 1, 1, 3]


def test_each_commit_is_in_doubt_until_it_is_allowed(path: Path) -> None:
    with pmstore.open(path, size="4MiB") as store:
        w = store.zeros("w", 50_000)
        store.commit()
        pool = pool_of(store)
        pool.hold_for_job()
        assert not pool.in_doubt
        assert pool.holds() == HELD_NOT
        for step in (1, 2, 3):
            w[:] = step
            store.commit()
            assert pool.in_doubt
            assert pool.holds() == HELD_FOR_JOB
            w[:] = 77
            with pytest.raises(InDoubtError, match=r"all ranks .*attach\(.*resolve .*--keep"):
                store.commit()
            store.rollback()
            assert (w == step).all()
            assert pool.in_doubt
            pool.allow()
            assert not pool.in_doubt
        pool.allow()
        pool.back()
        assert (w == 2).all()
        assert pool.holds() == HELD_NOT
        w[:] = 4  # holding stays on
        with pytest.raises(InDoubtError, match="commit that first"), store.transaction():
            w[0] = 5
        assert w[0] == 4
        store.commit()
        pool.allow()
        with store.transaction():
            w[0] = 5
        assert pool.in_doubt
        pool.allow()
    with pmstore.open(path) as store:
        assert pool_of(store).holds() == HELD_NOT  # allowed, and left: final
        assert store["w"][:2].tolist() == [5, 4]


def test_with_hold_too(path: Path) -> None:
    with pmstore.open(path, size="4MiB", hold=True) as store:
        for step in (1, 2):
            store["step"] = step
            store.commit()
        pool = pool_of(store)
        assert pool.holds() == HELD_FOR_STORE
        pool.hold_for_job()
        assert not pool.in_doubt
        store["step"] = 3
        store.commit()
        assert pool.in_doubt
        pool.allow()
        assert store.holds


def test_refused_where_something_is_pending(path: Path) -> None:
    with pmstore.open(path, size="4MiB") as store:
        store["a"] = 1
        with pytest.raises(pmstore.TransactionError, match="pending: commit it"):
            pool_of(store).hold_for_job()
        with (
            pytest.raises(pmstore.TransactionError, match="inside a transaction block"),
            store.transaction(),
        ):
            pool_of(store).hold_for_job()


def test_a_full_store_is_left_as_it_is(path: Path) -> None:
    size = 4 << 20
    with pmstore.open(path, "a", size=size, max_size=size) as store:
        with pytest.raises(pmstore.StoreFullError):
            for i in range(10_000):
                store.zeros(f"a{i}", 60_000, dtype=np.uint8)
        store.commit()
        with pytest.raises(pmstore.StoreFullError, match=r"hold .* takes log for two transactions"):
            pool_of(store).hold_for_job()
        for name in store:
            store[name][:] = 1  # all of it, in one transaction, as ever
        store.commit()
        assert not store.holds
    with pytest.raises(pmstore.StoreFullError, match=r"hold .* takes log for two transactions"):
        pmstore.open(path, hold=True)
    content = path.read_bytes()
    assert content[16] == content[4096 + 16] == 0  # feature bits of both superblocks
    with pmstore.open(path, "a", max_size=4 * size) as store:
        pool_of(store).hold_for_job()
        for step in (2, 3, 4):
            pool_of(store).allow()
            for name in store:
                store[name][:] = step
            store.commit()
        pool_of(store).back()
        assert all((store[name] == 3).all() for name in store)


def test_a_kill_leaves_it_in_doubt(path: Path) -> None:
    script = dedent("""
        import os, signal, sys, pmstore
        store = pmstore.open(sys.argv[1], size="4MiB")
        pool = store._core.pool
        pool.hold_for_job()
        for step in (1, 2):
            pool.allow()
            store["step"] = step
            store.commit()
        pool.allow()  # is forgotten
        store["step"] = 3
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    ended = subprocess.run([sys.executable, "-c", script, path], timeout=120, check=False)
    assert ended.returncode == -9
    with pmstore.open(path, "r") as store:
        assert store["step"] == 2
        assert store.info().in_doubt
        assert "for a job: not known to be committed by all ranks" in str(store.info())
    for _ in range(2):
        with pytest.raises(InDoubtError), pmstore.open(path) as store:
            store["step"] = 9
    with pmstore.open(path) as store:
        pool_of(store).back()
        assert store["step"] == 1


def commit(store: pmstore.Store) -> None:
    store["x"] = 1
    store.commit()


def commit_later(store: pmstore.Store) -> None:
    store["x"] = 1
    store.commit(wait=False)


def block(store: pmstore.Store) -> None:
    with store.transaction():
        store["x"] = 1


def next_slot(store: pmstore.Store) -> None:
    store.slots("s").next[:] = 9


def flip(store: pmstore.Store) -> None:
    store.slots("s").flip()


def tier(store: pmstore.Store) -> None:
    store.add_tier("t", f"{store.path}.tier")
    store.commit()


@pytest.mark.parametrize("do", [commit, commit_later, block, next_slot, flip, tier])
@pytest.mark.parametrize("hold", [False, True])
def test_every_door_is_shut(path: Path, do: Callable[[pmstore.Store], None], hold: bool) -> None:
    with in_doubt(path, hold=hold) as store:
        with pytest.raises(InDoubtError):
            do(store)
        store.rollback()
        with pytest.raises(InDoubtError):
            store.rewind()
    assert is_untouched(path)


def test_leaving_in_doubt(path: Path) -> None:
    with in_doubt(path) as store:  # only looks
        assert (store["w"] == 2).all()
    with (
        pytest.raises(InDoubtError, match=r"since is rolled back.*resolve"),
        pmstore.open(path) as store,
    ):
        store["x"] = 1  # pending
    assert store.closed
    with pytest.raises(ZeroDivisionError), pmstore.open(path) as store:
        store["x"] = 1
        raise ZeroDivisionError
    store = pmstore.open(path)
    store["x"] = 1
    store.close()
    with pytest.raises(SystemExit), pmstore.open(path) as store:
        store["x"] = 1
        sys.exit(0)
    assert is_untouched(path)


def test_leaving_after_a_commit_of_its_own(path: Path) -> None:
    with (
        pytest.raises(InDoubtError, match=r"left so.*resolve"),
        pmstore.open(path, size="4MiB") as store,
    ):
        store["step"] = 1
        store.commit()
        pool_of(store).hold_for_job()
        store["step"] = 2
        store.commit()
    assert store.closed
    with pmstore.open(path) as store:
        assert store["step"] == 2
        assert pool_of(store).in_doubt


def test_growth_lets_nothing_go(path: Path) -> None:
    with in_doubt(path) as store:
        size = path.stat().st_size
        store.zeros("large", 4 << 20)[:] = 3
        assert path.stat().st_size > size
        store.rollback()
    assert is_untouched(path)


def test_frees_of_what_the_held_version_has(path: Path) -> None:
    with in_doubt(path) as store:
        del store["w"], store["s"], store["step"]
        for i in range(20):
            store.zeros(f"n{i}", 10_000)[:] = 9
        store.rollback()
    assert is_untouched(path)


def test_mirrors(path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(30_000)
    with pytest.raises(InDoubtError), pmstore.open(path, size="4MiB") as store:
        store.mirror("m", tensor)
        store.commit()
        pool = pool_of(store)
        pool.hold_for_job()
        for step in (1, 2):
            tensor[:] = step
            pool.allow()
            store.commit(wait=False).wait()
            assert pool.in_doubt
        tensor[:] = 3
        for do in (store.commit, lambda: store.commit(wait=False), store.transaction().__enter__):
            with pytest.raises(InDoubtError):
                do()
    with pmstore.open(path) as store:
        assert (store.slots("m").current == 2).all()
        pool_of(store).back()
        assert (store.slots("m").current == 1).all()
    with pytest.raises(InDoubtError), in_doubt(path) as store:
        store.mirror("m", tensor)  # makes its slots, and each commit copies it
    assert is_untouched(path)


def test_other_programs_let_nothing_go(path: Path, tmp_path: Path) -> None:
    in_doubt(path).close()
    with pytest.raises(pmstore.TransactionError, match="resolve"):
        pmstore.compact(path)
    with pytest.raises(pmstore.TransactionError, match="held in another domain"):
        pmstore.open(path, domain="file" if path.is_relative_to("/dev/shm") else "process")
    for words in (("set", path, "x=1"), ("rm", path, "w"), ("compact", path)):
        result = command(*words)
        assert result.exit_code == 2, result.output
    for words in (("check", path), ("ls", path), ("dump", path, tmp_path / "d"), ("repair", path)):
        result = command(*words)
        assert result.exit_code == 0, result.output
    assert is_untouched(path)


@pytest.mark.parametrize(("how", "step"), [("--keep", 2), ("--back", 1)])
def test_resolve(path: Path, how: str, step: int) -> None:
    in_doubt(path).close()
    told = command("info", path)
    assert "for a job: not known to be committed by all ranks" in told.stdout
    result = command("resolve", path, how)
    assert result.exit_code == 0, result.output
    with pmstore.open(path) as store:
        assert store["step"] == step
        assert (store["w"] == step).all()
        assert (store.slots("s").current == step).all()
        assert not store.holds
        assert not store.info().in_doubt
        store["x"] = 1


def test_a_thread_that_commits_is_told(path: Path) -> None:
    """allow() is for one commit: the second of two in a row is in doubt."""
    with pmstore.open(path, size="4MiB") as store:
        pool = pool_of(store)
        store["a"] = 0
        store.commit()
        pool.hold_for_job()
        store["a"] = 1
        pool.allow()
        first = store.commit(wait=False)
        first.wait()
        store["a"] = 2
        with pytest.raises(InDoubtError):
            store.commit(wait=False)
        store.rollback()
        pool.release()
    with pmstore.open(path, "r") as store:
        assert store["a"] == 1
