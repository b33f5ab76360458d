"""What a program gives to `attach`, and how each of it is kept in the store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pmstore import Store
from pmstore.torch.errors import AttachError
from pmstore.torch.gradients import GradientKeeper
from pmstore.torch.loader import open_source
from pmstore.torch.loader_part import LoaderPart
from pmstore.torch.mirrored import MirroredModel, MirroredOptimizer, Pack
from pmstore.torch.model import ModelBinding
from pmstore.torch.optim.base import NativeOptimizer
from pmstore.torch.optimizer import OptimizerBinding, parameters_of
from pmstore.torch.place import Place
from pmstore.torch.rng import RngParts
from pmstore.torch.slotted import SlottedBinding
from pmstore.torch.stateful import Stateful, StatefulPart


@dataclass(frozen=True, slots=True)
class Program:
    """What a program gives to `attach`: each piece, or None."""

    model: nn.Module | None
    optimizer: Optimizer | None
    statefuls: dict[str, Stateful | None]
    """By their paths under the run's name."""
    loader: Iterable[Any] | None
    rng: bool
    mirrored: bool

    def given(self) -> dict[str, bool]:
        """Which pieces there are: stored with the run."""
        return {
            "model": self.model is not None,
            "optimizer": self.optimizer is not None,
            **{key: stateful is not None for key, stateful in self.statefuls.items()},
            "loader": self.loader is not None,
            "rng": self.rng,
            "mirror": self.mirrored,
        }


class Pieces:
    """What a run keeps in the store, beside its progress."""

    def __init__(self, store: Store, name: str, program: Program) -> None:
        """Touches neither store nor program.

        Raises: AttachError: something cannot be kept.
        """
        try:
            source = open_source(program.loader) if program.loader is not None else None
        except TypeError as error:
            raise AttachError(str(error)) from None
        self.model: ModelBinding | None = None
        self.optimizer: OptimizerBinding | None = None
        self.pack = Pack(store, f"{name}/mirror") if program.mirrored else None
        self._mirrored: list[MirroredModel | MirroredOptimizer] = []
        if self.pack is not None:
            self._mirror(store, name, program, self.pack)
        else:
            self._place(store, name, program)
        self.gradients = (
            GradientKeeper(store, f"{name}/gradients") if program.optimizer is not None else None
        )
        self.statefuls = [
            StatefulPart(store, f"{name}/{key}", one)
            for key, one in program.statefuls.items()
            if one is not None
        ]
        self.rng = RngParts(store, f"{name}/rng") if program.rng else None
        self.loader = LoaderPart(store, f"{name}/loader", source) if source is not None else None

    def _place(self, store: Store, name: str, program: Program) -> None:
        """Model and optimizer in the heap."""
        model, optimizer = program.model, program.optimizer
        if model is not None:
            kept = parameters_of(optimizer) if isinstance(optimizer, NativeOptimizer) else []
            self.model = ModelBinding(store, f"{name}/model", model, kept)
        path = f"{name}/optimizer"
        if isinstance(optimizer, NativeOptimizer):
            self.optimizer = SlottedBinding(store, path, optimizer, self.model, model)
        elif optimizer is not None:
            self.optimizer = OptimizerBinding(store, path, optimizer, self.model)

    def _mirror(self, store: Store, name: str, program: Program, pack: Pack) -> None:
        """Model and optimizer where they are."""
        model = optimizer = None
        if program.model is not None:
            self.model = model = MirroredModel(store, f"{name}/model", program.model)
            self._mirrored.append(model)
        if program.optimizer is not None:
            path = f"{name}/optimizer"
            self.optimizer = optimizer = MirroredOptimizer(
                store, path, program.optimizer, model, pack
            )
            self._mirrored.append(optimizer)

    @property
    def bindings(self) -> list[ModelBinding | OptimizerBinding]:
        return [one for one in (self.model, self.optimizer) if one is not None]

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        named = self.model.parameters if self.model is not None else []
        return named + (self.optimizer.extra_parameters if self.optimizer is not None else [])

    # ---- into the store; pending until the next commit

    def create(self, place: Place) -> None:
        """Everything of a new run. The program is untouched until it is bound."""
        for binding in self.bindings:
            binding.write()
        self._write_rest(place)

    def write(self, place: Place) -> None:
        """Everything that Python holds and the store does not yet."""
        self.follow()
        if self.model is not None:
            self.model.take_in()
        if self.optimizer is not None:
            self.optimizer.sync()
        self._write_rest(place)

    def _write_rest(self, place: Place) -> None:
        """Everything but model and optimizer, and the tensors of those that are mirrored."""
        if self.pack is not None:
            self.pack.write([one for binding in self._mirrored for one in binding.tensors()])
        if self.gradients is not None:
            self.gradients.write(self.parameters())
        for stateful in self.statefuls:
            stateful.write()
        if self.rng is not None:
            self.rng.write()
        if self.loader is not None:
            self.loader.write(place)

    def follow(self) -> None:
        """Notices parameters that are other objects now."""
        if self.optimizer is not None:
            self.optimizer.take_in()
        if self.model is not None:
            replaced = self.model.follow()
            if replaced and self.optimizer is not None:
                self.optimizer.replace(replaced)

    # ---- out of the store

    def check(self) -> None:
        """Compares with what is stored. Changes nothing. Raises: MismatchError."""
        for binding in self.bindings:
            binding.check()
        if self.loader is not None:
            self.loader.check()

    def restore(self, *, opened: bool) -> None:
        """Sets all but the place in the data and the default generators to what the last commit
        holds. opened: the optimizer's binding is."""
        if self.model is not None:
            self.model.bind()
        if self.pack is not None:
            held = self.pack.open()
            for binding in self._mirrored:
                binding.load(held)
        if self.optimizer is not None:
            if not opened:
                self.optimizer.open()
            self.optimizer.restore()
        if self.gradients is not None:
            self.gradients.restore(self.parameters())
        for stateful in self.statefuls:
            stateful.restore()
