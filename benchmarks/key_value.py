"""Small objects: put and commit, get, reopen; beside databases and object stores for Python.

Values are dicts of a few numbers, as a training program keeps beside its arrays. Each peer has its
own recommended settings.
"""

from __future__ import annotations

import json
import random
import shelve
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pmstore
from benchmarks.harness import (
    KILL,
    POWER,
    SEED,
    TORN,
    Budget,
    Method,
    Row,
    absent,
    measure,
    missing,
    report,
    scratch,
    with_ratios,
)
from benchmarks.peers import LEFT_OUT

Value = dict[str, Any]
BATCH = 20  # operations of one round


class Table(Protocol):
    """Names and small values."""

    def put(self, name: str, value: Value) -> None: ...
    def get(self, name: str) -> Value: ...
    def close(self) -> None: ...


class Items:
    """What is asked for its values as a dict is."""

    items: Any

    def get(self, name: str) -> Value:
        value: Value = self.items[name]
        return value

    def close(self) -> None:
        self.items.close()


class Pmstore(Items):
    domain = "process"

    def __init__(self, folder: Path) -> None:
        self.items = pmstore.open(folder / "run.pm", domain=self.domain)  # type: ignore[arg-type]

    def put(self, name: str, value: Value) -> None:
        self.items[name] = value
        self.items.commit()


class PmstoreFile(Pmstore):
    domain = "file"


class Sqlite:
    """WAL; synchronous=FULL: power-safe, NORMAL: a commit survives the process."""

    synchronous = "FULL"

    def __init__(self, folder: Path) -> None:
        self.db = sqlite3.connect(folder / "table.db", isolation_level=None)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute(f"PRAGMA synchronous={self.synchronous}")
        self.db.execute(
            "CREATE TABLE IF NOT EXISTS t (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID"
        )

    def put(self, name: str, value: Value) -> None:
        self.db.execute("INSERT OR REPLACE INTO t VALUES (?, ?)", (name, json.dumps(value)))

    def get(self, name: str) -> Value:
        value: Value = json.loads(
            self.db.execute("SELECT value FROM t WHERE name = ?", (name,)).fetchone()[0]
        )
        return value

    def close(self) -> None:
        self.db.close()


class SqliteNormal(Sqlite):
    synchronous = "NORMAL"


class Lmdb:
    sync = True

    def __init__(self, folder: Path) -> None:
        import lmdb

        self.env = lmdb.open(
            str(folder / "lmdb"),
            map_size=256 << 20,
            sync=self.sync,
            metasync=self.sync,
            writemap=not self.sync,
        )

    def put(self, name: str, value: Value) -> None:
        with self.env.begin(write=True) as tx:
            tx.put(name.encode(), json.dumps(value).encode())

    def get(self, name: str) -> Value:
        with self.env.begin() as tx:
            value: Value = json.loads(tx.get(name.encode()))
            return value

    def close(self) -> None:
        self.env.close()


class LmdbNosync(Lmdb):
    sync = False


class RocksDb:
    """sync: a write syncs its log. Otherwise a system call has it: it survives the process."""

    sync = True

    def __init__(self, folder: Path) -> None:
        from rocksdict import Options, Rdict, WriteOptions

        options = WriteOptions()
        options.sync = self.sync
        self.db = Rdict(str(folder / "rocksdb"), Options(raw_mode=True))
        self.db.set_write_options(options)

    def put(self, name: str, value: Value) -> None:
        self.db[name.encode()] = json.dumps(value).encode()

    def get(self, name: str) -> Value:
        value: Value = json.loads(self.db[name.encode()])
        return value

    def close(self) -> None:
        self.db.close()


class RocksDbNosync(RocksDb):
    sync = False


class Zodb(Items):
    def __init__(self, folder: Path) -> None:
        import transaction
        import ZODB
        import ZODB.FileStorage
        from BTrees.OOBTree import OOBTree

        self.db = ZODB.DB(ZODB.FileStorage.FileStorage(str(folder / "data.fs")))
        self.connection = self.db.open()
        self.transaction = transaction
        root = self.connection.root()
        if "t" not in root:
            root["t"] = OOBTree()
            transaction.commit()
        self.items = root["t"]

    def put(self, name: str, value: Value) -> None:
        self.items[name] = value
        self.transaction.commit()

    def close(self) -> None:
        self.connection.close()
        self.db.close()


class Diskcache(Items):
    def __init__(self, folder: Path) -> None:
        import diskcache

        self.items = diskcache.Cache(str(folder / "cache"), eviction_policy="none")

    def put(self, name: str, value: Value) -> None:
        self.items[name] = value


class Shelve(Items):
    def __init__(self, folder: Path) -> None:
        self.items = shelve.open(str(folder / "shelf"))  # noqa: SIM115

    def put(self, name: str, value: Value) -> None:
        self.items[name] = value
        self.items.sync()


TABLES: dict[str, tuple[str, str, Callable[[Path], Table], str]] = {
    "pmstore process": (KILL, "memory", Pmstore, ""),
    "pmstore file": (POWER, "disk", PmstoreFile, ""),
    "sqlite WAL, FULL": (POWER, "disk", Sqlite, ""),
    "sqlite WAL, NORMAL, tmpfs": (KILL, "memory", SqliteNormal, ""),
    "lmdb, sync": (POWER, "disk", Lmdb, "lmdb"),
    "lmdb, nosync + writemap": (KILL, "memory", LmdbNosync, "lmdb"),
    "RocksDB, sync": (POWER, "disk", RocksDb, "rocksdict"),
    "RocksDB, nosync": (KILL, "memory", RocksDbNosync, "rocksdict"),
    "ZODB FileStorage": (POWER, "disk", Zodb, "ZODB"),
    "diskcache, tmpfs": (KILL, "memory", Diskcache, "diskcache"),
    "shelve (dbm), tmpfs": (TORN, "memory", Shelve, ""),
}
"""Name to class of durability, place, maker, module it needs."""


def value_of(i: int) -> Value:
    return {
        "step": i,
        "loss": 1.0 / (i + 1),
        "name": f"run {i}",
        "shape": [64, i % 7],
        "done": False,
    }


def _run(names: int, rounds: int, budget: Budget | None = None) -> list[Row]:
    rows = []
    order = random.Random(SEED)
    with ExitStack() as stack:
        tables: dict[str, Table] = {}
        folders: dict[str, Path] = {}
        for name, (_, where, make, needs) in TABLES.items():
            if absent(needs):
                continue
            folders[name] = stack.enter_context(scratch(where))
            tables[name] = make(folders[name])
        for i in range(names):
            for table in tables.values():
                table.put(f"name {i}", value_of(i))
        count = [names]

        def put(table: Table) -> None:
            for _ in range(BATCH):
                count[0] += 1
                table.put(f"name {order.randrange(names)}", value_of(count[0]))

        def get(table: Table) -> None:
            for _ in range(BATCH):
                table.get(f"name {order.randrange(names)}")

        def reopen(name: str) -> float:
            tables[name].close()
            start = time.perf_counter()
            tables[name] = TABLES[name][2](folders[name])
            tables[name].get(f"name {names // 2}")
            return time.perf_counter() - start

        for (what, operation), part in (budget or Budget()).deal(
            ((("put + commit", put), 3), (("get", get), 1))
        ):
            methods = [
                Method(n, TABLES[n][0], lambda t=t, operation=operation: operation(t))  # type: ignore[misc]
                for n, t in tables.items()
            ]
            rows += measure(f"{what}, {names:,} names", methods, rounds, 2, BATCH, part)
        again = [Method(n, TABLES[n][0], lambda n=n: reopen(n)) for n in tables]  # type: ignore[misc]
        rows += measure(f"reopen + one get, {names:,} names", again, 5, 0)
        for table in tables.values():
            table.close()
    cases = dict.fromkeys(r.case for r in rows)
    for name, (durability, _, _, needs) in TABLES.items():
        if absent(needs):
            rows += [missing(name, case, durability, absent(needs)) for case in cases]
    rows += [missing(name, case, POWER, why) for name, why in LEFT_OUT.items() for case in cases]
    rows.sort(key=lambda r: list(cases).index(r.case))
    return with_ratios(rows, "pmstore process")


def _small_transactions(rounds: int) -> list[Row]:
    """A write of one number of a small array, in a block: what a step of a loop pays at least."""
    times = 200
    rows = []
    with scratch("memory") as folder, ExitStack() as stack:
        methods = []
        for domain in ("process", "emulated"):
            for how in ("declared", "hot"):
                store = stack.enter_context(pmstore.open(folder / f"{domain}-{how}", domain=domain))  # type: ignore[arg-type]
                array = store.zeros("a", 16)

                def run(
                    store: Any = store,
                    a: Any = array,
                    writes: Any = (array,) if how == "declared" else (),
                ) -> None:
                    for _ in range(times):
                        with store.transaction(writes=writes):
                            a[0] += 1

                methods.append(Method(f"pmstore {domain}, {how}", KILL, run))
        rows = measure("with transaction(): a[0] += 1", methods, rounds, 2, times)
    return with_ratios(rows, "pmstore process, declared")


def main(quick: bool, budget: Budget) -> None:
    rows = _run(100 if quick else 1000, 5 if quick else 30, Budget(0.6 * budget.left))
    rows += _small_transactions(5 if quick else 30)
    report(
        "key_value",
        "Small objects: databases and object stores for Python",
        rows,
        ratio_text="time over pmstore process's",
        quick=quick,
    )
