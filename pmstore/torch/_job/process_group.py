"""Which processes train one model together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pmstore import Store
from pmstore._base.ranks import launched
from pmstore._engine.failures import in_doubt
from pmstore.job.peers import Peers, checked_timeout
from pmstore.torch._state.sharded import is_sharded
from pmstore.torch.program import Program
from pmstore.torch.run_errors import AttachError

_warned = False


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks that train together, each with a store of its own: all resume at the same step.

    Attributes:
        process_group: of torch.distributed, or "world": all ranks. It may be of any backend; a
            group of gloo's is made beside it.
        timeout: seconds that ranks wait for each other, in attach and at a commit.

    Raises: TypeError, ValueError.
    """

    process_group: Any = "world"
    timeout: float = 300.0

    def __post_init__(self) -> None:
        checked_timeout(self.timeout)
        named = isinstance(self.process_group, str)
        if self.process_group is None or (named and self.process_group != "world"):
            raise TypeError(
                f"process_group={self.process_group!r}: 'world', or a group of torch.distributed"
            )

    def peers(self) -> Peers:
        """Raises: AttachError, PeerLostError."""
        try:
            peers = Peers(self.process_group, self.timeout)
        except ValueError as error:
            raise AttachError(str(error)) from error
        if peers.rank == 0 and restarts_will_fail(os.environ):
            warnings.warn(
                "torchrun is to start this job again if a rank dies (--max-restarts), but keeps "
                "the addresses of dead ranks: most restarts will fail or hang in "
                "init_process_group. Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in "
                "its environment, and with --standalone or --rdzv-backend=c10d",
                RuntimeWarning,
                stacklevel=3,
            )
        return peers


def job_of(job: Job | None, process_group: Any) -> Job | None:
    """What attach was given, in its long or its short form.

    Raises: TypeError: in both.
    """
    if job is not None and not isinstance(job, Job):
        raise TypeError(f"job is a pmstore.torch.Job(process_group, timeout), not {job!r}")
    if job is not None and process_group is not None:
        raise TypeError("attach takes process_group=, or job=Job(process_group, timeout)")
    return Job(process_group) if process_group is not None else job


def check_ranks(program: Program, ranks: Sequence[int]) -> None:
    """ranks: of the job. Raises: AttachError: this process trains together with others too, which
    would resume at a step of their own."""
    for what, together in _trained_with(program):
        missing = sorted(set(together) - set(ranks))
        if missing:
            raise AttachError(
                f"{what} trains the ranks {_listed(together)} together, and the group given to "
                f"attach has {_listed(ranks)}: after a crash {_listed(missing)} would go on from "
                "another step. Give attach a group of all that train together: "
                "process_group='world', at all ranks"
            )


def _trained_with(program: Program) -> Iterator[tuple[str, list[int]]]:
    """What says which ranks train together, as far as it can be seen: wrappers, and the meshes of
    DTensors."""
    for model in program.models.values():
        for module in model.modules():
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                yield "DistributedDataParallel", dist.get_process_group_ranks(module.process_group)
    for tensor in program.tensors():
        if is_sharded(tensor):
            mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
            yield f"a mesh of shape {tuple(mesh.shape)}", sorted(mesh.mesh.flatten().tolist())


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def restarts_will_fail(environment: Mapping[str, str]) -> bool:
    """Whether torchrun would start ranks again that share a store of addresses with dead ones."""
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shared and environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def leave_job(store: Store, name: str) -> Callable[[], None] | None:
    """The run is attached alone. Returns what takes it out of its job, if it is in one; pending.

    Raises: InDoubtError: the ranks of its job may have to go back.
    """
    if store._core.pool.in_doubt:
        raise in_doubt(store.path, "a run is not attached alone meanwhile")
    record = f"{name}/job"
    if record not in store:
        return None
    warnings.warn(
        f"the run {name!r} was made by a job of several ranks, and is attached without "
        "process_group: it leaves the job, and the other ranks' stores cannot go on with it",
        RuntimeWarning,
        stacklevel=3,
    )
    return partial(store.__delitem__, record)


def warn_of_ranks() -> None:
    """Once, where a process of several ranks attaches without saying so."""
    global _warned
    rank, world = _place()
    if _warned or world < 2:
        return
    _warned = True
    warnings.warn(
        f"this process is rank {rank} of {world}, and attach was not told: after a crash each rank "
        "goes on from its own last commit, and these may be of different steps. Write "
        "attach(..., process_group='world'), at all ranks, each with a store of its own",
        RuntimeWarning,
        stacklevel=4,
    )


def _place() -> tuple[int, int]:
    """Rank and how many there are, as torch knows them, or a launcher says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return launched()
