"""Training state in a persistent heap: numpy arrays and torch tensors whose every commit is atomic.

    import pmstore

    with pmstore.open("run.pm", size="4GiB") as store:
        w = store.zeros("w", (1024, 1024), "float32")   # an np.ndarray whose bytes are in the heap
        with store.transaction():                       # all or nothing
            w += 1
            store["step"] = 1

`pmstore.torch` (needs torch) binds models and optimizers; and `pmstore.scheduler` decides when to commit;
both are imported when they are used.
"""

from pmstore._block import Transaction
from pmstore.compaction import Compaction, compact
from pmstore.containers import Entry, Group
from pmstore.errors import (
    ClosedStoreError,
    CorruptStoreError,
    DomainError,
    ForkedStoreError,
    FormatVersionError,
    MirrorError,
    NameExistsError,
    NotAStoreError,
    PmstoreError,
    ReadOnlyStoreError,
    StoreFullError,
    StoreLockedError,
    TierError,
    TransactionError,
    UncleanMachineCrashError,
)
from pmstore.lists import List
from pmstore.slots import Slots
from pmstore.store import CheckReport, Info, Recovery, SegmentUsage, Stats, Store, open

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
    "TierError",
    "Transaction",
    "TransactionError",
    "UncleanMachineCrashError",
    "__version__",
    "compact",
    "epochs",
    "open",
    "restore",
    "scheduler",
    "torch",
]


def __getattr__(name: str) -> object:
    if name in ("restore", "epochs"):  # nor fsspec's and tiers' modules before they are used
        import importlib

        return getattr(importlib.import_module("pmstore.tiers"), name)
    if name in ("torch", "scheduler"):  # import pmstore must not import torch
        import importlib

        return importlib.import_module(f"pmstore.{name}")
    raise AttributeError(f"module 'pmstore' has no attribute {name!r}")
