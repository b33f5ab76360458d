"""Asynchronous tiers: committed state flows to disk and remote storage while training goes on.

    store.add_tier("disk", TierConfig("/mnt/checkpoints/run", keep=3))
    store.flush("disk")  # returns at once; the last commit is written in the background
    pmstore.restore("run.pm", "/mnt/checkpoints/run")

Source: DeepFreeze (CCGrid 2020). docs/TIERS.md tells how, and what it costs.
"""

from pmstore.tiers.choosing import epochs
from pmstore.tiers.config import TierConfig
from pmstore.tiers.exporting import export_safetensors
from pmstore.tiers.handle import Flush, FlushStats
from pmstore.tiers.manager import drain_all
from pmstore.tiers.reading import EpochInfo
from pmstore.tiers.restoring import RestoreReport, restore

__all__ = [
    "EpochInfo",
    "Flush",
    "FlushStats",
    "RestoreReport",
    "TierConfig",
    "drain_all",
    "epochs",
    "export_safetensors",
    "restore",
]
