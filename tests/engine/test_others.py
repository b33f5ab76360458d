"""What others made: files from strangers, names in their stores, variables that somebody left in
the environment."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import shlex
import stat
import struct
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from typer.testing import CliRunner, Result

import pmstore
from pmstore import exchange, portable
from pmstore.commands.application import app
from pmstore.objects import values
from pmstore.objects.array import Descriptor
from pmstore.testing import crashboard

MIB = 1 << 20


@pytest.mark.parametrize("name", ["exchange", "portable", "scheduler"])
def test_what_the_package_offers_is_imported_either_way(name: str) -> None:
    code = (
        f"import sys, pmstore.{name}; from pmstore import {name} as other; "
        f"assert other is pmstore.{name} is sys.modules['pmstore.{name}']; "
        "print([one for one in other.__all__ if not hasattr(other, one)])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


def run(*words: str | Path, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env=env)


def peak_mib(code: str) -> tuple[int, str]:
    """What a fresh process took at most for it, stores and all, and what it said."""
    report = (
        "print(next(line.split()[1] for line in open('/proc/self/status') if "
        "line.startswith('VmHWM')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{textwrap.dedent(code)}\n{report}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said, _, peak = done.stdout.rstrip().rpartition("\n")
    return int(peak) >> 10, said


# ---- dumps ---------------------------------------------------------------------------------------


def sealed(*records: Any) -> bytes:
    """A dump of these records and pieces of arrays, with the right count and checksum."""
    import zlib

    out, crc = [msgpack.packb({"format": "pmstore dump", "version": 1})], 0
    for record in records:
        out.append(msgpack.packb(record))
        crc = zlib.crc32(record if isinstance(record, bytes) else out[-1], crc)
    count = sum(isinstance(record, list) for record in records)
    return b"".join([*out, msgpack.packb(["end", count, crc])])


def array_of(shape: tuple[int, ...], dtype: Any = "<f4") -> bytes:
    return Descriptor(False, dtype, shape).pack()


HUGE = array_of((1 << 28,))


@pytest.mark.parametrize(
    "records",
    [
        [["name array", "a", HUGE, 1 << 30]],
        [["list", "l"], ["item array", HUGE, 1 << 30]],
        [["name array", "a", array_of((1 << 42,)), 1 << 44]],
        [["list", "l"], ["item array", array_of((1 << 42,)), 1 << 44]],
    ],
    ids=["1 GiB", "1 GiB in a list", "16 TiB", "16 TiB in a list"],
)
def test_a_dump_that_declares_much_takes_little(shm: Path, records: list[Any]) -> None:
    (shm / "dump").write_bytes(sealed(*records))
    taken, said = peak_mib(f"""
        import pmstore
        from pmstore import portable
        try:
            portable.load(open({str(shm / "dump")!r}, "rb"), {str(shm / "s.pm")!r}, size="1MiB")
        except pmstore.CorruptStoreError as error:
            print(error)
    """)
    assert str(shm / "dump") in said
    assert "not the bytes of an array" in said
    assert taken < 100
    assert [each.name for each in shm.iterdir()] == ["dump"]


def test_objects_within_objects_take_little(shm: Path) -> None:
    """2.4 MB that msgpack would make two million lists of."""
    tree = b"\x90"
    for _ in range(7):
        tree = b"\x98" + 8 * tree
    (shm / "dump").write_bytes(msgpack.packb({"format": "pmstore dump", "version": 1}) + tree)
    taken, said = peak_mib(f"""
        import pmstore
        from pmstore import portable
        try:
            portable.load(open({str(shm / "dump")!r}, "rb"), {str(shm / "s.pm")!r}, size="1MiB")
        except pmstore.CorruptStoreError as error:
            print(error)
    """)
    assert "record 1: objects within objects" in said
    assert taken < 100


def test_a_large_array_through_a_pipe(shm: Path) -> None:
    """Its room is made when an eighth has come: this one is longer than what waits in memory until
    then."""
    big = np.random.default_rng(1).integers(0, 256, 144 * MIB, np.uint8)
    with pmstore.open(shm / "s.pm", "x", size="320MiB") as store:
        store["big"] = big
        store["small"] = big[:100]
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb") as into:
            sender = threading.Thread(target=lambda: (portable.dump(store, into), into.close()))
            sender.start()
            with os.fdopen(reading, "rb") as out:
                assert portable.load(out, shm / "t.pm", size="320MiB") == 2
            sender.join()
    with pmstore.open(shm / "t.pm", "r") as store:
        assert np.array_equal(store["big"], big)
        assert np.array_equal(store["small"], big[:100])
    assert sorted(each.name for each in shm.iterdir()) == ["s.pm", "t.pm"]


PAIR = ["group", "a", msgpack.packb({"slots": 1})]
F4 = [array_of((2,)), 8]
EIGHT = b"12345678"


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (
            [["name value", "a", values.encode(1)]] * 2,
            ("record 2, 'a': the dump is damaged: the name occurs twice"),
        ),
        ([["list", "a"], ["name array", "a", *F4], EIGHT], "twice"),
        ([["group", "a", b""], ["group", "a", b""]], "twice"),
        ([["name value", "g/a", values.encode(1)]], "no record made a group"),
        (
            [["name value", "g", values.encode(1)], ["name value", "g/a", values.encode(1)]],
            "no record made a group",
        ),
        ([PAIR], "'a': slots hold two arrays"),
        ([PAIR, ["name array", "a/0", *F4], EIGHT], "slots hold two arrays"),
        (
            [PAIR, ["name array", "a/0", *F4], EIGHT, ["name value", "a/1", values.encode(1)]],
            "slots hold two arrays",
        ),
        (
            [PAIR, ["name array", "a/0", *F4], EIGHT, ["name array", "a/2", *F4], EIGHT],
            "slots hold two arrays",
        ),
        (
            [
                PAIR,
                ["name array", "a/0", *F4],
                EIGHT,
                ["name array", "a/1", array_of((4,), "<u2"), 8],
                EIGHT,
            ],
            "differ",
        ),
        ([PAIR, ["group", "a/0", b""]], "slots hold two arrays"),
        (
            [
                PAIR,
                *(part for i in "01" for part in (["name array", f"a/{i}", *F4], EIGHT)),
                ["list", "l"],
                ["list", "a/x"],
            ],
            "slots hold two arrays",
        ),
        ([["name value", "a", b"\x91" * 100_000]], "record 1, 'a': a stored value does not decode"),
        (
            [["name value", "a\x1b[31m//", values.encode(1)]],
            (r"'a\\x1b\[31m//': a name is not empty"),
        ),
        ([["name array", "a", array_of((2,)), -8]], "no length"),
        ([["name array", ".pmstore/a", array_of((2,)), -8]], "no length"),
    ],
)
def test_dumps_that_contradict_themselves(shm: Path, records: list[Any], says: str) -> None:
    with pytest.raises(pmstore.CorruptStoreError, match=says):
        portable.load(io.BytesIO(sealed(*records)), shm / "s.pm", size="1MiB")
    assert list(shm.iterdir()) == []


def test_arrays_without_bytes_take_no_memory(shm: Path) -> None:
    """numpy.empty makes strings of one character of those of none, and four bytes of each."""
    dump = sealed(["name array", "a", array_of((1 << 42,), "<U0"), 0])
    portable.load(io.BytesIO(dump), shm / "s.pm", size="1MiB")
    with pmstore.open(shm / "s.pm") as store:
        assert store["a"].nbytes == 0
        assert store["a"].shape == (1 << 42,)


# ---- npz -----------------------------------------------------------------------------------------


def zipped(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def npy(
    shape: str, data: bytes = b"", *, descr: str = "'<f4'", version: int = 1, header: str = ""
) -> bytes:
    text = (header or f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}").encode()
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + struct.pack("<H" if version == 1 else "<I", len(text))
        + text
        + data
    )


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (npy("(1099511627776,)"), r"shape \(1099511627776,\) and float32 in"),
        (npy("(4611686018427387904, 4)"), "in 87"),
        (npy("(-1,)"), "no shape"),
        (npy("(True,)", b"xxxx"), "no shape"),
        (npy("(3,)", b"xxxx"), "shape"),
        (npy("(1,)", b"xxxx", descr="'|O'"), "pickled"),
        (npy("", header="(" * 9000, version=2), "TokenError|no array"),
        (npy("", header="[" * 9000, version=3), "x.npz: 'a'"),
        (npy("", header="-" * 9000 + "1", version=3), "x.npz: 'a'"),
        (npy("", header="{}", version=3), "other keys"),
        (npy("", header="__import__('os').system('true')"), "malformed"),
        (npy("", header=" " * 50_000, version=2), "header of 50000 bytes"),
        (b"\x93NUMPY\x02\0\xff\xff\xff\xff{", "header of 4294967295 bytes"),
        (b"\x93NUMPY\x09\0\x01\0{", r"version 9\.0"),
        (b"\x93NUM", "magic"),
        (b"(lp0\n.", "magic"),
    ],
)
def test_npz_members(shm: Path, member: bytes, says: str) -> None:
    zipped(shm / "x.npz", {"a.npy": member})
    with pmstore.open(shm / "s.pm", "x") as store:
        with pytest.raises(pmstore.CorruptStoreError, match=says) as caught:
            exchange.import_npz(store, shm / "x.npz")
    assert str(caught.value).startswith(f"{shm}/x.npz: 'a': ")


def test_npz_of_every_version_of_the_format(shm: Path) -> None:
    members = {
        f"v{version}.npy": npy("(2, 3)", bytes(24), version=version) for version in (1, 2, 3)
    }
    wide = "{'descr': [('ä€', '<i4')], 'fortran_order': True, 'shape': (2,), }"
    members["wide.npy"] = npy("", bytes(8), version=3, header=wide)
    with pmstore.open(shm / "s.pm", "x") as store:
        assert exchange.import_npz(store, zipped(shm / "x.npz", members)) == 4
        assert [store[f"v{version}"].shape for version in (1, 2, 3)] == [(2, 3)] * 3
        assert store["wide"].dtype.names == ("ä€",)


def test_compressed_members_have_a_limit(shm: Path) -> None:
    np.savez_compressed(shm / "x.npz", a=np.zeros(120 * MIB, np.uint8))
    assert (shm / "x.npz").stat().st_size < MIB
    taken, said = peak_mib(f"""
        import pmstore
        from pmstore import exchange
        with pmstore.open({str(shm / "s.pm")!r}, "x") as store:
            try:
                exchange.import_npz(store, {str(shm / "x.npz")!r})
            except pmstore.CorruptStoreError as error:
                print(error)
    """)
    assert taken < 100
    told = run("import", shm / "x.npz", shm / "t.pm")
    assert told.exit_code == 1
    assert not (shm / "t.pm").exists()
    option = re.search(r"--inflated \d+", told.stderr)
    assert option is not None
    assert option[0] in said
    assert run("import", shm / "x.npz", shm / "t.pm", *option[0].split()).exit_code == 0
    with pmstore.open(shm / "t.pm", "r") as store:
        assert store["a"].shape == (120 * MIB,)
    assert run("import", shm / "x.safetensors", shm / "t.pm", "--inflated", "1GiB").exit_code == 2


def overlapping(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.npy", npy("(1000,)", bytes(4000)))
        for number in range(50):
            more = copy.copy(file.filelist[0])
            more.filename = f"b{number}.npy"
            file.filelist.append(more)


def encrypted(path: Path) -> None:
    zipped(path, {"a.npy": npy("(1,)", b"xxxx")})
    raw = bytearray(path.read_bytes())
    raw[6] |= 1
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(raw)


def twice(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.npy", npy("(1,)", b"xxxx"))
        file.writestr("a", npy("(1,)", b"xxxx"))


def damaged(path: Path) -> None:
    zipped(path, {"a.npy": npy("(1000,)", bytes(4000))})
    raw = bytearray(path.read_bytes())
    raw[2000] ^= 1
    path.write_bytes(raw)


def before_the_beginning(path: Path) -> None:
    """What its directory says of places is moved by more than there is."""
    zipped(path, {"a.npy": npy("(1000,)", bytes(4000))})
    raw = bytearray(path.read_bytes())
    at = raw.index(b"PK\x05\x06") + 16
    struct.pack_into("<I", raw, at, struct.unpack_from("<I", raw, at)[0] + 100)
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (before_the_beginning, r"x\.npz: "),
        (overlapping, "more bytes than the file"),
        (encrypted, "'a' is encrypted"),
        (twice, "'a' occurs twice"),
        (damaged, "'a': BadZipFile: Bad CRC"),
        (
            lambda path: zipped(path, {"a.npy": npy("(1,)", b"xxxx")}, zipfile.ZIP_LZMA),
            "compressed otherwise",
        ),
        (lambda path: path.write_bytes(b"PK" * 50), "not a zip file"),
    ],
)
def test_npz_files(shm: Path, make: Callable[[Path], None], says: str) -> None:
    make(shm / "x.npz")
    with pmstore.open(shm / "s.pm", "x") as store:
        with pytest.raises(pmstore.CorruptStoreError, match=says):
            exchange.import_npz(store, shm / "x.npz")


@pytest.mark.parametrize(
    "said",
    [
        5,
        [],
        {"tensors": [5]},
        {"tensors": [[[1]]]},
        {"lists": {"l": 1 << 40}},
        {"lists": {"l": -5}},
        {"lists": 5},
        {"order": [[1]]},
        {"separator": ""},
        {"separator": 5},
        {"groups": [5]},
        {"groups": ["a"]},
        {"values": {"v": "!!"}},
        {"values": {"a": "wA=="}},
        {"paths": {"a": "x/../..//"}},
        {"paths": {"a": 5}},
        {"lists": {"a": 0}},
    ],
)
def test_metadata_that_lie(shm: Path, said: Any) -> None:
    np.savez(shm / "x.npz", pmstore=np.frombuffer(msgpack.packb(said), np.uint8), a=np.zeros(2))
    header = {
        "__metadata__": {"pmstore": json.dumps(said)},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    }
    packed = json.dumps(header).encode()
    (shm / "x.safetensors").write_bytes(struct.pack("<Q", len(packed)) + packed + b"xxxx")
    with pmstore.open(shm / "s.pm", "x") as store:
        for read, name in (
            (exchange.import_npz, "x.npz"),
            (exchange.import_safetensors, "x.safetensors"),
        ):
            with pytest.raises(pmstore.CorruptStoreError, match=name):
                read(store.group(name), shm / name)


@pytest.mark.parametrize("said", ["[" * 99_999, '{"lists":{"l":' + "9" * 6000 + "}}", "{", "5"])
def test_json_that_exhausts_the_parser(shm: Path, said: str) -> None:
    packed = json.dumps({"__metadata__": {"pmstore": said}}).encode()
    (shm / "x.safetensors").write_bytes(struct.pack("<Q", len(packed)) + packed)
    with pmstore.open(shm / "s.pm", "x") as store:
        with pytest.raises(pmstore.CorruptStoreError, match=r"x\.safetensors"):
            exchange.import_safetensors(store, shm / "x.safetensors")


def test_text_whose_name_has_the_separator_comes_back_once(shm: Path) -> None:
    with pmstore.open(shm / "s.pm", "x") as store, pmstore.open(shm / "t.pm", "x") as back:
        store["a.b"] = "text"
        exchange.export_safetensors(store, shm / "x.safetensors")
        exchange.import_safetensors(back, shm / "x.safetensors")
        assert list(back) == ["a.b"]


def test_want_of_memory_is_told_with_its_place(shm: Path) -> None:
    """Honest files, in a process that may not have the memory."""
    np.savez(shm / "x.npz", a=np.zeros(160 * MIB, np.uint8))
    with pmstore.open(shm / "s.pm", "x", size="400MiB") as store:
        store.list("l").append(np.zeros(160 * MIB, np.uint8))
        with open(shm / "dump", "wb") as file:
            portable.dump(store, file)
    (shm / "s.pm").unlink()
    _, said = peak_mib(f"""
        import resource, pmstore
        from pmstore import exchange, portable
        def limited(read):
            status = open("/proc/self/status")
            had = int(next(line.split()[1] for line in status if line.startswith("VmSize"))) << 10
            resource.setrlimit(resource.RLIMIT_AS, (had + (100 << 20), -1))
            try:
                read()
            except pmstore.PmstoreError as error:
                print(type(error).__name__, error)
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        with pmstore.open({str(shm / "s.pm")!r}, "x") as store:
            limited(lambda: exchange.import_npz(store, {str(shm / "x.npz")!r}))
            with open({str(shm / "dump")!r}, "rb") as file:
                reader = portable._Reader(file, lambda done: None)
                reader.next()
                loader = portable._Loader(store, reader, None)
                limited(loader.load)
    """)
    assert said.splitlines() == [
        f"PmstoreError {shm}/x.npz: 'a': there is not enough memory for it",
        f"PmstoreError {shm}/dump: record 2: there is not enough memory for it",
    ]


@pytest.mark.parametrize(
    "member",
    [npy("(99,)", b"x"), npy("", header="(" * 9000), b"\x93NUMPY\x02\0\xff\xff\xff\xff", b""],
)
def test_npy_files(shm: Path, member: bytes) -> None:
    (shm / "x.npy").write_bytes(member)
    pmstore.open(shm / "s.pm", "x").close()
    told = run("set", shm / "s.pm", "a", "--file", shm / "x.npy")
    assert told.exit_code == 1
    assert told.stderr.startswith(f"pmstore: {shm}/x.npy: ")


# ---- who may read what is written ----------------------------------------------------------------


def test_files_are_private_unless_asked_otherwise(shm: Path) -> None:
    with pmstore.open(shm / "s.pm", "x") as store:
        store["a"] = np.arange(3)
    os.chmod(shm / "s.pm", 0o644)
    before = os.umask(0)
    try:
        for name, words in (("d", ["dump"]), ("x.npz", ["export"]), ("x.safetensors", ["export"])):
            for mode, options in (
                (0o600, []),
                (0o640, ["--mode", "640"]),
                (0o444, ["--mode", "0444"]),
            ):
                assert run(*words, shm / "s.pm", shm / name, *options).exit_code == 0
                assert stat.S_IMODE((shm / name).stat().st_mode) == mode
                (shm / name).unlink()
            assert run(*words, shm / "s.pm", shm / name, "--mode", "rw").exit_code == 2
        run("dump", shm / "s.pm", shm / "d")
        run("load", shm / "d", shm / "t.pm")
        assert stat.S_IMODE((shm / "t.pm").stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert sorted(each.name for each in shm.iterdir()) == ["d", "s.pm", "t.pm"]


def test_nothing_is_written_through_a_link_or_out_of_the_store(shm: Path) -> None:
    with pmstore.open(shm / "s.pm", "x") as store:
        store["../../out"] = store["a"] = np.arange(3)
    for name, words in (("d", ["dump"]), ("x.npz", ["export"]), ("x.safetensors", ["export"])):
        (shm / name).symlink_to("victim")
        told = run(*words, shm / "s.pm", shm / name)
        assert told.exit_code == 2
        assert "there is something already" in told.stderr
        (shm / name).unlink()
        assert run(*words, shm / "s.pm", shm / name).exit_code == 0
    (shm / "t.pm").symlink_to("victim")
    assert run("load", shm / "d", shm / "t.pm").exit_code == 2
    (shm / "t.pm").unlink()
    made = []
    for name in ("d", "x.npz", "x.safetensors"):
        made.append(f"{name}.pm")
        words = (
            ["load", shm / name, shm / made[-1]]
            if name == "d"
            else ["import", shm / name, shm / made[-1]]
        )
        assert run(*words).exit_code == 0
        with pmstore.open(shm / made[-1], "r") as store:
            assert store["../../out"].tolist() == [0, 1, 2]
    assert sorted(each.name for each in shm.iterdir()) == sorted(
        ["s.pm", "d", "x.npz", "x.safetensors", *made]
    )


def test_locks_follow_no_links(shm: Path) -> None:
    """Links in the path are followed once, when the store is looked for. (The kernel tells how a
    file was opened.)"""
    pmstore.open(shm / "s.pm", "x").close()
    (shm / "link.pm").symlink_to("s.pm")
    for mode in ("r", "r+"):
        with pmstore.open(shm / "link.pm", mode, lock=mode == "r") as store:  # type: ignore[call-overload]
            held = {
                (task / "fdinfo" / fd.name).read_text()
                # the lock's holder has descriptors of its own
                for task in Path("/proc/self/task").iterdir()
                for fd in (task / "fd").iterdir()
                if os.path.realpath(fd) == os.path.realpath(store.path)
            }
            assert len(held) == 2
            assert sum("FLOCK" in told for told in held) == 1
            flags = [re.search(r"flags:\s*(\d+)", told) for told in held]
            assert all(found is not None and int(found[1], 8) & os.O_NOFOLLOW for found in flags)


# ---- crash hooks ---------------------------------------------------------------------------------


COMMIT = """
import pmstore, sys
with pmstore.open(sys.argv[1]) as store:
    for step in range(3):
        store["step"] = step
        store.commit()
"""


def commits(store: Path, env: dict[str, str]) -> int:
    return subprocess.run([sys.executable, "-c", COMMIT, str(store)], env=env).returncode


def spoilt(board: Path, how: str) -> None:
    raw = board.read_bytes()
    if how == "zeros":
        board.write_bytes(bytes(4096))
    elif how == "text":
        board.write_text("my thesis\n" * 1000)
    elif how == "longer":
        board.write_bytes(raw + b"\0")
    elif how == "another magic":
        board.write_bytes(b"PMSBOOTY" + raw[8:])
    elif how == "another token":
        board.write_bytes(raw[:8] + b"0" * 32 + raw[40:])
    elif how == "a link":
        board.rename(board.with_name("real"))
        board.symlink_to("real")
    elif how == "a pipe":
        board.unlink()
        os.mkfifo(board)
    elif how == "gone":
        board.unlink()


@pytest.mark.parametrize(
    "how", ["zeros", "text", "longer", "another magic", "another token", "a link", "a pipe", "gone"]
)
def test_only_a_board_is_a_board(shm: Path, how: str) -> None:
    env = crashboard.environment(shm / "board", at=20)
    spoilt(shm / "board", how)
    files = {each: each.read_bytes() for each in shm.iterdir() if each.is_file()}
    assert commits(shm / "s.pm", env) == 0
    assert all(each.read_bytes() == before for each, before in files.items())
    assert (shm / "board").exists() == (how != "gone")


@pytest.mark.parametrize("without", ["PMSTORE_CRASH_BOARD", "PMSTORE_CRASH_TOKEN"])
def test_without_a_board_nothing_is_heard(shm: Path, without: str) -> None:
    env = crashboard.environment(shm / "board", at=20, power_seed=1)
    made = (shm / "board").read_bytes()
    del env[without]
    assert commits(shm / "s.pm", env) == 0
    assert (shm / "board").read_bytes() == made


def test_with_a_board_it_dies(shm: Path) -> None:
    assert commits(shm / "s.pm", crashboard.environment(shm / "board", at=20)) == -9
    assert crashboard.read(shm / "board")[0] == 20
    assert crashboard.read(shm / "board").path == str(shm / "s.pm")
    assert stat.S_IMODE((shm / "board").stat().st_mode) == 0o600


# ---- names on a command line ---------------------------------------------------------------------

NAMES = [
    "plain",
    "with blank",
    "$(touch PWNED)",
    "`touch PWNED`",
    "a;touch PWNED",
    "quote's",
    'd"q',
    "*",
    "~",
]
NAMES += ["back\\slash$(touch PWNED)"]
NEVER = ["red\x1b[31m", "line\nbreak", "-rf", "bell\a", "\u202eabc"]


def completed(path: Path, shell: str, incomplete: str) -> list[str]:
    line = f"pmstore show {path} {incomplete}"
    words = (
        {"COMP_WORDS": line, "COMP_CWORD": "3"}
        if shell == "bash"
        else {"_TYPER_COMPLETE_ARGS": line}
    )
    words["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    told = (
        CliRunner()
        .invoke(
            app, [], env={"_PMSTORE_COMPLETE": f"complete_{shell}", **words}, prog_name="pmstore"
        )
        .stdout
    )
    return told.rstrip("\n").split("\n") if told else []


@pytest.fixture
def named(shm: Path) -> Path:
    with pmstore.open(shm / "s.pm", "x") as store:
        for name in NAMES + NEVER:
            store[name] = 1
    return shm / "s.pm"


def test_completion_quotes_for_bash(named: Path, disk: Path) -> None:
    offered = completed(named, "bash", "")
    script = "\n".join(f"printf '%s\\0' {name}" for name in offered)
    said = subprocess.run(
        ["bash", "-c", script], cwd=disk, capture_output=True, text=True, check=True
    ).stdout
    assert said.split("\0")[:-1] == NAMES  # each is one word, and means itself
    assert not list(disk.iterdir())
    assert completed(named, "bash", "with") == ["with\\ blank"]
    # within a quote of the user's, ours would end it
    assert completed(named, "bash", "'wi") == [""]
    assert completed(named, "bash", "'pl") == ["plain"]


def test_completion_of_other_shells_offers_what_they_cannot_misread(named: Path) -> None:
    assert completed(named, "fish", "") == ["plain", "with blank"]
    told = "".join(completed(named, "zsh", ""))
    assert shlex.split(told)[-1].replace('"', "") == "*: :((plainwith blank))"
    assert "PWNED" not in told
