"""A suite of tests that every place of a tier passes. It needs pytest."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pmstore._base.newfile import create
from pmstore._engine.snapshot import LIVE, SPARED, Fill, Snapshot, Transfer, checksum, reserve
from pmstore.errors import PmstoreError, TierError
from pmstore.objects.array import Array
from pmstore.opening import open as open_store
from pmstore.tiers._epochs.manifest import CHUNK
from pmstore.tiers._places.place import BrokenEpochError, NewStore, Place
from pmstore.tiers._places.url import open_place

CHUNK_BYTES = 16 << 10
FILE = "run.0-1.0123abcd.000000.chunks"


class PlaceTests:
    """What a flush, a restore and readers rely on, asked of one place.

    For a file system of fsspec that is to hold tiers: inherit, and say its URL. Each test is given
    another name in it, under which nothing is yet.

        class TestOurs(PlaceTests):
            url = "ours://bucket/conformance"
            storage_options = {"endpoint": "..."}

    For a place of another kind, override `open`.
    """

    url: str
    storage_options: dict[str, object] = {}

    def open(self, name: str) -> Place:
        """The place of that name, which is new to it: no file is in it, and it need not exist."""
        return open_place(f"{self.url}/{name}", self.storage_options)

    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return self.open(f"{tmp_path.parent.name}-{tmp_path.name}-{time.time_ns()}")

    @pytest.fixture
    def made(self, place: Place) -> Place:
        """The place as a writer finds it that has its lock."""
        place.lock("run.0-1.", "0123abcd").release()
        return place

    @pytest.fixture
    def snapshot(self, tmp_path: Path) -> Iterator[Snapshot]:
        """A commit with some chunks that differ."""
        with open_store(tmp_path / "store.pm", size="4MiB") as store:
            store["a"] = np.arange(100_000.0)
            store.commit()
            snapshot = Snapshot(store._core.pool)
            yield snapshot
            snapshot.close()

    # ---- files ----

    def test_a_place_that_is_not_there_is_empty(self, place: Place) -> None:
        assert place.names() == {}
        assert dict(place.listed()) == {}
        with pytest.raises(FileNotFoundError):
            place.read("nothing.manifest")

    def test_what_is_published_is_read(self, made: Place) -> None:
        made.publish("a.manifest", b"first")
        made.publish("b.manifest", b"")
        made.publish("a.manifest", b"0123456789")
        assert made.read("a.manifest") == b"0123456789"
        assert made.read("b.manifest") == b""
        found = {name: size for name, size in made.names().items() if name.endswith(".manifest")}
        assert found == {"a.manifest": 10, "b.manifest": 0}
        listed = made.listed()
        assert {name: listed[name] for name in found} == found
        assert set(listed) == set(made.names())
        assert made.of("a.manifest") is made

    def test_ranges(self, made: Place) -> None:
        made.publish("a.manifest", b"0123456789")
        assert made.read("a.manifest", 3) == b"3456789"
        assert made.read("a.manifest", 3, 5) == b"34"
        assert made.read("a.manifest", 0, 100) == b"0123456789"
        assert made.read("a.manifest", 8, 100) == b"89"
        assert made.read("a.manifest", 10, 20) == b""

    def test_what_is_deleted_is_gone(self, made: Place) -> None:
        made.publish("a.manifest", b"1")
        made.delete("a.manifest")
        made.delete("a.manifest")
        made.delete("never.manifest")
        assert "a.manifest" not in made.names()
        with pytest.raises(FileNotFoundError):
            made.read("a.manifest")

    def test_times(self, made: Place) -> None:
        """Times are of one clock, which goes on."""
        made.publish("a.manifest", b"1")
        made.touch("a.lease")
        assert made.read("a.lease") == b""
        first, after = made.modified("a.manifest"), made.modified("a.lease")
        if first is None or after is None:  # this place does not tell
            return
        assert after >= first
        time.sleep(1.1)  # services tell whole seconds
        made.touch("a.lease")
        renewed = made.modified("a.lease")
        assert renewed is not None
        assert renewed > after
        with pytest.raises(FileNotFoundError):
            made.modified("never.lease")

    def test_two_writers(self, place: Place) -> None:
        """The second one is refused, or the first one is told that it was replaced. Writers of
        other ranks are in nobody's way."""
        first = place.lock("run.0-2.", "00000000")
        first.check()
        other = place.lock("run.1-2.", "11111111")
        other.check()
        first.check()
        with pytest.raises(TierError):  # noqa: PT012
            second = place.lock("run.0-2.", "22222222")
            second.check()
            first.check()
        other.check()
        first.release()
        other.release()

    def test_several_threads(self, made: Place) -> None:
        failed: list[BaseException] = []

        def use(number: int) -> None:
            try:
                for turn in range(4):
                    name = f"{number}-{turn}.manifest"
                    made.publish(name, b"%d" % number * 1000)
                    assert made.read(name, 10, 20) == b"%d" % number * 10
                    assert name in made.names()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed

    def test_places_of_ranks_are_found(self, place: Place) -> None:
        assert place.root.strip("/")
        assert place.find(f"{place.root}-none-*") == []
        place.lock("run.0-1.", "0123abcd").release()
        place.publish("a.manifest", b"1")
        assert [one.rstrip("/") for one in place.find(f"{place.root[:-1]}[{place.root[-1]}]")] == [
            place.root
        ]

    # ---- chunks ----

    def _write(self, place: Place, snapshot: Snapshot) -> tuple[Array, dict[int, bytes]]:
        """Entries of a manifest, and the content of each chunk."""
        live = np.flatnonzero(snapshot.chunks(CHUNK_BYTES, 0) & LIVE).astype(np.uint64)
        chunks = np.zeros(len(live), CHUNK)
        chunks["index"] = live
        content = {}
        for index in live.tolist():
            buffer = np.empty(CHUNK_BYTES, np.uint8)
            snapshot.take(index * CHUNK_BYTES, buffer)
            content[index] = buffer.tobytes()
        transfer = Transfer()
        with place.create(FILE, len(live) * CHUNK_BYTES, False) as file:
            assert file.end == 0
            half = len(live) // 2
            for part in (slice(0, half), slice(half, None)):
                found = file.write(snapshot, CHUNK_BYTES, live[part], transfer)
                chunks["crc"][part], chunks["position"][part] = found
            assert file.end == len(live) * CHUNK_BYTES
        assert transfer.done_bytes == len(live) * CHUNK_BYTES
        return chunks, content

    def test_chunks_lie_where_it_is_said(self, made: Place, snapshot: Snapshot) -> None:
        chunks, content = self._write(made, snapshot)
        assert len(content) > 20
        assert made.names()[FILE] == made.listed()[FILE] == len(content) * CHUNK_BYTES
        whole = made.read(FILE)
        for one in chunks:
            position = int(one["position"])
            data = content[int(one["index"])]
            assert whole[position : position + CHUNK_BYTES] == data
            assert made.read(FILE, position, position + CHUNK_BYTES) == data
            assert checksum(data) == int(one["crc"])

    def test_chunks_that_are_known_are_spared(self, made: Place, snapshot: Snapshot) -> None:
        """The file has only those that are written."""
        live = np.flatnonzero(snapshot.chunks(CHUNK_BYTES, 0) & LIVE).astype(np.uint64)
        known = np.full(len(live), -1, np.int64)
        buffer = np.empty(CHUNK_BYTES, np.uint8)
        for i in range(0, len(live), 2):
            snapshot.take(int(live[i]) * CHUNK_BYTES, buffer)
            known[i] = checksum(buffer)
        with made.create(FILE, len(live) * CHUNK_BYTES, True) as file:
            _, position = file.write(snapshot, CHUNK_BYTES, live, Transfer(), known)
            end = file.end
        assert ((position == SPARED) == (known >= 0)).all()
        assert end == (len(live) // 2) * CHUNK_BYTES
        assert made.names()[FILE] == end

    def test_a_rate_is_kept(self, made: Place, snapshot: Snapshot) -> None:
        live = np.flatnonzero(snapshot.chunks(CHUNK_BYTES, 0) & LIVE).astype(np.uint64)
        nbytes, began = len(live) * CHUNK_BYTES, time.monotonic()
        with made.create(FILE, nbytes, False) as file:
            file.write(snapshot, CHUNK_BYTES, live, Transfer(nbytes * 2))
        assert time.monotonic() - began > 0.25

    def test_a_flush_that_is_cancelled(self, made: Place, snapshot: Snapshot) -> None:
        live = np.flatnonzero(snapshot.chunks(CHUNK_BYTES, 0) & LIVE).astype(np.uint64)
        transfer = Transfer()
        transfer.cancel()
        with pytest.raises(PmstoreError), made.create(FILE, len(live) * CHUNK_BYTES, False) as file:
            file.write(snapshot, CHUNK_BYTES, live, transfer)
        made.delete(FILE)
        assert FILE not in made.names()

    def _copied(
        self,
        place: Place,
        files: list[tuple[str, Array]],
        nbytes: int,
        folder: Path,
        transfer: Transfer,
    ) -> bytes:
        path = folder / ".store.pm.restoring"
        with open(path, "x+b", buffering=0, opener=create) as file:
            fill = Fill(file.fileno(), nbytes if place.maps else 0, str(path))
            try:
                if not fill.mapped:
                    reserve(file.fileno(), nbytes, str(path))
                store = NewStore(file.fileno(), path, nbytes, fill)
                place.copy(files, CHUNK_BYTES, store, transfer)
            finally:
                fill.close()
                path.unlink()
            file.seek(0)
            return file.read()

    def test_chunks_are_copied_into_a_store(
        self, made: Place, snapshot: Snapshot, tmp_path: Path
    ) -> None:
        chunks, content = self._write(made, snapshot)
        chunks = chunks[np.argsort(chunks["position"])]
        transfer = Transfer()
        found = self._copied(made, [(FILE, chunks)], snapshot.file_bytes, tmp_path, transfer)
        assert transfer.done_bytes == len(chunks) * CHUNK_BYTES
        for index, data in content.items():
            assert found[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES] == data

    @pytest.mark.parametrize("harm", ["checksum", "cut", "gone"])
    def test_a_file_that_is_damaged(
        self, made: Place, snapshot: Snapshot, tmp_path: Path, harm: str
    ) -> None:
        """It is told as that, and as nothing else: an older epoch may be taken for it."""
        chunks, _ = self._write(made, snapshot)
        chunks = chunks[np.argsort(chunks["position"])]
        name = FILE
        if harm == "checksum":
            chunks["crc"][5] ^= 1
        elif harm == "cut":
            whole = made.read(FILE)
            made.delete(FILE)
            made.publish(FILE, whole[:-5000])
        else:
            name = FILE.replace("000000", "000001")
        with pytest.raises(BrokenEpochError) as told:
            self._copied(made, [(name, chunks)], snapshot.file_bytes, tmp_path, Transfer())
        assert told.value.kind == ("missing" if harm == "gone" else "corrupt")
        assert name in str(told.value)
