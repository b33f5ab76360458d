"""Other users of SIGSEGV, and of the arrays' memory: fault handlers before and after open, and
system calls that write."""

from __future__ import annotations

import errno
import mmap
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pythons

import pmstore


def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# A library that puts its own handler over ours, or had one before: in C it would be sigaction;
# ctypes does the same.
LIBRARY = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_ubyte * 128),
                ("flags", ctypes.c_int), ("restorer", ctypes.c_void_p)]
HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
@HANDLER
def handler(number, info, context):
    os.write(1, b"the library's handler\\n")
    os._exit(7)
def install():
    action = Action(handler=ctypes.cast(handler, ctypes.c_void_p).value, flags=4 | 0x40000000)
    assert libc.sigaction(11, ctypes.byref(action), None) == 0
"""

WRITES = """
with store.transaction():
    a += 1
store.commit()
assert a.sum() == 10000
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_librarys_handler(path: Path, when: str) -> None:
    """Writes of arrays go on, whichever came first; a real fault is the library's."""
    opening = (
        f"import pmstore\nstore = pmstore.open({str(path)!r})\na = store.zeros('a', "
        "10000)\nstore.commit()\n"
    )
    parts = (
        [LIBRARY, "install()\n", opening] if when == "before" else [LIBRARY, opening, "install()\n"]
    )
    done = run("".join(parts) + WRITES + "ctypes.string_at(0)")
    assert done.returncode == 7, done.stderr
    assert done.stdout == "the library's handler\n"


@pytest.mark.parametrize("when", ["before", "after", "-X", "twice"])
def test_faulthandler(path: Path, when: str) -> None:
    opening = (
        f"import pmstore\nstore = pmstore.open({str(path)!r})\na = store.zeros('a', "
        "10000)\nstore.commit()\n"
    )
    enable = "import faulthandler\nfaulthandler.enable()\n"
    code = {
        "before": enable + opening,
        "after": opening + enable,
        "-X": opening,
        "twice": enable + opening + enable,
    }[when]
    code += (
        "a += 1\n"
        + WRITES.replace("10000", "20000")
        + "import ctypes\ndef culprit():\n    ctypes.string_at(0)\nculprit()"
    )
    done = run(code, *(["-X", "faulthandler"] if when == "-X" else []))
    assert done.returncode == -11
    assert "Segmentation fault" in done.stderr
    assert "in culprit" in done.stderr


def test_a_wild_write_into_the_store_is_a_fault(path: Path) -> None:
    """Metadata is never writable through the arrays' view: who writes past an array's page dies,
    and the store is whole."""
    code = f"""
import ctypes, faulthandler, pmstore
faulthandler.enable()
store = pmstore.open({str(path)!r})
store["v"] = "value"
store.commit()
node = store._core.pool.find(0, b"v").node
ctypes.memset(store._core.pool.info.base + node, 0xff, 64)
"""
    done = run(code)
    assert done.returncode == -11
    assert "Segmentation fault" in done.stderr
    with pmstore.open(path, "r") as store:
        assert store["v"] == "value"


def test_pytest_in_the_process(path: Path, shm: Path) -> None:
    """pytest enables faulthandler for its runs; a store that was open before goes on."""
    (shm / "test_x.py").write_text(f"""
import pmstore
def test_x():
    with pmstore.open({str(path)!r}) as store:
        a = store.require("a", 9999)
        store.commit()
        a += 1
""")
    code = f"""
import sys, pytest, pmstore
store = pmstore.open({str(shm / "other.pm")!r})
a = store.zeros("a", 10000)
store.commit()
where = [{str(shm)!r}, {str(shm / "test_x.py")!r}]
assert pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", *where]) == 0
a += 1
store.commit()
"""
    done = run(code)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
def test_gdb(path: Path) -> None:
    """With SIGSEGV passed on, as the documentation says, a program runs as it does without."""
    code = (
        f"import pmstore\ns = pmstore.open({str(path)!r})\na = s.zeros('a', 9999)\ns.commit()\na "
        "+= 1\nprint('done')"
    )
    command = [
        "gdb",
        "-batch",
        "-ex",
        "handle SIGSEGV nostop noprint pass",
        "-ex",
        "run",
        "--args",
        sys.executable,
        "-c",
        code,
    ]
    assert (
        "done"
        in subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    )


# ---- system calls that write into arrays: the right result, or an error that names will_write, and
# nothing lost


@pytest.fixture
def data(shm: Path) -> Path:
    file = shm / "data"
    file.write_bytes(bytes(range(256)) * 64)
    return file


def readinto(array: Any, data: Path) -> None:
    with open(data, "rb", buffering=0) as file:
        assert file.readinto(array.data) == len(array)


def buffered_readinto(array: Any, data: Path) -> None:
    with open(data, "rb") as file:
        assert file.readinto(array.data) == len(array)


def recv_into(array: Any, data: Path) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data.read_bytes())
        got = 0
        while got < len(array):
            got += here.recv_into(memoryview(array)[got:])


def preadv(array: Any, data: Path) -> None:
    import os

    with open(data, "rb") as file:
        assert os.preadv(file.fileno(), [array.data], 0) == len(array)


def through_mmap(array: Any, data: Path) -> None:
    with open(data, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        array[:] = np.frombuffer(mapped[:], np.uint8)
        array.data[100:200] = mapped[100:200]


def fromfile(array: Any, data: Path) -> None:
    array[:] = np.fromfile(data, np.uint8)


FOREIGN = [readinto, buffered_readinto, recv_into, preadv, through_mmap, fromfile]


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("fill", FOREIGN, ids=lambda f: f.__name__)
def test_foreign_writes(path: Path, data: Path, domain: Any, fill: Any, declared: bool) -> None:
    with pmstore.open(path, domain=domain) as store:
        array = store.zeros("a", 16384, "u1")
        store["witness"] = np.ones(100)
        store.commit()
        expected = data.read_bytes()
        for attempt in range(2):
            if declared:
                store.will_write(array)
            try:
                fill(array, data)
            except OSError as error:
                if declared or error.errno != errno.EFAULT:
                    raise
                store.will_write(array)  # the documented remedy
                fill(array, data)
            assert array.tobytes() == expected, attempt
            store.rollback()
            assert not array.any()
        store.will_write(array)
        fill(array, data)
        store.commit()
        assert store.check().problems == ()
    with pmstore.open(path, "r") as store:
        assert store["a"].tobytes() == expected


GLOO = """
import datetime, sys, torch, pmstore
import torch.distributed as dist
path, meeting, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
declared = sys.argv[4] == "declared"
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=240))
sent = torch.arange(100000.0)
if rank == 0:
    for _ in range(2):
        dist.send(sent, 1)
    dist.send(sent[:4000], 1)
    dist.all_reduce(torch.ones(5000))
    dist.broadcast(sent, 0)
    dist.all_gather([torch.empty(5000), torch.empty(5000)], torch.ones(5000))
else:
    with pmstore.open(path) as store:
        t, r = store.tensor("t", 100000), store.tensor("r", 5000)
        gathered = [store.tensor("g/0", 5000), store.tensor("g/1", 5000)]
        t.requires_grad_()
        store.commit()
        version = t._version
        for _ in range(2):
            if declared:
                store.will_write(t)
            dist.recv(t, 0)
            assert torch.equal(t, sent)
            store.rollback()
            assert not t.any()
        part = t.detach()[3:4003]
        if declared:
            store.will_write(t)
        dist.recv(part, 0)
        assert torch.equal(part, sent[:4000]) and not t[:3].any() and not t[4003:].any()
        store.commit()
        if declared:
            store.will_write(t, r, *gathered)
        dist.all_reduce(r)
        assert r.sum() == 5000
        dist.broadcast(t.detach(), 0)
        assert torch.equal(t, sent)
        dist.all_gather(gathered, torch.full((5000,), 2.0))
        assert [int(g.sum()) for g in gathered] == [5000, 10000]
        assert t._version == version
        store.rollback()
        assert not r.any() and not gathered[1].any()
        assert torch.equal(t.detach()[3:4003], sent[:4000])
        assert store.check().problems == ()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["declared", "undeclared"])
def test_gloo(path: Path, shm: Path, how: str) -> None:
    """Receiving into stored tensors: gloo has the kernel write into them."""
    pytest.importorskip("torch")
    ranks = [
        pythons.start(["-W", "ignore", "-c", GLOO, str(path), str(shm / "meeting"), str(rank), how])
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=300)
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
