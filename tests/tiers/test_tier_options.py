"""What a tier is asked to be: options, URLs, places of ranks; and what is said where it cannot
be."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from tier_helpers import CHUNK, restored

import pmstore
from pmstore._engine.snapshot import checksum
from pmstore.errors import TierError
from pmstore.tiers._epochs.manifest import BadManifestError, Manifest
from pmstore.tiers._places.local import LocalPlace
from pmstore.tiers._places.url import open_place


@pytest.mark.parametrize(
    ("options", "told"),
    [
        # "*" is among its letters
        ({"replicated": "run/*", "world_size": 2, "run": "r"}, "replicated"),
        ({"replicated": [3], "world_size": 2, "run": "r"}, "replicated"),
        ({"max_wait_seconds": float("nan")}, "max_wait_seconds"),
        ({"max_wait_seconds": float("inf")}, "max_wait_seconds"),
        ({"max_wait_seconds": -1}, "max_wait_seconds"),
        ({"max_wait_seconds": "3"}, "max_wait_seconds"),
        ({"stall_seconds": 0}, "stall_seconds"),
        ({"stall_seconds": float("nan")}, "stall_seconds"),
        ({"chunk_bytes": 8192.0}, "chunk_bytes"),
        ({"chunk_bytes": "8KiB"}, "chunk_bytes"),
        ({"world_size": 1 << 30, "run": "r"}, "world_size"),
        ({"world_size": 2.0, "run": "r"}, "world_size"),
        ({"run": 5}, "run"),
        ({"keep": 1 << 70}, "keep"),
        ({"keep": True}, "keep"),
        ({"every": np.int64(3)}, "every"),
    ],
)
def test_options_that_make_no_sense(
    filled: pmstore.Store, url: str, options: dict[str, Any], told: str
) -> None:
    before = dict(filled.tiers)
    with pytest.raises((TypeError, ValueError), match=told):
        filled.add_tier("t", pmstore.TierConfig(url, **options))
    assert dict(filled.tiers) == before


def test_what_is_no_tier(filled: pmstore.Store, url: str) -> None:
    with pytest.raises(TypeError, match="keep"):
        filled.add_tier("u", url, keep=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="the URL of a tier is a str, such as"):
        filled.add_tier("u", "")
    with pytest.raises(TierError, match=r"there is no tier 'zz' \(there are: 't'\)"):
        filled.remove_tier("zz")
    assert list(filled.tiers) == ["t"]


@pytest.mark.parametrize("field", ["keep", "every", "mode", "run", "rank", "storage_options"])
def test_a_field_of_another_type_is_a_type_error(field: str) -> None:
    with pytest.raises(TypeError, match=field):
        pmstore.TierConfig("/mnt/run", **{field: 1.5})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the URL of a tier is a str or a path of str, not int"):
        pmstore.TierConfig(3)  # type: ignore[arg-type]


def test_a_tier_is_remembered_as_it_was_said(filled: pmstore.Store, path: Path, url: str) -> None:
    said = pmstore.TierConfig(
        f"file://{url}", keep=3, every=9, max_rate="2MB", memory="1MiB", replicated=["a*"]
    )
    assert said == pmstore.TierConfig(
        Path(url), keep=3, every=9, max_rate=2_000_000, memory=1 << 20, replicated=("a*",)
    )
    filled.add_tier("t", said)
    filled.commit()
    filled.close()
    with pmstore.open(path) as store:
        assert store.tiers["t"] == said


def test_a_commit_that_may_not_wait_at_all(filled: pmstore.Store, url: str) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, max_wait_seconds=0, chunk_bytes=CHUNK))
    filled.flush("t", wait=True)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("/a/b", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("file:///a%20b/c", "/a b/c"),
        ("file:///a/run#1", "/a/run#1"),  # not /a/run: the rest of the name is not a fragment
        ("file:///a/b?c", "/a/b?c"),
        ("file://localhost/a", "/a"),
        ("local:///a", "/a"),
        (Path("/a"), "/a"),
    ],
)
def test_urls_of_directories(given: Any, path: str) -> None:
    backend = open_place(given)
    assert isinstance(backend, LocalPlace)
    assert str(backend.path) == path


@pytest.mark.parametrize(
    "given",
    ["file://mnt/run", "file:/mnt/run", "s3:/bucket/run", "s3:bucket", "", "a\0b", "file://"],
)
def test_urls_that_would_mean_another_place(filled: pmstore.Store, given: str) -> None:
    with pytest.raises(ValueError, match=r"slashes|URL"):
        filled.add_tier("u", given)


def test_a_url_of_bytes(filled: pmstore.Store, url: str) -> None:
    with pytest.raises(TypeError, match="a str or a path of str, not bytes"):
        filled.add_tier("u", os.fsencode(url))  # type: ignore[arg-type]


def test_a_relative_directory_stays_where_it_was(
    path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shm)
    with pmstore.open(path) as store:
        store["a"] = np.arange(10)
        store.add_tier("t", "here")
    (shm / "elsewhere").mkdir()
    monkeypatch.chdir(shm / "elsewhere")
    with pmstore.open(path) as store:
        store.flush("t", wait=True)
    assert not (shm / "elsewhere" / "here").exists()
    assert restored(path, str(shm / "here"))["a"].tolist() == list(range(10))


@pytest.mark.parametrize("place", ["run[1]/node{rank}", "job{rank}/node{rank}/tier", "a*b/{rank}"])
def test_places_of_ranks_whose_names_are_patterns(
    filled: pmstore.Store, shm: Path, path: Path, place: str
) -> None:
    url = str(shm / place)
    filled.add_tier("ranks", pmstore.TierConfig(url, keep=2, run="r", world_size=1))
    filled["a"][:] = 7
    filled.commit()
    filled.flush("ranks", wait=True)
    for other in ("node1", "job1/node2/tier", "job1"):
        (shm / other).mkdir(parents=True, exist_ok=True)
    assert [one.problem for one in pmstore.epochs(url)] == [None]
    assert set(restored(path, url)["a"]) == {7.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", float("inf")),
        ("rank", float("inf")),
        ("head", 1 << 40),  # bytes(n) are n zeros
        ("head", [0] * 4096),
        ("shared", [["a", float("inf"), 1]]),
        ("time", "now"),
    ],
)
def test_fields_of_other_types(filled: pmstore.Store, url: str, field: str, value: Any) -> None:
    filled.flush("t", wait=True)
    (manifest,) = Path(url).glob("*.manifest")
    with pytest.raises(BadManifestError):
        Manifest.unpack(repack(manifest, {field: value}))


def repack(manifest: Path, fields: dict[str, Any]) -> bytes:
    body: bytes = msgpack.packb({**msgpack.unpackb(manifest.read_bytes()[20:]), **fields})
    return struct.pack("<8sIQ", b"PMSTIER1", checksum(body), len(body)) + body


@pytest.mark.parametrize("time", [float("nan"), float("inf"), 1e30, -1e30])
def test_times_that_no_calendar_has(filled: pmstore.Store, url: str, time: float) -> None:
    testing = pytest.importorskip("typer.testing")
    from pmstore.commands.application import app

    filled.flush("t", wait=True)
    (manifest,) = Path(url).glob("*.manifest")
    manifest.write_bytes(repack(manifest, {"time": time}))
    shown = testing.CliRunner().invoke(app, ["epochs", url])
    assert shown.exit_code == 0, shown.output
    assert "whole" in shown.output
    told = testing.CliRunner().invoke(app, ["epochs", url, "--json"])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(told.output, parse_constant=refuse)[0]["problem"] is None


def test_restores_to_places_that_are_none(filled: pmstore.Store, url: str, shm: Path) -> None:
    filled.flush("t", wait=True)
    with pytest.raises(FileNotFoundError, match="there is no such directory") as caught:
        pmstore.restore(shm / "no" / "x.pm", url)
    assert caught.value.filename == str(shm / "no")
    with pytest.raises(ValueError, match="domain='bogus': use one of"):
        pmstore.restore(shm / "x.pm", url, domain="bogus")


def test_what_a_killed_restore_left_is_found_whatever_its_name(
    filled: pmstore.Store, url: str, shm: Path
) -> None:
    filled.flush("t", wait=True)
    left, others = shm / ".run[1].pm.abcd.restoring", shm / ".other.pm.abcd.restoring"
    left.touch()
    others.touch()
    pmstore.restore(shm / "run[1].pm", url)
    assert not left.exists()
    pmstore.restore(shm / "*", url)
    assert others.exists()


def test_errors_of_libraries_are_tier_errors() -> None:
    """Those of botocore are no OSError."""
    pytest.importorskip("s3fs")
    backend = open_place("memory://nowhere")
    backend.fs = Refusing()  # type: ignore[union-attr]
    for call in (
        backend.names,
        lambda: backend.read("a"),
        lambda: backend.publish("a", b""),
        lambda: backend.delete("a"),
    ):
        with pytest.raises(TierError, match="LookupError: no credentials") as caught:
            call()
        assert isinstance(caught.value.__cause__, LookupError)


class Refusing:
    def __getattr__(self, name: str) -> Any:
        raise LookupError("no credentials")


def test_a_damaged_description_says_what_to_do(path: Path, url: str) -> None:
    with pmstore.open(path) as store:
        store.add_tier("t", url)
        store[".pmstore/tiers/t"] = {"url": url, "keep": -3}
    with pmstore.open(path) as store:
        with pytest.raises(TierError, match=r"del store\['.pmstore/tiers/t'\]"):
            store.flush("t")
        del store[".pmstore/tiers/t"]
        store.commit()
        store.add_tier("t", url)
        store.flush("t", wait=True)


@pytest.mark.parametrize(
    "place",
    [
        "http://user:P4SS@127.0.0.1:9/run",
        "sftp://user:P4SS/WORD@host/run",
        "ftp://:P4SS@host/run",
        "simplecache::ftp://user:P4SS@host/run",
    ],
)
def test_a_password_in_a_url_is_refused(path: Path, place: str) -> None:
    """It would be remembered, and shown by whatever names the tier. No message says it."""
    with pmstore.open(path) as store:
        for use in (
            lambda: pmstore.TierConfig(place),
            lambda: store.add_tier("t", place),
            lambda: pmstore.restore(path.with_name("other.pm"), place),
            lambda: pmstore.epochs(place),
        ):
            with pytest.raises(ValueError, match="storage_options") as caught:
                use()
            assert "P4SS" not in str(caught.value)
        # of somebody who wrote it there by other means
        store.add_tier("t", path.with_name("tier"))
        store[".pmstore/tiers/t"] = {**store[".pmstore/tiers/t"], "url": place}
    with pmstore.open(path) as store, pytest.raises(TierError, match="storage_options") as told:
        store.flush("t")
    assert "P4SS" not in str(told.value)


def test_a_user_in_a_url_is_no_password(path: Path) -> None:
    for place in ("sftp://user@host:22/run", "s3://bucket/run", "hdfs://host:8020/a:b@c"):
        assert pmstore.TierConfig(place).url == place


@pytest.mark.parametrize("umask", [0, 0o777])
def test_files_of_a_local_tier_whatever_the_umask(path: Path, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with pmstore.open(path) as store:
            store["a"] = np.arange(3)
            store.add_tier("t", tmp_path / "tier")
            store.flush("t", wait=True)
        pmstore.restore(path.with_name("restored.pm"), tmp_path / "tier")
    finally:
        os.umask(before)
    assert path.with_name("restored.pm").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "tier").stat().st_mode & 0o777 == 0o700
    files = [one for one in (tmp_path / "tier").rglob("*") if one.is_file()]
    assert files
    assert {one.stat().st_mode & 0o777 for one in files} == {0o600}
