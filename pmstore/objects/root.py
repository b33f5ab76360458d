"""The outermost group of a store, and what it says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pmstore.base.words import counted
from pmstore.errors import ClosedStoreError, ForkedStoreError
from pmstore.objects.containers import Group

if TYPE_CHECKING:
    from collections.abc import Callable

    from pmstore.engine.reports import CheckReport, Info, Recovery, SegmentUsage, Stats
    from pmstore.objects.core import Core

# What the reports need is imported when one is asked for: to make their classes takes as long as to
# open a store.


class Root(Group):
    """All that an open store holds. `pmstore.Store` adds to it what happens: transactions, mirrors,
    tiers, the end."""

    __slots__ = ()

    def __init__(self, core: Core) -> None:
        super().__init__(core, ())

    @property
    def closed(self) -> bool:
        return self._core.pool.handle.closed

    @property
    def path(self) -> str:
        """The file, as it was given to `open`."""
        return self._core.path

    @property
    def domain(self) -> str:
        """The domain in force: "dax", "file", "process" or "emulated". `SURVIVES` says what each
        survives."""
        return self._core.pool.info.domain

    @property
    def mode(self) -> Literal["r", "r+"]:
        """Whether it can be written."""
        return "r" if self._core.pool.info.read_only else "r+"

    @property
    def epoch(self) -> int:
        """Number of commits since the store was made."""
        pool = self._core.pool
        if pool.handle.closed:
            raise ClosedStoreError(f"{self.path}: the store is closed: open it again")
        return pool.epoch()

    @property
    def recovery(self) -> Recovery:
        """What the open had to undo or replay."""
        from pmstore.engine.reports import recovery_of

        return recovery_of(self._core.pool.info)

    @property
    def rollbacks(self) -> int:
        """Changes whenever a roll back, or a reader's `refresh`, did: what was remembered of the
        store before it may be wrong."""
        return self._core.pool.rollbacks() + self._core.moves

    @property
    def holds(self) -> bool:
        """Whether the version before the last commit is held, so that `Store.rewind` can go back to
        it (see `hold` of `pmstore.open`)."""
        return bool(self._core.pool.holds())

    def stats(self) -> Stats:
        """Sizes and counts, now."""
        from pmstore.engine import inspection

        return inspection.stats(self._core.pool)

    def info(self) -> Info:
        """What a person asks first."""
        from pmstore.distributed.records import jobs  # upward: told of with all else of a store
        from pmstore.engine.reports import SURVIVES, Info

        info, stats = self._core.pool.info, self.stats()
        return Info(
            path=self.path,
            domain=info.domain,
            survives=SURVIVES[info.domain],
            flush=info.flush,
            read_only=info.read_only,
            epoch=stats.epoch,
            names=len(self),
            file_bytes=stats.file_bytes,
            used_bytes=stats.used_bytes,
            free_bytes=stats.free_bytes,
            opens=info.opens,
            unclean_opens=info.unclean_opens,
            uuid=info.uuid.hex(),
            recovery=self.recovery,
            held=bool(self._core.pool.holds()),
            in_doubt=self._core.pool.in_doubt,
            jobs=jobs(self),
        )

    def usage(self) -> tuple[SegmentUsage, ...]:
        """What is in use of the file's segments, and where: a map of the heap. Reads the page
        tables, not the data."""
        from pmstore.engine import inspection

        return inspection.usage(self._core.pool)

    def check(self, *, progress: Callable[[int, int], object] | None = None) -> CheckReport:
        """Examines the whole store: allocator, directories, that every value and description
        decodes, and that slots are pairs. Reads only; it takes microseconds for each object, and
        does not read arrays.

        progress: called on a thread, some times a second, with objects looked at and in all, as
            far as that is known.
        """
        from pmstore.base.workers import progress as telling
        from pmstore.engine.inspection import Check
        from pmstore.engine.reports import CheckReport
        from pmstore.objects import soundness

        check = Check()
        with self._core.lock, telling(lambda: check.looks, progress):
            counts, problems = check.run(self._core.pool)
            if not problems:  # else the directories are not to be walked
                problems = soundness.problems(self._core.pool, check.decoded)
        return CheckReport(**counts, problems=tuple(problems))

    def __repr__(self) -> str:
        if self.closed:
            return f"<pmstore.Store {self.path!r}, closed>"
        try:
            return (
                f"<pmstore.Store {self.path!r}, domain {self.domain}, epoch {self.epoch}, "
                f"{counted(len(self), 'name')}>"
            )
        except ForkedStoreError:
            return f"<pmstore.Store {self.path!r}, of the parent process>"
