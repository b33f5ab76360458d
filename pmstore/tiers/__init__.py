"""Asynchronous tiers: committed state flows to disk and remote storage while training goes on.

    store.add_tier("disk", TierConfig("/mnt/checkpoints/run", keep=3))
    store.flush("disk")  # returns at once; the last commit is written in the background
    pmstore.restore("run.pm", "/mnt/checkpoints/run")

config.py   how a tier is to be used
tiers.py    the tiers of an open store
trust.py    which of the tiers that a store remembers are its own
_places/    what tiers lie in
_epochs/    the files of a tier, and which of them stay
_flush/     from a store to a tier
_restore/   from a tier to a store

Source: DeepFreeze (CCGrid 2020). docs/TIERS.md tells how, and what it costs.
"""

from typing import TYPE_CHECKING

from pmstore._base.lazy_imports import door

if TYPE_CHECKING:
    from pmstore.tiers._epochs.listing import EpochInfo, epochs
    from pmstore.tiers._flush.flush import Flush, FlushStats
    from pmstore.tiers._places.place import Place
    from pmstore.tiers._restore.restore import RestoreReport, restore
    from pmstore.tiers.config import TierConfig
    from pmstore.tiers.tiers import drain_all

__all__ = [
    "EpochInfo",
    "Flush",
    "FlushStats",
    "Place",
    "RestoreReport",
    "TierConfig",
    "drain_all",
    "epochs",
    "restore",
]

if not TYPE_CHECKING:  # which would take every name for one of ours
    __getattr__ = door(
        "pmstore.tiers",
        {
            "pmstore.tiers.config": ("TierConfig",),
            "pmstore.tiers._flush.flush": ("Flush", "FlushStats"),
            "pmstore.tiers.tiers": ("drain_all",),
            "pmstore.tiers._epochs.listing": ("EpochInfo", "epochs"),
            "pmstore.tiers._places.place": ("Place",),
            "pmstore.tiers._restore.restore": ("RestoreReport", "restore"),
        },
    )
