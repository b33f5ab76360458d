"""Optimizers, schedules and scalers that a run was not given, and that train what it keeps.

Their state would be lost at a restart, without a word. Three facts of torch tell of them, and none
is a guess: a hook sees every optimizer that steps; a scheduler is an object that names the
optimizer that it drives, and counts its steps; a scaler calls the optimizer's `step`.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pmstore._base.weak_registry import alive
from pmstore.torch._random.search import parts_of
from pmstore.torch.run_errors import AttachError
from pmstore.torch.wrappers import inner_optimizers

_DEPTH = 6
"""Steps from an object that was given to one that it holds, and:"""
_MOST_OBJECTS = 2000
_MOST_FRAMES = 10
"""Calls between a scaler's and the optimizer's step."""


def _find_held(given: Iterable[Any], kind: type) -> list[Any]:
    """The objects of a kind that these are, or hold as attributes, items, or in closures: what
    holds one answers for its state. (A model does not, nor an optimizer; nor does a schedule for
    the optimizer that it drives.)"""
    closed = (nn.Module, Optimizer, *((LRScheduler,) if kind is Optimizer else ()))
    found: list[Any] = []
    seen: dict[int, Any] = {}
    classes: set[int] = set()
    level = list(given)
    for _ in range(_DEPTH + 1):
        below: list[Any] = []
        for one in level:
            if id(one) in seen or len(seen) > _MOST_OBJECTS:
                continue
            seen[id(one)] = one
            if issubclass(type(one), kind):
                found.append(one)
            if not issubclass(type(one), closed):
                below.extend(part for _, part in parts_of("", one, classes))
        level = below
    return found


class Schedulers:
    """Schedulers of torch that drive the run's optimizers and were not given to attach."""

    def __init__(self, optimizers: Sequence[Optimizer], given: Sequence[Any]) -> None:
        """given: what has a state that the run keeps."""
        self._optimizers = optimizers
        self._given = given
        self._watched: list[tuple[weakref.ref[LRScheduler], Any]] = []

    def look(self) -> None:
        """Looks for those that are alive.

        Raises: AttachError: one drives an optimizer for which none was given. (Beside one that was
            given it may be one that the program has replaced, and which something still holds:
            its next step will tell.)
        """
        if not self._optimizers or not (found := self._found()):
            return
        held = _find_held(self._given, LRScheduler)
        known = {driven for one in held for driven in _driven(one)}
        if any(known.isdisjoint(_driven(one) & self._mine) for one in found):
            del found
            gc.collect()  # what nobody holds any more drives nothing
            found = self._found()
        for one in found:
            if known.isdisjoint(_driven(one) & self._mine):
                raise _unheld(one)
        kept = set(map(id, held))
        self._watched = [(weakref.ref(one), _place(one)) for one in found if id(one) not in kept]

    def look_early(self) -> None:
        """Looks as `look` does, before a stored run goes on, but only where torch has marked an
        optimizer as one that a scheduler drives. Most schedulers do so; the others are found at
        the end of the first step. (A look takes some 50 ms, and a resume should not.)"""
        if any(hasattr(one.step, "_wrapped_by_lr_sched") for one in self._optimizers):
            self.look()

    @property
    def watched(self) -> bool:
        """Whether there are some that were not given, and may not be in use."""
        return bool(self._watched)

    def check(self) -> None:
        """Looks at the end of a step. Raises: AttachError: one that was not given was stepped."""
        for reference, place in self._watched:
            one = reference()
            if one is not None and _place(one) != place:
                raise _unheld(one)

    @property
    def _mine(self) -> set[int]:
        return set(map(id, self._optimizers))

    def _found(self) -> list[LRScheduler]:
        # An object refers to its class. (To list all objects takes three times as long, and
        # touches each of some 300,000: a fork copies their pages.)
        referrers = gc.get_referrers(*_subclasses(LRScheduler))
        schedulers = [one for one in referrers if issubclass(type(one), LRScheduler)]
        return [one for one in schedulers if _driven(one) & self._mine]


def _subclasses(kind: type) -> list[type]:
    """The class and all that are derived from it."""
    found = [kind]
    for one in found:
        derived: list[type] = type.__subclasses__(one)
        found += [below for below in derived if below not in found]
    return found


def _driven(scheduler: LRScheduler) -> set[int]:
    """Its optimizer, and those inside, if that is a wrapper; by id."""
    optimizer = getattr(scheduler, "optimizer", None)
    if not isinstance(optimizer, Optimizer):
        return set()
    return {id(optimizer), *(id(inner) for _, inner in inner_optimizers(optimizer))}


def _place(scheduler: LRScheduler) -> Any:
    return getattr(scheduler, "last_epoch", None)


def _unheld(scheduler: LRScheduler) -> AttachError:
    return AttachError(
        f"a {type(scheduler).__qualname__} drives an attached optimizer and was not given to "
        "attach, so that it would begin anew at a restart. Make it before attach and give it: "
        "attach(..., lr_scheduler=schedule); several as a dict, or some of them as stateful={...}. "
        "One that the program has done with is deleted before attach: `del schedule`"
    )


class Others:
    """What the steps of a run are watched for while it is attached.

    Attributes:
        moved: the kind of an optimizer that is none of this run's and has stepped in this
            step, and the thread that it stepped in.
        suspects: `check` has something to look at in each step.
    """

    def __init__(
        self,
        name: str,
        optimizers: Sequence[Optimizer],
        given: Sequence[Any],
        parameters: Callable[[], list[tuple[str, torch.Tensor]]],
    ) -> None:
        """name: of the run; given: what else has a state that the run keeps; parameters: those of
        the run, with their names."""
        self.moved: tuple[str, int] | None = None
        self._name = name
        self._optimizers = optimizers
        self._given = given
        self._parameters = parameters
        self._schedulers = Schedulers(optimizers, given)
        self._looked = False
        self.suspects: bool = True
        self._process = os.getpid()
        self._held: list[Optimizer] | None = None  # by what was given, once that was asked

    # ---- while the run is attached

    def watch(self) -> None:
        """Watches from now on."""
        _watching[id(self)] = self
        _hook.place()

    def unwatch(self) -> None:
        """May be called again."""
        for optimizer in self._optimizers:
            _known.pop(id(optimizer), None)
        _watching.pop(id(self), None)
        if not _watching:
            _hook.remove()

    def check(self, *, used: bool) -> None:
        """Looks at the end of a step. used: something that is attached was used, in a training
        forward or an update.

        Raises: AttachError: the step trained nothing that is attached, but another model; or a
            scheduler that was not given was stepped.
        """
        moved, self.moved = self.moved, None
        if moved is not None and not used and self._optimizers and moved[1] == get_ident():
            raise AttachError(
                f"this step of the run {self._name!r} trained nothing that is attached: no "
                f"attached model or optimizer was used, but a {moved[0]} that was not given to "
                "attach stepped parameters of another model. (A notebook's cell that makes the "
                "model and is run again makes another one.) Call run.detach() and attach again, "
                "with what is trained: attach(store, model=..., optimizer=...); several models and "
                "optimizers as dicts"
            )
        if not self._looked:
            self._schedulers.look()
            self._looked = True  # not before: a step that is refused is no look
            self.suspects = self._schedulers.watched
        if self.suspects:
            self._schedulers.check()

    # ---- an optimizer is about to step

    def has(self, optimizer: Optimizer) -> bool:
        """Whether it is the run's."""
        return any(one is optimizer for one in self._optimizers)

    def meet(self, optimizer: Optimizer) -> None:
        """It is no run's. Raises: AttachError: it trains parameters of this one."""
        if os.getpid() != self._process:  # what a fork's child trains is its own
            return
        if self._held is None:
            self._held = _find_held(self._given, Optimizer)
        if any(one is optimizer for one in self._held):
            return
        if any(one is mine for _, one in inner_optimizers(optimizer) for mine in self._optimizers):
            return  # it goes on to step that one
        kind = type(optimizer).__qualname__
        names = {id(one): name for name, one in self._parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in names:
                    raise AttachError(
                        f"a {kind} that was not given to attach steps {names[id(parameter)]!r} of "
                        f"the run {self._name!r}: its state would be lost at a restart. Give all "
                        "optimizers to attach, before the first step: optimizer={'first': ..., "
                        "'second': ...}; those of one model may share parameters. Or call "
                        "run.detach() before this phase, and attach another run, with a name= of "
                        "its own"
                    )
        self.moved = kind, get_ident()

    def refuse_scaler(self, frame: FrameType | None) -> None:
        """frame: that of an optimizer's step. Raises: AttachError: a scaler calls it that was not
        given."""
        for _ in range(_MOST_FRAMES):
            if frame is None:
                return
            one: Any = frame.f_locals.get("self")
            if issubclass(type(one), torch.amp.GradScaler) and one.is_enabled():
                if not any(one is held for held in _find_held(self._given, torch.amp.GradScaler)):
                    raise AttachError(
                        f"a {type(one).__qualname__} that was not given to attach scales the "
                        f"gradients of the run {self._name!r}: its scale would be lost at a "
                        "restart. Give it: attach(..., scaler=scaler)"
                    )
                return
            frame = frame.f_back


_watching: WeakValueDictionary[int, Others] = WeakValueDictionary()
_known: dict[int, weakref.ref[Others]] = {}
"""By the id of an optimizer that has stepped, whose it is. Whoever is alive holds it."""


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    reference = _known.get(id(optimizer))
    if reference is None or reference() is None:
        _look_at(optimizer, sys._getframe(1))


def _look_at(optimizer: Optimizer, frame: FrameType) -> None:
    watching = alive(_watching)
    for one in watching:
        if one.has(optimizer):
            one.refuse_scaler(frame)
            _known[id(optimizer)] = weakref.ref(one)
            return
    for one in watching:
        one.meet(optimizer)
    if not watching:
        _hook.remove()


class _Hook:
    """Torch's hook of all optimizers, there while a run is attached."""

    def __init__(self) -> None:
        self._handle: Any = None

    def place(self) -> None:
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(_before_step)

    def remove(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()


_hook = _Hook()
