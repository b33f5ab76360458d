"""Lightning's checkpoints as stores."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.plugins.io import CheckpointIO

from pmstore._base.newfile import part_of, rename
from pmstore._base.untrusted import sound
from pmstore.errors import CorruptStoreError
from pmstore.objects.structure import join, split
from pmstore.opening import open as open_store

_GROUP = "checkpoint"
_FORMAT = 1


class PmstoreCheckpointIO(CheckpointIO):
    """Writes the Trainer's checkpoints as stores, and reads them.

        Trainer(plugins=[PmstoreCheckpointIO()], callbacks=[ModelCheckpoint(...)])

    A checkpoint's path is a store: each tensor is an array of it. The file has its path when it is
    whole and durable: a process that is killed leaves the checkpoint that was there before, or
    none. `AsyncCheckpointIO(PmstoreCheckpointIO())` writes them in the background.

    What is neither data nor a collection of data (an object among the hyperparameters) is pickled
    into the store, and read with weights_only=False alone. Sharded checkpoints, as of FSDP, do not
    come by here: Lightning writes them itself.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Writes a checkpoint, and replaces what was at the path. It is durable on return, as far
        as the file system reaches.

        Raises: TypeError: storage_options; ValueError: the path is of no file system of this
            machine; what `pmstore.open` raises; pickle's errors.
        """
        if storage_options is not None:
            raise TypeError(
                "PmstoreCheckpointIO takes no storage_options: a checkpoint is a file on a file "
                "system of this machine"
            )
        target = _local(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        pickled: list[tuple[list[Any], bytes]] = []
        skeleton, arrays = split(_take_out(checkpoint, [], pickled))
        versions = {
            key: dict(value._metadata)
            for key, value in checkpoint.items()
            if isinstance(value, OrderedDict) and hasattr(value, "_metadata")
        }
        needed = sum(one.nbytes for one in arrays) + sum(len(one) for _, one in pickled)
        with part_of(target) as part:
            with open_store(part, "x", size=max(1 << 20, needed * 9 // 8)) as store:
                store[f"{_GROUP}/format"] = _FORMAT
                store[f"{_GROUP}/value"] = skeleton
                store[f"{_GROUP}/versions"] = versions
                store[f"{_GROUP}/pickled_at"] = [at for at, _ in pickled]
                for number, array in enumerate(arrays):
                    at_home = array.detach().cpu() if isinstance(array, torch.Tensor) else array
                    store[f"{_GROUP}/arrays/{number}"] = at_home
                for number, (_, content) in enumerate(pickled):
                    store[f"{_GROUP}/pickled/{number}"] = np.frombuffer(content, np.uint8)
            rename(part, target)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Returns what was saved. Its tensors are copies, on the CPU, or where map_location says: a
        device or its name. (Lightning moves them where they belong.)

        weights_only: False: what was pickled is read too. That runs code that the file names: only
            for files that you trust.

        Raises: FileNotFoundError; NotAStoreError: a checkpoint that was written without this
            plug-in; pickle.UnpicklingError: something was pickled, and weights_only is not False.
        """
        target = _local(path)
        if not target.exists():
            raise FileNotFoundError(errno.ENOENT, "there is no checkpoint", str(target))
        with open_store(target, "r") as store, sound(str(target)):
            if store.get(f"{_GROUP}/format") != _FORMAT:
                raise CorruptStoreError("it holds no checkpoint of Lightning")
            pickled_at = store[f"{_GROUP}/pickled_at"]
            if pickled_at and weights_only is not False:
                places = ", ".join(".".join(map(str, at)) for at in pickled_at[:5])
                raise pickle.UnpicklingError(
                    f"{target} holds what is not data, at {places}: to read it runs code that the "
                    "file names. If you trust the file: fit(..., weights_only=False), or "
                    "load_checkpoint(..., weights_only=False)"
                )
            arrays: list[Any] = []
            while (name := f"{_GROUP}/arrays/{len(arrays)}") in store:
                array = store[name]
                arrays.append(
                    _moved(array.clone(), map_location)
                    if isinstance(array, torch.Tensor)
                    else array.copy()
                )
            checkpoint: dict[str, Any] = join(store[f"{_GROUP}/value"], arrays)
            for key, versions in store[f"{_GROUP}/versions"].items():
                checkpoint[key]._metadata = OrderedDict(versions)
            contents = [
                store[f"{_GROUP}/pickled/{number}"].tobytes() for number in range(len(pickled_at))
            ]
        for at, content in zip(pickled_at, contents, strict=True):
            holder: Any = checkpoint
            for key in at[:-1]:
                holder = holder[key]
            holder[at[-1]] = pickle.loads(content)
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint. Does nothing if there is none."""
        target = _local(path)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


def _local(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if "://" in text:
        if not text.startswith("file://"):
            raise ValueError(
                f"{text}: a checkpoint that is a store lies on a file system of this machine. "
                "Flush a run to that place instead: PmstoreCallback(..., tiers={'remote': ...})"
            )
        text = text.removeprefix("file://")
    return Path(text)


def _moved(tensor: torch.Tensor, where: Any) -> torch.Tensor:
    return tensor.to(where) if isinstance(where, (str, torch.device)) else tensor


def _take_out(item: Any, at: list[Any], pickled: list[tuple[list[Any], bytes]]) -> Any:
    """Returns the structure with None in the place of what is no data. That is pickled, and added
    to `pickled` with its place."""
    kind = type(item)
    try:
        if kind is dict or kind is OrderedDict:
            split(dict.fromkeys(item))
            return kind((key, _take_out(one, [*at, key], pickled)) for key, one in item.items())
        if kind is list:
            return [_take_out(one, [*at, number], pickled) for number, one in enumerate(item)]
        split(item)
    except TypeError:
        pickled.append((at, pickle.dumps(item)))
        return None
    return item
