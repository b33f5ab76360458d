"""Tensors of which each rank has a part (DTensors): the part that is here, and what says which part
it is.

A *shard record* is plain data, stored beside the block that holds the local part, so that a
program without the ranks can put the parts of several stores together:

    shape, stride   of the whole tensor
    dtype           "float32"
    mesh            shape of the device mesh
    names           of its dimensions, or None
    ranks           global ranks of the mesh, flat, in the order of its coordinates
    placements      one for each dimension of the mesh: ["shard", dim], ["replicate"],
                    ["strided", dim, split_factor]; of a kept gradient ["partial", reduction] too
    coordinate      of this rank in the mesh
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

ShardRecord: TypeAlias = dict[str, Any]
HOW_TO_RESHARD = (
    "to go on with other ranks, meshes or placements, begin a new run from the stored one: "
    "dcp.load(state, storage_reader=pmstore.dcp.StoreReader.of_run([the stores of all ranks])), "
    "then attach with new stores"
)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. Costs nothing where no program has any."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose bytes are here: of a DTensor its part, else the tensor itself."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter or not is_sharded(tensor):
        return tensor  # the usual case
    return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]


def version(tensor: torch.Tensor) -> int:
    """What grows with each write in place. Writes through a DTensor and writes into its part are
    counted apart by torch."""
    part = local(tensor)
    return tensor._version if part is tensor else tensor._version + part._version


# ---- records -------------------------------------------------------------------------------------


def record_of(tensor: torch.Tensor) -> ShardRecord | None:
    """None: it is no DTensor. Raises: ValueError: a placement that a store has no word for."""
    if not is_sharded(tensor):
        return None
    whole: DTensor = tensor  # type: ignore[assignment]
    mesh = whole.device_mesh
    return {
        "shape": list(whole.shape),
        "stride": list(whole.stride()),
        "dtype": str(whole.dtype).removeprefix("torch."),
        "mesh": list(mesh.shape),
        "names": list(mesh.mesh_dim_names) if mesh.mesh_dim_names else None,
        "ranks": mesh.mesh.flatten().tolist(),
        "placements": [_encoded(one) for one in whole.placements],
        "coordinate": list(mesh.get_coordinate() or ()),
    }


def _encoded(placement: Placement) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if type(placement) is _StridedShard:
        return ["strided", placement.dim, int(placement.split_factor)]
    if type(placement) is Shard:
        return ["shard", placement.dim]
    if type(placement) is Replicate:
        return ["replicate"]
    if type(placement) is Partial:
        return ["partial", placement.reduce_op]
    raise ValueError(f"the placement {placement} is none that a store has a word for")


def _decoded(placement: Sequence[Any]) -> Placement:
    """Raises: ValueError."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kind, *rest = placement
    if kind == "strided":
        return _StridedShard(rest[0], split_factor=rest[1])
    if kind == "shard":
        return Shard(rest[0])
    if kind == "replicate":
        return Replicate()
    if kind == "partial":
        return Partial(rest[0])
    raise ValueError(f"a stored tensor has a placement that this version does not know: {kind!r}")


def chunk(record: ShardRecord) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which part of the whole tensor the block is: offsets and sizes, one of each for a dimension,
    as `compute_local_shape_and_global_offset` of torch says it. Needs no process group. An empty
    part has size 0, and lies behind the end.

    Raises: ValueError: the part is not one stretch in every dimension (`_StridedShard` can deal out
        rows in turns), or the record is damaged.

    >>> chunk({"shape": [5, 3], "mesh": [2], "coordinate": [1], "placements": [["shard", 0]]})
    ((3, 0), (2, 3))
    """
    shape, mesh, coordinate = record["shape"], record["mesh"], record["coordinate"]
    placements = record["placements"]
    if not len(mesh) == len(coordinate) == len(placements):
        raise ValueError("a shard record has as many placements as its mesh has dimensions")
    here: list[Sequence[int]] = [range(size) for size in shape]
    for (kind, *rest), count, rank in zip(placements, mesh, coordinate, strict=True):
        if kind == "shard":
            here[rest[0]] = _part(here[rest[0]], count, rank)
        elif kind == "strided":
            dim, factor = rest
            parts = [_part(_part(here[dim], factor, piece), count, rank) for piece in range(factor)]
            parts = [part for part in parts if part]
            whole = all(one[-1] + 1 == two[0] for one, two in pairwise(parts))
            if whole and parts and isinstance(here[dim], range):
                here[dim] = range(parts[0][0], parts[-1][-1] + 1)
            else:
                here[dim] = [index for part in parts for index in part]
        elif kind != "replicate":
            raise ValueError(f"a tensor that is {kind} has no parts that could be put together")
    for dim, index in enumerate(here):
        if index and index[-1] - index[0] != len(index) - 1:
            raise ValueError(
                f"the rows of dimension {dim} that are at {coordinate} are no single stretch: "
                f"{describe(record)}"
            )
    offsets = (index[0] if index else size for index, size in zip(here, shape, strict=True))
    return tuple(offsets), tuple(map(len, here))


def _part(index: Sequence[int], count: int, which: int) -> Sequence[int]:
    """Returns the part that `torch.chunk` cuts."""
    size = -(-len(index) // count)
    return index[size * which : size * (which + 1)]


def describe(record: ShardRecord | None) -> str:
    """Says for a message what is sharded over what.

    >>> describe(
    ...     {
    ...         "shape": [4, 3],
    ...         "dtype": "float32",
    ...         "mesh": [2],
    ...         "names": ["dp"],
    ...         "ranks": [0, 1],
    ...         "placements": [["shard", 0]],
    ...         "coordinate": [1],
    ...     }
    ... )
    '(4, 3) float32 as [Shard(0)] over a mesh (2,) of dp, at [1]'
    """
    if record is None:
        return "a tensor that is whole"
    said = ", ".join(
        f"{kind.capitalize()}({', '.join(map(str, rest))})" if rest else kind.capitalize()
        for kind, *rest in record["placements"]
    )
    names = f" of {', '.join(record['names'])}" if record["names"] else ""
    mesh = tuple(record["mesh"])
    ranks = list(record["ranks"])
    which = "" if ranks == list(range(len(ranks))) else f" of ranks {ranks}"
    return (
        f"{tuple(record['shape'])} {record['dtype']} as [{said}] over a mesh {mesh}{names}{which}"
        f", at {record['coordinate']}"
    )


# ---- tensors -------------------------------------------------------------------------------------


def as_recorded(part: torch.Tensor, record: ShardRecord | None, like: torch.Tensor) -> torch.Tensor:
    """A tensor over `part`, as the record says: a DTensor on the mesh of `like`; None: itself.

    Raises: ValueError: `like` lies on another mesh.
    """
    if record is None:
        return part
    from torch.distributed.tensor import DTensor

    beside = record_of(like)
    same = ("mesh", "names", "ranks")
    if beside is None or any(beside[key] != record[key] for key in same):
        raise ValueError(f"stored {describe(record)}, beside {describe(beside)}: other meshes")
    return DTensor.from_local(
        part,
        like.device_mesh,  # type: ignore[attr-defined]
        [_decoded(one) for one in record["placements"]],
        run_check=False,
        shape=torch.Size(record["shape"]),
        stride=tuple(record["stride"]),
    )
