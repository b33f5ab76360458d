"""Keeps what a store mirrors, and does what happens to it at commit and roll back. torch is not
imported for a store without mirrors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from pmstore._engine.constants import ROLLED_BACK
from pmstore._engine.landing import LandCopy, LandFlip, Landing
from pmstore.errors import MirrorError
from pmstore.mirror.pending_commit import Batch, PendingCommit
from pmstore.objects.core import Core

if TYPE_CHECKING:
    import torch

    from pmstore.mirror.copier import Copier, Piece
    from pmstore.mirror.mirror import Mirror
    from pmstore.mirror.pinned_memory import PinnedBlocks

# domains whose mapping is: what a device writes into it is the file's
_SHARED = ("dax", "process", "emulated")

_under_way: set[PendingCommit] = set()
"""Commits that threads of the engine are at: what they read is kept, whatever becomes of their
stores."""


class Mirrors:
    """The mirrors of one store, and the commit that copies them."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._mirrors: dict[str, Mirror] = {}
        self._copiers: dict[torch.device, Copier] = {}
        self._pinned: PinnedBlocks | None = None
        self._pending: PendingCommit | None = None
        self._armed: PendingCommit | None = None
        self._committing = threading.RLock()
        self.timeout_seconds: float | None = 300.0
        """How long copies may take: a commit whose copies do not come by then fails."""

    # ---- which

    def add(self, mirror: Mirror) -> None:
        self._mirrors[mirror.name] = mirror

    def get(self, name: str) -> Mirror | None:
        return self._mirrors.get(name)

    def remove(self, name: str) -> None:
        self.join()
        self._mirrors.pop(name, None)

    def copier(self, device: torch.device) -> Copier:
        """Returns the copier for a device, and makes it at the first call. Raises: MirrorError."""
        from pmstore.mirror.copier import copier_for
        from pmstore.mirror.pinned_memory import PinnedBlocks

        made = self._copiers.get(device)
        if made is None:
            if self._pinned is None and self._core.pool.info.domain in _SHARED:
                self._pinned = PinnedBlocks()
            made = self._copiers[device] = copier_for(device, self._pinned)
        return made

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Sets the mirrors aside while the block runs: commits copy nothing from devices, and
        whoever writes may put another version into the slots. `restore` comes next."""
        self.join()
        held, self._mirrors = self._mirrors, {}
        try:
            yield
        finally:
            for mirror in held.values():
                mirror.settled = set()  # slots may have been made anew
            self._mirrors = held

    # ---- commits

    def commit(self) -> PendingCommit:
        """Starts a commit. Everything that is pending is in it, and every mirrored tensor as it is
        now."""
        with self._alone():
            self.join()
            landing, batches, over = self._prepare()
            made = PendingCommit(landing, batches, over)
            _under_way.add(made)
            self._pending = made
            try:
                made.start(any(mirror.fenced for mirror in self._mirrors.values()))
            except BaseException:
                if not made.started:
                    self._pending = None
                    _under_way.discard(made)
                raise
            return made

    def _alone(self) -> AbstractContextManager[object]:
        """Keeps other commits out from the look for another one until this one can be seen:
        otherwise two would copy into the same slots, which the first makes the current ones. A fork
        child, where every call is refused, may never get the lock: another thread held it."""
        return self._committing if self._core.process == os.getpid() else nullcontext()

    def arm(self) -> None:
        """Copies everything, for the commit that follows."""
        self.join()
        if not self._mirrors:
            return
        landing, batches, over = self._prepare()
        try:
            for batch in batches:
                batch.synchronize()
        except Exception as error:
            raise MirrorError(
                f"{self._core.path}: a copy from the device failed: {error}"
            ) from error
        # keeps the memory that the commit will read
        self._armed = PendingCommit(landing, batches, over)
        landing.arm()

    @property
    def empty(self) -> bool:
        """Whether nothing is mirrored."""
        return not self._mirrors

    @property
    def under_way(self) -> bool:
        """Whether a commit is under way."""
        return self._pending is not None and not self._pending.done

    def fence(self) -> None:
        """Orders what comes behind the copies of the commit under way: see
        `PendingCommit.fence`."""
        if self._pending is not None:
            self._pending.fence()

    def wait_over(self) -> None:
        """Waits until a commit under way is over. `join` raises what it failed with."""
        if self._pending is not None:
            self._pending.wait_over()

    def join(self) -> None:
        """Waits for a commit under way.

        Raises: what it failed with, if nobody was told.
        """
        armed, self._armed = self._armed, None
        if armed is not None and armed.done:
            armed.join_quietly()  # the commit itself has told
        # not by iterating: other threads, finalizers and signal handlers commit meanwhile
        for one in _under_way.copy():
            if one.done:
                _under_way.discard(one)
        pending = self._pending
        if pending is not None:
            try:
                pending.join()
            finally:
                if pending.done:
                    self._pending = None

    def _prepare(self) -> tuple[Landing, list[Batch], Callable[[bool], None]]:
        """Starts all copies. Returns the landing that waits for them, their batches, and what is to
        be called when the commit is over. Raises: MirrorError."""
        pieces: dict[torch.device, list[Piece]] = {}
        flips: list[LandFlip] = []
        done: list[tuple[Mirror, set[int]]] = []
        base = self._core.pool.info.base
        with self._core.lock:
            for mirror in list(self._mirrors.values()):
                blocks = self._place(mirror, pieces, flips)
                if blocks:
                    done.append((mirror, blocks))
        if self._pinned is not None:
            self._pinned.keep({base + block for _, blocks in done for block in blocks})
        copies: list[LandCopy] = []
        batches: list[Batch] = []
        try:
            for device, some in pieces.items():
                more, batch = self.copier(device).start(some)
                copies += more
                batches.append(batch)
        except Exception as error:
            for batch in batches:
                batch.synchronize()  # nothing is written any more
            raise MirrorError(
                f"{self._core.path}: copies from the device could not be started: {error}"
            ) from error

        def over(committed: bool) -> None:
            if not committed:
                return
            for mirror, blocks in done:
                mirror.settled = blocks
                mirror.slots.end_landing()

        return Landing(self._core.pool, copies, flips, self.timeout_seconds), batches, over

    def _place(
        self, mirror: Mirror, pieces: dict[torch.device, list[Piece]], flips: list[LandFlip]
    ) -> set[int]:
        """Finds where the mirror's next version goes, and adds it to pieces and flips. Returns the
        mirror's blocks; none if its slots are not in the store (any more)."""
        from pmstore.mirror.copier import Piece, flat_bytes

        landing = mirror.slots.begin_landing(mirror.settled, filled=bool(mirror.parts))
        if landing is None:
            return set()
        if landing.flip is not None:
            block = None if landing.idle is None else flat_bytes(landing.idle)
            for tensor, at, live in mirror.parts:
                piece = Piece(tensor, landing.flip.data, at, block, live)
                pieces.setdefault(tensor.device, []).append(piece)
            flips.append(landing.flip)
        return landing.blocks

    # ---- blocks, roll backs, the end

    def hook(self, when: int) -> None:
        """Arms or restores the mirrors. `_binding.Transaction` calls it."""
        # of the outermost block: it is the caller's, so that nobody else commits what is armed
        if when != ROLLED_BACK:
            self.arm()
        elif self._core.pool.block_depth() == 0 and not self._core.pool.handle.closed:
            self.restore()

    def before_rollback(self) -> None:
        """Finishes a commit that is under way. If it fails, it is rolled back with the rest."""
        if self._pending is not None:
            self._pending.join_quietly()
            self._pending = None

    def restore(self) -> None:
        """Makes every tensor what the last commit holds. Tensors whose mirror was made since then
        stay as they are."""
        for mirror in list(self._mirrors.values()):
            with suppress(KeyError):
                mirror.restore()

    def close(self) -> None:
        """Gives back what devices hold of the store's memory. A fork child has no device."""
        if self._core.process != os.getpid():
            return
        while self._copiers:
            self._copiers.popitem()[1].close()
        if self._pinned is not None:
            self._pinned.keep(set())
