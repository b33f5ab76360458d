"""Which place a URL names, and the places of all ranks where each has one of its own."""

from __future__ import annotations

import errno
import glob
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pmstore.tiers._places.fsspec import FsspecBackend
from pmstore.tiers._places.local import Access, LocalBackend
from pmstore.tiers._places.place import Backend
from pmstore.tiers.patience import Patience

PASSWORD = re.compile(r"://[^/?#@:]*:(?!\d*(/|$))[^@]*@")
"""In a URL, or in one of a chain of them: behind the first colon is no port, and a host follows."""

RANK = "{rank}"
"""In a URL: each rank has a place of its own, such as a disk of its node."""


def open_backend(
    url: str | os.PathLike[str],
    storage_options: dict[str, Any] | None = None,
    patience: Patience | None = None,
    access: Access | None = None,
) -> LocalBackend | FsspecBackend:
    """A path or file: URL is a local directory; any other URL needs `pip install 'pmstore[tiers]'`.
    patience: with a remote place; None: somebody else looks whether it answers. access: of local
    files that will be written.

    Raises: TierError, ValueError, TypeError.
    """
    text = normal_url(url)
    if text.startswith("/"):
        return LocalBackend(Path(text), access or Access())
    return FsspecBackend(text, storage_options or {}, patience)


def normal_url(url: str | os.PathLike[str]) -> str:
    """As it is remembered: of a local directory its absolute path, so that it means the same when
    the working directory is another one; else the URL.

    Raises: ValueError, TypeError.
    """
    text = os.fspath(url) if isinstance(url, os.PathLike) else url
    if not isinstance(text, str):
        raise TypeError(f"the URL of a tier is a str or a path of str, not {type(text).__name__}")
    if "\0" in text:
        raise ValueError("a URL has no NUL character")
    scheme, separator, rest = text.partition("://")
    if not separator:
        if re.match(r"(file|s3|gs|gcs|az|abfs|hdfs|https?|memory):", text):
            raise ValueError(
                f"{text!r} is no URL: two slashes follow the colon, as in 's3://bucket/run' or "
                "'file:///mnt/run'"
            )
        path = text
    elif scheme in ("file", "local"):
        host, slash, rest = rest.partition("/")
        if host not in ("", "localhost"):
            raise ValueError(
                f"{text!r} names the host {host!r}: a local directory has three slashes, as in "
                "'file:///mnt/run'"
            )
        path = slash + unquote(rest)
    elif PASSWORD.search(text):
        raise ValueError(  # without the URL
            "a tier's URL with a password in it (user:password@) is remembered and shown: give "
            "user and password by storage_options, which are not"
        )
    else:
        return text
    if not path:
        raise ValueError(
            "the URL of a tier is a str, such as 's3://bucket/run' or '/mnt/checkpoints/run'"
        )
    return os.path.join(os.getcwd(), path)


class Places:
    """The places of all ranks, read as one."""

    def __init__(self, url: str, places: list[Backend]) -> None:
        self.url = url
        self._places = places
        self._of: dict[str, Backend] = {}

    def names(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for place in self._places:
            for name, size in place.names().items():
                if name not in found:
                    found[name], self._of[name] = size, place
        return found

    def listed(self) -> dict[str, int]:
        return self.names()

    def of(self, name: str) -> Backend:
        """Where a file lies. Raises: FileNotFoundError."""
        if name not in self._of and name not in self.names():
            raise FileNotFoundError(errno.ENOENT, "at no rank's place", name)
        return self._of[name]

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return self.of(name).read(name, start, end)

    def touch(self, name: str) -> None:
        """At each place."""
        for place in self._places:
            place.touch(name)

    def delete(self, name: str) -> None:
        """At each place."""
        for place in self._places:
            place.delete(name)


def open_places(
    url: str | os.PathLike[str],
    storage_options: dict[str, Any] | None = None,
    patience: Patience | None = None,
) -> Backend | Places:
    """For reading: as `open_backend`, and where the URL has "{rank}" in it, all that are there.

    Raises: TierError, ValueError.
    """
    text = normal_url(url)
    if RANK not in text:
        return open_backend(text, storage_options, patience)
    there = open_backend(text, storage_options, patience)
    name = str(there.path) if isinstance(there, LocalBackend) else there.root
    pieces = name.split(RANK)
    pattern = "*".join(map(glob.escape, pieces))
    found = glob.glob(pattern) if isinstance(there, LocalBackend) else there.find(pattern)
    first, *others = map(re.escape, pieces)
    numbered = re.compile(first + r"([0-9]{1,9})" + r"\1".join(others))
    ranks = {int(match[1]) for one in found if (match := numbered.fullmatch(one))}
    return Places(
        text,
        [
            open_backend(text.replace(RANK, str(rank)), storage_options, patience)
            for rank in sorted(ranks)
        ],
    )
