"""The paragraph "Bad input" of the first issue, line by line: a clear error or the obvious right
result, nothing lost."""

from __future__ import annotations

import dataclasses
import errno
import os
import pydoc
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore


def contents(path: Path) -> bytes:
    return path.read_bytes()


def test_help_tells_of_every_field() -> None:
    """`help` shows no docstrings of fields."""
    from pmstore.scheduler import Known
    from pmstore.testing import Program

    for kind in (pmstore.TierConfig, Known, Program):
        told = pydoc.render_doc(kind, renderer=pydoc.plaintext)
        for field in dataclasses.fields(kind):
            assert field.name == "command" or re.search(rf"^ \| +{field.name}: \w", told, re.M)


# ---- files ----


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_no_store(path: Path, mode: Any) -> None:
    with pytest.raises(FileNotFoundError, match="mode='a'"):
        pmstore.open(path, mode)
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        pmstore.open(path / "no" / "folder")
    with pytest.raises(OSError):
        pmstore.open(path.parent, mode)


def test_a_folder_is_no_store(shm: Path) -> None:
    for mode in ("r", "r+", "a", "w", "x"):
        with pytest.raises((IsADirectoryError, FileExistsError)):
            pmstore.open(shm, mode)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [b"hello", b"\0" * 4096, os.urandom(1 << 21), b"PMSTORE"],
    ids=["text", "zeros", "noise", "magic"],
)
@pytest.mark.parametrize("mode", ["r", "r+", "a"])
def test_not_a_store(path: Path, mode: Any, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(pmstore.NotAStoreError, match=r"give the path of a store$"):
        pmstore.open(path, mode)
    assert contents(path) == data


def test_an_empty_file(path: Path) -> None:
    path.touch()
    for mode in ("r", "r+"):
        with pytest.raises(pmstore.NotAStoreError):
            pmstore.open(path, mode)  # type: ignore[arg-type]
    with pytest.raises(FileExistsError):
        pmstore.open(path, "x")
    with pmstore.open(path) as store:
        store["x"] = 1
    with pytest.raises(FileExistsError, match="'w'"):
        pmstore.open(path, "x")
    with pmstore.open(path, "w") as store:
        assert len(store) == 0


@pytest.fixture
def made(path: Path) -> Iterator[Path]:
    """A store with something in it, closed."""
    with pmstore.open(path, size="2MiB") as store:
        store["a"] = np.arange(1000)
        store["x"] = {"k": 1}
    return path


def test_another_version(made: Path) -> None:
    data = bytearray(contents(made))
    for copy in (0, 4096):
        if data[copy : copy + 8] == b"PMSTORE\n":
            data[copy + 8] = 99
    made.write_bytes(data)
    with pytest.raises(pmstore.FormatVersionError):
        pmstore.open(made)
    assert contents(made) == data


@pytest.mark.parametrize("keep", [1, 8, 512, 4096, 8192, 12288, 100_000, 1 << 20, (1 << 21) - 8192])
def test_truncated(made: Path, keep: int) -> None:
    os.truncate(made, keep)
    for mode in ("r", "r+", "a"):
        with pytest.raises(pmstore.CorruptStoreError) as caught:
            pmstore.open(made, mode)  # type: ignore[arg-type]
        if keep >= 4096:  # the superblock says how long the file was
            told = f"the end of the store is missing: the file has {keep:,} bytes, its superblock"
            assert told in str(caught.value)
            assert "make it again, whole" in str(caught.value)
            assert caught.value.offset == keep
    assert made.stat().st_size == keep


def test_damaged_superblock_anchor_and_metadata_never_crash(made: Path) -> None:
    whole = contents(made)
    for at in [
        *range(0, 4096, 97),
        *range(4096, 9 * 4096, 211),
        *range(9 * 4096, len(whole), 20011),
    ]:
        data = bytearray(whole)
        data[at] ^= 0xFF
        made.write_bytes(data)
        try:
            with pmstore.open(made, "r") as store:
                store.check()
                for name in store:
                    store[name]
        except (pmstore.CorruptStoreError, pmstore.FormatVersionError, KeyError):
            pass


def test_locked_by_another_process(path: Path) -> None:
    code = (
        f"import pmstore, sys; s = pmstore.open({str(path)!r}); print('open', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline().strip() == "open"
        for mode in ("r+", "a", "w"):
            with pytest.raises(pmstore.StoreLockedError, match=f"process {holder.pid}") as caught:
                pmstore.open(path, mode)  # type: ignore[arg-type]
            assert caught.value.pid == holder.pid
            assert isinstance(caught.value, BlockingIOError)
        with pytest.raises(pmstore.StoreLockedError, match=f"process {holder.pid}"):
            pmstore.open(path, "r", lock=True)
        with pmstore.open(path, "r") as beside:
            assert list(beside) == []
            assert beside.recovery.live
            assert "open for writing" in str(beside.recovery)
            for wrong in ("5", float("nan")):
                with pytest.raises((TypeError, ValueError)):
                    next(beside.follow(timeout=wrong))  # type: ignore[arg-type]
        with pytest.raises(pmstore.StoreLockedError):
            pmstore.open(path, lock_timeout=0.2)
        threading.Timer(0.2, holder.stdin.close).start()
        pmstore.open(path, lock_timeout=30).close()


def test_locked_by_this_process(store: pmstore.Store) -> None:
    with pytest.raises(pmstore.StoreLockedError, match="this process"):
        pmstore.open(store.path)
    store.commit()


def test_readers_share(made: Path) -> None:
    with pmstore.open(made, "r") as one, pmstore.open(made, "r") as two:
        assert one["x"] == two["x"]
        with pmstore.open(made) as writer:  # they do not keep it waiting
            writer["later"] = 1
        assert "later" not in one
        assert one.refresh()
        assert one["later"] == 1
        assert "later" not in two


def test_readers_with_a_lock_share_and_keep_writers_out(made: Path) -> None:
    with (
        pmstore.open(made, "r", lock=True) as one,
        pmstore.open(made, "r", lock=True) as two,
        pmstore.open(made, "r") as three,
    ):
        assert one["x"] == two["x"] == three["x"]
        with pytest.raises(pmstore.StoreLockedError):
            pmstore.open(made)


def test_read_only_file_system(made: Path, tmp_path: Path) -> None:
    place = tmp_path / "mnt"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", place], capture_output=True, check=False
    )
    if mounted.returncode:  # not root: the nearest thing is a file that may not be written
        made.chmod(0o400)
        with pytest.raises(PermissionError):
            pmstore.open(made)
        with pmstore.open(made, "r") as store:
            assert store["x"] == {"k": 1}
        return
    try:
        (place / "s.pm").write_bytes(contents(made))
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        for mode in ("a", "r+", "w", "x"):
            with pytest.raises(OSError) as caught:
                pmstore.open(place / "s.pm", mode)  # type: ignore[arg-type]
            assert caught.value.errno in (errno.EROFS, errno.EEXIST)
        with pytest.raises(OSError):
            pmstore.open(place / "new.pm")
        with pmstore.open(place / "s.pm", "r") as store:
            assert store["x"] == {"k": 1}
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("size", [1, 4096, "1000kB", (1 << 20) - 1])
def test_size_too_small(path: Path, size: Any) -> None:
    with pytest.raises(ValueError, match="1 MiB"):
        pmstore.open(path, size=size)
    assert not path.exists()


@pytest.mark.parametrize("size", [0, -1, "", "4 apples", "GiB", "-1MB", 1 << 70])
def test_sizes_that_are_none(path: Path, size: Any) -> None:
    with pytest.raises(ValueError):
        pmstore.open(path, size=size)
    for wrong in (1.5, True, b"1MB"):
        with pytest.raises(TypeError):
            pmstore.open(path, size=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        pmstore.open(path, max_size="1MiB", size="2MiB")
    assert os.listdir(path.parent) == []


def test_arguments_of_open(path: Path) -> None:
    for wrong in ({"mode": "rw"}, {"domain": "disk"}, {"lock_timeout": float("nan")}):
        with pytest.raises(ValueError):
            pmstore.open(path, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NUL"):
        pmstore.open("a\0b")
    with pytest.raises(TypeError):
        pmstore.open(b"bytes")  # type: ignore[arg-type]
    with pytest.raises(pmstore.DomainError):
        pmstore.open(path, domain="dax")
    assert os.listdir(path.parent) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB; for an unprivileged user, a limit on the size of files."""
    import resource

    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", place], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        yield place
        subprocess.run(["umount", place], check=True)
        return
    import signal

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, hard))
    yield place
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)


def test_disk_full_at_create(small_disk: Path) -> None:
    with pytest.raises(pmstore.StoreFullError) as caught:
        pmstore.open(small_disk / "s.pm", size="64MiB")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(small_disk) == []
    with pmstore.open(small_disk / "s.pm", size="1MiB") as store:
        store["x"] = 1


def test_disk_full_at_growth(small_disk: Path, domain: Any) -> None:
    path = small_disk / "s.pm"
    with pmstore.open(path, size="2MiB", domain=domain) as store:
        a = store.zeros("a", 1000)
        store["small"] = 1
        store.commit()
        a += 1
        for _ in range(3):
            with pytest.raises(pmstore.StoreFullError, match="Nothing was changed"):
                store["big"] = np.ones(64 << 20, "u1")
            with pytest.raises(pmstore.StoreFullError):
                store.zeros("big", 1 << 40)
            with pytest.raises(pmstore.StoreFullError):
                store["big"] = b"x" * (64 << 20)
        assert "big" not in store
        store.commit()
    with pmstore.open(path, domain=domain) as store:
        assert store["a"].sum() == 1000
        assert sorted(store) == ["a", "small"]
        assert store.check().problems == ()


def test_max_size(path: Path) -> None:
    with pmstore.open(path, size="1MiB", max_size="2MiB") as store:
        with pytest.raises(pmstore.StoreFullError):
            store.zeros("a", 4 << 20, "u1")
        store["x"] = 1
    assert path.stat().st_size <= 2 << 20


def test_max_size_of_a_store_that_is_there(path: Path, domain: Any) -> None:
    """What StoreFullError advises: opened with a larger one it grows on; the number stays until
    another is given."""
    room = 1 << 19  # more than a store of the first size has
    with pmstore.open(path, size="1MiB", max_size="1MiB", domain=domain) as store:
        store["x"] = 1
        with pytest.raises(pmstore.StoreFullError, match="larger max_size"):
            store.zeros("a", room, "u1")
    with pmstore.open(path, domain=domain) as store, pytest.raises(pmstore.StoreFullError):
        store.zeros("a", room, "u1")
    before = path.read_bytes()
    with pmstore.open(path, "r", max_size="16MiB") as store:  # a reader changes nothing
        assert store["x"] == 1
    assert path.read_bytes() == before
    with pmstore.open(path, domain=domain, max_size="16MiB") as store:
        store.zeros("a", room, "u1")
    with pmstore.open(path, domain=domain) as store:
        store.zeros("b", room, "u1")
        store["a"][:] = 1
        with pytest.raises(pmstore.StoreFullError):
            store.zeros("c", 16 << 20, "u1")
    with pytest.raises(ValueError, match="max_size is smaller than the file"):
        pmstore.open(path, domain=domain, max_size="1MiB")
    with pmstore.open(path, domain=domain) as store:
        assert store["a"].all()
        assert store["x"] == 1
        assert (store.check().problems, store.check().sound_copies) == ((), 3)


# ---- arrays ----


def test_object_dtype(store: pmstore.Store) -> None:
    for make in (
        lambda: store.empty("a", 3, object),
        lambda: store.__setitem__("a", np.array([None])),
    ):
        with pytest.raises(TypeError, match="Python objects"):
            make()
    assert "a" not in store


def test_odd_arrays(store: pmstore.Store) -> None:
    base = np.arange(60.0).reshape(3, 4, 5)
    arrays = {
        "strided": base[::2, ::-1, 1:3],
        "zero": np.zeros((3, 0, 2)),
        "scalar": np.array(5.0),
        "fortran": np.asfortranarray(base),
        "axes": base.transpose(1, 2, 0),
        "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
        "reversed": base[::-1],
        "readonly": np.frombuffer(b"abcd", "u1"),
        "matrix": base[0].view(np.ndarray),
    }
    for name, value in arrays.items():
        store[name] = value
        back = store[name]
        assert type(back) is np.ndarray
        assert (back.shape, back.dtype) == (value.shape, value.dtype)
        assert np.array_equal(back, value)
        assert back.flags.writeable
        back[...] = 1
    store.rollback()
    store.update(arrays)
    assert store["fortran"].flags.f_contiguous
    assert store["axes"].strides == arrays["axes"].strides
    assert store["scalar"] == 5
    store["scalar"] += 1
    assert store["scalar"].shape == ()
    assert store["scalar"] == 6
    with pytest.raises(TypeError, match="mask"):
        store["masked"] = np.ma.masked_array([1, 2], [True, False])


@pytest.mark.parametrize("shape", [-1, (2, -1), 1.5, "3", (2, "x"), None, (1 << 62, 1 << 62)])
def test_shapes(store: pmstore.Store, shape: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        store.zeros("a", shape)
    assert "a" not in store


def test_tensors(store: pmstore.Store) -> None:
    torch = pytest.importorskip("torch")
    t = torch.ones(3, requires_grad=True)
    (t * 2).sum().backward()
    store["t"] = t
    assert store["t"].tolist() == [1, 1, 1]
    assert store["t"].requires_grad
    assert store["t"].grad is None
    with pytest.raises(TypeError, match=r"\.cpu\(\)"):
        store["m"] = torch.ones(3, device="meta")
    with pytest.raises(TypeError, match="to_dense"):
        store["m"] = torch.eye(3).to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch: nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(TypeError, match="unbind"):
        store["m"] = nested
    with pytest.raises(TypeError, match="int_repr"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch: quantized tensors are deprecated
            quantized = torch._empty_affine_quantized(
                [2], scale=1.0, zero_point=0, dtype=torch.qint8
            )
        store["m"] = quantized
    assert "m" not in store


# ---- names ----


@pytest.mark.parametrize(
    "name",
    ["", "/", "/a", "a/", "a//b", "x" * 4097, "é" * 2049, "a\ud800", "a\0b", "a/" + "y" * 5000],
)
def test_names_that_are_none(store: pmstore.Store, name: str) -> None:
    for use in (
        lambda: store.__setitem__(name, 1),
        lambda: store[name],
        lambda: name in store,
        lambda: store.zeros(name, 3),
        lambda: store.group(name),
        lambda: store.__delitem__(name),
    ):
        with pytest.raises(ValueError, match="name"):
            use()
    assert list(store) == []


@pytest.mark.parametrize("name", [1, None, b"a", ("a",)])
def test_names_that_are_not_str(store: pmstore.Store, name: Any) -> None:
    for use in (
        lambda: store.__setitem__(name, 1),
        lambda: store[name],
        lambda: store.zeros(name, 3),
        lambda: name in store,
    ):
        with pytest.raises(TypeError, match="str"):
            use()


def test_names_that_are_odd(store: pmstore.Store) -> None:
    names = ["x" * 4096, "é" * 2048, " ", ".", "..", "\n", "'\"", "🦑", "g/" + "z" * 4096]
    for i, name in enumerate(names):
        store[name] = i
    assert [store[name] for name in names] == list(range(len(names)))


# ---- life ----


def test_use_after_close(path: Path) -> None:
    store = pmstore.open(path)
    group = store.group("g")
    block = store.transaction()
    store["x"] = 1
    store.close()
    store.close()
    uses = (
        lambda: store["x"],
        lambda: store.__setitem__("x", 1),
        lambda: store.__delitem__("x"),
        lambda: store["y"],
        lambda: "x" in store,
        lambda: len(store),
        lambda: list(store),
        lambda: store.zeros("z", 3),
        lambda: store.require("z", 3),
        lambda: store.commit(),
        lambda: store.rollback(),
        lambda: store.will_write(),
        lambda: store.epoch,
        lambda: store.stats(),
        lambda: store.check(),
        lambda: store.info(),
        lambda: store.group("h"),
        lambda: store.__enter__(),
        lambda: store.transaction().__enter__(),
        lambda: block.__enter__(),
        lambda: group["x"],
        lambda: group.entries(),
    )
    for use in uses:
        with pytest.raises(pmstore.ClosedStoreError, match="closed"):
            use()
    assert store.closed


def test_commit_and_rollback_inside_a_block(store: pmstore.Store) -> None:
    a = store.zeros("a", 3)
    with store.transaction():
        a[0] = 1
        for call in (store.commit, store.rollback):
            with pytest.raises(pmstore.TransactionError, match="inside a transaction block"):
                call()
        a[1] = 1
    assert a.tolist() == [1, 1, 0]


def test_a_transaction_from_a_second_thread(store: pmstore.Store) -> None:
    inside, leave = threading.Event(), threading.Event()

    def owner() -> None:
        with store.transaction():
            store["owner"] = 1
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=owner, name="the-owner")
    thread.start()
    inside.wait(60)
    with pytest.raises(pmstore.TransactionError, match="the-owner") as caught:
        with store.transaction(timeout=0.1):
            pytest.fail("entered")
    assert caught.value.owner is not None
    assert "the-owner" in caught.value.owner
    with pytest.raises(pmstore.TransactionError, match="the-owner"):
        store.transaction(timeout=0).__enter__()
    with pytest.raises(pmstore.TransactionError, match="the-owner"):
        store.commit()
    assert store["owner"] == 1  # reading needs no block
    threading.Timer(0.2, leave.set).start()
    with store.transaction():
        store["second"] = store["owner"] + 1
    thread.join()
    assert store["second"] == 2


def test_a_block_is_left_by_its_own_thread(store: pmstore.Store) -> None:
    block = store.transaction()
    caught = []

    def other() -> None:
        try:
            block.__exit__(None, None, None)
        except pmstore.TransactionError as error:
            caught.append(str(error))

    with block:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "thread that entered it" in caught[0]


@pytest.mark.parametrize("timeout", ["1", [], float("nan")])
def test_timeouts(store: pmstore.Store, timeout: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        store.transaction(timeout=timeout)
    with (
        store.transaction(timeout=None),
        store.transaction(timeout=-1),
        store.transaction(timeout=1e300),
    ):
        pass


def test_an_odd_number_of_pages(path: Path) -> None:
    """The last granule of the page table then reaches behind its last entry; its capture is put
    back like any other."""
    code = f"""
import numpy as np, pmstore
store = pmstore.open({str(path)!r}, domain="process", size="1MiB")
store.list("l")
with store.transaction():
    store["a"] = np.arange(60)
    store["g/h/a"] = np.arange(3000.0)
store["a"] = np.zeros(1)
store.rollback()
assert store.check().problems == () and store["a"].tolist() == list(range(60))
store["a"] = np.zeros(1)
import os; os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    with pmstore.open(path) as store:
        assert store["a"].tolist() == list(range(60))
        assert store.check().problems == ()
