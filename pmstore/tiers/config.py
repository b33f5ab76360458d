"""How a tier is to be used: what the store remembers of it, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pmstore.engine.snapshot import PAGE_BYTES
from pmstore.tiers.manifest import RUN, WORLD_MOST

__all__ = ["TierConfig"]

KEYS = (
    "url",
    "keep",
    "every",
    "chunk_bytes",
    "max_bytes_per_second",
    "memory_bytes",
    "max_wait_seconds",
    "stall_seconds",
    "on_error",
    "rank",
    "world_size",
    "run",
    "replicated",
    "mode",
)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """See `Store.add_tier` for the fields."""

    url: str
    keep: int | None = None
    every: int | None = None
    chunk_bytes: int = 256 << 10
    max_bytes_per_second: int = 0
    memory_bytes: int = 0
    max_wait_seconds: float | None = 60.0
    stall_seconds: float | None = 300.0
    on_error: str = "raise"
    rank: int = 0
    world_size: int = 1
    run: str | None = None
    replicated: Sequence[str] = ()
    mode: int | None = None
    storage_options: dict[str, Any] | None = None
    """Not kept in the store: it may hold credentials."""

    def __post_init__(self) -> None:

        if isinstance(self.replicated, (str, bytes)) or not all(
            isinstance(one, str) for one in self.replicated
        ):
            raise TypeError(
                f"replicated={self.replicated!r}: a list of patterns, such as ['run/model/*']"
            )
        object.__setattr__(self, "replicated", tuple(self.replicated))
        for name in ("chunk_bytes", "max_bytes_per_second", "memory_bytes", "rank", "world_size"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name}={getattr(self, name)!r}: an int")
        for name in ("max_wait_seconds", "stall_seconds"):
            self._check_seconds(name)
        if self.on_error not in ("raise", "warn"):
            raise ValueError(f"on_error={self.on_error!r}: 'raise' or 'warn'")
        for name in ("keep", "every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value < 1 << 62):
                raise ValueError(
                    f"{name}={value!r}: an int, how many epochs or commits, at least 1; or None"
                )
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
        if self.mode is not None and (type(self.mode) is not int or self.mode & ~0o066 != 0o600):
            raise ValueError(
                f"mode={self.mode!r}: permissions of files, such as 0o640; their owner reads and "
                "writes them"
            )
        if self.run is not None and (not isinstance(self.run, str) or not RUN.fullmatch(self.run)):
            raise ValueError(f"run={self.run!r}: letters, digits, '_' and '-', at most 64")
        if self.world_size > 1 and self.run is None:
            raise ValueError(
                "with several ranks, run= names what their epochs have in common: give all of them "
                "the same"
            )
        for name in ("max_bytes_per_second", "memory_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is not negative")

    def _check_seconds(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise TypeError(f"{name}={value!r}: seconds, or None for no limit")
        least = 0 if name == "max_wait_seconds" else 0.001
        if value is not None and not least <= value <= 1e9:
            raise ValueError(f"{name}={value!r}: at least {least} seconds, or None for no limit")

    def to_value(self) -> dict[str, Any]:
        """What is kept in the store."""
        return {
            **{key: asdict(self)[key] for key in KEYS if key != "replicated"},
            "replicated": list(self.replicated),
        }

    @classmethod
    def from_value(cls, value: Any) -> TierConfig:
        """Raises: ValueError, TypeError."""
        if not isinstance(value, dict) or "url" not in value:
            raise ValueError("not the description of a tier")
        return cls(**{key: value[key] for key in KEYS if key in value})

    def with_options(self, storage_options: dict[str, Any] | None) -> TierConfig:
        return replace(self, storage_options=storage_options)
