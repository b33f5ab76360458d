"""How each peer saves and loads a state (a dict of numpy arrays), a few lines each, in its own
recommended settings.

A peer is made on a folder, `save`s one state after the other, and `load`s what a new process finds
there. Its durability class is what its documentation and its calls give, not what a run found;
`benchmarks.kills` tries it.
"""

from __future__ import annotations

import io
import os
import pickle
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.harness import KILL, POWER, TORN

State = dict[str, np.ndarray[Any, Any]]


class Peer(Protocol):
    """One way of keeping a state. Opened on a folder that may hold what an earlier one left."""

    def save(self, state: State) -> None: ...
    def load(self) -> State: ...
    def close(self) -> None: ...


class Files:
    """A file, written anew for each save; durable: under another name, synced, renamed, the
    directory synced."""

    name = "state"
    durable = False

    def __init__(self, folder: Path, template: State) -> None:
        self.path = folder / self.name
        self.folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def write(self, path: Path, state: State) -> None:
        raise NotImplementedError

    def load(self) -> State:
        raise NotImplementedError

    def save(self, state: State) -> None:
        if not self.durable:
            self.write(self.path, state)
            return
        temporary = self.path.with_name("new-" + self.name)
        self.write(temporary, state)
        fd = os.open(temporary, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        temporary.rename(self.path)
        os.fsync(self.folder)

    def close(self) -> None:
        os.close(self.folder)


class Savez(Files):
    name = "state.npz"

    def write(self, path: Path, state: State) -> None:
        np.savez(path, **state)  # type: ignore[arg-type] # its stub has allow_pickle in the way

    def load(self) -> State:
        with np.load(self.path) as data:
            return dict(data)


class SavezCompressed(Savez):
    def write(self, path: Path, state: State) -> None:
        np.savez_compressed(path, **state)  # type: ignore[arg-type]


class SavezDurable(Savez):
    durable = True


class TorchSave(Files):
    name = "state.pt"

    def write(self, path: Path, state: State) -> None:
        import torch

        torch.save({k: torch.from_numpy(v) for k, v in state.items()}, path)

    def load(self) -> State:
        import torch

        return {k: v.numpy() for k, v in torch.load(self.path).items()}


class TorchSaveDurable(TorchSave):
    durable = True


class PickleDurable(Files):
    name, durable = "state.pickle", True

    def write(self, path: Path, state: State) -> None:
        with open(path, "wb") as f:
            pickle.dump(state, f, protocol=5)

    def load(self) -> State:
        with open(self.path, "rb") as f:
            state: State = pickle.load(f)
            return state


class SafetensorsDurable(Files):
    name, durable = "state.safetensors", True

    def write(self, path: Path, state: State) -> None:
        from safetensors.numpy import save_file

        save_file(state, path)

    def load(self) -> State:
        from safetensors.numpy import load_file

        return load_file(self.path)


class Memmap:
    """One mapped file, the arrays one after the other; flush() is msync(MS_SYNC)."""

    def __init__(self, folder: Path, template: State) -> None:
        self.path = folder / "state.bin"
        total = sum(a.nbytes for a in template.values())
        new = not self.path.exists()
        self.map = np.memmap(self.path, np.uint8, "w+" if new else "r+", shape=(total,))
        self.views, at = {}, 0
        for k, a in template.items():
            self.views[k] = (
                np.frombuffer(self.map, np.uint8)[at : at + a.nbytes].view(a.dtype).reshape(a.shape)
            )
            at += a.nbytes

    def save(self, state: State) -> None:
        for k, a in state.items():
            self.views[k][...] = a
        self.map.flush()

    def load(self) -> State:
        return {k: v.copy() for k, v in self.views.items()}

    def close(self) -> None:
        self.views.clear()
        del self.map


def pack(a: np.ndarray[Any, Any]) -> bytes:
    """One array with its dtype and shape."""
    out = io.BytesIO()
    np.lib.format.write_array(out, np.ascontiguousarray(a), allow_pickle=False)
    return out.getvalue()


def unpack(data: bytes) -> np.ndarray[Any, Any]:
    made: np.ndarray[Any, Any] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return made


class Sqlite:
    """WAL, synchronous=FULL: a commit syncs the log; NORMAL: it survives the process. One row an
    array, all in one transaction."""

    synchronous = "FULL"

    def __init__(self, folder: Path, template: State) -> None:
        self.db = sqlite3.connect(folder / "state.db", isolation_level=None)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute(f"PRAGMA synchronous={self.synchronous}")
        self.db.execute("CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value BLOB)")

    def save(self, state: State) -> None:
        self.db.execute("BEGIN IMMEDIATE")
        self.db.executemany(
            "INSERT OR REPLACE INTO state VALUES (?, ?)", [(k, pack(a)) for k, a in state.items()]
        )
        self.db.execute("COMMIT")

    def load(self) -> State:
        return {k: unpack(v) for k, v in self.db.execute("SELECT name, value FROM state")}

    def close(self) -> None:
        self.db.close()


class SqliteNormal(Sqlite):
    synchronous = "NORMAL"


class Lmdb:
    """sync: a commit syncs. Otherwise nosync + writemap, its fastest mode that survives the
    process."""

    sync = True

    def __init__(self, folder: Path, template: State) -> None:
        import lmdb

        room = 64 << 20
        room += 8 * sum(a.nbytes for a in template.values())
        self.env = lmdb.open(
            str(folder / "lmdb"),
            map_size=room,
            sync=self.sync,
            metasync=self.sync,
            writemap=not self.sync,
            map_async=False,
        )
        self.template = template

    def save(self, state: State) -> None:
        with self.env.begin(write=True) as tx:
            for k, a in state.items():
                # bytes alone: no dtype, no shape
                tx.put(k.encode(), np.ascontiguousarray(a).reshape(-1).view(np.uint8).data)

    def load(self) -> State:
        with self.env.begin() as tx:
            pairs = [(bytes(k).decode(), v) for k, v in tx.cursor()]
            return {
                k: np.frombuffer(v, self.template[k].dtype).reshape(self.template[k].shape).copy()
                for k, v in pairs
            }

    def close(self) -> None:
        self.env.close()


class LmdbNosync(Lmdb):
    sync = False


class RocksDb:
    """A log of writes; all arrays in one batch. sync: a commit syncs the log. Otherwise a system
    call has it, so that it survives the process."""

    sync = True

    def __init__(self, folder: Path, template: State) -> None:
        from rocksdict import Options, Rdict, WriteOptions

        self.options = WriteOptions()
        self.options.sync = self.sync
        self.db = Rdict(str(folder / "rocksdb"), Options(raw_mode=True))
        self.template = template

    def save(self, state: State) -> None:
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for k, a in state.items():
            batch.put(k.encode(), a.tobytes())  # bytes alone: no dtype, no shape
        self.db.write(batch, self.options)

    def load(self) -> State:
        return {
            k.decode(): np.frombuffer(v, self.template[k.decode()].dtype)
            .reshape(self.template[k.decode()].shape)
            .copy()
            for k, v in self.db.items()
        }

    def close(self) -> None:
        self.db.close()


class RocksDbNosync(RocksDb):
    sync = False


class H5py:
    """Data sets written in place, flush, fsync."""

    def __init__(self, folder: Path, template: State) -> None:
        import h5py

        self.file = h5py.File(folder / "state.h5", "a")
        for k, a in template.items():
            if k not in self.file:
                self.file.create_dataset(k, shape=a.shape, dtype=a.dtype)
        self.file.flush()
        self.fd = os.open(folder / "state.h5", os.O_RDONLY)

    def save(self, state: State) -> None:
        for k, a in state.items():
            self.file[k][...] = a
        self.file.flush()
        os.fsync(self.fd)

    def load(self) -> State:
        return {k: self.file[k][()] for k in self.file}

    def close(self) -> None:
        self.file.close()
        os.close(self.fd)


class Zarr:
    """A group in a directory, one array a name, no compression; no sync is offered."""

    def __init__(self, folder: Path, template: State) -> None:
        import zarr

        self.group = zarr.open_group(str(folder / "state.zarr"), mode="a")
        for k, a in template.items():
            if k not in self.group:
                self.group.create_array(
                    k, shape=a.shape, dtype=a.dtype, chunks=a.shape or (), compressors=None
                )

    def save(self, state: State) -> None:
        for k, a in state.items():
            self.group[k][...] = a

    def load(self) -> State:
        return {k: np.asarray(self.group[k][...]) for k in self.group.array_keys()}

    def close(self) -> None:
        pass


class BareWrite:
    """What any durable method costs at least: the bytes over the old ones in a preallocated file,
    and one fdatasync."""

    def __init__(self, folder: Path, template: State) -> None:
        total = sum(a.nbytes for a in template.values())
        self.fd = os.open(folder / "bare", os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(self.fd).st_size != total:
            os.pwrite(self.fd, bytes(total), 0)
            os.fsync(self.fd)
        self.template = template

    def save(self, state: State) -> None:
        os.pwritev(
            self.fd, [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in state.values()], 0
        )
        os.fdatasync(self.fd)

    def load(self) -> State:
        made, at = {}, 0
        for k, a in self.template.items():
            made[k] = np.frombuffer(os.pread(self.fd, a.nbytes, at), a.dtype).reshape(a.shape)
            at += a.nbytes
        return made

    def close(self) -> None:
        os.close(self.fd)


# ---- pmstore ----


class Pmstore:
    """What its three ways share: a store in a domain. How a state goes in is `save`."""

    domain = "process"

    def __init__(self, folder: Path, template: State) -> None:
        import pmstore

        size = (64 << 20) + 6 * sum(a.nbytes for a in template.values())
        self.store = pmstore.open(folder / "run.pm", size=size, domain=self.domain)  # type: ignore[arg-type]
        self.prepare(template)
        self.store.commit()

    def prepare(self, template: State) -> None:
        self.arrays = {k: self.store.require(k, a.shape, a.dtype) for k, a in template.items()}
        self.pairs = tuple(self.arrays.values())

    def save(self, state: State) -> None:
        """Into the arrays of the store, which are declared."""
        with self.store.transaction(writes=self.pairs):
            for k, a in self.arrays.items():
                a[...] = state[k]

    def load(self) -> State:
        return {k: np.asarray(self.store[k]).copy() for k in self.store}

    def close(self) -> None:
        self.store.close()


class PmstoreCopy(Pmstore):
    """A new object for each save: `store[name] = array`."""

    def prepare(self, template: State) -> None:
        pass

    def save(self, state: State) -> None:
        with self.store.transaction():
            for k, a in state.items():
                self.store[k] = a


class PmstoreSlots(Pmstore):
    """Into the idle one of two blocks, which the commit names the current one."""

    def prepare(self, template: State) -> None:
        self.slots = {k: self.store.slots(k, a.shape, a.dtype) for k, a in template.items()}

    def save(self, state: State) -> None:
        with self.store.transaction():
            for k, slots in self.slots.items():
                slots.next[...] = state[k]
                slots.flip()

    def load(self) -> State:
        return {k: slots.current.copy() for k, slots in self.slots.items()}


class Way(NamedTuple):
    """A peer: its name, its class of durability, whether it lies on tmpfs ("memory") or on a disk,
    the module it needs."""

    name: str
    durability: str
    where: str
    make: Callable[[Path, State], Peer]
    needs: str = ""


def in_domain(base: type[Pmstore], domain: str) -> type[Pmstore]:
    """That way of keeping a state, in another domain."""
    return type(f"{base.__name__}_{domain}", (base,), {"domain": domain})


WAYS: Mapping[str, Way] = {
    way.name: way
    for way in (
        Way("np.savez, disk", TORN, "disk", Savez),
        Way("np.savez, tmpfs", TORN, "memory", Savez),
        Way("np.savez_compressed, disk", TORN, "disk", SavezCompressed),
        Way("np.savez_compressed, tmpfs", TORN, "memory", SavezCompressed),
        Way("np.savez + fsync + rename", POWER, "disk", SavezDurable),
        Way("torch.save, disk", TORN, "disk", TorchSave, "torch"),
        Way("torch.save + fsync + rename", POWER, "disk", TorchSaveDurable, "torch"),
        Way("pickle + fsync + rename", POWER, "disk", PickleDurable),
        Way("safetensors + fsync + rename", POWER, "disk", SafetensorsDurable, "safetensors"),
        Way("np.memmap + flush", TORN, "disk", Memmap),
        Way("sqlite WAL, FULL", POWER, "disk", Sqlite),
        Way("sqlite WAL, NORMAL", KILL, "memory", SqliteNormal),
        Way("lmdb, sync", POWER, "disk", Lmdb, "lmdb"),
        Way("lmdb, nosync + writemap", KILL, "memory", LmdbNosync, "lmdb"),
        Way("RocksDB, sync", POWER, "disk", RocksDb, "rocksdict"),
        Way("RocksDB, nosync", KILL, "memory", RocksDbNosync, "rocksdict"),
        Way("h5py + flush + fsync", TORN, "disk", H5py, "h5py"),
        Way("zarr, disk", TORN, "disk", Zarr, "zarr"),
        Way("pwrite + fdatasync (bare)", TORN, "disk", BareWrite),
        Way("pmstore process, in place", KILL, "memory", Pmstore),
        Way("pmstore process, copy in", KILL, "memory", PmstoreCopy),
        Way("pmstore process, slots", KILL, "memory", PmstoreSlots),
        Way("pmstore emulated, in place", KILL, "memory", in_domain(Pmstore, "emulated")),
        Way("pmstore emulated, copy in", KILL, "memory", in_domain(PmstoreCopy, "emulated")),
        Way("pmstore emulated, slots", KILL, "memory", in_domain(PmstoreSlots, "emulated")),
        Way("pmstore file, in place", POWER, "disk", in_domain(Pmstore, "file")),
        Way("pmstore file, copy in", POWER, "disk", in_domain(PmstoreCopy, "file")),
        Way("pmstore file, slots", POWER, "disk", in_domain(PmstoreSlots, "file")),
    )
}
"""Every way of keeping a state that the questions on iterative algorithms and on kills compare."""

LEFT_OUT = {
    "redb": "not tried: its package for Python, redb 0.5.0, promises no file format yet, and there"
    " is none for C"
}
"""Peers that one would look for, and why they have no figures."""
