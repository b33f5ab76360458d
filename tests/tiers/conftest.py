"""What the tests of tiers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_helpers import CHUNK

import pmstore


@pytest.fixture
def url(shm: Path) -> str:
    """Of a tier in a local directory that does not exist yet."""
    return str(shm / "tier")


@pytest.fixture
def filled(path: Path, url: str) -> Iterator[pmstore.Store]:
    """A store with an array of a megabyte and a tier "t"."""
    with pmstore.open(path, size="8MiB") as store:
        store["a"] = np.arange(131072.0)
        store["config"] = {"lr": 0.5}
        store["deep/er/b"] = np.ones((3, 4), "float32")
        store.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK))
        store.commit()
        yield store


@pytest.fixture
def step(filled: pmstore.Store) -> Callable[[float], int]:
    """Commits `a` full of a number and flushes; returns the epoch. Nothing of it is under way then:
    a test may change what lies there."""

    def make(value: float) -> int:
        filled["a"][:] = value
        filled.commit()
        epoch = filled.flush("t", wait=True).epoch
        filled.drain()
        return epoch

    return make


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """Storage options of a bucket on loopback."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {
        "key": "test",
        "secret": "test",
        "client_kwargs": {"endpoint_url": f"http://{host}:{port}", "region_name": "eu-west-1"},
    }
    fs = fsspec.filesystem("s3", **options)
    with suppress(FileExistsError):  # moto keeps it for all servers of a process
        fs.mkdir("bucket", region_name="eu-west-1")
    yield options
    server.stop()
