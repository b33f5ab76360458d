"""Other processes of the machine that talk to a store's writer, or in its place."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import pmstore

# Sends all sockets that it sees what holds up who closes it: a connection with bytes that nobody
# takes, and a long time to linger. Then it says that it has, and knocks until it is killed.
STRANGER = """
import array, os, socket, sys, threading, time
here = os.stat(sys.argv[1])
names = {line.split()[-1] for line in open("/proc/net/unix") if line.split()[-1].startswith("@")}
mine = f"@pmstore/{here.st_dev:x}/{here.st_ino:x}/"
names = {n for n in names if n.startswith(mine) or len(n) == 6}  # six: the system's choice
assert any(n.startswith(mine) for n in names)
server = socket.create_server(("127.0.0.1", 0))
server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
held = []
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for name in names:
        slow = socket.create_connection(server.getsockname())
        held.append(server.accept())
        slow.setblocking(False)
        try:
            while True:
                slow.send(b"x" * 65536)
        except BlockingIOError:
            pass
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, array.array("i", [1, 30000]))
        to = socket.socket(socket.AF_UNIX, kind)
        held.append(to)
        try:
            to.connect("\\0" + name[1:])
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [slow.fileno()]))
            to.sendmsg([b"x" * 64], [rights])
        except OSError:
            pass
        threading.Thread(target=slow.close, daemon=True).start()  # it may linger here
time.sleep(0.5)
print("sent", flush=True)
while True:
    for name in names:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as to:
                try:
                    to.connect("\\0" + name[1:])
                    to.send(bytes(64))
                except OSError:
                    pass
"""

WRITER = """
import sys, pmstore
store = pmstore.open(sys.argv[1], "w", size="1MiB")
store["x"] = 1
store.commit()
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[2] == "open":
    pmstore.open(sys.argv[1] + "2", "w", size="1MiB").close()
if sys.argv[2] != "exit":
    store.close()
"""


@contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    made = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert made.stdout is not None
        assert made.stdout.readline()
        yield made
    finally:
        made.kill()
        made.communicate()


@pytest.mark.parametrize("end", ["close", "open", "exit"])
def test_who_cannot_read_a_store_is_in_nobodys_way(path: Path, end: str) -> None:
    """Neither the writer's nor its readers'. He knows nothing that lies in the file."""
    with process(WRITER, str(path), end) as writer, process(STRANGER, str(path)):
        for _ in range(3):
            with pmstore.open(path, "r") as reader:
                assert reader["x"] == 1
        writer.communicate("\n", timeout=60)
        assert writer.returncode == 0


def stop(writer: subprocess.Popen[str]) -> None:
    writer.send_signal(signal.SIGSTOP)
    os.waitpid(writer.pid, os.WUNTRACED)


@contextmanager
def alarms(handler: Callable[..., object]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


ARRAY = """
import sys, numpy as np, pmstore
store = pmstore.open(sys.argv[1], "w")
store["a"] = np.arange(100_000)
store.commit()
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_signal_is_handled_while_a_reader_waits(path: Path) -> None:
    """The handler lets a stopped writer go on: without it nobody answers."""
    with process(ARRAY, str(path)) as writer, alarms(lambda *_: writer.send_signal(signal.SIGCONT)):
        stop(writer)
        signal.alarm(1)
        with pmstore.open(path, "r") as reader:
            stop(writer)
            signal.alarm(1)
            assert (reader["a"] == np.arange(100_000)).all()


def test_an_interrupt_ends_the_waiting(path: Path) -> None:
    """Nothing is lost by it: what is missing is loaded the next time."""
    with process(ARRAY, str(path)) as writer, alarms(signal.default_int_handler):
        with pmstore.open(path, "r") as reader:
            stop(writer)
            signal.alarm(1)
            with pytest.raises(KeyboardInterrupt):
                reader["a"]
            writer.send_signal(signal.SIGCONT)
            assert (reader["a"] == np.arange(100_000)).all()


# ---- in the writer's place ----

PAGE = 4096
SECRET = 488  # in the session record, see docs/FORMAT.md


def answer_in_its_place(path: Path, ready: int) -> None:
    """Who may read the file of a writer that was killed can lock it, and knows what lies in it."""
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        head = file.read(8 * PAGE)
        record = max(
            (head[at : at + 512] for at in (5 * PAGE, 6 * PAGE)),
            key=lambda copy: struct.unpack_from("<Q", copy)[0],
        )
        opened = struct.unpack_from("<q", record, 40)[0]
        here = os.stat(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
            door.bind(f"\0pmstore/{here.st_dev:x}/{here.st_ino:x}/{opened:x}")
            os.write(ready, b"x")
            while True:
                question, asker = door.recvfrom(PAGE)
                assert question[:16] == record[SECRET : SECRET + 16]
                if struct.unpack_from("<I", question, 52)[0] == 1:  # a pin
                    answer = question[16:40] + question[48:52] + struct.pack("<iQ", 0, PAGE)
                    door.sendto(answer + head[:PAGE], asker)


@pytest.mark.skipif(os.getuid() != 0, reason="takes root, to become another user")
def test_another_users_process_answers_in_the_writers_place(path: Path) -> None:
    path.parent.chmod(0o755)
    with process(WRITER, str(path), "close") as writer:
        path.chmod(0o644)
        writer.kill()
        writer.communicate()
    read, write = os.pipe()
    stranger = os.fork()
    if stranger == 0:
        with suppress(BaseException):
            os.setuid(65534)
            answer_in_its_place(path, write)
        os._exit(1)
    try:
        assert os.read(read, 1) == b"x"
        with pytest.raises(pmstore.StoreLockedError, match="another user's process answers"):
            pmstore.open(path, "r")
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)
        os.close(read)
        os.close(write)
