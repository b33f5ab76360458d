"""Opens and creates stores: `pmstore.open`."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Literal

from pmstore._base.sizes import parse_size
from pmstore._engine.constants import DOMAINS, MIN_SIZE_BYTES, MODES
from pmstore._engine.pool import Pool
from pmstore.errors import CorruptStoreError, FormatVersionError, TierError
from pmstore.objects import array
from pmstore.objects.core import Core
from pmstore.store import Store

Mode = Literal["r", "r+", "a", "w", "x"]
Domain = Literal["auto", "dax", "file", "process", "emulated"]


DEFAULT_SIZE = "64MiB"
"""Of a new file."""


def open(
    path: str | os.PathLike[str],
    mode: Mode = "a",
    *,
    size: int | str | None = None,
    max_size: int | str | None = None,
    domain: Domain = "auto",
    lock_timeout: float | None = 0.0,
    hot: bool = True,
    force: bool = False,
    hold: bool = False,
    lock: bool = False,
) -> Store:
    """Opens or creates a store.

    mode: "a" opens, or creates if there is none or an empty file; "r+" opens; "w" creates,
        replacing what is there; "x" creates, and there must be nothing; "r" opens for reading,
        also while another process writes: it shows the last commit, whole, and stays at it until
        `Store.refresh`; a crashed file it shows without changing it. Arrays are then not writeable,
        and private copies of what is stored, made when they are first looked up.
    size: of a new file, in bytes or as "4GiB" (default 64 MiB, at least 1 MiB). It grows by itself.
    max_size: the file never grows beyond; it replaces what an existing store was given before.
        None: that, or no limit but the file system.
    domain: what a commit survives (see `SURVIVES`); "auto": "dax" where the file system can,
        "process" on tmpfs, else "file".
    lock: of mode "r": keeps writers out as long as it is open. Arrays are then the file's own
        pages, and nothing is copied.
    lock_timeout: seconds to wait for another process that has the store open; 0: none; None: for
        ever.
    hot: False protects all pages again at every commit (slower; no assumption about writers being
        quiet at a commit).
    force: open a store that UncleanMachineCrashError or UncleanCopyError would refuse. It may be
        torn.
    hold: each commit holds the version before it, so that `Store.rewind` can go back to it, once,
        also after a crash and another open with hold=True. The next commit lets go of it; so does
        leaving `with` normally; leaving it by an exception, `close` and a crash do not. Where the
        commit changed slots or mirrors, their next version takes the place of the one that is held.
        So to open it (`Slots.next`, a step of an optimizer on slots, a commit of mirrors, also one
        that fails) lets go too. It needs room for two transactions' logs: the file is about three
        times what it holds. Without hold, a version that an earlier open holds stays until the
        first commit. One that is held for a job of several ranks stays until the job attaches the
        store again, or `pmstore resolve`: till then a commit raises InDoubtError.

    Raises:
        StoreLockedError: it is open elsewhere; names the process.
        NotAStoreError, CorruptStoreError, FormatVersionError, UncleanMachineCrashError,
            UncleanCopyError: of an existing file.
        StoreFullError: no room for the file. DomainError: the domain is not to be had here.
        FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, OSError; ValueError,
            TypeError for arguments.

    >>> import tempfile
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder,
    ...     open(f"{folder}/run.pm", size="8MiB") as store,
    ... ):
    ...     w = store.zeros("w", (2, 2), "float32")
    ...     store["config"] = {"lr": 1e-3}
    ...     with store.transaction():
    ...         w += 1
    ...         store["step"] = 1
    ...     sorted(store), store.check().problems
    (['config', 'step', 'w'], ())
    """
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError(f"path is a str or a path of str, not {type(name).__name__}")
    if "\0" in name:
        raise ValueError("a path has no NUL character")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: use one of {', '.join(map(repr, MODES))}")
    if domain not in DOMAINS:
        raise ValueError(f"domain={domain!r}: use one of {', '.join(map(repr, DOMAINS))}")
    size_bytes = parse_size(DEFAULT_SIZE if size is None else size)
    if size is not None and size_bytes < MIN_SIZE_BYTES:
        raise ValueError(
            f"size={size!r} is too small: a store needs at least {MIN_SIZE_BYTES} bytes (1 MiB)"
        )
    if lock and mode != "r":
        raise ValueError("lock=True is of mode 'r': every other mode has the lock")
    beside = mode == "r" and not lock

    def open_pool(keep: bool) -> Pool:
        return Pool(
            name,
            mode,
            size_bytes=size_bytes,
            max_size_bytes=parse_size(max_size, "max_size"),
            domain=domain,
            lock_timeout_seconds=lock_timeout,
            hot=hot,
            force=force,
            hold=hold,
            beside=beside,
            keep=keep,
            ranges=array.span,
        )

    store = Store(Core(open_pool(False), open_pool if beside else None))
    if mode != "r":
        try:
            # told to whoever uses them
            with suppress(TierError, CorruptStoreError, FormatVersionError):
                if ".pmstore" in store:
                    store._open_tiers()  # tiers that are flushed by themselves begin to be flushed
        except Warning:  # a warning of a tier that was not added here became an error
            store.close()
            raise
    return store


def open_before(path: str) -> Store:
    """Opens the store as `open(path, "r", lock=True)` does, but shows the version before the last
    commit, which the store holds.

    Raises: TransactionError: it holds none; and as `open`.
    """
    return Store(Core(Pool(path, "r", before=True, ranges=array.span)))
