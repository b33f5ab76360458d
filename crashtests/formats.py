"""Files from strangers, damaged and forged: dumps, npz, safetensors, manifests of tiers.

    python -m crashtests --kind formats --cases 1000 --seconds 600

Each is a file that was sound: bytes of it are flipped, cut or doubled; or it is taken apart, some
fields are replaced by what an enemy might write, and it is put together again with right checksums.
Reading it must give a sound store or a PmstoreError. The peak of memory hardly rises, and nothing
is left beside the store.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import io
import json
import random
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

import pmstore
from crashtests import cases
from pmstore import exchange, portable, tiers
from pmstore._engine.snapshot import checksum
from pmstore.errors import PmstoreError
from pmstore.tiers._epochs.manifest import BadManifestError, Manifest, ManifestName

ALLOWED_MIB = 100
"""More than there was before the first case. Nothing that a case reads has a MiB."""

_ATOMS: list[Any] = [
    *(
        0,
        1,
        -1,
        255,
        1 << 30,
        1 << 40,
        1 << 62,
        (1 << 64) - 1,
        -(1 << 63),
        True,
        None,
        0.5,
        float("nan"),
    ),
    *(
        "",
        "a",
        "..",
        "/",
        "a//b",
        "a/0",
        ".pmstore/tiers/x",
        "\x1b[31m",
        "\0",
        "x" * 5000,
        "|O",
        "<U0",
        "<f4",
        "[" * 3000,
    ),
    *(b"", b"\xc0", b"\x91" * 3000, b"\xdd\xff\xff\xff\xff", b"\x80", b"x" * 100),
    *([], {}, [[]], [1 << 60, 1 << 60], [0, -1], {"slots": 1}, {"a": 1}),
]


# ---- damage --------------------------------------------------------------------------------------


def flipped(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(out)) if out else 0
        what = chance.randrange(5)
        if what == 0:
            del out[at:]
        elif what == 1:
            out[at:at] = out[at : at + chance.choice((1, 4, 64))]
        elif out:
            at = min(at, len(out) - 1)
            out[at] = chance.choice(
                (0, 0xFF, out[at] ^ 1 << chance.randrange(8), chance.randrange(256))
            )
    return bytes(out)


def _spots(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (list, dict)):
            yield from _spots(value[key])


def forged(value: Any, chance: random.Random, times: int) -> Any:
    """The list or map with some of what is in it replaced, removed, doubled or exchanged. In
    place."""
    for _ in range(times):
        spots = list(_spots(value))
        if not spots:
            break
        inside, key = chance.choice(spots)
        what = chance.randrange(8)
        if what == 0:
            del inside[key]
        elif what == 1 and isinstance(inside, list):
            inside.insert(key, copy.deepcopy(inside[key]))
        elif what == 2:
            other, its = chance.choice(spots)
            inside[key], other[its] = copy.deepcopy(other[its]), copy.deepcopy(inside[key])
        elif isinstance(inside[key], int) and chance.random() < 0.5:
            inside[key] += chance.choice((-1, 1, 8, 1 << 20))
        elif isinstance(inside[key], bytes) and inside[key] and chance.random() < 0.7:
            inside[key] = flipped(inside[key], chance)
        else:
            inside[key] = copy.deepcopy(chance.choice(_ATOMS))
    return value


def _try(pack: Callable[[Any], bytes], value: Any) -> bytes:
    """b"" where a forgery cannot be written down."""
    try:
        return pack(value)
    except (ValueError, TypeError, OverflowError, RecursionError, struct.error):
        return b""


# ---- the four formats ----------------------------------------------------------------------------


def fill(store: pmstore.Store) -> None:
    store["config"] = {"lr": 1e-3, "layers": [1, 2, (3, 4)], "big": 1 << 100}
    store["model/w"] = np.arange(60.0).reshape(20, 3)
    store["model/rec"] = np.zeros(3, [("x", "<f4"), ("y", "<i2", (2,))])
    store["fortran"] = np.asfortranarray(np.arange(12, dtype="f4").reshape(3, 4))
    store["text"] = "words"
    store["day"] = np.array(["2026-01-01"], "M8[D]")
    store.list("losses").extend([1, "two", np.arange(5), None])
    store.slots("pair", 4)


class Dump:
    def __init__(self, folder: Path) -> None:
        with pmstore.open(folder / "made.pm", "x", size="1MiB") as store:
            fill(store)
            stream = io.BytesIO()
            portable.dump(store, stream)
        self.whole = stream.getvalue()
        self.objects = list(msgpack.Unpacker(io.BytesIO(self.whole)))

    def case(self, chance: random.Random) -> bytes:
        if chance.random() < 0.3:
            return flipped(self.whole, chance)
        objects = forged(
            msgpack.unpackb(msgpack.packb(self.objects[1:-1])), chance, chance.choice((1, 1, 2, 4))
        )
        packed = [_try(msgpack.packb, each) for each in objects]
        crc = 0
        for each, raw in zip(objects, packed, strict=True):
            crc = zlib.crc32(each if isinstance(each, bytes) else raw, crc)
        end = ["end", sum(isinstance(each, list) for each in objects), crc]
        return b"".join([msgpack.packb(self.objects[0]), *packed, msgpack.packb(end)])

    def read(self, path: Path, folder: Path) -> None:
        with path.open("rb") as file:
            portable.load(file, folder / "s.pm", size="1MiB", domain="process")
        walk(folder / "s.pm")


class Npz:
    def __init__(self, folder: Path) -> None:
        with pmstore.open(folder / "made.pm", "x", size="1MiB") as store:
            fill(store)
            exchange.export_npz(store, folder / "made.npz")
        self.whole = (folder / "made.npz").read_bytes()
        with zipfile.ZipFile(folder / "made.npz") as file:
            self.members = {name: file.read(name) for name in file.namelist()}
            self.said = msgpack.unpackb(np.load(io.BytesIO(self.members["pmstore.npy"])).tobytes())

    def case(self, chance: random.Random) -> bytes:
        if chance.random() < 0.3:
            return flipped(self.whole, chance)
        members = dict(self.members)
        if chance.random() < 0.5:
            said = forged(msgpack.unpackb(msgpack.packb(self.said)), chance, chance.choice((1, 2)))
            out = io.BytesIO()
            np.save(out, np.frombuffer(_try(msgpack.packb, said), np.uint8))
            members["pmstore.npy"] = out.getvalue()
        else:
            name = chance.choice(list(members))
            cut = chance.choice((80, len(members[name])))  # mostly its header
            members[name] = flipped(members[name][:cut], chance) + members[name][cut:]
        out = io.BytesIO()
        with (
            warnings.catch_warnings(),
            zipfile.ZipFile(out, "w", chance.choice((0, 0, 8, 14))) as file,
        ):
            warnings.simplefilter("ignore")  # of a name twice
            for name, data in members.items():
                file.writestr(name, data)
            if chance.random() < 0.1:
                file.writestr(chance.choice(list(members)), b"")
        return flipped(out.getvalue(), chance) if chance.random() < 0.1 else out.getvalue()

    def read(self, path: Path, folder: Path) -> None:
        with pmstore.open(folder / "s.pm", "x", size="1MiB", domain="process") as store:
            exchange.import_npz(store, path)
        walk(folder / "s.pm")


class Safetensors:
    def __init__(self, folder: Path) -> None:
        with pmstore.open(folder / "made.pm", "x", size="1MiB") as store:
            fill(store)
            del store["model/rec"], store["day"]
            exchange.export_safetensors(store, folder / "made.safetensors")
        self.whole = (folder / "made.safetensors").read_bytes()
        (length,) = struct.unpack_from("<Q", self.whole)
        self.header, self.data = json.loads(self.whole[8 : 8 + length]), self.whole[8 + length :]

    def case(self, chance: random.Random) -> bytes:
        if chance.random() < 0.3:
            return flipped(self.whole, chance)
        header = json.loads(json.dumps(self.header))
        if chance.random() < 0.6:
            said = forged(
                json.loads(header["__metadata__"]["pmstore"]), chance, chance.choice((1, 2))
            )
            header["__metadata__"]["pmstore"] = _try(
                lambda each: json.dumps(each, default=_text).encode(), said
            ).decode()
        else:
            forged(header, chance, chance.choice((1, 2)))
        packed = _try(lambda each: json.dumps(each, default=_text).encode(), header)
        return struct.pack("<Q", len(packed)) + packed + self.data

    def read(self, path: Path, folder: Path) -> None:
        with pmstore.open(folder / "s.pm", "x", size="1MiB", domain="process") as store:
            exchange.import_safetensors(store, path)
        walk(folder / "s.pm")


def _text(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


class ManifestOfTier:
    def __init__(self, folder: Path) -> None:
        self.tier = folder / "tier"
        with pmstore.open(folder / "made.pm", "x", size="1MiB") as store:
            fill(store)
            store.add_tier("t", str(self.tier))
            store.commit()
            store.flush("t", wait=True)
        (self.path,) = self.tier.glob("*.manifest")
        self.whole = self.path.read_bytes()
        self.fields = msgpack.unpackb(self.whole[20:])

    def case(self, chance: random.Random) -> bytes:
        if chance.random() < 0.3:
            return flipped(self.whole, chance)
        body = _try(
            msgpack.packb,
            forged(msgpack.unpackb(self.whole[20:]), chance, chance.choice((1, 1, 2))),
        )
        return struct.pack("<8sIQ", b"PMSTIER1", checksum(body), len(body)) + body

    def read(self, path: Path, folder: Path) -> None:
        name = ManifestName.parse(self.path.name)
        assert name is not None
        with contextlib.suppress(BadManifestError):
            Manifest.unpack(path.read_bytes())
        self.path.write_bytes(path.read_bytes())
        tiers.epochs(str(self.tier))
        tiers.restore(folder / "s.pm", str(self.tier), domain="process")
        with pmstore.open(folder / "s.pm", "r") as store:
            # a forged manifest may put sound chunks where they do not belong
            sound = not store.check().problems
        if sound:
            walk(folder / "s.pm")


def walk(path: Path) -> None:
    """Looks at everything in a store: what was believed must be sound."""
    with pmstore.open(path, "r") as store:
        found = store.check()
        assert not found.problems, found.problems
        for entry in pmstore.objects.containers.tree(store):
            item = store[entry.name]
            if isinstance(item, pmstore.Slots):
                item = item.current
            for one in item if isinstance(item, pmstore.List) else [item]:
                if isinstance(one, np.ndarray) and one.nbytes:
                    one.tobytes()


FORMATS: dict[str, type] = {
    "dump": Dump,
    "npz": Npz,
    "safetensors": Safetensors,
    "manifest": ManifestOfTier,
}


# ---- running -------------------------------------------------------------------------------------


def one_case(made: Any, data: bytes, room: Path) -> str:
    """What came of it: "read", or the name of the PmstoreError. Anything else is raised."""
    with tempfile.TemporaryDirectory(dir=room) as place:
        folder = Path(place)
        (folder / "case").write_bytes(data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made.read(folder / "case", folder)
            return "read"
        except PmstoreError as error:
            return type(error).__name__
        finally:
            left = sorted(
                each.name for each in folder.iterdir() if each.name not in ("case", "s.pm")
            )
            assert not left, left


def peak_mib() -> int:
    status = Path("/proc/self/status").read_text()
    return (
        int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) >> 10
    )


def fuzz(drawn: tuple[str, int], size: int, _: None) -> cases.Found:
    """So many files of one format. Raises what a reader should not have raised."""
    kind, seed = drawn
    counts = Counter[str]()
    with contextlib.suppress(ModuleNotFoundError):
        import torch  # else the first case that has a tensor would take its memory  # noqa: F401
    before = peak_mib()
    with tempfile.TemporaryDirectory(prefix="pmstore-formats-", dir="/dev/shm") as place:
        room = Path(place)
        (room / "sound").mkdir()
        made = FORMATS[kind](room / "sound")
        for number in range(size):
            data = made.case(random.Random(f"{kind}:{seed}:{number}"))
            counts[one_case(made, data, room)] += 1
            if peak_mib() > before + ALLOWED_MIB:
                raise MemoryError(f"file {number}: {peak_mib()} MiB")
    return cases.Found(counts)


CASES = cases.Kind(
    500,
    "files",
    lambda: len(FORMATS),
    lambda seed, size: (" ".join(map(str, d := cases.turn(list(FORMATS), seed))), d),
    fuzz,
)
