"""The place that a URL names, and the places of all ranks where each has one of its own."""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pmstore.tiers._places.fsspec import Ask, FsspecPlace, Prompt
from pmstore.tiers._places.local import Access, LocalPlace
from pmstore.tiers._places.place import Place, Source

PASSWORD = re.compile(r"://[^/?#@:]*:(?!\d*(/|$))[^@]*@")
"""A password in a URL, or in one of a chain of them: behind the first colon is no port, and a host
follows."""

RANK = "{rank}"
"""A part of a URL that stands for the rank: each has a place of its own, such as a disk of its
node."""
STALL_SECONDS = 300.0
"""So long a remote place may take for one answer, unless it is said otherwise."""
PRIVATE = Access()
PROMPT = Prompt()


def open_place(
    url: str | os.PathLike[str],
    storage_options: dict[str, Any] | None = None,
    asks: Ask = PROMPT,
    access: Access = PRIVATE,
) -> Place:
    """Opens the place that a URL names: a path or file: URL is a local directory, any other URL
    needs the extra `tiers`. asks: how a remote place is asked. access: permissions of local files
    that will be written.

    Raises: TierError, ValueError, TypeError.
    """
    text = normal_url(url)
    if text.startswith("/"):
        return LocalPlace(Path(text), access)
    return FsspecPlace(text, storage_options or {}, asks)


def normal_url(url: str | os.PathLike[str]) -> str:
    """The URL as it is remembered: of a local directory its absolute path, so that it means the
    same when the working directory is another one.

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

    def __init__(self, url: str, places: Sequence[Place]) -> None:
        self.url = url
        self._places = places
        self._of: dict[str, Place] = {}

    def names(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for place in self._places:
            for name, size in place.names().items():
                if name not in found:
                    found[name], self._of[name] = size, place
        return found

    def listed(self) -> dict[str, int]:
        return self.names()

    def of(self, name: str) -> Place:
        if name not in self._of and name not in self.names():
            raise FileNotFoundError(errno.ENOENT, "at no rank's place", name)
        return self._of[name]

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return self.of(name).read(name, start, end)

    def touch(self, name: str) -> None:
        """Makes the file at each place, or touches it."""
        for place in self._places:
            place.touch(name)

    def delete(self, name: str) -> None:
        """Removes the file at each place."""
        for place in self._places:
            place.delete(name)


def open_places(
    url: str | os.PathLike[str], storage_options: dict[str, Any] | None = None, asks: Ask = PROMPT
) -> Source:
    """Opens what is read at a URL: as `open_place`, and where it has "{rank}" in it, the places of
    all ranks that are there.

    Raises: TierError, ValueError.
    """
    text = normal_url(url)
    place = open_place(text, storage_options, asks)
    if RANK not in text:
        return place
    pieces = place.root.split(RANK)
    first, *others = map(re.escape, pieces)
    numbered = re.compile(first + r"([0-9]{1,9})" + r"\1".join(others))
    found = place.find("*".join(map(glob.escape, pieces)))
    ranks = {int(match[1]) for one in found if (match := numbered.fullmatch(one))}
    return Places(
        text,
        [
            open_place(text.replace(RANK, str(rank)), storage_options, asks)
            for rank in sorted(ranks)
        ],
    )
