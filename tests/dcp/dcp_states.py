"""State dicts whose values say where they come from, for tests of checkpoints.

Every function makes the same global values for the same `number`, on however many ranks: what a
rank holds of them depends on the mesh alone. So what was saved by some ranks is compared, bit for
bit, with what others make themselves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("complex64", "complex128", "bool", "int64", "int32", "int16", "int8"),
    *("uint8", "uint16", "uint32", "uint64"),
)


def values(number: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Other ones for another number; small whole numbers, which all dtypes but bool tell apart."""
    flat = (torch.arange(math.prod(shape)) * 7 + number) % 13 + number % 3
    return flat.reshape(shape).to(dtype)


def pair_mesh() -> DeviceMesh:
    """Two dimensions: 4 ranks are 2 x 2, 1 to 3 are one row."""
    world = dist.get_world_size()
    shape = (2, 2) if world == 4 else (1, world)
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))


def dealt(number: int, mesh: DeviceMesh, placements: list[Placement], *shape: int) -> DTensor:
    return distribute_tensor(values(number, *shape), mesh, placements, src_data_rank=None)


def plain(number: int) -> dict[str, Any]:
    """The same on every rank, but for what only one rank has."""
    of_dtypes = {name: values(number, 3, 5, dtype=getattr(torch, name)) for name in DTYPES}
    rank = dist.get_rank()
    return {
        "dtypes": of_dtypes,
        "scalar": torch.tensor(float(number)),
        "empty": torch.empty(0, 3),
        "turned": values(number, 4, 6).t(),
        "strided": values(number, 8, 6)[::2, 1::2],
        "large": values(number, 300, 1000),
        "channels": values(number, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        "nested": {"list": [values(number, 3), {"deep": values(number, 2, 2)}], "number": number},
        "words": f"stage {number}",
        "nothing": None,
        "pair": (number, 0.5),
        **({"of the first rank": values(number, 4)} if rank == 0 else {}),
    }


def sharded(number: int) -> dict[str, Any]:
    """DTensors on a mesh of one dimension: even, uneven, and empty at some ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = {f"rows {n}": dealt(number, mesh, [Shard(0)], n, 3) for n in (0, 1, 2, 5, 12)}
    columns = {f"columns {n}": dealt(number, mesh, [Shard(1)], 4, n) for n in (1, 7, 12)}
    return {
        **rows,
        **columns,
        "deep": dealt(number, mesh, [Shard(2)], 2, 3, 5),
        "whole": dealt(number, mesh, [Replicate()], 4, 3),
        "large": dealt(number, mesh, [Shard(0)], 1001, 300),
        "flat": dealt(number, mesh, [Shard(0)], 7),
    }


def changing(number: int) -> dict[str, Any]:
    """Sharded differently in every stage: by rows, by columns, whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kinds: list[Placement] = [Shard(0), Shard(1), Replicate()]
    turn = dist.get_world_size() % 3
    return {f"{i}": dealt(number, mesh, [kinds[(i + turn) % 3]], 7, 5) for i in range(3)}


def twice_sharded(number: int) -> dict[str, Any]:
    """DTensors on a mesh of two dimensions."""
    mesh = pair_mesh()
    both: dict[str, list[Placement]] = {
        "rows and columns": [Shard(0), Shard(1)],
        "columns and rows": [Shard(1), Shard(0)],
        "rows twice": [Shard(0), Shard(0)],
        "hybrid": [Replicate(), Shard(0)],
        "inner whole": [Shard(1), Replicate()],
        "whole": [Replicate(), Replicate()],
    }
    return {name: dealt(number, mesh, dims, 7, 5) for name, dims in both.items()}


# ---- models ----


class Network(nn.Module):
    """Sizes that no number of ranks divides, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 2, bias=False)


def _fill(tensor: torch.Tensor, number: int) -> None:
    whole = values(number, *tensor.shape).abs()
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            dealt = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            tensor.to_local().copy_(dealt.to_local())
        else:
            tensor.copy_(whole)


Trained = tuple[nn.Module, torch.optim.Optimizer]


def _trained(network: nn.Module, number: int) -> Trained:
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.125, betas=(0.5, 0.25))
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    network.zero_grad()
    for i, (_, parameter) in enumerate(network.named_parameters()):
        _fill(parameter, number + i)
        optimizer.state[parameter]["step"].fill_(number)
        _fill(optimizer.state[parameter]["exp_avg"], number + i + 1)
        _fill(optimizer.state[parameter]["exp_avg_sq"], number + i + 2)
    for i, (_, buffer) in enumerate(network.named_buffers()):
        _fill(buffer, number + i) if buffer.ndim else buffer.fill_(number)
    return network, optimizer


def fsdp(number: int) -> Trained:
    network = Network()
    fully_shard(network.first)
    fully_shard(network)
    return _trained(network, number)


def hsdp(number: int) -> Trained:
    """Whole copies along "outer", each sharded along "inner"."""
    network = Network()
    fully_shard(network, mesh=pair_mesh())
    return _trained(network, number)


def parallel(number: int) -> Trained:
    """Tensor-parallel along "inner", sharded along "outer"."""
    network, mesh = Network(), pair_mesh()
    layers = {"first": RowwiseParallel(), "last": ColwiseParallel()}
    parallelize_module(network, mesh["inner"], layers)
    fully_shard(network, mesh=mesh["outer"])
    return _trained(network, number)


def states(trained: Trained) -> dict[str, Any]:
    model, optimizer = get_state_dict(*trained)
    return {"model": model, "optimizer": optimizer}


def take(trained: Trained, loaded: dict[str, Any]) -> None:
    set_state_dict(*trained, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])


# ---- comparing ----


def differences(found: Any, wanted: Any, name: str = "") -> list[str]:
    """What of two state dicts is not the same, on this rank."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict) or found.keys() != wanted.keys():
            return [f"{name}: other keys"]
        return [d for key in wanted for d in differences(found[key], wanted[key], f"{name}/{key}")]
    if isinstance(wanted, list | tuple):
        if type(found) is not type(wanted) or len(found) != len(wanted):
            return [f"{name}: {found!r} is not {wanted!r}"]
        pairs = zip(found, wanted, strict=True)
        return [d for i, both in enumerate(pairs) for d in differences(*both, f"{name}/{i}")]
    if isinstance(wanted, DTensor):
        if not isinstance(found, DTensor) or found.placements != wanted.placements:
            return [f"{name}: dealt otherwise"]
        return differences(found.to_local(), wanted.to_local(), name)
    if isinstance(wanted, torch.Tensor):
        same = isinstance(found, torch.Tensor) and found.dtype == wanted.dtype
        if not same or not torch.equal(_bytes(found), _bytes(wanted)):
            return [f"{name}: {found} is not {wanted}"]
        return []
    return [] if found == wanted else [f"{name}: {found!r} is not {wanted!r}"]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
