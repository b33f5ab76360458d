"""The version before the last commit, held: open(hold=True), rewind, info, resolve; with the death
of the process in between."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import pmstore
from pmstore.commands.application import app
from pmstore.errors import TransactionError
from pmstore.opening import open_before


@pytest.fixture(params=["/dev/shm", "/var/tmp"], ids=["memory", "disk"])
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    path = Path(f"{request.param}/pms-hold-{os.getpid()}.pm")
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


def held(path: Path, mode: Any = "a", **options: Any) -> pmstore.Store:
    return pmstore.open(path, mode, size="4MiB", hold=True, **options)


def command(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def dies(path: Path, program: str) -> None:
    """A process that opens the store, does this, and is killed."""
    script = dedent("""
        import os, signal, sys, numpy as np, pmstore
        store = pmstore.open(sys.argv[1], "a", size="4MiB", hold=True)
    """)
    script += dedent(program) + "\nos.kill(os.getpid(), signal.SIGKILL)\n"
    ended = subprocess.run([sys.executable, "-c", script, path], timeout=120, check=False)
    assert ended.returncode == -9


def test_a_reader_is_shown_the_version_before(path: Path) -> None:
    """Arrays, slots, values and names, and no byte of the file changes."""
    dies(
        path,
        """
        array, pair = store.zeros("array", 5000), store.slots("pair", 20_000)
        for step in range(4):
            array[:] = pair.next[:] = step
            pair.flip()
            store.pop(f"x{step - 1}", None)
            store[f"x{step}"] = array + 0.5
            store.commit()
        array[:] = 99
        store["pending"] = 1
        """,
    )
    file = path.read_bytes()
    for step in (3, 2):
        with open_before(str(path)) if step == 2 else pmstore.open(path, "r", lock=True) as store:
            assert set(store) == {"array", "pair", f"x{step}"}
            assert (store["array"] == step).all()
            assert (store["pair"].current == step).all()
            assert (store[f"x{step}"] == step + 0.5).all()
            assert store.check().problems == ()
    assert path.read_bytes() == file
    with pmstore.open(path) as store:
        store["more"] = 1
        store.commit()
    with pytest.raises(TransactionError, match="no version before the last commit is held"):
        open_before(str(path))


def test_rewind_goes_back_one_commit_once(path: Path) -> None:
    with held(path) as store:
        w = store.zeros("w", 100_000)
        store["step"] = 0
        store.commit()
        for step in (1, 2):
            w[:] = step
            store["step"] = step
            store.commit()
        epoch = store.epoch
        w[5] = 77  # pending
        store["gone"] = 1
        assert store.holds
        store.rewind()
        assert w[5] == 1
        assert (w == 1).all()
        assert store["step"] == 1
        assert "gone" not in store
        assert store.epoch == epoch + 1
        assert not store.holds
        with pytest.raises(pmstore.TransactionError, match=r"no version before the last commit"):
            store.rewind()
        assert not store.check().problems
        w[:] = 3
        store.commit()
        store.rewind()
        assert (w == 1).all()


def test_it_is_there_after_a_crash_and_after_another(path: Path) -> None:
    dies(
        path,
        """
        w = store.zeros("w", 5000)
        store["a"] = np.ones(30_000)
        store.commit()
        w += 1
        del store["a"]
        store["step"] = 1
        store.commit()
        w += 5
        store["b"] = np.full(30_000, 7.0)  # not where "a" was
        """,
    )
    with pmstore.open(path, "r") as store:
        assert store.holds
        assert store.info().held
        assert store["step"] == 1
        assert (store["w"] == 1).all()
        assert "pmstore resolve" in str(store.info())
    dies(path, "store['c'] = np.full(30_000, 8.0)")
    with held(path) as store:
        store["d"] = np.full(30_000, 9.0)
        store.rewind()
        assert (store["w"] == 0).all()
        assert (store["a"] == 1).all()
        assert "step" not in store
        assert not store.check().problems


def test_leaving_with_is_final_and_an_exception_is_not(path: Path) -> None:
    with held(path) as store:
        store["step"] = 1
        store.commit()
        store["step"] = 2
    with held(path) as store:
        assert not store.holds
        assert store["step"] == 2
    with pytest.raises(ZeroDivisionError), held(path) as store:
        store["step"] = 3
        store.commit()
        raise ZeroDivisionError
    store = held(path)
    assert store.holds
    store.close()  # nobody said that it is final
    with held(path) as store:
        store.rewind()
        assert store["step"] == 2


def test_a_store_opened_without_hold_lets_go_at_its_first_commit(path: Path) -> None:
    dies(path, "store['step'] = 1; store.commit(); store['step'] = 2; store.commit()")
    with pmstore.open(path) as store:
        assert store["step"] == 2
    with pytest.raises(pmstore.TransactionError, match="resolve"):
        pmstore.compact(path)
    with pmstore.open(path) as store:
        assert store.holds
        store["step"] = 3
        store.commit()
        assert not store.holds
        store["step"] = 4
        store.commit()
        assert not store.holds
    with held(path) as store:
        assert not store.holds
        assert store["step"] == 4


def test_a_store_that_was_full_without_hold_grows_for_it(path: Path) -> None:
    with pmstore.open(path, size="4MiB") as store:
        w = store.zeros("w", 350_000, "float32")
        store.commit()
        before = store.info().file_bytes
    with held(path) as store:
        assert store.info().file_bytes > before
        w = store["w"]
        for step in (1, 2, 3):
            w[:] = step
            store.commit()
        store.rewind()
        assert (w == 2).all()
        assert not store.check().problems
    with pmstore.open(path) as store:
        assert (store["w"] == 2).all()


def test_slots_let_go_when_the_next_version_takes_the_held_ones_place(path: Path) -> None:
    with held(path) as store:
        slots = store.slots("s", 20_000)
        for step in (1.0, 2.0):
            slots.next[:] = step
            slots.flip()
            store.commit()
        assert store.holds
        store.rewind()
        assert (slots.current == 1).all()
        slots.next[:] = 3.0
        slots.flip()
        store.commit()
        slots.next[:] = 4.0
        assert not store.holds
        store.rollback()
        assert (slots.current == 3).all()


@pytest.mark.parametrize(("first", "then"), [("process", "file"), ("file", "emulated")])
def test_another_domain_is_refused_while_something_is_held(
    path: Path, first: pmstore.Domain, then: pmstore.Domain
) -> None:
    pmstore.open(path, size="4MiB").close()  # for resolve its own domain is that of the disk
    store = held(path, domain=first)
    for step in (1, 2):
        store["step"] = step
        store.commit()
    store.close()
    with pytest.raises(pmstore.TransactionError, match=r"held in another domain.*resolve"):
        pmstore.open(path, domain=then)
    result = command("resolve", path, "--keep")
    assert result.exit_code == 0, result.output
    with pmstore.open(path, domain=then) as store:
        assert store["step"] == 2


@pytest.mark.parametrize(("how", "step"), [("--keep", 2), ("--back", 1)])
def test_resolve(path: Path, how: str, step: int) -> None:
    dies(path, "store['step'] = 1; store.commit(); store['step'] = 2; store.commit()")
    assert "pmstore resolve" in command("info", path).stdout
    assert command("resolve", path).exit_code == 2
    result = command("resolve", path, how)
    assert result.exit_code == 0, result.output
    with pmstore.open(path, "r") as store:
        assert store["step"] == step
        assert not store.holds
    result = command("resolve", path, how)
    assert result.exit_code == 1
    assert "nothing is held" in result.output


def test_what_a_live_writer_holds_is_its_own(path: Path) -> None:
    """Nobody else knows of it, and says so of it what is not true."""
    with held(path) as store:
        store["step"] = 1
        store.commit()
        assert store.holds
        with pmstore.open(path, "r") as reader:
            assert not reader.info().held
        result = command("resolve", path, "--back")
    assert result.exit_code == 2
    assert "held open by" in result.output
    assert "nothing is held" not in result.output


def test_refused_inside_a_transaction_block(path: Path) -> None:
    with held(path) as store:
        store["a"] = np.ones(3)
        store.commit()
        with (
            pytest.raises(pmstore.TransactionError, match=r"rewind\(\) inside a transaction block"),
            store.transaction(),
        ):
            store.rewind()
        assert store.holds


def test_flushes_follow_a_rewind(path: Path, tmp_path: Path) -> None:
    """A chunk that the rewind changed back is flushed again; what is restored holds nothing."""
    with held(path) as store:
        w = store.zeros("w", 300_000)
        store.add_tier("t", str(tmp_path / "tier"))
        store.commit()
        for step in (1, 2):
            w[200_000:] = step
            store.commit()
            store.flush("t", wait=True)
        store.rewind()
        store.flush("t", wait=True)
        epoch = store.epoch
    back = tmp_path / "back.pm"
    pmstore.restore(back, tmp_path / "tier")
    with pmstore.open(back, domain="file") as store:
        assert store.epoch == epoch
        assert not store.holds
        assert (store["w"][200_000:] == 1).all()
        assert (store["w"][:200_000] == 0).all()
        assert not store.check().problems


def test_a_view_of_what_came_and_went_stays(path: Path) -> None:
    """Of a block that was freed since, in use by a view; and of one that was made since."""
    with held(path) as store:
        old = store.zeros("old", 30_000)
        small = store.zeros("small", 8)
        store.commit()
        old[:], small[:] = 1, 1
        store.commit()
        del store["old"], store["small"]
        new = store.zeros("new", 30_000)
        new[:] = 5
        store.commit()
        others = [store.zeros(f"x{i}", 30_000) for i in range(4)]
        for one in others:
            one[:] = 9
        store.rewind()
        assert (store["old"] == 1).all()
        assert (old == 1).all()
        assert (store["small"] == 1).all()
        assert (small == 1).all()
        assert "new" not in store
        old[:] = 3
        store.commit()
        assert (store["old"] == 3).all()
        assert not store.check().problems


@pytest.mark.parametrize("unit", [200, 8192, 100_000])
def test_a_full_store_can_hold_too(path: Path, unit: int) -> None:
    """Made without hold, and filled: the log lacks the second half, which is made now."""
    size = 4 << 20
    with pmstore.open(path, "a", size=size, max_size=size) as store:
        with pytest.raises(pmstore.StoreFullError):
            for i in range(10_000):
                store.zeros(f"a{i}", unit, dtype=np.uint8)
        store.commit()
    with pmstore.open(path, "a", hold=True, max_size=4 * size) as store:
        for name in store:
            store[name][:] = 1
        store.commit()
        store.rewind()
        assert all((store[name] == 0).all() for name in store)
        assert not store.check().problems


def test_what_logs_lack_for_halves_is_added_once(path: Path) -> None:
    with pmstore.open(path, "a", size="16MiB") as store:
        store.zeros("a", 7 << 20, dtype=np.uint8)
        store.commit()
    with pmstore.open(path, "a", hold=True) as store:
        for i in range(8):
            store.zeros(f"b{i}", 7 << 20, dtype=np.uint8)
            store.commit()
        stats = store.stats()
        assert stats.file_bytes < 3.3 * stats.data_bytes
