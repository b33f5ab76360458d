"""How each piece that a program gives to `attach` is kept in the store."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pmstore import Store
from pmstore._engine._binding import Watch
from pmstore.objects.core import in_heap
from pmstore.torch._data.loader_part import LoaderPart
from pmstore.torch._data.position import Place
from pmstore.torch._data.source_choice import open_source
from pmstore.torch._random.defaults import RngPart
from pmstore.torch._state.gradients import GradientKeeper
from pmstore.torch._state.model import ModelBinding
from pmstore.torch._state.module_attributes import AttributesPart, is_computed
from pmstore.torch._state.optimizer import OptimizerBinding
from pmstore.torch._state.optimizer_state import parameters_of
from pmstore.torch._state.placement import InHeap, Mirrored, Placement
from pmstore.torch._state.requires_grad import Parameters, TrainablePart
from pmstore.torch._state.sharded import is_sharded, local
from pmstore.torch._state.stateful import Stateful, StatefulPart
from pmstore.torch.changes import SAME, all_of, asking
from pmstore.torch.held_objects import HeldObjects
from pmstore.torch.program import Program
from pmstore.torch.run_errors import AttachError
from pmstore.torch.wrappers import inner_optimizers


class Part(Protocol):
    """One thing that a run keeps. What this class declares a run asks of every part alike. The
    other words mean the same in each part that has the need for them:

    create   of a new run: what the program gives goes into the store; pending
    check    compares what is stored with what the program gives; changes nothing
    fit      of an edited program: makes what is stored fit; pending
    open     finds what is stored
    bind     the program's tensors become the store's
    capture  what has changed goes into the store; pending
    restore  the program becomes what the last commit holds
    release  the program's objects stay as they are, and the run lets go of them
    watch    sees whether `capture` has anything to write; None: nobody knows without it
    """

    @property
    def watch(self) -> Watch | None: ...

    def capture(self) -> None: ...

    def restore(self) -> None: ...


_SHARED = (
    "the {} shared its memory with another tensor, such as a view, tensor.data, one of a "
    "state_dict(), or one that was loaded with assign=True. attach has moved it into the store, "
    "and the other one stays where it was: neither sees any more what is written to the other. If "
    "the program uses that one, take it after attach; else del it before"
)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return local(tensor).untyped_storage()


def _is_left_behind(_: str, tensor: torch.Tensor, before: Any) -> bool:
    """Whether the tensor lies elsewhere now, and its memory is still used. before: a weak reference
    to it."""
    return _storage(tensor)._cdata != before.cdata and not before.expired()


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
        self._store = store
        self._name = name
        self.modules: list[torch.nn.Module] = list(program.models.values())
        kind = Mirrored if program.mirrored else InHeap
        placement: Placement = kind(store, name, program.models, program.optimizers)
        self.placement: Placement = placement
        self.model: ModelBinding | None = placement.model
        self.optimizers: dict[str, OptimizerBinding] = placement.optimizers
        self._seen: Watch | None = None  # of all that have a watch; None: not known
        self._watched: list[Part] = []  # these; bindings first, the model's before all others
        self._unseen: list[Part] = []  # those that have none
        self._all = Parameters()
        self._all_of: list[object] = []  # what they were taken from
        self.gradients: GradientKeeper | None = (
            GradientKeeper(store, f"{name}/gradients", self._all, sharded=self._sharded)
            if program.optimizers
            else None
        )
        # whose steps use gradients: those kept by their state_dict alone do too
        self._users: list[torch.optim.Optimizer] = [*program.optimizers.values()]
        # (a wrapper of one of them, as Lookahead is, makes that one step)
        self._beside = {
            key: one
            for key, one in program.statefuls.items()
            if isinstance(one, torch.optim.Optimizer)
            and not any(inner in self._users for _, inner in inner_optimizers(one))
        }
        self._users += self._beside.values()
        self._ends: list[weakref.finalize[..., Any]] = []  # of the hooks on these
        self.trainable: TrainablePart = TrainablePart(store, f"{name}/trainable", self._all)
        self.parts: list[Part] = []
        if self.model is not None:
            path = f"{name}/attributes"
            self.parts.append(AttributesPart(store, path, program.models, self.model))
        data = source.objects if source is not None and source.asks else {}
        self.held = HeldObjects(program.models, program.optimizers, data, program.keepers)
        if self.held.watched:
            self.parts.append(self.held)
        self.parts.append(self.trainable)
        if self.gradients is not None:
            self.parts.append(self.gradients)
        self.parts += [
            StatefulPart(store, f"{name}/{key}", one)
            for key, one in program.statefuls.items()
            if one is not None
        ]
        self.keepers: list[Stateful] = program.keepers
        self.rng: RngPart = RngPart(store, f"{name}/rng")
        self.loader: LoaderPart | None = (
            LoaderPart(store, f"{name}/loader", source) if source is not None else None
        )

    @property
    def _sharded(self) -> bool:
        return any(map(is_sharded, [one for _, one in self.parameters()]))

    @property
    def bindings(self) -> list[ModelBinding | OptimizerBinding]:
        return [*((self.model,) if self.model is not None else ()), *self.optimizers.values()]

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        named = list(self.model.parameters) if self.model is not None else []
        for optimizer in self.optimizers.values():
            named += optimizer.extra_parameters
        return named

    def find_parameters(self) -> None:
        """Finds the parameters for the parts that keep something of each. REQUIRES: `follow`, and
        `sync` of all optimizers, since anything has changed."""
        known, at = self._all_of, 1
        first = self.model.parameters if self.model is not None else self
        if known and known[0] is first:
            for one in self.optimizers.values():
                if one.synced is None or one.synced is not known[at]:
                    break
                at += 1
            else:
                return
        self._all.set(self.parameters())
        self._all_of = [first, *(one.synced for one in self.optimizers.values())]

    def spend(self, optimizer: torch.optim.Optimizer) -> None:
        """Marks gradients as used, after an optimizer's step. Another optimizer that has the same
        parameters may still use them."""
        assert self.gradients is not None
        if len(self._users) == 1:
            self.gradients.spent.spend(optimizer.param_groups)
            return
        others = {
            id(one)
            for other in self._users
            if other is not optimizer
            for one in parameters_of(other)
        }
        used = parameters_of(optimizer)
        alone = [one for one in used if id(one) not in others]
        self.gradients.spent.spend([{"params": alone}])

    def _watch(self) -> None:
        """Sees the steps of optimizers that are no binding's."""
        pieces = weakref.ref(self)

        def before(key: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (mine := pieces()) is not None and mine.gradients is not None:
                mine.gradients.refuse_unknown(key, parameters_of(optimizer))

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (mine := pieces()) is not None and mine.gradients is not None:
                mine.spend(optimizer)

        for key, one in self._beside.items():
            for handle in (
                one.register_step_pre_hook(partial(before, key)),
                one.register_step_post_hook(after),
            ):
                end = weakref.finalize(self, handle.remove)
                end.atexit = False
                self._ends.append(end)
        self._beside = {}

    def release(self) -> None:
        """The run is detached: the program's objects stay as they are, without a hook of it."""
        for binding in self.optimizers.values():
            binding.release()
        self.placement.release()
        while self._ends:
            self._ends.pop()()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Wraps what moves parameters and buffers into the store. It warns of those that the
        program still has in another tensor, too, which stays behind."""
        named = list(self.model.named_tensors) if self.model is not None else []
        for optimizer in self.optimizers.values():
            named += [(f"parameter {name}", one) for name, one in optimizer.extra_parameters]
        # torch keeps what a view is of, also of those that a forward leaves in its module, and what
        # its hooks compute anew before each forward; and an earlier run what lies in its store
        expected = [one for _, one in named if one._base is not None]
        for module in (one for model in self.modules for one in model.modules()):
            expected += [
                one
                for key, one in vars(module).items()
                if type(one) is torch.Tensor and (one._base is not None or is_computed(module, key))
            ]
        left_out = {
            _storage(one)._cdata
            for one in expected
            if one.layout is torch.strided and not one.is_nested
        }
        reference: Any = StorageWeakRef
        before = [
            (name, one, reference(memory))
            for name, one, memory in ((name, one, _storage(one)) for name, one in named)
            if memory._cdata not in left_out and not in_heap(memory.data_ptr())
        ]
        yield
        left = [each for each in before if _is_left_behind(*each)]
        if left:
            gc.collect()
        for name, tensor, memory in left:
            if _is_left_behind(name, tensor, memory):
                warnings.warn(_SHARED.format(name), RuntimeWarning, stacklevel=2)
                return

    # ---- into the store; pending until the next commit

    def create(self, place: Place) -> None:
        """Everything of a new run. The program is untouched until it is bound."""
        self._watch()
        for binding in self.bindings:
            binding.create()
        self._capture_rest()
        if self.loader is not None:
            self.loader.capture(place)

    def capture(self, place: Place) -> None:
        """Everything that Python holds and the store does not yet."""
        others = self._seen.others() if self._seen is not None else None
        if others is None or (others and not self._capture_others(others)):
            self._capture_tensors()
            self._capture_rest()
        elif self._unseen and not others:
            self._capture_parts([*self._unseen, self.rng])  # last: what is asked may draw
        if self.loader is not None:
            self.loader.capture(place)

    def _capture_others(self, numbers: list[int]) -> bool:
        """Writes what has changed, of the watched by their numbers. Returns False if that is more
        than values: then all have to be watched anew."""
        self._seen = None  # until all is written
        if self.model is not None and numbers[0] == 0:
            return False
        others = [self._watched[number] for number in numbers]
        optimizers = [one for one in others if isinstance(one, OptimizerBinding)]
        for one in optimizers:
            watch = one.watch
            one.capture()
            if one.watch is not watch:
                return False
        parts = [one for one in others[len(optimizers) :] if one is not self.rng]
        self._capture_parts([*parts, *self._unseen, self.rng])
        self._see()
        return True

    def capture_tensors(self) -> None:
        """Tensors that are other objects now, or lie elsewhere: what the program has changed
        outside of steps."""
        self._capture_tensors()
        self.placement.capture()

    def _capture_tensors(self) -> None:
        self._seen = None  # until all is written
        self.follow()
        if self.model is not None:
            self.model.capture()
        for optimizer in self.optimizers.values():
            optimizer.capture()

    def _capture_rest(self) -> None:
        """Everything but models and optimizers, and the tensors of those that are mirrored."""
        self.placement.capture()
        self.find_parameters()
        self._capture_parts([*self.parts, self.rng])
        self._see()

    def _see(self) -> None:
        """All is written: watches what has to be seen."""
        watched: list[Part] = []
        unseen: list[Part] = []
        watches: list[Watch] = []
        for one in (*self.bindings, *self.parts, self.rng):
            if (watch := one.watch) is not None:
                watched.append(one)
                watches.append(watch)
            elif isinstance(one, (ModelBinding, OptimizerBinding)):
                return  # all is looked at each time
            else:
                unseen.append(one)
        self._watched, self._unseen, self._seen = watched, unseen, asking(all_of(watches))

    @staticmethod
    def _capture_parts(parts: Sequence[Part]) -> None:
        for part in parts:
            if part.watch is None or part.watch.look() != SAME:
                part.capture()

    def follow(self) -> None:
        """Notices parameters that are other objects now."""
        model = self.model
        if model is not None and (model.before is not None or model.linked.look() != SAME):
            replaced = model.follow()
            for optimizer in self.optimizers.values():
                optimizer.replace(replaced, model.before)
            model.followed()
            for optimizer in self.optimizers.values():
                optimizer.replacing = None

    # ---- out of the store

    def check(self, *, regrouped: bool = False) -> None:
        """Compares with what is stored. Changes nothing. regrouped: the optimizers' groups are to
        be the program's. Raises: MismatchError."""
        noted: Any = self._store.get(f"{self._name}/given") or {}
        settings = noted.get("settings", {})
        if self.model is not None:
            self.model.check()
        for one in self.optimizers.values():
            before = len(settings.get(one.piece, {}).get("groups", ()))
            one.check(None if regrouped else before)
        if self.loader is not None:
            self.loader.check()

    def restore(self, *, opened: bool) -> None:
        """Sets all but the place in the data and the default generators to what the last commit
        holds. opened: the bindings are."""
        self._seen = None
        self._watch()
        if not opened:
            for binding in self.bindings:
                binding.open()
        if self.model is not None:
            self.model.restore()
        self.placement.restore()
        for optimizer in self.optimizers.values():
            optimizer.restore()
        self.find_parameters()
        for part in self.parts:
            part.restore()
