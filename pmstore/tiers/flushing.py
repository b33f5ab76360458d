"""The part of a store that flushes what is committed to tiers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pmstore.objects.core import Core
from pmstore.objects.root import Root

if TYPE_CHECKING:
    from pmstore.tiers._flush.flush import Flush, TierState
    from pmstore.tiers.config import TierConfig
    from pmstore.tiers.tiers import Tiers


class Flushing(Root):
    """See `pmstore.Store`."""

    __slots__ = ("_tiers",)

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._tiers: Tiers | None = None

    @property
    def tiers(self) -> Mapping[str, TierConfig]:
        """The tiers that the store has, by name."""
        return self._open_tiers().configs

    def _open_tiers(self) -> Tiers:
        if self._tiers is None:
            from pmstore.tiers.tiers import Tiers

            with self._core.lock:  # two of them would write to the same tiers
                if self._tiers is None:
                    made = Tiers(self._core.pool)
                    made.load(self)
                    self._tiers = made
        return self._tiers

    def add_tier(self, name: str, tier: TierConfig | str | os.PathLike[str]) -> None:
        """Adds a place that committed state is flushed to, or changes one. The store remembers it
        (from the next commit on).

            store.add_tier("disk", "/mnt/checkpoints/run")
            store.add_tier("s3", TierConfig("s3://bucket/run", keep=3, every=500))

        What it remembers counts where this file had the tier added, by this user. A store that was
        copied, restored or came from elsewhere names its tiers in a warning, and does not flush to
        them by itself: add them again, or `pmstore trust` it.

        tier: a URL or path alone is a `TierConfig` of it, with defaults for all else. Given again,
            it replaces all that was said of the tier before.

        Raises: TierError, ValueError, TypeError.
        """
        self._open_tiers().add(self, name, tier)

    def remove_tier(self, name: str) -> None:
        """Forgets a tier, after its flush under way. What is in it stays.

        Raises: TierError: there is none of that name.
        """
        self._open_tiers().remove(self, name)

    def flush(
        self,
        tier: str,
        *,
        wait: bool = False,
        full: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> Flush:
        """Flushes the last commit to a tier, in the background; the store is used as before
        meanwhile.

        Only chunks that changed since this process's last flush to the tier are written; full: all
        of them. The epoch counts when its manifest is there, and then survives this machine as far
        as the tier does; epochs beyond `keep` are deleted after that (`drain` waits for it). Up to
        eight flushes to a tier wait for each other, a further call for the first of them. wait:
        return when it counts. progress: called with (bytes written, bytes to write) ten times a
        second and at the end, on some thread; it may use the store, wait for the flush, drain or
        close.

        Raises: TierError, OSError: of the flush before, if nobody was told; with wait of this one.
        """
        handle = self._open_tiers().flush(tier, full, progress)
        return handle.wait() if wait else handle

    def flush_if_idle(self, tier: str) -> Flush | None:
        """As `flush`, unless the tier's last flush is still under way, or deletes old epochs: then
        None.

        Raises: as `flush`.
        """
        tiers = self._open_tiers()
        return tiers.flush(tier, False) if tiers.idle(tier) else None

    def tier_states(self) -> list[TierState]:
        """How far this process's flushes are, for each tier that it has flushed to. Waits for
        nothing."""
        return [] if self._tiers is None else self._tiers.states()

    def drain(self, timeout: float | None = None) -> None:
        """Waits for all flushes under way, and until old epochs are deleted.

        Raises: TimeoutError after timeout seconds; TierError, OSError: of a flush that nobody was
            told of.
        """
        if self._tiers is not None:
            self._tiers.drain(timeout)
