"""The configuration of a tier: what the store remembers of it, and what it does not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal

from pmstore._base.sizes import parse_size
from pmstore._engine.constants import PAGE_BYTES
from pmstore.tiers._epochs.manifest import RUN, WORLD_MOST
from pmstore.tiers._places.url import normal_url

_SIZES = {"max_rate": "max_bytes_per_second", "memory": "memory_bytes"}
"""Fields that the store remembers as bytes, 0 for None, under another name."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """A tier: where committed state is flushed to, and how. For `Store.add_tier`.

    What is given in several ways is kept in one: `url` of a local directory as its absolute path,
    sizes as bytes.

    Attributes:
        url: a local directory, or any URL of fsspec ("s3://bucket/run" needs the extra `s3`).
            "{rank}" in it is the rank.
        keep: how many epochs stay; None: all.
        every: flushed by itself when so many commits have been made since the last time; None: when
            it is asked for.
        max_rate: bytes a second, as a number or "100MB"; None: no limit.
        memory: bytes, as a number or "1GiB", for content that commits change while a flush still
            needs it; None: a quarter of the state. A commit that would need more waits for the
            flush, at most `max_wait_seconds`; then the flush fails, not the commit. The flush's
            buffers, up to 16 MiB, come on top.
        max_wait_seconds: for which a commit waits for room; None: for ever.
        stall_seconds: a flush to a remote place without progress for so long fails; None: it never
            does.
        on_error: what the next flush does about one that failed and that nobody was told of. (Those
            that `every` or a scheduler begins warn, and go on.)
        chunk_bytes: state is compared and written in pieces of so many bytes: a multiple of 4096.
        rank: which of several ranks this is, whose epochs belong together.
        world_size: how many ranks there are.
        run: what the epochs of all ranks have in common; None, for one rank: the store's uuid.
        replicated: patterns of names ("run/model/*") of arrays that are the same at all ranks: each
            rank flushes its share.
        mode: permissions of files in a local directory, such as 0o640, for those who share it,
            whatever the umask; directories that are made let in whoever may read. None: files as
            private as the store, directories 0o700.
        storage_options: for fsspec. Not remembered by the store: it may hold credentials.

    Raises: ValueError, TypeError.

    >>> tier = TierConfig("file:///mnt/run", keep=3, max_rate="100MB")
    >>> tier.url, tier.max_rate
    ('/mnt/run', 100000000)
    """

    url: str | os.PathLike[str]
    _: KW_ONLY
    keep: int | None = None
    every: int | None = None
    max_rate: int | str | None = None
    memory: int | str | None = None
    max_wait_seconds: float | None = 60.0
    stall_seconds: float | None = 300.0
    on_error: Literal["raise", "warn"] = "raise"
    chunk_bytes: int = 256 << 10
    rank: int = 0
    world_size: int = 1
    run: str | None = None
    replicated: Sequence[str] = ()
    mode: int | None = None
    storage_options: dict[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", normal_url(self.url))
        for name in _SIZES:
            object.__setattr__(self, name, parse_size(getattr(self, name), name) or None)
        if isinstance(self.replicated, (str, bytes)) or not all(
            isinstance(one, str) for one in self.replicated
        ):
            raise TypeError(
                f"replicated={self.replicated!r}: a list of patterns, such as ['run/model/*']"
            )
        object.__setattr__(self, "replicated", tuple(self.replicated))
        for name in ("chunk_bytes", "rank", "world_size"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name}={getattr(self, name)!r}: an int")
        for name in ("max_wait_seconds", "stall_seconds"):
            self._check_seconds(name)
        if self.on_error not in ("raise", "warn"):
            raise ValueError(f"on_error={self.on_error!r}: 'raise' or 'warn'")
        for name in ("keep", "every"):
            value = getattr(self, name)
            if value is None:
                continue
            told = f"{name}={value!r}: an int, how many epochs or commits, at least 1; or None"
            if type(value) is not int:
                raise TypeError(told)
            if not 1 <= value < 1 << 62:
                raise ValueError(told)
        if (
            self.chunk_bytes < PAGE_BYTES
            or self.chunk_bytes % PAGE_BYTES
            or self.chunk_bytes > 1 << 30
        ):
            raise ValueError(
                f"chunk_bytes={self.chunk_bytes}: a multiple of {PAGE_BYTES}, at most 1 GiB"
            )
        if not 0 <= self.rank < self.world_size <= WORLD_MOST:
            raise ValueError(
                f"rank={self.rank} and world_size={self.world_size}: 0 <= rank < world_size <= "
                f"{WORLD_MOST}"
            )
        if self.mode is not None:
            told = (
                f"mode={self.mode!r}: permissions of files, such as 0o640; their owner reads and "
                "writes them"
            )
            if type(self.mode) is not int:
                raise TypeError(told)
            if self.mode & ~0o066 != 0o600:
                raise ValueError(told)
        if self.run is not None:
            told = f"run={self.run!r}: letters, digits, '_' and '-', at most 64"
            if not isinstance(self.run, str):
                raise TypeError(told)
            if not RUN.fullmatch(self.run):
                raise ValueError(told)
        if self.storage_options is not None and not isinstance(self.storage_options, dict):
            raise TypeError(  # without its value: it may be a credential
                "storage_options is a dict, for fsspec, or None, not "
                f"{type(self.storage_options).__name__}"
            )
        if self.world_size > 1 and self.run is None:
            raise ValueError(
                "with several ranks, run= names what their epochs have in common: give all of them "
                "the same"
            )

    def _check_seconds(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise TypeError(f"{name}={value!r}: seconds, or None for no limit")
        least = 0 if name == "max_wait_seconds" else 0.001
        if value is not None and not least <= value <= 1e9:
            raise ValueError(f"{name}={value!r}: at least {least} seconds, or None for no limit")

    @property
    def place(self) -> str:
        """The URL, as it is kept."""
        return os.fspath(self.url)

    @property
    def max_bytes_per_second(self) -> int:
        """The rate limit; 0: none."""
        return parse_size(self.max_rate)

    @property
    def memory_bytes(self) -> int:
        """The bytes of `memory`; 0: a quarter of the state."""
        return parse_size(self.memory)

    def to_value(self) -> dict[str, Any]:
        """Returns what is kept in the store."""
        value = {key: getattr(self, key) for key in _KEYS.values()}
        return {**value, "replicated": list(self.replicated)}

    @classmethod
    def from_value(cls, value: Any) -> TierConfig:
        """Reads what is kept in the store.

        Raises: ValueError, TypeError.
        """
        if not isinstance(value, dict) or "url" not in value:
            raise ValueError("not the description of a tier")
        for key in _SIZES.values():
            if type(value.get(key, 0)) is not int:
                raise TypeError(f"{key}={value[key]!r}: an int")
        given = {name: value[key] for name, key in _KEYS.items() if key in value}
        return cls(**{name: one for name, one in given.items() if one or name not in _SIZES})


_KEYS = {
    field.name: _SIZES.get(field.name, field.name)
    for field in fields(TierConfig)
    if field.name != "storage_options"
}
"""Names of fields in what the store remembers, by field."""
