"""Moving a training program into a store, or binding it to the run that is there."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from pmstore import Store
from pmstore.base.alive import alive
from pmstore.errors import TransactionError
from pmstore.scheduler import CommitPolicy, CommitScheduler
from pmstore.torch.errors import AttachError, MismatchError, TornStepError, records
from pmstore.torch.gradients import GradientKeeper
from pmstore.torch.loader import open_source
from pmstore.torch.mirrored import MirroredModel, MirroredOptimizer, Pack, wants_mirror
from pmstore.torch.model import ModelBinding, encode_name
from pmstore.torch.optim.base import NativeOptimizer
from pmstore.torch.optimizer import OptimizerBinding
from pmstore.torch.part import Part
from pmstore.torch.rng import RngParts
from pmstore.torch.run import MIDSTEP, Pieces, Run
from pmstore.torch.slotted import SlottedBinding
from pmstore.torch.stateful import Stateful, StatefulPart, as_stateful, extra_state

__all__ = ["attach"]

_FORMAT = 1
_runs: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
# model or optimizer -> its run
_trained: weakref.WeakKeyDictionary[Any, weakref.ref[Run]] = weakref.WeakKeyDictionary()


def attach(
    store: Store,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    lr_scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    loader: Iterable[Any] | None = None,
    stateful: Mapping[str, Stateful | torch.Generator] | None = None,
    policy: CommitPolicy | CommitScheduler | None = None,
    tiers: Sequence[str] = (),
    name: str = "run",
    rng: bool = True,
    mirror: bool | None = None,
) -> Run:
    """Puts a training run's state into the store, or goes on with the run that is stored there.

    The first time, parameters, buffers and optimizer state are copied into the heap under the group
    `name`, and committed together with everything else a run depends on. When the store holds a run
    of that name, the program's tensors are bound to the stored ones: no data is read or copied, and
    what they held before is dropped.

    Either way every parameter, buffer and state tensor stays the object it is; its memory (`.data`)
    is the heap from now on, for as long as the tensor lives (after the store is closed: a private
    copy of it). Tied parameters stay tied.

    Tensors on an accelerator are mirrored instead: they stay where they are, a commit copies
    parameters, buffers and optimizer state into slots of the store (see `Store.mirror`), while the
    program goes on if it is `run.commit(wait=False)`; a resume and a roll back copy them back.

    Args:
        store: open for writing.
        mirror: True: mirror the tensors, also those on the CPU, which are then not in the heap.
            None: if any parameter is on an accelerator.
        model: on the CPU or, mirrored, on cuda. What its modules' `get_extra_state` returns is kept
            too.
        optimizer: state that it makes later is moved in as it appears.
        lr_scheduler, scaler: anything with state_dict and load_state_dict whose state is data.
        stateful: what else the run depends on, under names of its own: generators, moving averages
            of weights, metrics, a second optimizer (whose state is then copied at each step, not in
            the heap).
        loader: what `run.batches` iterates: a DataLoader, a list of batches, or anything that can
            be iterated again.
        policy: when to commit: a rule of `pmstore.scheduler` (EveryN, Young,
            ConvergenceAware("time"), ...), for which a scheduler is made that keeps its state in
            this store; or a CommitScheduler of your own, whose targets call `store.commit`; None:
            at every step.
        tiers: names of tiers of the store (`store.add_tier`) that the run flushes to, fastest
            first. With `ConvergenceAware` the scheduler decides when, for each; with another rule
            of pmstore or none, each is flushed after a commit whenever it is idle (after one with
            `wait=False`: at the next). Those with `every` flush by themselves.
        name: of the run's group in the store; several runs can share a store.
        rng: keep the default generators of Python, numpy and torch too. Without it a resumed run is
            not bit for bit the same where anything is random.

    Raises:
        AttachError: something cannot be moved (another device, no data yet), or is attached
            already.
        MismatchError: the stored run is one of another model, optimizer or other pieces; it lists
            the differences.
        CorruptStoreError: what is stored is not as a run was stored: the store is damaged, or its
            names were changed.
        TornStepError: the last commit was made in the middle of a step.
        TransactionError: inside a transaction of the store.
        StoreFullError: no room.
        In every case store and program are as before.
    """
    if policy is not None and not isinstance(policy, (CommitScheduler, CommitPolicy)):
        raise TypeError(
            "policy is a rule of pmstore.scheduler, such as EveryN(100) or "
            'ConvergenceAware("time"), or a CommitScheduler, '
            f"not {policy!r}"
        )
    _refuse_twice(store, name, model, optimizer)
    unknown = [tier for tier in tiers if tier not in store.tiers]
    if unknown:
        raise AttachError(
            f"the store has no tier {unknown[0]!r}: store.add_tier({unknown[0]!r}, url) adds one"
        )
    if store.in_transaction:
        raise TransactionError(
            "attach inside a transaction of the store: call it outside, it commits by itself"
        )
    if store.mode == "r":
        raise AttachError(
            "the store is open for reading, and a run writes: open it with mode='r+'. To read a "
            f"stored model, use store['{name}/model'], which maps names to tensors"
        )
    statefuls: dict[str, Stateful | None] = {
        "lr_scheduler": lr_scheduler,
        "scaler": scaler,
        "model_extra_state": extra_state(model),
        **{
            f"stateful/{encode_name(key)}": as_stateful(key, one)
            for key, one in (stateful or {}).items()
        },
    }
    mirrored = wants_mirror(model, optimizer) if mirror is None else mirror
    pieces = _pieces(store, name, model, optimizer, statefuls, loader, rng, mirrored)
    given = {
        "model": model is not None,
        "optimizer": optimizer is not None,
        **{key: stateful is not None for key, stateful in statefuls.items()},
        "loader": loader is not None,
        "rng": rng,
        "mirror": mirrored,
    }
    run = (_resume if f"{name}/about" in store else _begin)(store, name, pieces, given)
    try:
        run._schedule(policy, tuple(tiers))
    except BaseException:
        run.detach()
        raise
    _runs[id(run)] = run
    for piece in (model, optimizer):
        if piece is not None:
            _trained[piece] = weakref.ref(run)
    return run


def _pieces(
    store: Store,
    name: str,
    model: nn.Module | None,
    optimizer: Optimizer | None,
    statefuls: dict[str, Stateful | None],
    loader: Iterable[Any] | None,
    rng: bool,
    mirrored: bool,
) -> Pieces:
    """What will be kept, without touching store or program."""
    try:
        source = open_source(loader) if loader is not None else None
    except TypeError as error:
        raise AttachError(str(error)) from None
    pack = Pack(store, f"{name}/mirror") if mirrored else None
    bindings = (
        _bindings(store, name, model, optimizer)
        if pack is None
        else _mirrored(store, name, model, optimizer, pack)
    )
    return Pieces(
        progress=np.zeros(4, np.int64),  # a stand-in for the stored one
        model=bindings[0],
        optimizer=bindings[1],
        statefuls=[
            StatefulPart(store, f"{name}/{key}", one)
            for key, one in statefuls.items()
            if one is not None
        ],
        rng=RngParts(store, f"{name}/rng") if rng else None,
        gradients=GradientKeeper(store, f"{name}/gradients") if optimizer is not None else None,
        source=source,
        start=Part(store, f"{name}/loader/start") if source else None,
        generators=Part(store, f"{name}/loader/generators") if source else None,
        pack=pack,
    )


def _bindings(
    store: Store, name: str, model: nn.Module | None, optimizer: Optimizer | None
) -> tuple[ModelBinding | None, OptimizerBinding | None]:
    slotted = isinstance(optimizer, NativeOptimizer)
    kept = (
        [one for group in optimizer.param_groups for one in group["params"]]
        if optimizer is not None and slotted
        else []
    )
    binding = ModelBinding(store, f"{name}/model", model, kept) if model is not None else None
    path = f"{name}/optimizer"
    if optimizer is None:
        return binding, None
    if isinstance(optimizer, NativeOptimizer):
        return binding, SlottedBinding(store, path, optimizer, binding, model)
    return binding, OptimizerBinding(store, path, optimizer, binding)


def _mirrored(
    store: Store, name: str, model: nn.Module | None, optimizer: Optimizer | None, pack: Pack
) -> tuple[MirroredModel | None, MirroredOptimizer | None]:
    binding = MirroredModel(store, f"{name}/model", model) if model is not None else None
    path = f"{name}/optimizer"
    return binding, MirroredOptimizer(
        store, path, optimizer, binding, pack
    ) if optimizer is not None else None


def _begin(store: Store, name: str, pieces: Pieces, given: dict[str, bool]) -> Run:
    """A new run. The program is bound after the commit: if that fails, it has not been touched."""
    with store.transaction():
        pieces.progress = store.zeros(f"{name}/progress", (4,), "int64")
        for binding in (pieces.model, pieces.optimizer):
            if binding is not None:
                binding.write()
        run = Run(store, name, pieces, resumed=False)
        run._write_rest(0)
        store[f"{name}/about"] = {
            "format": _FORMAT,
            "torch": str(torch.__version__),
            "pieces": given,
        }
    run._bind()
    return run


def _resume(store: Store, name: str, pieces: Pieces, given: dict[str, bool]) -> Run:
    """The stored run. Everything is compared before the program is touched."""
    with records(store.path, name):
        _check_about(store, name, given)
        progress = store[f"{name}/progress"]
        if not isinstance(progress, np.ndarray) or (progress.shape, progress.dtype) != (
            (4,),
            np.dtype(np.int64),
        ):
            raise ValueError(f"{name}/progress is not four numbers")
        pieces.progress = progress
        if pieces.progress[MIDSTEP]:
            raise TornStepError(
                f"the last commit of {name!r} was made in the middle of a training step (after "
                "run.detach(), or by another thread's transaction, between optimizer.step() and "
                "run.commit()), so that what the step had not yet written is lost. The tensors "
                f"under {name}/model are whole: load them into a new run, or restore an older state"
            )
        bindings = [binding for binding in (pieces.model, pieces.optimizer) if binding is not None]
        for binding in bindings:
            binding.check()
        _check_generators(store, name, pieces.source)
        for binding in bindings:
            binding.open()
        run = Run(store, name, pieces, resumed=True)
        run._bind()
    if pieces.optimizer is not None and run.step:
        # What a scheduler of this process would otherwise take for a call in the wrong order, and
        # warn.
        pieces.optimizer.optimizer._opt_called = True  # type: ignore[attr-defined]
    return run


def _refuse_twice(
    store: Store, name: str, model: nn.Module | None, optimizer: Optimizer | None
) -> None:
    if not name or not isinstance(name, str):
        raise AttachError(f"name is the name of the run's group in the store, not {name!r}")
    for run in alive(_runs):
        if run.attached and run.store is store and run.name == name:
            raise AttachError(
                f"the run {name!r} of this store is attached already: use that Run, or call its "
                "detach() first"
            )
    for what, piece in (("model", model), ("optimizer", optimizer)):
        run_of = _trained.get(piece) if piece is not None else None
        other = run_of() if run_of is not None else None
        if other is not None and other.attached:
            raise AttachError(
                f"the {what} is attached already, as {other.name!r}: its memory can be in one "
                "place only. Call that Run's detach() first"
            )
    mine = {id(one) for one in model.parameters()} if model is not None else set()
    if optimizer is not None:
        mine.update(id(one) for group in optimizer.param_groups for one in group["params"])
    for run in alive(_runs):
        shared = (
            next((key for key, one in run._parameters() if id(one) in mine), None)
            if run.attached
            else None
        )
        if shared is not None:
            raise AttachError(
                f"the parameter {shared!r} is attached already, with another model or optimizer, "
                f"as {run.name!r}: its memory can be in one place only. Call that Run's detach() "
                "first"
            )


def _check_about(store: Store, name: str, given: dict[str, bool]) -> None:
    about = store[f"{name}/about"]
    if about["format"] != _FORMAT:
        raise AttachError(
            f"the stored run {name!r} has format {about['format']}, this version of pmstore reads "
            f"{_FORMAT}: use the version that wrote it"
        )
    stored = about["pieces"]
    missing = [piece for piece, there in stored.items() if there and not given.get(piece)]
    unexpected = [piece for piece, there in given.items() if there and not stored.get(piece)]
    if missing or unexpected:
        raise MismatchError(
            f"the stored run {name!r} has other pieces than were given to attach",
            missing=missing,
            unexpected=unexpected,
        )


def _check_generators(store: Store, name: str, source: Any) -> None:
    if source is None:
        return
    stored = len(Part(store, f"{name}/loader/generators").read())
    if stored != len(source.generators):
        raise MismatchError(
            "the loader is not the one whose place is stored",
            mismatched=[
                f"it has {len(source.generators)} generators of its own, the stored one {stored}"
            ],
        )
