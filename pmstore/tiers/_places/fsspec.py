"""A tier in whatever fsspec reaches."""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Callable
from typing import Any, TypeVar

from pmstore.errors import TierError
from pmstore.tiers._places.place import Lock
from pmstore.tiers.patience import Patience


class _OwnerMark:
    """A mark with the writer's session: who finds another one there has been replaced. Object
    stores have no locks."""

    def __init__(self, backend: FsspecBackend, name: str, session: str) -> None:
        self.backend, self.name, self.session = backend, name, session
        backend.publish(name, session.encode())

    def check(self) -> None:
        try:
            found = self.backend.read(self.name)
        except FileNotFoundError:
            found = b""
        if found != self.session.encode():
            raise TierError(
                f"{self.backend.url}: another writer of this run has taken over (session "
                f"{found[:16]!r}). This one stops; give it another run= or URL"
            )

    def release(self) -> None:
        """The mark stays: the next writer replaces it."""


_Answer = TypeVar("_Answer")


class FsspecBackend:
    """Any URL that fsspec knows. An epoch counts from the moment its manifest is there, which
    object stores put in one piece."""

    def __init__(
        self, url: str, storage_options: dict[str, Any], patience: Patience | None
    ) -> None:
        try:
            import fsspec
        except ImportError:
            raise TierError(
                f"{url}: tiers beyond local directories need fsspec: pip install 'pmstore[tiers]'"
            ) from None
        self.url = url
        self._patience = patience
        self.fs: Any
        self.root: str
        try:
            self.fs, self.root = fsspec.core.url_to_fs(url, **storage_options)
        except ImportError as error:
            extra = "s3" if url.startswith("s3") else "tiers"
            raise TierError(
                f"{url}: {error}. pip install 'pmstore[{extra}]' or the library that it names"
            ) from None
        except ValueError as error:
            raise TierError(f"{url}: {error}") from None
        self.root = self.root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        """Libraries of places have errors of their own, which nobody could be told to expect:
        credentials that are missing, hosts that are not there. Some call whatever a service answers
        an EIO, which says nothing of the bytes there."""
        try:
            return question() if self._patience is None else self._patience.ask(question)
        except Exception as error:
            if isinstance(error, OSError) and error.errno != errno.EIO:
                raise
            raise TierError(f"{self.url}: {type(error).__name__}: {error}") from error

    def find(self, pattern: str) -> list[str]:
        """Paths that match."""
        found: list[str] = self._ask(lambda: self.fs.glob(pattern))
        return found

    def listed(self) -> dict[str, int]:
        return self.names()

    def names(self) -> dict[str, int]:
        def listing() -> list[dict[str, Any]]:
            self.fs.invalidate_cache()
            listed: list[dict[str, Any]] = self.fs.ls(self.root, detail=True)
            return listed

        try:
            listed = self._ask(listing)
        except FileNotFoundError:
            return {}
        return {
            one["name"].rsplit("/", 1)[-1]: int(one["size"] or 0)
            for one in listed
            if one["type"] == "file"
        }

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        path = self._path(name)

        def reading() -> bytes:
            try:
                data: bytes = self.fs.cat_file(path, start=start or None, end=end)
            except FileNotFoundError:
                raise
            except OSError:
                if end is None or self.fs.size(path) > start:
                    raise
                return b""  # services refuse a range past the end, as all of an empty file is
            return data

        return self._ask(reading)

    def publish(self, name: str, data: bytes) -> None:
        def writing() -> None:
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(self._path(name), data)

        self._ask(writing)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask(lambda: self.fs.rm_file(self._path(name)))

    def touch(self, name: str) -> None:
        self._ask(lambda: self.fs.pipe_file(self._path(name), b""))

    def modified(self, name: str) -> float | None:
        def asking() -> float | None:
            with contextlib.suppress(NotImplementedError):
                when: float = self.fs.modified(self._path(name)).timestamp()
                return when
            return None

        return self._ask(asking)

    def lock(self, prefix: str, session: str) -> Lock:
        return _OwnerMark(self, f"{prefix}owner", session)

    def create(self, name: str) -> contextlib.AbstractContextManager[io.BufferedIOBase]:
        """A new file for chunks, written from start to end. An exception on leaving means that it
        may not be there."""
        self.fs.makedirs(self.root, exist_ok=True)
        opened: contextlib.AbstractContextManager[io.BufferedIOBase] = self.fs.open(
            self._path(name), "wb", block_size=8 << 20
        )
        return opened
