"""Damaged stores, and everything that a user does with them: what comes out is success or an error
of pmstore's own.

    python tests/damage.py [--seed N] [--count N] [--seconds S] [--only VARIANT]

Bytes of a whole store are changed: anything of the engine's metadata (page tables, directories,
lists, descriptions, values, records, log entries), and the checksums over them are then made right
again, as somebody would who means it. Of a run of torch names go and values change too. A line of
JSON for each finding; exit code 1 if there is one. Where the process itself dies, its last line on
standard error has the number to give as --seed.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import json
import random
import shutil
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from pmstore import exchange, portable
from pmstore.commands.application import app
from pmstore.objects.containers import Group
from pmstore.objects.lists import List
from pmstore.objects.slots import Slots

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

PAGE, LINE = 4096, 64
MASK = (1 << 64) - 1
ANCHOR, ROOT, FAST = 2 * PAGE, 7 * PAGE, (8 * PAGE, 40 * PAGE)
SESSIONS = (5 * PAGE, 6 * PAGE)
HANG_SECONDS = 60
VARIANTS = ("plain", "crashed", "trained", "file")

# ---- checksums, as docs/FORMAT.md has them -------------------------------------------------------

_TABLE = [0] * 256
for _byte in range(256):
    _crc = _byte
    for _ in range(8):
        _crc = _crc >> 1 ^ (0x82F63B78 if _crc & 1 else 0)
    _TABLE[_byte] = _crc


def crc32c(crc: int, data: bytes) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def check16(salt: int, word: int) -> int:
    product = (word ^ 0x9E3779B97F4A7C15) * (
        (salt * 0xFF51AFD7ED558CCD & MASK) ^ 0xC4CEB9FE1A85EC53
    )
    mixed = product & MASK ^ product >> 64
    mixed ^= mixed >> 32
    return (mixed ^ mixed >> 16) & 0xFFFF


class Image:
    """A store's bytes, where its metadata lie, and how to seal them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        generations = [struct.unpack_from("<Q", data, copy * PAGE + 48)[0] for copy in (0, 1)]
        used = PAGE * (generations[1] > generations[0])
        count = struct.unpack_from("<I", data, used + 80)[0]
        self.segments = [struct.unpack_from("<5Q", data, used + 128 + 64 * i) for i in range(count)]
        session = max(SESSIONS, key=lambda at: struct.unpack_from("<Q", data, at)[0])
        self.seed = crc32c(0, data[session + 448 : session + 456])
        self.entries = list(self._entries())
        self.places = self._places()

    def _entries(self) -> Iterator[tuple[int, int, int]]:
        """Valid ones of the undo logs: header, where the pre-image is, its bytes."""
        for start, room in [(at, 32 * PAGE) for at in FAST] + [
            (log, bytes_) for _, log, bytes_, _, _ in self.segments
        ]:
            at = start
            while at + LINE <= start + room:
                length = struct.unpack_from("<I", self.data, at + 20)[0]
                image = at + (32 if length <= 32 else LINE)
                if (
                    not length
                    or image + length > start + room
                    or not self._sealed(self.data, at, image, length)
                ):
                    break
                yield at, image, length
                at += LINE if length <= 32 else LINE + -(-length // LINE) * LINE

    def _entry_crc(self, data: bytes | bytearray, at: int, image: int, length: int) -> int:
        return crc32c(
            crc32c(self.seed, bytes(data[at : at + 28])), bytes(data[image : image + length])
        )

    def _sealed(self, data: bytes, at: int, image: int, length: int) -> bool:
        return bool(
            self._entry_crc(data, at, image, length) == struct.unpack_from("<I", data, at + 28)[0]
        )

    def _words(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Of the page tables: place, file page number, kind, pages, place of the data."""
        for table, _, _, start, pages in self.segments:
            page = 0
            while page < pages:
                word = struct.unpack_from("<Q", self.data, table + 16 * page)[0]
                kind, length = word >> 44 & 15, word & (1 << 36) - 1
                yield table + 16 * page, start // PAGE + page, kind, length, start + page * PAGE
                page += max(length, 1)

    def _places(self) -> dict[str, list[int]]:
        """Lines by what they hold, those that hold nothing left out."""
        places: dict[str, list[int]] = {"head": [], "table": [], "object": [], "entry": []}

        def add(what: str, start: int, end: int) -> None:
            places[what] += [at for at in range(start, end, LINE) if any(self.data[at : at + LINE])]

        add("head", 0, 8 * PAGE)
        for at, image, length in self.entries:
            add("entry", at, image + length)
        for place, _, kind, length, data in self._words():
            add("table", place & -LINE, place + 16 * length)
            if kind in (4, 5):
                add("object", data, data + length * PAGE)
        return places

    def seal(self, data: bytearray) -> None:
        """What was changed gets the checksum that it would have."""
        for at in (0, PAGE):
            struct.pack_into("<I", data, at + PAGE - 4, crc32c(0, bytes(data[at : at + PAGE - 4])))
        for at in (3 * PAGE, 4 * PAGE, *SESSIONS):
            if not any(data[at : at + 512]):
                continue  # never written
            struct.pack_into("<I", data, at + 508, crc32c(0, bytes(data[at : at + 508])))
        transaction = struct.unpack_from("<Q", data, ANCHOR)[0] & (1 << 48) - 1
        struct.pack_into(
            "<Q", data, ANCHOR, transaction | check16(0x726F68636E61, transaction) << 48
        )
        for place, page, _, _, _ in self._words():
            if data[place : place + 8] != self.data[place : place + 8]:
                word = struct.unpack_from("<Q", data, place)[0] & (1 << 48) - 1
                struct.pack_into("<Q", data, place, word | check16(page, word) << 48)
        for at, image, length in self.entries:
            if data[at : image + length] != self.data[at : image + length]:
                struct.pack_into("<I", data, at + 28, self._entry_crc(data, at, image, length))

    def damaged(self, rng: random.Random) -> bytearray:
        data = bytearray(self.data)
        what = rng.choices(
            ("object", "table", "entry", "head"), (12, 3, 3 if self.entries else 0, 1)
        )[0]
        for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
            at = rng.choice(self.places[what]) + rng.randrange(LINE)
            how = rng.randrange(5)
            if how == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif how == 1:
                data[at] = rng.choice((0, 1, 0x2F, 0x7F, 0x80, 0xC0, 0xD9, 0xFF))
            elif how == 2:  # a number that another place has
                other = rng.choice(self.places[what]) + rng.randrange(0, LINE, 8)
                data[at & -8 : (at & -8) + 8] = data[other : other + 8]
            elif how == 3:
                number = (
                    struct.unpack_from("<Q", data, at & -8)[0] + rng.choice((-64, -1, 1, 64, PAGE))
                    & MASK
                )
                struct.pack_into("<Q", data, at & -8, number)
            else:
                data[at] = rng.randrange(256)
        if rng.random() < 0.9:
            self.seal(data)
        return data


# ---- stores --------------------------------------------------------------------------------------


def _model() -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _attach(store: pmstore.Store) -> Any:
    from pmstore.torch import attach

    model, optimizer = _model()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    run = attach(
        store,
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        loader=[1, 2, 3],
        name="run",
    )
    return run, model, optimizer


def _fill(store: pmstore.Store) -> None:
    store["config"] = {
        "lr": 1e-3,
        (1, 2): [None, 2**100, b"x", 1 + 2j],
        "when": __import__("datetime").datetime(2024, 1, 1),
    }
    store["scalar"] = np.float32(2)
    store["text"] = "é" * 30
    store["a"] = np.arange(60, dtype="f4").reshape(3, 4, 5).transpose(2, 0, 1)
    store["empty"] = np.zeros((0, 3))
    store["record"] = np.zeros(4, [("x", "<f4"), ("y", "<i8", (2,))])
    store["group/inner/b"] = np.ones(5000)
    store["group/inner/c"] = [1, 2, 3]
    store["group/x"] = np.arange(7)
    items = store.list("items")
    items.extend(range(300))
    items.append(np.arange(4))
    store.list("group/few").extend(["one", {"two": 2}, np.zeros(3)])
    pair = store.slots("slots", (50,))
    with store.transaction():
        pair.next[:] = 1
        pair.flip()
    if torch is not None:
        store["tensor"] = torch.ones(3, 4, requires_grad=True)
    for number in range(40):
        store[f"many/name {number}"] = number
    for number in range(0, 40, 3):
        del store[f"many/name {number}"]


def make(folder: Path, variant: str) -> Image:
    path = folder / f"{variant}.pm"
    domain: Any = "file" if variant == "file" else "process"
    store = pmstore.open(path, "w", size="1MiB", domain=domain)
    _fill(store)
    if variant == "trained":
        run, model, optimizer = _attach(store)
        for batch in run.batches(1):
            optimizer.zero_grad()
            model(torch.randn(5, 4) * batch).sum().backward()
            optimizer.step()
            run.commit()
        store.add_tier("near", folder / "tier")
        run.detach()
    store.commit()
    if variant == "crashed":
        store["config"] = {"lr": 3.0}
        store["new"] = np.ones(9)
        store.list("items")[3] = "other"
        store["a"][:] = 5
        del store["group/x"]
        data = path.read_bytes()  # with an open transaction in its log
        store.close()
    else:
        store.close()
        data = path.read_bytes()
    return Image(data)


# ---- what users do -------------------------------------------------------------------------------


def _read(group: Any, depth: int = 0) -> None:
    """All of it; what is damaged may stop the reading of one thing, not of the others."""
    with suppress(pmstore.PmstoreError):
        repr(group), len(group), group._repr_html_()
    with suppress(pmstore.PmstoreError):
        group.entries()
    with suppress(pmstore.PmstoreError):
        for name in group:
            assert isinstance(name, str)
            with suppress(pmstore.PmstoreError):
                assert name in group
            with suppress(pmstore.PmstoreError):
                _look(group[name], depth)
    for whole in (dict, lambda g: list(g.values()), lambda g: list(g.items())):
        with suppress(pmstore.PmstoreError):
            whole(group)
    with suppress(pmstore.PmstoreError):
        assert group.get("no such name") is None


def _look(value: Any, depth: int) -> None:
    if isinstance(value, Group):
        if depth < 10:
            _read(value, depth + 1)
    elif isinstance(value, List):
        repr(value), value._repr_html_()
        for read in (
            lambda: list(value),
            lambda: value[-1] if len(value) else None,
            lambda: value[1:8:3],
        ):
            with suppress(pmstore.PmstoreError):
                read()
    elif isinstance(value, Slots):
        repr(value), value._repr_html_(), value.shape, value.flipped
        value.current.sum()
        value.previous
    elif isinstance(value, np.ndarray):
        value.tobytes()
    elif torch is not None and isinstance(value, torch.Tensor):
        value.detach().clone()
    else:
        repr(value)


def _change(store: pmstore.Store) -> Iterator[Callable[[], Any]]:
    def step() -> None:
        pair = store.slots("slots", (50,))
        pair.next[:] = 3
        pair.flip()

    yield lambda: store.__setitem__("config", {"lr": 2.0})
    yield lambda: store.__setitem__("text", "é" * 300)
    yield lambda: store.__setitem__("group/inner/new", 3)
    yield lambda: store.require("group/inner/b", 5000)
    yield lambda: store.setdefault("many/name 1", 3)
    yield lambda: store.list("items").insert(5, "x")
    yield lambda: store.list("items").append(np.zeros(3))
    yield lambda: store.list("items").__delitem__(slice(100, 250))
    yield lambda: store.list("items").__setitem__(2, "y")
    yield step
    yield lambda: store["a"].__iadd__(1) if "a" in store else None
    yield store.commit
    yield lambda: store.zeros("new/z", 4000)
    yield store.rollback
    yield lambda: store.group("group").clear()
    yield lambda: [store.__setitem__(f"many/other {n}", n) for n in range(60)]
    for name in ("group", "items", "slots", "a", "config", "many", "empty", "tensor"):

        def remove(name: str = name) -> None:
            with suppress(KeyError):  # it may have gone with what was damaged
                del store[name]

        yield remove
    yield store.commit


def _out(folder: Path, store: pmstore.Store) -> Iterator[Callable[[], Any]]:
    yield lambda: exchange.export_npz(store, folder / "out.npz")
    yield lambda: exchange.export_safetensors(store, folder / "out.safetensors")
    yield lambda: portable.dump(store, io.BytesIO())
    yield store.check
    yield store.info
    yield store.stats
    yield store.usage
    yield lambda: store.tiers


COMMANDS = (
    ["ls", "-r"], ["ls", "--json"], ["info"], ["check"], ["dump", "-o"],
    ["show", "--", "config"], ["show", "--", "group"], ["show", "--", "items"],
)  # fmt: skip


def attempt(path: Path, what: str, action: Callable[[], Any]) -> str:
    """What is wrong with how it ended; empty: nothing."""
    try:
        action()
    except pmstore.CorruptStoreError as error:
        if str(path) not in str(error) and "dump" not in what:
            return f"{what}: CorruptStoreError that names no file: {error}"
    except pmstore.PmstoreError:
        pass
    except IndexError as error:
        if "is out of range for the list" not in str(error):  # a list that is shorter now says so
            return f"{what}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
    except (TypeError, ValueError) as error:
        known = (
            "npz has no dtype for",
            "safetensors has no dtype for",
            "two names of the store are",
        )
        if not any(text in str(error) for text in known):
            return f"{what}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
    except Exception as error:
        return f"{what}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
    return ""


def command(path: Path, words: list[str], folder: Path) -> str:
    from typer.testing import CliRunner

    words = [words[0], str(path), *words[1:]]
    if words[-1] == "-o":
        words.append(str(folder / "out.dump"))
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        told = "".join(traceback.format_exception(result.exception))
        return f"pmstore {' '.join(words)}: {result.exception!r}\n{told}"
    return (
        ""
        if result.exit_code in (0, 1, 2)
        else f"pmstore {' '.join(words)}: exit code {result.exit_code}"
    )


def examine(path: Path, data: bytes, folder: Path, rng: random.Random, variant: str) -> list[str]:
    found: list[str] = []

    def begin(mode: Any) -> pmstore.Store | None:
        path.write_bytes(data)
        store: list[pmstore.Store] = []
        found.append(
            attempt(
                path, f"open {mode}", lambda: store.append(pmstore.open(path, mode, force=True))
            )
        )
        return store[0] if store else None

    store = begin("r")
    if store is not None:
        found.append(attempt(path, "read", lambda: _read(store)))
        found += [attempt(path, f"out {n}", action) for n, action in enumerate(_out(folder, store))]
        found.append(attempt(path, "close", store.close))
        found.append(command(path, rng.choice(COMMANDS), folder))
    store = begin("r+")
    if store is not None:
        found += [attempt(path, f"change {n}", action) for n, action in enumerate(_change(store))]
        found.append(attempt(path, "read", lambda: _read(store)))
        found.append(attempt(path, "close", store.close))
    if variant == "trained":
        store = begin("r+")
        if store is not None:
            held = store
            if rng.random() < 0.7:
                attempt(path, "muddle", lambda: _muddle(held, rng))
            found.append(attempt(path, "attach", lambda: _train(held)))
            found.append(attempt(path, "close", store.close))
    path.write_bytes(data)
    found.append(command(path, ["compact"], folder))
    for left in folder.glob("out.*"):
        left.unlink()
    return [one for one in found if one]


def _muddle(store: pmstore.Store, rng: random.Random) -> None:
    """A store that is sound, and a run in it that is not: names are gone, or hold something
    else."""
    from pmstore.objects.containers import tree

    names = [entry.name for entry in tree(store) if entry.name.startswith(("run", ".pmstore"))]
    for name in rng.sample(names, min(len(names), rng.choice((1, 1, 2, 5)))):
        with suppress(KeyError, pmstore.PmstoreError):
            kind = type(store[name])
            del store[name]
            new = rng.choice(
                [
                    None,
                    0,
                    -1,
                    "",
                    {},
                    [],
                    {"a": 1},
                    [1, 2],
                    (1,),
                    b"x",
                    np.zeros(3),
                    np.zeros((), "i8"),
                    "gone",
                ]
            )
            if new != "gone" if not isinstance(new, np.ndarray) else kind is not Group:
                store[name] = new
    store.commit()


def _train(store: pmstore.Store) -> None:
    run, model, optimizer = _attach(store)
    try:
        for _ in run.batches(2):
            optimizer.zero_grad()
            model(torch.ones(5, 4)).sum().backward()
            optimizer.step()
            run.commit()
        run.rollback()
    finally:
        run.detach()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1 << 60)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--only", choices=VARIANTS)
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(prefix="pmstore-damage-", dir="/dev/shm"))
    variants = [v for v in VARIANTS if (a.only or v) == v and (v != "trained" or torch is not None)]
    bad, done, start = 0, 0, time.monotonic()
    try:
        images = {variant: make(folder, variant) for variant in variants}
        for seed in range(a.seed, a.seed + a.count):
            if time.monotonic() - start > a.seconds:
                break
            rng = random.Random(seed)
            variant = variants[seed % len(variants)]
            print(f"seed {seed} {variant}", end="\r", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            path = folder / "damaged.pm"
            data = images[variant].damaged(rng)
            for one in examine(path, data, folder, rng, variant):
                bad += 1
                print(json.dumps({"seed": seed, "variant": variant, "said": one}), flush=True)
            done += 1
        faulthandler.cancel_dump_traceback_later()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"damaged": done, "findings": bad}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
