"""Damaged files: CorruptStoreError that names file and place, whatever is done with them, and
nothing else."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import Image

import pmstore
from pmstore.objects import array
from pmstore.objects.core import payload

DAMAGE = Path(__file__).parents[1] / "damage.py"


@pytest.mark.parametrize("variant", ["plain", "crashed", "trained", "file"])
def test_whatever_is_damaged_and_done_with_it(variant: str) -> None:
    """The same by hand, for hours: python tests/damage.py."""
    if variant == "trained":
        pytest.importorskip("torch")
    command = [sys.executable, str(DAMAGE), "--only", variant, "--count", "10", "--seed", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert json.loads(run.stdout.splitlines()[-1]) == {"damaged": 10, "findings": 0}


def test_what_is_damaged_is_sealed(path: Path) -> None:
    """Else the damage would be refused at once, and nothing behind it met: what is written back as
    it was is as it was."""
    with pmstore.open(path, "w", size="1MiB", domain="process") as store:
        store["x"] = np.arange(3000)
        store.commit()
        store["x"][:] = 7
        data = path.read_bytes()
    image = Image(data)
    assert image.entries
    copy = bytearray(data)
    for at, _, _ in image.entries:
        copy[at + 28] ^= 0xFF  # of its checksum
    image.seal(copy)
    assert bytes(copy) == data
    before = struct.unpack_from("<Q", copy, image.places["table"][0])[0]
    struct.pack_into("<Q", copy, image.places["table"][0], before ^ 1 << 60)
    image.seal(copy)
    assert bytes(copy) == data


@pytest.fixture
def made(path: Path) -> Path:
    with pmstore.open(path, "w", size="1MiB", domain="process") as store:
        for name in ("before", "victim", "after"):
            store[f"group/{name}"] = f"value of {name}"
    return path


def change(path: Path, old: bytes, new: bytes) -> int:
    """In the one place where it is. Returns the place."""
    data = path.read_bytes()
    assert len(old) == len(new)
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    return data.index(old)


@pytest.mark.parametrize("name", ["victi?", "vict/m", "/ictim", "vi\0tim", "vi\udcfftim", "before"])
def test_a_damaged_name(made: Path, name: str) -> None:
    """A walk meets it, and says so; what came before is read, and what has a name is still found by
    it."""
    node = (
        change(
            made,
            b"victimvalue".replace(b"value", b"\xafvalue"),
            name.encode(errors="surrogateescape").ljust(6, b"x") + b"\xafvalue",
        )
        - 64
    )
    with pmstore.open(made, "r") as store:
        group, seen = store["group"], []
        for walk in (
            lambda: seen.extend(group),
            lambda: list(group.items()),
            lambda: list(group.values()),
            lambda: dict(group),
            group.entries,
            lambda: sorted(group),
        ):
            with pytest.raises(pmstore.CorruptStoreError, match="directory: the name '") as caught:
                walk()
            assert (caught.value.path, caught.value.offset) == (str(made), node)
            assert str(made) in str(caught.value)
        assert group["before"] == "value of before"
        assert group["after"] == "value of after"
        with pytest.raises(KeyError):
            group["no such name"]
        (problem,) = store.check().problems
        assert re.search(r"directory: the name '.*' (is none|has another hash)", problem)
    with pmstore.open(made) as store:
        with pytest.raises(pmstore.CorruptStoreError, match="directory: the name '"):
            store["group"].clear()
        with pytest.raises(pmstore.CorruptStoreError, match="directory: the name '"):
            del store["group"]
        store.rollback()


def test_a_damaged_value(made: Path) -> None:
    place = change(made, b"\xafvalue of before", b"\xb0value of before")
    with pmstore.open(made, "r") as store:
        for read in (lambda: store["group/before"], lambda: dict(store["group"])):
            with pytest.raises(
                pmstore.CorruptStoreError, match="a stored value does not decode"
            ) as caught:
                read()
            assert caught.value.path == str(made)
            assert caught.value.offset is not None
            assert 0 < place - caught.value.offset <= 128
        (problem,) = store.check().problems
        assert problem.startswith("'group/before': ")


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "too many axes": {"kind": "numpy", "dtype": "<f8", "shape": [0] * 65},
    "more axes than numpy has": {"kind": "numpy", "dtype": "<f8", "shape": [0] + [1] * 63},
    "too long": {"kind": "numpy", "dtype": "<f8", "shape": [0, 1 << 62, 1 << 62]},
    "no dtype": {"kind": "numpy", "dtype": "hello", "shape": [0]},
    "a dtype of no sense": {
        "kind": "numpy",
        "dtype": {"names": [], "formats": 3, "offsets": {}, "itemsize": None},
        "shape": [0],
    },
    "a record with holes": {
        "kind": "numpy",
        "dtype": {"names": ["a"], "formats": [], "offsets": [0], "itemsize": 1},
        "shape": [0],
    },
    "no order": {"kind": "numpy", "dtype": "<f8", "shape": [0, 3], "order": [0, 0]},
    "no map": {},
    "another kind": {"kind": "pickle", "dtype": "<f8", "shape": [0]},
    "a tensor of no dtype": {"kind": "torch", "dtype": ["float32"], "shape": [0]},
    "a gradient of integers": {
        "kind": "torch",
        "dtype": "int32",
        "shape": [0],
        "requires_grad": True,
    },
    "a tensor too long": {"kind": "torch", "dtype": "float32", "shape": [0, 1 << 62, 1 << 62]},
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_description_of_nothing(path: Path, what: str) -> None:
    import msgpack

    description = IMPOSSIBLE[what]
    if description.get("kind") == "torch":
        pytest.importorskip("torch")
    with pmstore.open(path, "w", size="1MiB") as store:
        store._core.pool.put_array(0, b"x", msgpack.packb(description), 0)
        reads: list[Callable[[], Any]] = [
            lambda: store["x"],
            lambda: store.get("x"),
            lambda: list(store.values()),
        ]
        for read in reads:
            said: list[pmstore.CorruptStoreError] = []
            try:
                read()
            except pmstore.CorruptStoreError as error:
                said.append(error)
            assert all((error.path, error.offset is None) == (str(path), False) for error in said)
            # What one numpy or torch refuses another may have.
            assert said or what in ("more axes than numpy has", "a tensor too long", "too long")
        assert store.check().problems == () or store.check().problems[0].startswith("'x': ")


def test_a_domain_that_is_none(made: Path) -> None:
    data = bytearray(made.read_bytes())
    for copy in (0, 4096):
        struct.pack_into("<I", data, copy + 84, 77)
    Image(made.read_bytes()).seal(data)
    made.write_bytes(data)
    with pytest.raises(pmstore.CorruptStoreError, match="superblock"):
        pmstore.open(made)


@pytest.mark.parametrize(
    "gone",
    [
        "model_layout",
        "rng/python/value",
        "lr_scheduler/value",
        "progress",
        "optimizer",
        "loader/start/value",
    ],
)
@pytest.mark.parametrize("new", ["gone", [1]], ids=["gone", "list"])
def test_a_run_that_is_not_whole(path: Path, gone: str, new: Any) -> None:
    torch = pytest.importorskip("torch")
    from pmstore.torch import attach

    def begin(store: pmstore.Store) -> None:
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        run = attach(
            store,
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            loader=[1.0, 2.0],
            name="run",
        )
        try:
            for batch in run.batches():
                optimizer.zero_grad()
                model(torch.ones(2, 3) * batch).sum().backward()
                optimizer.step()
                run.commit()
                break
        finally:
            run.detach()

    with pmstore.open(path, "w", size="2MiB") as store:
        begin(store)
    with pmstore.open(path) as store:
        del store[f"run/{gone}"]
        if new != "gone":
            store[f"run/{gone}"] = new
    with pmstore.open(path) as store:
        with pytest.raises(pmstore.PmstoreError, match="run") as caught:
            begin(store)
        if isinstance(caught.value, pmstore.CorruptStoreError):
            assert caught.value.path == str(path)
        assert store["run/about"]["format"]


def test_payloads_are_as_they_were(path: Path) -> None:
    """What decodes is not touched by all this: a round trip of each kind of description."""
    for value in (
        np.zeros((0, 3)),
        np.arange(6).reshape(2, 3).T,
        np.zeros(2, [("a", "i4"), ("b", "f8")]),
    ):
        descriptor = array.Descriptor.unpack(payload(value).meta)
        descriptor.check_dtype()
        assert descriptor.shape == value.shape
