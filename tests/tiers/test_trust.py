"""A store that came from elsewhere sends nothing anywhere by itself: tiers that it remembers count
where it had them added."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import pmstore
from pmstore import exchange, portable
from pmstore.commands.application import app
from pmstore.formats import description
from pmstore.scheduler import CommitScheduler
from pmstore.tiers import trust
from pmstore.tiers.tiers import GROUP

STRANGE = "did not have it added here"


@pytest.fixture
def flushing(path: Path, url: str) -> Path:
    """A store with a tier that is flushed to at every commit."""
    with pmstore.open(path, size="4MiB") as store:
        store["a"] = np.arange(1000.0)
        store.add_tier("evil", pmstore.TierConfig(url, every=1, keep=2))
    return path


def commits(store: pmstore.Store) -> None:
    """Two, each looked at as the thread that watches for them does, whether there is one or not."""
    for i in range(2):
        store["step"] = i
        store.commit()
        store._open_tiers().flush_those_due()
    store.drain(60)


def pmstore_says(*words: object, code: int = 0, told: str | None = None) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], input=told)
    assert done.exit_code == code, done.output
    return done.output


def epochs_of(url: str) -> list[int]:
    return [one.epoch for one in pmstore.epochs(url)] if Path(url).exists() else []


def test_a_store_that_had_a_tier_added_flushes_to_it(flushing: Path, url: str) -> None:
    moved = flushing.with_name("moved.pm")
    os.rename(flushing, moved)  # the same file
    with pmstore.open(moved) as store:
        commits(store)
    assert epochs_of(url)


@pytest.mark.parametrize(
    "how",
    ["copied", "made by somebody else", "another user's key", "another URL", "no key can be kept"],
)
def test_a_store_from_elsewhere_flushes_nowhere(
    flushing: Path, url: str, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = flushing
    if how == "copied":
        path = path.with_name("copy.pm")
        shutil.copy(flushing, path)
    elif how == "made by somebody else":
        with pmstore.open(path) as store:
            store[f"{GROUP}/evil"] = {"url": url, "every": 1}
    elif how == "another URL":
        with pmstore.open(path) as store:
            store[f"{GROUP}/evil"] = {**store[f"{GROUP}/evil"], "url": url + "-2"}
    elif how == "another user's key":
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
        with pmstore.open(tmp_path / "x.pm") as other:
            other.add_tier("t", url)  # makes it
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=STRANGE) as told:
        store = pmstore.open(path)
    (one,) = told
    assert url in str(one.message)
    assert "'evil'" in str(one.message)
    assert "pmstore trust" in str(one.message)
    assert one.filename == __file__
    with store:
        commits(store)  # and nothing more is said
        assert list(store.tiers) == ["evil"]
    assert epochs_of(url) == []
    assert not Path(url + "-2").exists()


def test_a_seal_of_no_kind(flushing: Path, url: str) -> None:
    for seal in (None, 5, "x", "\u00e9" * 64, "0" * 64, b"0" * 64, ["0"] * 64):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the seal before
            store = pmstore.open(flushing)
        with store:
            store[f"{GROUP}/evil"] = {"url": url, "every": 1, "seal": seal}
        with pytest.warns(UserWarning, match=STRANGE):
            pmstore.open(flushing).close()
    assert epochs_of(url) == []


@pytest.mark.filterwarnings("error")
def test_where_warnings_are_errors_the_store_is_closed(flushing: Path) -> None:
    copy = flushing.with_name("copy.pm")
    shutil.copy(flushing, copy)
    with pytest.raises(UserWarning, match=STRANGE):
        pmstore.open(copy)
    pmstore.open(copy, "r").close()  # nobody holds it


@pytest.mark.parametrize("how", ["add_tier", "flush", "flush_if_idle", "trust"])
def test_a_program_that_names_it_again(flushing: Path, url: str, how: str) -> None:
    copy = flushing.with_name("copy.pm")
    shutil.copy(flushing, copy)
    with pytest.warns(UserWarning, match=STRANGE):
        store = pmstore.open(copy)
    with store:
        if how == "add_tier":
            store.add_tier("evil", pmstore.TierConfig(url, every=1, keep=2))
        elif how == "trust":
            store._open_tiers().trust(store, ["evil"])
        else:
            with pytest.warns(UserWarning, match=f"{url}.*{STRANGE}.*the program names it"):
                getattr(store, how)("evil").wait()
            store.flush("evil", wait=True)  # told once
        commits(store)
    assert epochs_of(url)
    if how in ("add_tier", "trust"):
        shutil.rmtree(url)
        with pmstore.open(copy) as store:
            commits(store)
        assert epochs_of(url)


def test_a_scheduler_that_names_it(flushing: Path, url: str) -> None:
    from pmstore.scheduler import EveryN

    copy = flushing.with_name("copy.pm")
    shutil.copy(flushing, copy)
    with pytest.warns(UserWarning, match=STRANGE):
        store = pmstore.open(copy)
    with store:
        scheduler = CommitScheduler(EveryN(1), store=store, tiers=["evil"])
        with pytest.warns(UserWarning, match=f"{url}.*the program names it"):
            scheduler.commit("evil")
        store.drain(60)
    assert epochs_of(url)


def test_a_removed_tier_is_gone(flushing: Path) -> None:
    copy = flushing.with_name("copy.pm")
    shutil.copy(flushing, copy)
    with pytest.warns(UserWarning, match=STRANGE):
        store = pmstore.open(copy)
    with store:
        store.remove_tier("evil")
    pmstore.open(copy).close()


def test_a_restored_store_names_its_tiers(flushing: Path, url: str) -> None:
    with pmstore.open(flushing) as store:
        store.flush("evil", wait=True)
    back = flushing.with_name("back.pm")
    pmstore.restore(back, url)
    with pytest.warns(UserWarning, match=STRANGE):
        pmstore.open(back).close()


def test_compaction_keeps_what_was_added(flushing: Path, url: str) -> None:
    with pmstore.open(flushing) as store:
        store["big"] = np.zeros(1_000_000)
        store.commit()
        del store["big"]
    inode = flushing.stat().st_ino
    pmstore.compact(flushing)
    assert flushing.stat().st_ino != inode
    shutil.rmtree(url, ignore_errors=True)
    with pmstore.open(flushing) as store:
        commits(store)
    assert epochs_of(url)


def test_compaction_makes_no_tier_trusted(flushing: Path, url: str) -> None:
    copy = flushing.with_name("copy.pm")
    shutil.copy(flushing, copy)
    with pytest.warns(UserWarning, match=STRANGE):
        pmstore.compact(copy)
    with pytest.warns(UserWarning, match=STRANGE):
        pmstore.open(copy).close()
    assert epochs_of(url) == []


# ---- the key -------------------------------------------------------------------------------------


def test_the_key_is_a_secret(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pmstore.open(path) as store:
        info = store._core.pool.info
    sealed = trust.seal(info, "t", {"url": "x"})
    key = tmp_path / "state" / "pmstore" / "key"
    assert (key.stat().st_mode & 0o777, key.stat().st_size, key.parent.stat().st_mode & 0o777) == (
        0o600,
        32,
        0o700,
    )
    assert [one.name for one in key.parent.iterdir()] == ["key"]
    assert trust.sealed(info, "t", sealed)
    assert not trust.sealed(info, "u", sealed)
    assert not trust.sealed(info, "t", {**sealed, "url": "y"})
    assert not trust.sealed(info, "t", {**sealed, "keep": 1})
    assert not trust.sealed(info, "t", {**sealed, "odd": b"bytes"})
    key.chmod(0o640)
    assert not trust.sealed(info, "t", sealed)  # somebody else may have read it
    key.chmod(0o600)
    assert trust.sealed(info, "t", sealed)
    secret = tmp_path / "secret"
    os.rename(key, secret)
    key.symlink_to(secret)
    assert not trust.sealed(info, "t", sealed)
    assert "seal" not in trust.seal(info, "t", {"url": "x"})
    key.unlink()
    key.write_bytes(b"short")
    key.chmod(0o600)
    assert "seal" not in trust.seal(info, "t", {"url": "x"})


def test_a_state_home_that_is_no_absolute_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/somewhere")
    assert trust.key_path() == Path("/somewhere/.local/state/pmstore/key")


def test_processes_that_make_the_key_at_once(tmp_path: Path) -> None:
    program = (
        "import pmstore, sys\nfrom pmstore.tiers import "
        "trust\nsys.stdin.read()\nprint(trust._key(True).hex())"
    )
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    keys = {one.communicate("")[0] for one in started}
    assert len(keys) == 1
    assert len(keys.pop().strip()) == 64


# ---- the command line ----------------------------------------------------------------------------


def test_commands_name_where_a_store_would_go(flushing: Path, url: str) -> None:
    copy = flushing.with_name("copy.pm")
    shutil.copy(flushing, copy)
    assert "not added here" not in pmstore_says("info", flushing)
    assert f"evil at {url}, every 1 commit; not added here" in pmstore_says("info", copy)
    assert '"added_here": false' in pmstore_says("info", copy, "--json")
    told = pmstore_says("flush", copy, code=1)
    assert url in told
    assert "pmstore trust" in told
    assert url in pmstore_says("trust", copy, told="n\n", code=1)
    assert epochs_of(url) == []
    assert "1 tier trusted" in pmstore_says("trust", copy, "--yes")
    assert "all tiers" in pmstore_says("trust", copy)
    assert "not added here" not in pmstore_says("info", copy)
    assert "flushed to" in pmstore_says("flush", copy)
    assert epochs_of(url)


def test_a_command_that_is_given_a_strange_tier_says_where_it_goes(
    flushing: Path, url: str
) -> None:
    copy = flushing.with_name("copy.pm")
    shutil.copy(flushing, copy)
    told = pmstore_says("flush", copy, "evil")
    assert f"tier 'evil' is at '{url}'" in told
    assert epochs_of(url)


def test_a_store_that_remembers_nothing_has_nothing_to_trust(path: Path) -> None:
    pmstore.open(path, size="1MiB").close()
    assert "remembers no tier" in pmstore_says("trust", path)


def test_names_and_urls_do_not_steer_the_terminal(flushing: Path) -> None:
    with pmstore.open(flushing) as store:
        store[f"{GROUP}/\x1b[2J"] = {"url": "/tmp/\x1b[31mred"}
    for words in (("info", flushing), ("trust", flushing, "--yes")):
        assert "\x1b" not in pmstore_says(*words)


# ---- files of others -----------------------------------------------------------------------------


def evil(store: pmstore.Store, url: str) -> None:
    store["w"] = np.arange(3.0)
    store[f"{GROUP}/evil"] = {"url": url, "every": 1}
    store.list(".pmstore/list").extend([1, np.zeros(300_000)])
    store["pmstore.scheduler/run"] = np.zeros(300_000)


def carry_safetensors(store: pmstore.Store, to: Path) -> Callable[[pmstore.Store], Any]:
    pytest.importorskip("safetensors")
    exchange.export_safetensors(store, to / "m.safetensors")
    return lambda new: exchange.import_safetensors(new, to / "m.safetensors")


def carry_npz(store: pmstore.Store, to: Path) -> Callable[[pmstore.Store], Any]:
    exchange.export_npz(store, to / "m.npz")
    return lambda new: exchange.import_npz(new, to / "m.npz")


@pytest.mark.parametrize("carry", [carry_safetensors, carry_npz])
@pytest.mark.parametrize("planted", [True, False])
def test_no_file_plants_a_tier(
    shm: Path,
    url: str,
    carry: Callable[[pmstore.Store, Path], Any],
    planted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """planted: by a file that somebody else's program wrote; else ours does not write what is for
    nobody else."""
    with pmstore.open(shm / "theirs.pm", size="32MiB") as store:
        evil(store, url)
        with monkeypatch.context() as patch:
            if planted:
                patch.setattr(description, "is_own_name", lambda path: False)
            read = carry(store, shm)
    with pmstore.open(shm / "mine.pm", size="32MiB") as store:
        if planted:
            with pytest.warns(UserWarning, match=r"'\.pmstore', 'pmstore\.scheduler' was left out"):
                read(store)
        else:
            read(store)
        assert list(store) == ["w"]
        assert store["w"].tolist() == [0, 1, 2]
    with pmstore.open(shm / "mine.pm") as store:
        commits(store)
    assert epochs_of(url) == []


@pytest.mark.parametrize("planted", [True, False])
def test_no_dump_plants_a_tier(
    shm: Path, url: str, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = io.BytesIO()
    with pmstore.open(shm / "theirs.pm", size="32MiB") as store:
        evil(store, url)
        store["z"] = "last"
        with monkeypatch.context() as patch:
            if planted:
                patch.setattr(portable, "is_own_name", lambda path: False)
            portable.dump(store, dump)
    dump.seek(0)
    if planted:
        with pytest.warns(UserWarning, match=r"'\.pmstore', 'pmstore\.scheduler' was left out"):
            portable.load(dump, shm / "mine.pm")
    else:
        assert len(dump.getvalue()) < 10_000
        portable.load(dump, shm / "mine.pm")
    with pmstore.open(shm / "mine.pm") as store:
        assert sorted(store) == ["w", "z"]
        assert store.check().problems == ()
        commits(store)
    assert epochs_of(url) == []


def test_a_group_of_that_name_elsewhere_is_nothing_special(shm: Path) -> None:
    with pmstore.open(shm / "theirs.pm", size="4MiB") as store:
        store["run/.pmstore/x"] = np.arange(3.0)
        exchange.export_npz(store, shm / "m.npz")
    with pmstore.open(shm / "mine.pm", size="4MiB") as store:
        exchange.import_npz(store, shm / "m.npz")
        assert store["run/.pmstore/x"].tolist() == [0, 1, 2]
        with pytest.warns(UserWarning, match="left out"):
            exchange.import_npz(store.group(".pmstore/tiers"), shm / "m.npz")
        assert len(store[GROUP]) == 0
