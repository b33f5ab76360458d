"""Training state in a persistent heap: numpy arrays and torch tensors whose every commit is atomic.

    import pmstore

    with pmstore.open("run.pm", size="4GiB") as store:
        w = store.zeros("w", (1024, 1024), "float32")   # an np.ndarray whose bytes are in the heap
        with store.transaction():                       # all or nothing
            w += 1
            store["step"] = 1

The names of this package. `help(pmstore.Store)` says all of `Store`, and so for each:

    open                     makes a store, or opens it
    Store                    arrays, tensors, values, transactions, roll backs, tiers
    Group, List, Slots       what a store holds beside arrays and values
    Transaction, Entry       `with store.transaction()`; one name of a group
    Info, Recovery, Stats, CheckReport, SegmentUsage
                             what a store says of itself
    compact, Compaction      makes the file smaller
    TierConfig               a tier of a store (`Store.add_tier`): committed state flows to disks
                             and object stores in the background
    epochs, restore          lists what a tier has; makes a store of it
    errors                   all of them; each is a `PmstoreError`, and says what to do

Modules, imported when they are used:

    pmstore.torch            attach: a training run as one commit, of model, optimizer, scheduler,
                             loader, generators (needs torch)
    pmstore.torch.optim      AdamW, Adam, SGD that write the next version beside the committed one:
                             no copy at a commit
    pmstore.dcp              storage for torch.distributed.checkpoint; runs read as checkpoints
    pmstore.integrations     Lightning, Hugging Face, Accelerate, Ray, scikit-learn, JAX
    pmstore.scheduler        when to commit, and to which tier: learned while the job runs
    pmstore.tiers            flushes, epochs, places that a tier can lie in
    pmstore.pymm             for programs written for PyMM
    pmstore.exchange         safetensors and npz, in and out
    pmstore.portable         a whole store as one file
    pmstore.testing          crash tests of your own training loop, in pytest; on the command line:
                             pmstore crashtest
    pmstore_lab.simulation   commit policies in simulated time, against the exact optimum

The documents begin in docs/index.md of the repository: a tutorial, how-tos, the rules of training
runs, the reference. docs/ARCHITECTURE.md tells how it works.
"""

from pmstore._base.lazy_imports import brief, door, is_there
from pmstore._base.version import VERSION

TYPE_CHECKING = False  # as typing's flag is: typing takes longer to import than all of this
if TYPE_CHECKING:
    from pmstore import dcp, errors, exchange, portable, pymm, scheduler, testing, tiers, torch
    from pmstore._engine._binding import Transaction
    from pmstore._engine.store_info import CheckReport, Info, Recovery, SegmentUsage, Stats
    from pmstore.errors import (
        ClosedStoreError,
        CorruptStoreError,
        DomainError,
        ForkedStoreError,
        FormatVersionError,
        InDoubtError,
        MirrorError,
        MixedStoresError,
        MovedError,
        NameExistsError,
        NotAStoreError,
        PeerLostError,
        PmstoreError,
        ReadOnlyStoreError,
        SnapshotLostError,
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
    from pmstore.tiers import TierConfig, epochs, restore

__version__ = VERSION

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
    "InDoubtError",
    "Info",
    "List",
    "MirrorError",
    "MixedStoresError",
    "MovedError",
    "NameExistsError",
    "NotAStoreError",
    "PeerLostError",
    "PmstoreError",
    "ReadOnlyStoreError",
    "Recovery",
    "SegmentUsage",
    "Slots",
    "SnapshotLostError",
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
    "dcp",
    "epochs",
    "errors",
    "exchange",
    "open",
    "portable",
    "pymm",
    "restore",
    "scheduler",
    "testing",
    "tiers",
    "torch",
]

_public = list(__all__)
if not TYPE_CHECKING:  # to type checkers it would make any name one of ours
    if not is_there("torch"):  # dir() and import * look at all that is here
        _public = [name for name in _public if name not in ("dcp", "torch")]
    _find = door(
        "pmstore",
        {
            "pmstore._engine._binding": ("Transaction",),
            "pmstore._engine.store_info": (
                *("CheckReport", "Info", "Recovery", "SegmentUsage", "Stats"),
            ),
            "pmstore.errors": (
                *("ClosedStoreError", "CorruptStoreError", "DomainError", "ForkedStoreError"),
                *("FormatVersionError", "InDoubtError", "MirrorError", "MixedStoresError"),
                *("MovedError", "NameExistsError", "NotAStoreError", "PeerLostError"),
                *("PmstoreError", "ReadOnlyStoreError", "SnapshotLostError", "StoreFullError"),
                *("StoreLockedError", "TierError", "TransactionError", "UncleanCopyError"),
                *("UncleanMachineCrashError",),
            ),
            "pmstore.formats.compaction": ("Compaction", "compact"),
            "pmstore.objects.containers": ("Group",),
            "pmstore.objects.entries": ("Entry",),
            "pmstore.objects.lists": ("List",),
            "pmstore.objects.slots": ("Slots",),
            "pmstore.opening": ("open",),
            "pmstore.store": ("Store",),
            "pmstore.tiers": ("TierConfig", "epochs", "restore"),
        },
        ("dcp", "errors", "exchange", "portable", "pymm", "scheduler", "testing", "tiers", "torch"),
    )
    __getattr__ = brief(_find, _public)
    del __all__  # it is asked for there


def __dir__() -> list[str]:
    return sorted(_public)
