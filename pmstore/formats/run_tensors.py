"""Copies stored runs to and from safetensors, under the names of the model's state dict: whole, or
each rank's part in a file of its own, as tensors lie that are spread over ranks (DTensors)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pmstore._base.newfile import PRIVATE
from pmstore._base.untrusted import sound
from pmstore.errors import CorruptStoreError, MixedStoresError
from pmstore.extras import optional
from pmstore.formats.array_files import write_safetensors
from pmstore.opening import open as open_store

if TYPE_CHECKING:
    import torch

    from pmstore.dcp._read.rank_stores import Paths

PLACES = "pmstore.shards"
"""The metadata key that says which part of which whole the tensors of a file are: for each name a
shard record (`pmstore.torch._state.sharded`), with offsets and sizes; and of which state of the
run."""


def export_run(
    stores: Paths,
    path: str | os.PathLike[str],
    *,
    name: str = "run",
    parts: bool = False,
    optimizer: bool = False,
    mode: int = PRIVATE,
) -> list[Path]:
    """Writes the parameters and buffers of a stored run as safetensors. Returns the files, which
    are durable.

    stores: of all ranks, as `StoreReader.of_run` takes them; with parts also of some. They are
        read at one state of the run, whether it was killed or trains.
    path: of the file. With parts, each rank has a file: "model.safetensors" becomes
        "model-00001-of-00004.safetensors" for rank 1 of four stores. With one store alone the path
        stays: so each rank can write its own, where its store is.
    parts: each store's own part, with its place in the metadata. Nothing is put together, and
        nothing copied that is contiguous. False: whole tensors, which need as much memory as those
        that lie in parts.
    optimizer: its state too, as "optim.state.<parameter>.<state>".
    mode: permissions.

    Raises: as `StoreReader.of_run`; FileExistsError; ModuleNotFoundError; TypeError naming tensors
        of a dtype that safetensors has not.
    """
    from pmstore.dcp._read.rank_stores import find
    from pmstore.dcp._read.state_keys import Prefixes

    chosen = find(stores)
    if parts:
        return _export_parts(chosen, Path(path), name, optimizer, mode)
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from pmstore.dcp._read.run_reader import open_run

    source = open_run(chosen, name, Prefixes())
    try:
        described = source.metadata().state_dict_metadata
        tensors: dict[str, Any] = {}
        for key, one in described.items():
            called = _called(key, optimizer)
            if called and key not in source.twins and isinstance(one, TensorStorageMetadata):
                tensors[called] = _put_together(source, key, one)
        write_safetensors(tensors, {}, path, mode)
    finally:
        source.close()
    return [Path(path)]


def _called(key: str, optimizer: bool) -> str:
    """Returns the name in a file for a key of a checkpoint; "" if it is not to be written."""
    kind, _, rest = key.partition(".")
    return rest if kind == "model" else key if kind == "optim" and optimizer else ""


def _put_together(source: Any, key: str, described: Any) -> torch.Tensor:
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex

    parts = [(one, MetadataIndex(key, one.offsets)) for one in described.chunks]
    if len(parts) == 1:
        tensor: torch.Tensor = source.chunk(parts[0][1])
        return tensor
    whole = torch.empty(described.size, dtype=described.properties.dtype, device="cpu")
    for one, index in parts:
        spans = zip(one.offsets, one.sizes, strict=True)
        whole[tuple(slice(at, at + size) for at, size in spans)].copy_(source.chunk(index))
    return whole


def _export_parts(
    chosen: list[str], path: Path, name: str, optimizer: bool, mode: int
) -> list[Path]:
    from pmstore.dcp._read.rank_stores import Ranks
    from pmstore.dcp._read.state_keys import Prefixes, listed
    from pmstore.torch._read.stored import StoredRun, StoredTensor, StoreHolding
    from pmstore.torch._state.sharded import chunk

    files = []
    with ExitStack() as stack:
        if len(chosen) == 1:
            stores = [stack.enter_context(open_store(chosen[0], "r"))]
        else:
            ranks = Ranks(chosen, name)
            stack.callback(ranks.close)
            stores = ranks.stores
        for number, store in enumerate(stores):
            run = StoredRun(StoreHolding(store), name)
            found = listed(run, Prefixes())
            tensors, places = {}, {}
            for key, one in found.items.items():
                called = _called(key, optimizer)
                if not called or key in found.twins or not isinstance(one, StoredTensor):
                    continue
                tensors[called] = one.read()
                if one.shard is not None:
                    offsets, sizes = chunk(one.shard)
                    places[called] = {**one.shard, "offsets": offsets, "sizes": sizes}
            said = {"state": [run.step, *_state_of(store, name)], "places": places}
            count = len(stores)
            ending = f"-{number:05}-of-{count:05}" if count > 1 else ""
            files.append(path.with_name(f"{path.stem}{ending}{path.suffix}"))
            write_safetensors(tensors, {PLACES: json.dumps(said)}, files[-1], mode)
    return files


def _state_of(store: Any, name: str) -> list[int]:
    """Returns the numbers that tell the state of a job from all others: job, term, number, mark."""
    from pmstore.objects.generations import decode

    numbers = store.get(f"{name}/job")
    if numbers is None:
        return []
    key = decode(numbers).key
    return [*key.job, key.term, key.number, key.mark]


# ---- import --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor that lies in a file."""

    file: Any
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def import_run(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    model: torch.nn.Module,
    *,
    strict: bool = True,
) -> None:
    """Copies parameters and buffers from safetensors into a model: from one file with whole
    tensors, of any program, or from files with parts, all that `export_run(parts=True)` wrote. The
    model may be sharded in another way, or not at all; each rank reads what it needs. Attached or
    not, its tensors stay where they are; dtypes are converted.

    strict: False: what is in one of the two alone is left.

    Raises: MismatchError: names or shapes differ; the model was not changed. MixedStoresError:
        files are of different states of a run, or a part is missing. CorruptStoreError: a file is
        damaged. FileNotFoundError, ModuleNotFoundError.
    """
    with optional:
        import torch
        from safetensors import safe_open
    from pmstore.torch._state.fsdp import reshard
    from pmstore.torch._state.sharded import chunk, local, record_of
    from pmstore.torch.run_errors import MismatchError

    given = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    with ExitStack() as stack:
        pieces: dict[str, list[_Piece]] = {}
        whole: dict[str, tuple[int, ...]] = {}
        state: Any = None
        for one in [os.fspath(path) for path in given]:
            with sound(one):
                file = stack.enter_context(safe_open(one, "pt"))
                said = json.loads((file.metadata() or {}).get(PLACES, "{}"))
                state = said.get("state") if state is None else state
                if state != said.get("state"):
                    raise MixedStoresError(f"{one} is of another state of the run than {given[0]}")
                for key in file.keys():  # no mapping  # noqa: SIM118
                    _note(file, key, said.get("places", {}).get(key), pieces, whole)
        reshard([model])
        tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        kept = model.state_dict(keep_vars=True)
        missing = [key for key in pieces if key not in tensors and not key.startswith("optim.")]
        unexpected = [key for key in kept if key in tensors and key not in pieces]
        both = [key for key in pieces if key in tensors]
        mismatched = [
            f"{key}: stored {whole[key]}, given {tuple(tensors[key].shape)}"
            for key in both
            if whole[key] != tuple(tensors[key].shape)
        ]
        if mismatched or (strict and (missing or unexpected)):
            raise MismatchError(
                "the model is not the one in the files",
                missing=missing if strict else (),
                unexpected=unexpected if strict else (),
                mismatched=mismatched,
            )
        for key in both:
            _check_whole(key, pieces[key], whole[key])
        with torch.no_grad():
            for key in both:
                record, part = record_of(tensors[key]), local(tensors[key])
                offsets = chunk(record)[0] if record else (0,) * part.dim()
                for piece in pieces[key]:
                    _copy(key, piece, part, offsets)


def _note(
    file: Any,
    key: str,
    place: Mapping[str, Any] | None,
    pieces: dict[str, list[_Piece]],
    whole: dict[str, tuple[int, ...]],
) -> None:
    """Notes a tensor of a file. Raises: CorruptStoreError; MixedStoresError: two files disagree
    about its size."""
    sizes = tuple(file.get_slice(key).get_shape())
    offsets, size = (0,) * len(sizes), sizes
    if place is not None:
        offsets, size = tuple(map(int, place["offsets"])), tuple(map(int, place["shape"]))
        inside = all(
            0 <= at <= at + part <= most
            for at, part, most in zip(offsets, sizes, size, strict=True)
        )
        if tuple(place["sizes"]) != sizes or not inside:
            raise CorruptStoreError(f"{key!r} does not lie where the file says")
    if whole.setdefault(key, size) != size:
        raise MixedStoresError(f"{key!r} is {size} in one file, and {whole[key]} in another")
    held = pieces.setdefault(key, [])
    if all(one.offsets != offsets or one.sizes != sizes for one in held):  # else it is replicated
        held.append(_Piece(file, offsets, sizes))


def _check_whole(key: str, pieces: Sequence[_Piece], size: tuple[int, ...]) -> None:
    """Checks that the files have all elements of a tensor. Raises: MixedStoresError."""
    there = sum(prod(one.sizes) for one in pieces)
    if there != prod(size):
        raise MixedStoresError(
            f"{key!r} has {prod(size):,} elements, and the files hold {there:,} of them: give the "
            "files of all ranks"
        )


def _copy(key: str, piece: _Piece, part: torch.Tensor, offsets: Sequence[int]) -> None:
    """Copies the elements that the piece and the part have in common."""
    if not part.dim():
        part.copy_(piece.file.get_tensor(key))
        return
    here, there = [], []
    for mine, size, its, length in zip(
        offsets, part.shape, piece.offsets, piece.sizes, strict=True
    ):
        first, after = max(mine, its), min(mine + size, its + length)
        if first >= after:
            return
        here.append(slice(first - mine, after - mine))
        there.append(slice(first - its, after - its))
    part[tuple(here)].copy_(piece.file.get_slice(key)[tuple(there)])
