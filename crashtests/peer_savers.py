"""How each peer saves the state of one step over that of the step before, and reads it back.

Run as a program, saves under the recorder:    python -m crashtests.peer_savers PEER FOLDER STEPS

Each Saver is written as its documentation has it, or as programs do: nothing is done worse than
usual. The state has two arrays whose bytes depend on the step, one whose length does too, and the
step.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

State = dict[str, Any]
MARK_CALL = 0x706D73
"""prctl() which the recorder takes for a mark (native/watch.c). 0 starts; 2 n: step n begins to be
saved; 2 n + 1: it is."""


def state_of(step: int, grows: bool = True) -> State:
    a = np.arange(1024, dtype=np.float32) + step * 10_000
    return {
        "a": a,
        "b": a[:512] * -1,
        "c": np.full(40 + 8 * step * grows, step, np.int64),
        "step": np.array([step]),
    }


def step_of(state: State) -> int | None:
    """The step that all of the state is of; None: it is of no one step."""
    step = int(state["step"][0]) if "step" in state else -1
    if not 0 <= step < 100:
        return None
    for expected in (state_of(step), state_of(step, grows=False)):
        if set(state) == set(expected) and all(
            np.array_equal(state[name], expected[name]) for name in expected
        ):
            return step
    return None


class Saver(Protocol):
    def save(self, state: State) -> None: ...
    def load(self) -> State: ...
    def close(self) -> None: ...


class _Files:
    """Saves to one file, by a function of a path and a state."""

    def __init__(
        self,
        folder: Path,
        write: Callable[[Path, State], None],
        read: Callable[[Path], State],
        how: str,
    ) -> None:
        self._path, self._write, self._read, self._how = folder / "state", write, read, how

    def save(self, state: State) -> None:
        if self._how == "in place":
            self._write(self._path, state)
            return
        new = self._path.with_name("state.new")
        self._write(new, state)
        if "fsync" in self._how:
            _sync(new)
        os.replace(new, self._path)
        if "directory" in self._how:
            _sync(self._path.parent)

    def load(self) -> State:
        return self._read(self._path)

    def close(self) -> None:
        pass


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _torch(how: str) -> Callable[[Path], Saver]:
    def make(folder: Path) -> Saver:
        import torch

        def write(path: Path, state: State) -> None:
            torch.save({name: torch.from_numpy(value) for name, value in state.items()}, path)

        def read(path: Path) -> State:
            return {
                name: value.numpy() for name, value in torch.load(path, weights_only=True).items()
            }

        return _Files(folder, write, read, how)

    return make


def _safetensors(how: str) -> Callable[[Path], Saver]:
    def make(folder: Path) -> Saver:
        from safetensors.numpy import load_file, save_file

        return _Files(folder, lambda path, state: save_file(state, path), load_file, how)

    return make


def _savez(how: str) -> Callable[[Path], Saver]:
    def make(folder: Path) -> Saver:
        def write(path: Path, state: State) -> None:
            with path.open("wb") as file:  # given a name, savez would add .npz to it
                np.savez(file, **state)

        def read(path: Path) -> State:
            with np.load(path) as archive:
                return dict(archive)

        return _Files(folder, write, read, how)

    return make


class _Distributed:
    """torch.distributed.checkpoint, always to the same checkpoint id. Two ranks write two files, as
    two threads of one do."""

    def __init__(self, folder: Path, files: int) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        warnings.filterwarnings("ignore")  # that there is one process
        self._path, self._torch, self._dcp, self._files = folder / "checkpoint", torch, dcp, files

    def save(self, state: State) -> None:
        writer = self._dcp.FileSystemWriter(self._path, thread_count=self._files)
        self._dcp.save(
            {k: self._torch.from_numpy(v) for k, v in state.items()}, storage_writer=writer
        )

    def load(self) -> State:
        saved = self._dcp.FileSystemReader(self._path).read_metadata().state_dict_metadata
        state = {k: self._torch.zeros(v.size, dtype=v.properties.dtype) for k, v in saved.items()}
        self._dcp.load(state, checkpoint_id=self._path)
        return {k: v.numpy() for k, v in state.items()}

    def close(self) -> None:
        pass


class _Lmdb:
    def __init__(self, folder: Path, **options: bool) -> None:
        import lmdb

        self._environment = lmdb.open(str(folder / "db"), map_size=1 << 20, **options)

    def save(self, state: State) -> None:
        with self._environment.begin(write=True) as txn:
            for name, value in state.items():
                txn.put(name.encode(), value.dtype.str.encode() + b" " + value.tobytes())

    def load(self) -> State:
        state = {}
        with self._environment.begin() as txn:
            for name, value in txn.cursor():
                kind, data = bytes(value).split(b" ", 1)
                state[bytes(name).decode()] = np.frombuffer(data, kind.decode())
        return state

    def close(self) -> None:
        self._environment.close()


class _Pmstore:
    """Writes in place, in a transaction, as a training loop does."""

    def __init__(self, folder: Path, domain: Any) -> None:
        import pmstore

        path = folder / "state.pm"
        try:
            self._store = pmstore.open(path, size="1MiB", domain=domain)
        except pmstore.UncleanCopyError:  # an image, not a copy of a running store
            self._store = pmstore.open(path, domain=domain, force=True)

    def save(self, state: State) -> None:
        with self._store.transaction():
            if "a" in self._store:
                self._store["a"][:] = state["a"]
                self._store["b"][:] = state["b"]
            else:
                self._store["a"], self._store["b"] = state["a"], state["b"]
            self._store["c"], self._store["step"] = state["c"], state["step"]

    def load(self) -> State:
        problems = self._store.check().problems
        if problems:
            raise OSError(str(problems))
        return {name: np.array(value) for name, value in self._store.items()}

    def close(self) -> None:
        self._store.close()


@dataclass(frozen=True)
class Peer:
    name: str
    title: str
    make: Callable[[Path], Saver]
    grows: bool = True
    """One of the arrays has another length in each step."""


PEERS = {
    peer.name: peer
    for peer in [
        Peer("torch", "`torch.save`, in place", _torch("in place")),
        Peer("torch-rename", "`torch.save`, new file, rename", _torch("rename")),
        Peer("torch-fsync", "`torch.save`, new file, fsync, rename", _torch("fsync, rename")),
        Peer(
            "torch-dirsync",
            "`torch.save`, new file, fsync, rename, fsync of the directory",
            _torch("fsync, rename, directory"),
        ),
        Peer(
            "dcp", "`torch.distributed.checkpoint`, same id", lambda folder: _Distributed(folder, 1)
        ),
        Peer(
            "dcp-two",
            "`torch.distributed.checkpoint`, same id, two files, constant shapes",
            lambda folder: _Distributed(folder, 2),
            grows=False,
        ),
        Peer("safetensors", "`safetensors`, in place", _safetensors("in place")),
        Peer("safetensors-rename", "`safetensors`, new file, rename", _safetensors("rename")),
        Peer("savez", "`np.savez`, in place", _savez("in place")),
        Peer(
            "savez-dirsync",
            "`np.savez`, new file, fsync, rename, fsync of the directory",
            _savez("fsync, rename, directory"),
        ),
        Peer("lmdb", "lmdb", _Lmdb),
        Peer("lmdb-writemap", "lmdb, `writemap=True`", lambda folder: _Lmdb(folder, writemap=True)),
        Peer(
            "lmdb-nosync",
            "lmdb, `writemap=True, sync=False`",
            lambda folder: _Lmdb(folder, writemap=True, sync=False),
        ),
        Peer(
            "pmstore-process",
            "pmstore, domain `process`",
            lambda folder: _Pmstore(folder, "process"),
        ),
        Peer("pmstore-file", "pmstore, domain `file`", lambda folder: _Pmstore(folder, "file")),
    ]
}


def main() -> None:
    prctl = ctypes.CDLL(None).prctl
    steps = int(sys.argv[3])
    peer = PEERS[sys.argv[1]]
    states = [state_of(step, peer.grows) for step in range(steps + 1)]
    saver = peer.make(Path(sys.argv[2]))
    # The first two saves import, compile and cache what the later ones use, and are not recorded.
    saver.save(states[0])
    saver.save(states[0])
    prctl(MARK_CALL, 0, 0, 0, 0)
    for step in range(1, steps + 1):
        prctl(MARK_CALL, 2 * step, 0, 0, 0)
        saver.save(states[step])
        prctl(MARK_CALL, 2 * step + 1, 0, 0, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
