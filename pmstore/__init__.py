"""Training state in a persistent heap: numpy arrays and torch tensors whose every commit is atomic.

    import pmstore

    with pmstore.open("run.pm", size="4GiB") as store:
        w = store.zeros("w", (1024, 1024), "float32")   # an np.ndarray whose bytes are in the heap
        with store.transaction():                       # all or nothing
            w += 1
            store["step"] = 1

What else there is, imported when it is used:

    pmstore.torch.attach     a training run as one commit: model, optimizer, scheduler, loader,
                             generators (needs torch)
    pmstore.torch.optim      AdamW, Adam, SGD that write the next version beside the committed one:
                             no copy at a commit
    pmstore.scheduler        when to commit, and to which tier: learned while the job runs
    Store.add_tier, restore  committed state flows to disks and object stores in the background, and
                             back (pmstore.tiers)
    pmstore.pymm             for programs written for PyMM
    pmstore.exchange         safetensors and npz, in and out
    pmstore.portable         a whole store as one file
    pmstore.testing          crash tests of your own training loop, in pytest; on the command line:
                             pmstore crashtest
    pmstore_lab.simulation   commit policies in simulated time, against the exact optimum

All errors are `PmstoreError`s; each says what to do. docs/ARCHITECTURE.md tells how it works.
"""

import importlib
from typing import TYPE_CHECKING

from pmstore.engine._binding import Transaction
from pmstore.engine.reports import CheckReport, Info, Recovery, SegmentUsage, Stats
from pmstore.errors import (
    ClosedStoreError,
    CorruptStoreError,
    DomainError,
    ForkedStoreError,
    FormatVersionError,
    MirrorError,
    MovedError,
    NameExistsError,
    NotAStoreError,
    PmstoreError,
    ReadOnlyStoreError,
    StoreFullError,
    StoreLockedError,
    TierError,
    TransactionError,
    UncleanCopyError,
    UncleanMachineCrashError,
)
from pmstore.formats.compaction import Compaction, compact
from pmstore.objects.containers import Group
from pmstore.objects.entries import Entry
from pmstore.objects.lists import List
from pmstore.objects.slots import Slots
from pmstore.opening import open
from pmstore.store import Store

if TYPE_CHECKING:
    from pmstore import exchange, portable
    from pmstore.tiers import TierConfig, epochs, restore

__version__ = "0.1.0"

__all__ = [
    "CheckReport",
    "ClosedStoreError",
    "Compaction",
    "CorruptStoreError",
    "DomainError",
    "Entry",
    "ForkedStoreError",
    "FormatVersionError",
    "Group",
    "Info",
    "List",
    "MirrorError",
    "MovedError",
    "NameExistsError",
    "NotAStoreError",
    "PmstoreError",
    "ReadOnlyStoreError",
    "Recovery",
    "SegmentUsage",
    "Slots",
    "Stats",
    "Store",
    "StoreFullError",
    "StoreLockedError",
    "TierConfig",
    "TierError",
    "Transaction",
    "TransactionError",
    "UncleanCopyError",
    "UncleanMachineCrashError",
    "__version__",
    "compact",
    "epochs",
    "exchange",
    "open",
    "portable",
    "restore",
    "scheduler",
    "torch",
]


def __getattr__(name: str) -> object:
    # nor fsspec's and tiers' modules before they are used
    if name in ("TierConfig", "restore", "epochs"):
        return getattr(importlib.import_module("pmstore.tiers"), name)
    if name in ("torch", "scheduler", "exchange", "portable"):  # import pmstore imports no torch
        return importlib.import_module(f"pmstore.{name}")
    raise AttributeError(f"module 'pmstore' has no attribute {name!r}")
