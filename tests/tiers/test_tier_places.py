"""Places that tiers lie in: each passes the suite that is public, `pmstore.testing.PlaceTests`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pmstore.testing import PlaceTests
from pmstore.tiers import Place
from pmstore.tiers._places.fsspec import FsspecPlace, Prompt
from pmstore.tiers._places.local import LocalPlace
from pmstore.tiers._places.url import open_place

fsspec = pytest.importorskip("fsspec")


class TestDirectory(PlaceTests):
    @pytest.fixture(autouse=True)
    def _where(self, tmp_path: Path) -> None:
        self.url = str(tmp_path)

    def test_its_kind(self, place: Place) -> None:
        assert isinstance(place, LocalPlace)


class TestDirectoryInMemory(TestDirectory):
    """On /dev/shm, where stores are filled through a mapping."""

    @pytest.fixture(autouse=True)
    def _where(self, shm: Path) -> None:
        self.url = str(shm)

    @pytest.fixture
    def tmp_path(self, shm: Path) -> Path:
        return shm


class TestMemory(PlaceTests):
    url = "memory://conformance"

    @pytest.fixture(autouse=True)
    def _emptied(self) -> Iterator[None]:
        yield
        with suppress(FileNotFoundError):
            fsspec.filesystem("memory").rm("/conformance", recursive=True)

    def test_its_kind(self, place: Place) -> None:
        assert isinstance(place, FsspecPlace)


class TestFilesOfFsspec(PlaceTests):
    """Its own file system of a disk, which pmstore does not use for directories."""

    @pytest.fixture(autouse=True)
    def _where(self, tmp_path: Path) -> None:
        self.url = f"file://{tmp_path}"

    def open(self, name: str) -> Place:
        return FsspecPlace(f"{self.url}/{name}", {}, Prompt())


class TestS3(PlaceTests):
    url = "s3://bucket/conformance"

    @pytest.fixture(autouse=True)
    def _where(self, s3: dict[str, Any]) -> None:
        self.storage_options = s3


def test_a_place_is_what_its_contract_says(tmp_path: Path) -> None:
    places: list[Place] = [open_place(tmp_path), open_place("memory://typed")]
    for place in places:
        for name in set(Place.__annotations__) | {one for one in vars(Place) if one[0] != "_"}:
            assert hasattr(place, name), f"{type(place).__name__} has no {name}"
    shutil.rmtree(tmp_path)
