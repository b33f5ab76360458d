"""Commands that show, change and carry what is in a store."""

from __future__ import annotations

import datetime as dt
import io
import json
import re
import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from typer.testing import CliRunner, Result

import pmstore
from pmstore import portable
from pmstore._engine.constants import ROOT
from pmstore.commands.application import app
from pmstore.commands.table import TABLE
from pmstore.objects import dtypes
from pmstore.show import picture

try:
    import torch
except ModuleNotFoundError:
    torch = None  # type: ignore[assignment]

needs_torch = pytest.mark.skipif(torch is None, reason="needs torch")


def run(*words: str | Path, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], input=stdin)


def fill(store: pmstore.Store) -> None:
    store["config"] = {"lr": 1e-3, "when": dt.date(2026, 1, 1), (1, 2): b"\0"}
    store["text"] = "ünï"
    store["losses"] = np.exp(-np.arange(200) / 50)
    store["fortran"] = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    store["empty"] = np.zeros((0, 3), "i2")
    store["scalar"] = np.array(3.5)
    store["model/fc1.weight"] = np.arange(12.0, dtype="f4").reshape(4, 3)
    store.group("nothing here")
    store.list("history").extend([1, "two", np.arange(3), None])
    if torch:
        store["model/fc1.weight"] = torch.nn.Parameter(torch.arange(12.0).reshape(4, 3))
        store["model/half"] = torch.arange(5).to(torch.bfloat16)
        store["model/deep/f8"] = torch.ones(3).to(torch.float8_e4m3fn)
        store.list("history").append(torch.ones(2))
    store.list("model/none")


@pytest.fixture
def path(shm: Path) -> Path:
    path = shm / "run.pm"
    with pmstore.open(path, size="4MiB") as store:
        fill(store)
    return path


def contents(path: Path) -> list[Any]:
    """Everything, in order, as what can be compared."""
    found: list[Any] = []

    def plain(item: Any) -> Any:
        if torch and isinstance(item, torch.Tensor):
            raw = item.detach().contiguous().view(torch.uint8) if item.ndim else item
            return [
                type(item).__name__,
                str(item.dtype),
                item.shape,
                item.requires_grad,
                raw.tolist(),
            ]
        if isinstance(item, np.ndarray):
            return [item.dtype.str, item.shape, item.flags.f_contiguous, item.tolist()]
        return [type(item).__name__, repr(item)]

    def walk(group: pmstore.Group, prefix: str) -> None:
        for name, item in group.items():
            if isinstance(item, pmstore.Group):
                found.append([prefix + name, "group"])
                walk(item, f"{prefix}{name}/")
            elif isinstance(item, pmstore.List):
                found.append([prefix + name, "list", [plain(one) for one in item]])
            else:
                found.append([prefix + name, plain(item)])

    with pmstore.open(path, "r") as store:
        assert store.check().problems == ()
        walk(store, "")
    return found


# ---- show, info ----


@needs_torch
def test_show(path: Path) -> None:
    shown = run("show", path, "losses").stdout
    assert "array of float64, 200" in shown
    assert "0.0186856 to 1" in shown
    assert re.search(r"^values +1 │⠉?.", shown, re.MULTILINE)
    assert re.search(r"^last +\.\.\. .*, 0\.0186856$", shown, re.MULTILINE)
    assert "1, 0.980199" in shown
    assert "lr" in run("show", path, "config").stdout
    assert "requires grad" in run("show", path, "model/fc1.weight").stdout
    assert "fc1.weight  tensor float32 4x3  48 bytes" in run("show", path, "model").stdout
    assert "[2] array int64 3" in run("show", path, "history").stdout
    assert run("show", path, "model/deep/f8").exit_code == 0
    assert "0 x 3" in run("show", path, "empty").stdout
    told = json.loads(run("show", path, "model/half", "--json", "-n", "2").stdout)
    assert (told["kind"], told["dtype"], told["shape"], told["mean"], told["first"]) == (
        "tensor",
        "bfloat16",
        [5],
        2.0,
        [0, 1],
    )
    assert json.loads(run("show", path, "text", "--json").stdout)["value"] == "ünï"
    assert json.loads(run("show", path, "history", "--json").stdout)["items"] == 5
    missing = run("show", path, "nix")
    assert missing.exit_code == 2
    assert len(missing.stderr.strip().splitlines()) == 1


def test_show_and_notebooks_know_every_dtype_of_torch(shm: Path) -> None:
    torch = pytest.importorskip("torch")
    names = [name for name in dtypes.TORCH_DTYPES if hasattr(torch, name)]
    with pmstore.open(shm / "run.pm") as store:
        for name in names:
            raw = torch.tensor([0, 1, 0, 1] * 12, dtype=torch.uint8)
            store[name] = raw.view(getattr(torch, name)).view(3, -1).t()
        assert "int4" in store._repr_html_()
    for name in names:
        result = run("show", shm / "run.pm", name)
        assert result.exit_code == 0, result.exception
        assert f"tensor of {name}, " in result.stdout
        assert "first" in result.stdout
        assert json.loads(run("show", shm / "run.pm", name, "--json").stdout)["dtype"] == name


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u8", "?", ">f4", "c16"])
def test_statistics_are_numpys(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "_PIECE", 100)
    values = (np.random.default_rng(1).normal(size=(30, 33)) * 50).astype(dtype)
    values[0] = 0
    found = picture.statistics(values)
    real = np.abs(values).astype(float) if values.dtype.kind == "c" else values.astype(float)
    assert (found.elements, found.minimum, found.maximum) == (990, real.min(), real.max())
    assert np.isclose(found.mean, real.mean())
    assert np.isclose(found.std, real.std())
    assert found.zeros == np.count_nonzero(real == 0)
    assert found.histogram == np.histogram(real, 40, (real.min(), real.max()))[0].tolist()


def test_statistics_of_what_is_not_finite() -> None:
    found = picture.statistics(np.array([[np.nan, np.inf], [-np.inf, 2.0]]))
    assert (found.nan, found.infinite, found.minimum, found.maximum, found.std) == (
        1,
        2,
        2.0,
        2.0,
        0.0,
    )
    found = picture.statistics(np.array([np.nan]))
    assert (found.minimum, found.histogram) == (None, [])
    assert picture.statistics(np.zeros(0)).elements == 0
    huge = picture.statistics(np.array([-1e308, 1e308]))
    assert huge.elements == sum(huge.histogram) == 2
    assert picture.heat([[0, 1], [np.nan, 0.5]]) == ["  ██", "??▒▒"]


def test_info_has_a_map_of_the_heap(path: Path) -> None:
    told = json.loads(run("info", path, "--json").stdout)
    [segment] = told["segments"]
    assert len(segment["cells"]) == 64
    assert sum(segment["cells"]) == segment["used_bytes"] == told["used_bytes"]
    with pmstore.open(path) as store:
        store["large"] = np.zeros(1 << 20)
        segments = store.usage()
        assert len(segments) == 2
        assert sum(segment.used_bytes for segment in segments) == store.stats().used_bytes
        assert sum(map(sum, (segment.cells for segment in segments))) == store.stats().used_bytes
        assert sum(segment.blocks for segment in segments) == store.stats().blocks
        assert sum(segment.data_bytes for segment in segments) == store.stats().data_bytes
        assert all(
            used <= segment.data_bytes / 64 + 64 for segment in segments for used in segment.cells
        )
    assert run("info", "--all", path).stdout.count("|") == 4
    assert "|" not in run("info", path).stdout


# ---- create, set, rm, compact ----


def test_create(shm: Path) -> None:
    path = shm / "new.pm"
    made = run("create", path, "--size", "2MiB", "--max-size", "1GiB", "--domain", "emulated")
    assert made.exit_code == 0
    assert "2.0 MiB, domain emulated" in made.stdout
    with pmstore.open(path) as store:
        assert store.domain == "emulated"
    again = run("create", path)
    assert again.exit_code == 2
    assert "something already" in again.stderr
    assert run("create", shm / "x.pm", "--domain", "moon").exit_code == 2
    assert run("create", shm / "x.pm", "--size", "1").exit_code == 2
    assert not (shm / "x.pm").exists()


def test_set_and_rm(path: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(4.0))
    assert run("set", path, "new/lr", "0.5").exit_code == 0
    assert run("set", path, "note", "--text", "[not json").exit_code == 0
    assert run("set", path, "start", "--dtype", "float32", "[[0, 1], [2, 3]]").exit_code == 0
    assert run("set", path, "file", "--file", tmp_path / "a.npy").exit_code == 0
    assert run("set", path, "piped", "-", stdin='{"a": [1, null]}').exit_code == 0
    with pmstore.open(path, "r") as store:
        assert store["new/lr"] == 0.5
        assert store["note"] == "[not json"
        assert (store["start"].dtype, store["start"].tolist()) == (np.float32, [[0, 1], [2, 3]])
        assert store["file"].tolist() == [0, 1, 2, 3]
        assert store["piped"] == {"a": [1, None]}
    for wrong in (
        ["x", "foo"],
        ["text/x", "1"],
        ["model", "1"],
        ["a//b", "1"],
        ["x", "[1]", "--dtype", "objects"],
    ):
        result = run("set", path, *wrong)
        assert result.exit_code == 2
        assert len(result.stderr.strip().splitlines()) == 1
    assert run("rm", path, "note", "nothing").exit_code == 2
    assert "-r removes it" in run("rm", path, "note", "new").stderr
    with pmstore.open(path, "r") as store:
        assert "note" in store  # all or none
    assert run("rm", "-r", path, "note", "new").exit_code == 0
    with pmstore.open(path, "r") as store:
        assert "note" not in store
        assert "new" not in store


def test_compact(path: Path) -> None:
    before = contents(path)
    with pmstore.open(path) as store:
        store["large"] = np.zeros(1 << 20)
        store.commit()
        del store["large"]
    size = path.stat().st_size
    result = run("compact", path)
    assert result.exit_code == 0
    assert path.stat().st_size < size / 4
    assert contents(path) == before
    assert run("compact", path.with_name("none.pm")).exit_code == 2


def test_compact_when_the_first_try_is_too_small(shm: Path) -> None:
    path = shm / "run.pm"
    with pmstore.open(path, size="4MiB") as store:
        fill(store)
        store["big"] = np.zeros(216_000)
    size = path.stat().st_size
    assert run("compact", path).exit_code == 0
    assert path.stat().st_size < size * 0.6


def test_names_do_not_steer_the_terminal(shm: Path) -> None:
    path = shm / "run.pm"
    with pmstore.open(path) as store:
        store["g/\x1b[31mred\n"] = 1
    for words in (
        ["ls", "-r", path],
        ["show", path, "g"],
        ["show", path, "\x1b[31m"],
        ["rm", path, "\x1b[31m"],
    ):
        told = run(*words)
        assert "\x1b" not in told.stdout + told.stderr
        assert "\\x1b[31m" in told.stdout + told.stderr


def test_a_store_in_use(path: Path, tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"")
    with pmstore.open(path):
        for words in (
            ["set", path, "x", "1"],
            ["rm", path, "x"],
            ["compact", path],
            ["repair", path],
        ):
            result = run(*words)
            assert result.exit_code == 2
            assert "held open" in result.stderr
        assert run("ls", path).exit_code == 0  # read beside it


# ---- dump and load ----


@needs_torch
def test_dump_and_load(path: Path, shm: Path) -> None:
    with pmstore.open(path) as store:
        store["rest/rec"] = np.zeros(2, [("a", "i4"), ("b", "U3")])
        store["rest/big"] = np.arange(400_000)  # more than a chunk
        store["rest/complex"] = torch.ones(2, dtype=torch.complex128)
        store["rest/day"] = np.array(["2026-01-01"], "M8[D]")
    assert run("dump", path, shm / "run.dump").exit_code == 0
    loaded = run("load", shm / "run.dump", shm / "back.pm")
    assert loaded.exit_code == 0
    assert contents(shm / "back.pm") == contents(path)
    for words in (["dump", path, shm / "run.dump"], ["load", shm / "run.dump", shm / "back.pm"]):
        assert run(*words).exit_code == 2
    stream = io.BytesIO()
    with pmstore.open(shm / "back.pm", "r") as store:
        portable.dump(store, stream)
    assert stream.getvalue()[100:] == (shm / "run.dump").read_bytes()[100:]
    assert sorted(each.name for each in shm.iterdir()) == ["back.pm", "run.dump", "run.pm"]


def test_damaged_dumps(shm: Path) -> None:
    path = shm / "s.pm"
    with pmstore.open(path, size="1MiB") as store:
        store["g/x"] = np.arange(20)
        store["v"] = [1, "two", None]
        store.list("l").extend([1, np.arange(3)])
    run("dump", path, shm / "dump")
    whole = (shm / "dump").read_bytes()
    rng = np.random.default_rng(1)
    cases = [whole[:at] for at in range(0, len(whole), 9)]
    places = rng.integers(0, len(whole), 60)
    cases += [
        whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :]
        for at in places
    ]
    bad = 0
    for case in cases:
        target = shm / "loaded.pm"
        try:
            portable.load(io.BytesIO(case), target, size="1MiB")
        except pmstore.CorruptStoreError:
            bad += 1
            assert not target.exists()
        else:  # a header's number that only informs
            assert contents(target) == contents(path)
            target.unlink()
    assert bad > len(cases) * 0.8


def test_groups_that_contain_each_other(shm: Path, tmp_path: Path) -> None:
    path = shm / "run.pm"
    with pmstore.open(path, "x") as store:
        store["outer/inner/value"] = 1
        pool = store._core.pool
        outer = pool.find(ROOT, b"outer")
        assert outer is not None
        inner = pool.find(outer.data, b"inner")
        assert inner is not None
    # where the name's node says where its directory is, it says now: in the other one
    with path.open("r+b") as file:
        file.seek(inner.node)
        node = file.read(64)
        file.seek(inner.node + node.index(struct.pack("<Q", inner.data)))
        file.write(struct.pack("<Q", outer.data))
    with pmstore.open(path, "r") as store:
        assert "more than one owner" in store.check().problems[0]
        with pytest.raises(
            pmstore.CorruptStoreError, match="groups contain each other: 'outer/inner' is met twice"
        ):
            portable.dump(store, io.BytesIO())
    for words in (["ls", "-r", str(path)], ["dump", str(path), str(tmp_path / "dump")]):
        result = run(*words)
        assert result.exit_code == 1
        assert "groups contain each other" in result.output
    with pytest.raises(pmstore.CorruptStoreError, match="not compacted"):
        pmstore.compact(path)


def test_hostile_dumps(shm: Path) -> None:
    head = msgpack.packb({"format": "pmstore dump", "version": 1})
    records: list[list[Any]] = [
        ["name array", "x", b"", 1 << 60],
        ["name array", "../x", b"\x80", 8],
        ["name value", "a\0b", b"\xc0"],
        ["name value", 5, b"\xc0"],
        ["name value", "a", 5],
        ["item value", b"\xc0"],
        ["group", "a", 1, 2, 3, 4, 5],
        ["what", "x"],
        [7],
        [],
    ]
    for record in records:
        with pytest.raises(pmstore.CorruptStoreError):
            portable.load(io.BytesIO(head + msgpack.packb(record)), shm / "x.pm", size="1MiB")
    for case in (
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb({"format": "pmstore dump", "version": 2}),
        head + b"\xc6\xff\xff\xff\xff",
    ):
        with pytest.raises(pmstore.CorruptStoreError):
            portable.load(io.BytesIO(case), shm / "x.pm", size="1MiB")
    assert list(shm.iterdir()) == []


def test_slots(shm: Path) -> None:
    path = shm / "run.pm"
    with pmstore.open(path, size="2MiB") as store:
        for _ in range(3):
            with store.transaction():
                turn = store.slots("model/w", 4)
                turn.next[:] = turn.current + 1
                turn.flip()
    assert (
        "array of float64, 4, 32 bytes, the current version of slots"
        in run("show", path, "model/w").stdout
    )
    assert json.loads(run("show", path, "model/w", "--json").stdout)["slots"] is True
    row = {"name": "model/w", "kind": "slots", "dtype": "float64", "shape": [4], "bytes": 32}
    assert json.loads(run("ls", path, "model", "--json").stdout) == [row]
    assert "w  slots float64 4  32 bytes" in run("show", path, "model").stdout
    run("dump", path, shm / "dump")
    run("load", shm / "dump", shm / "back.pm")
    run("export", path, shm / "x.safetensors")
    run("import", shm / "x.safetensors", shm / "imported.pm")
    run("compact", path)
    for each in (path, shm / "back.pm"):
        with pmstore.open(each) as store:
            assert isinstance(store["model/w"], pmstore.Slots)
            assert store["model/w"].current.tolist() == [3] * 4
            assert store.check().problems == ()
    with pmstore.open(shm / "imported.pm") as store:
        assert store["model/w"].tolist() == [3] * 4


# ---- notebooks ----


@needs_torch
def test_notebooks(path: Path) -> None:
    with pmstore.open(path) as store:
        store["<b>"] = 1
        for index in range(60):
            store[f"many/{index}"] = index
        assert "&lt;b&gt;" in store._repr_html_()
        assert "<b>" not in store._repr_html_()
        assert "bfloat16" in store["model"]._repr_html_()
        assert "and 10 more" in store["many"]._repr_html_()
        history, many = store["history"], store["many"]
        assert "two" in history._repr_html_()
        del store["history"], store["many"]
        assert "any more" in history._repr_html_()
        assert "any more" in many._repr_html_()
    for gone in (store, history, many):
        assert "closed" in gone._repr_html_()
        assert "closed" in repr(gone)


# ---- export and import ----


@needs_torch
def test_safetensors(path: Path, shm: Path) -> None:
    exported = run("export", path, shm / "x.safetensors")
    assert exported.exit_code == 0
    from safetensors import safe_open

    with safe_open(shm / "x.safetensors", "pt") as file:
        assert file.metadata()["text"] == "ünï"
        assert torch.equal(file.get_tensor("model.fc1.weight"), torch.arange(12.0).reshape(4, 3))
        assert file.get_tensor("model.half").dtype == torch.bfloat16
        assert file.get_tensor("history.2").tolist() == [0, 1, 2]
    assert run("import", shm / "x.safetensors", shm / "back.pm").exit_code == 0
    expected = contents(path)
    for entry in expected:
        if entry[0] == "fortran":
            entry[1][2] = False  # the format knows one order only
    assert contents(shm / "back.pm") == expected
    again = run("import", shm / "x.safetensors", shm / "back.pm")
    assert again.exit_code == 2
    assert "in the store already" in again.stderr
    assert run("import", shm / "x.safetensors", shm / "back.pm", "--replace").exit_code == 0
    assert contents(shm / "back.pm") == expected
    assert (
        run("import", shm / "x.safetensors", shm / "back.pm", "--group", "again/here").exit_code
        == 0
    )
    with pmstore.open(shm / "back.pm", "r") as store:
        assert store["again/here/model/half"].dtype == torch.bfloat16
    assert (
        run(
            "export", path, shm / "part.safetensors", "--group", "model", "--separator", "|"
        ).exit_code
        == 0
    )
    with safe_open(shm / "part.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["deep|f8", "fc1.weight", "half"]


@needs_torch
def test_safetensors_of_others(shm: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"fc1.weight": torch.ones(2, 3), "fc1.bias": torch.zeros(2, dtype=torch.bfloat16)}
    save_file(tensors, shm / "x.safetensors", metadata={"format": "pt"})
    assert run("import", shm / "x.safetensors", shm / "s.pm").exit_code == 0
    assert (
        run(
            "import", shm / "x.safetensors", shm / "t.pm", "--tensors", "--separator", "|"
        ).exit_code
        == 0
    )
    with pmstore.open(shm / "s.pm", "r") as store:
        assert isinstance(store["fc1/weight"], np.ndarray)
        assert store["fc1/bias"].dtype == torch.bfloat16
        assert store["format"] == "pt"
    with pmstore.open(shm / "t.pm", "r") as store:
        assert torch.equal(store["fc1.weight"], torch.ones(2, 3))


@needs_torch
def test_npz(path: Path, shm: Path) -> None:
    refused = run("export", path, shm / "x.npz")
    assert refused.exit_code == 2
    assert "model/half (bfloat16)" in refused.stderr
    run("rm", path, "model/half", "model/deep/f8")
    with pmstore.open(path) as store:
        store["rec"] = np.zeros(2, [("a", "i4"), ("b", "U3")])
    assert run("export", path, shm / "x.safetensors").exit_code == 2
    for option in ([], ["--compress"]):
        assert run("export", path, shm / "x.npz", *option).exit_code == 0
        with np.load(shm / "x.npz", allow_pickle=False) as file:
            assert file["model/fc1.weight"].tolist() == np.arange(12.0).reshape(4, 3).tolist()
            assert file["fortran"].flags.f_contiguous
        assert run("import", shm / "x.npz", shm / "back.pm").exit_code == 0
        assert contents(shm / "back.pm") == contents(path)
        (shm / "x.npz").unlink()
        (shm / "back.pm").unlink()
    np.savez(shm / "plain.npz", a=np.arange(3), b=np.ones(2))
    assert run("import", shm / "plain.npz", shm / "back.pm", "--tensors").exit_code == 0
    with pmstore.open(shm / "back.pm", "r") as store:
        assert torch.equal(store["a"], torch.arange(3))


def test_imports_that_fail_leave_nothing(shm: Path) -> None:
    np.savez(shm / "pickle.npz", a=np.array([object()], dtype=object))
    np.save(shm / "one.npz", np.arange(3))
    Path(shm / "one.npz.npy").rename(shm / "one.npz")
    (shm / "text.npz").write_text("something else")
    (shm / "short.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    (shm / "evil.safetensors").write_bytes(
        struct.pack("<Q", 60)
        + b'{"__metadata__":{"pmstore":"{\\"lists\\":{\\"l\\":99999}}"}}'.ljust(60)
    )
    for name in (
        "pickle.npz",
        "one.npz",
        "text.npz",
        "short.safetensors",
        "evil.safetensors",
        "none.npz",
        "x.txt",
    ):
        result = run("import", shm / name, shm / "new.pm")
        assert result.exit_code in (1, 2), name
        assert result.stderr.startswith("pmstore: "), result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        assert not (shm / "new.pm").exists()


def test_names_that_collide(shm: Path) -> None:
    with pmstore.open(shm / "s.pm") as store:
        store["a.b"] = np.zeros(1)
        store["a/b"] = np.zeros(1)
    refused = run("export", shm / "s.pm", shm / "x.safetensors")
    assert refused.exit_code == 2
    assert "--separator" in refused.stderr
    assert run("export", shm / "s.pm", shm / "x.safetensors", "--separator", "/").exit_code == 0
    assert run("import", shm / "x.safetensors", shm / "t.pm").exit_code == 0
    assert contents(shm / "t.pm") == contents(shm / "s.pm")


# ---- help, completion ----


def test_every_command_has_examples() -> None:
    commands = [(name,) for name in TABLE]
    commands += [("demo",), ("schedule", "simulate")]
    for command in commands:
        told = run(*command, "--help")
        assert told.exit_code == 0
        assert f"Example: pmstore {' '.join(command)} " in told.stdout
    assert "Example: pmstore " in run("--help").stdout


def test_the_list_of_commands_is_not_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for begin, *words in (["Look:", "--help"], ["Commands:", "schedule", "--help"]):
        listed = run(*words).stdout.partition(begin)[2]
        assert listed
        assert "..." not in listed


def test_completion_of_names(path: Path) -> None:
    words = f"pmstore show {path} model/"
    environment = {"_PMSTORE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "3"}
    told = CliRunner().invoke(app, [], env=environment, prog_name="pmstore")
    assert "model/fc1.weight" in told.stdout
