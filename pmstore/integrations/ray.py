"""Ray Train: checkpoints that are epochs of a tier.

upload = upload_fn(run, "shared")
...
ray.train.report({"loss": loss}, checkpoint=MARKER, checkpoint_upload_fn=upload)
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Callable
from typing import Any

from pmstore.extras import optional
from pmstore.integrations.versions import tested
from pmstore.tiers import restore as restore_epoch
from pmstore.tiers._restore.restore import RestoreReport
from pmstore.torch import Run

with optional:
    import ray.train
    from ray.train import Checkpoint

tested("ray", "2.60", "2.60")

_FORMAT = 1


def upload_fn(run: Run, tier: str) -> Callable[[Checkpoint, str], Checkpoint]:
    """Makes the function for `ray.train.report(..., checkpoint_upload_fn=)`, in the worker. The
    function flushes the last commit to the tier of the run's store, waits until it counts, and
    returns a Checkpoint that names it.

    The returned Checkpoint is a folder of its own in Ray's storage, with a file for each rank that
    says which epoch of which tier it is: Ray deletes such folders by its `num_to_keep`, and the
    tier, which belongs to all of them, must not be one. Give the tier a `keep` of at least as
    many. `restore(checkpoint, path)` makes a store of it.

    The Checkpoint that is given to `report` is not read: Ray calls the function only if there is
    one; any folder will do. With `checkpoint_upload_mode=ASYNC` the commit is the last one when the
    upload begins; ranks may then be at different steps.

    Durable on return as far as the tier is. Raises: TierError, OSError: of the flush; RuntimeError
    of Ray outside of a worker.
    """
    storage = ray.train.get_context().get_storage()
    rank = ray.train.get_context().get_world_rank()

    def upload(checkpoint: Checkpoint, checkpoint_dir_name: str) -> Checkpoint:
        store = run.store
        flush = store.flush(tier, wait=True)
        config = store.tiers[tier]
        told = {
            "format": _FORMAT,
            "tier": str(config.url),
            "epoch": flush.epoch,
            "run": config.run or store.info().uuid,
            "rank": config.rank,
        }
        path = posixpath.join(storage.experiment_fs_path, checkpoint_dir_name)
        files = storage.storage_filesystem
        files.create_dir(path, recursive=True)
        with files.open_output_stream(posixpath.join(path, _file(rank))) as stream:
            stream.write(json.dumps(told).encode())
        return Checkpoint(path, files)

    return upload


def restore(
    checkpoint: Checkpoint, path: str | os.PathLike[str], rank: int | None = None, **options: Any
) -> RestoreReport:
    """Makes a store at path, where nothing is, of a Checkpoint that `upload_fn` returned. It takes
    the options of `pmstore.restore`, which it calls for the epoch.

    rank: whose; None: that of this worker, and 0 outside of workers.

    Raises: ValueError: it is no such Checkpoint, or not of so many ranks; and as
    `pmstore.restore`: TierError: the tier has let that epoch go.
    """
    if rank is None:
        rank = ray.train.get_context().get_world_rank() if _in_worker() else 0
    where = posixpath.join(checkpoint.path, _file(rank))
    try:
        files: Any = checkpoint.filesystem
        with files.open_input_stream(where) as stream:
            told = json.loads(stream.read())
        if told["format"] != _FORMAT:
            raise ValueError(f"format {told['format']!r}")
        url, epoch, run, shard = told["tier"], told["epoch"], told["run"], told["rank"]
    except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where} is not as upload_fn writes it for rank {rank}: {error}"
        ) from error
    return restore_epoch(path, url, epoch, run=run, rank=shard, **options)


def _file(rank: int) -> str:
    return f"pmstore-rank-{rank:05d}.json"


def _in_worker() -> bool:
    try:
        ray.train.get_context().get_world_rank()
    except (RuntimeError, AttributeError):
        return False
    return True
