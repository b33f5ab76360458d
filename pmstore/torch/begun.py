"""Whether a training step is under way: from its first training forward, or its first write, to its
end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from pmstore import Store
from pmstore.torch.parts import Pieces


class _BeforeForward:
    """A model's forward hook. A copy of the model, by `deepcopy` or pickle, has one that does
    nothing."""

    __slots__ = ("begun",)

    def __init__(self, begun: Begun | None = None) -> None:
        self.begun = begun

    def __call__(self, module: nn.Module, args: Any) -> None:
        begun = self.begun
        if begun is not None and module.training and torch.is_grad_enabled():
            if begun.before is not None and not torch.compiler.is_compiling() and not begun.forward:
                begun.before()
            begun.forward = True
            if not torch.compiler.is_compiling():  # a number that changes is compiled again
                begun.forwards += 1

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":  # asked for by torch.jit.script
            name = (
                "an attached model has a hook, which torch.jit.script cannot compile: call "
                "run.detach() before"
            )
        raise AttributeError(name)

    def __deepcopy__(self, memo: object) -> _BeforeForward:
        return _BeforeForward()

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()


class Begun:
    """What a run knows of the step that is under way.

    A step begins with a forward of a model in training mode with gradients enabled, with
    `optimizer.step()`, or when a tensor of the run is written in any other way. The first two are
    noted when they happen. The last is asked when it matters: of the engine, which compares with
    the last commit; or, where that is not the end of the last step, of torch's counters of writes
    in place.

    Attributes:
        forward: of a model, since the last step ended.
        forwards: of all models, since the run was attached; those of compiled code are not seen.
        updating: `optimizer.step()` was called since then.
        ended: the step was ended, and its commit is under way.
        over: the loop over the data has come to its end, and left nothing undone: a forward from
            here on is no part of a step unless it writes.
        before: called before the first forward of a step; or None.
    """

    def __init__(self, store: Store, pieces: Pieces) -> None:
        self.forward: bool = False
        self.forwards = 0
        self.updating: bool = False
        self.ended: bool = False
        self.over: bool = False
        self.before: Callable[[], None] | None = None
        self._store = store
        self._pieces = pieces
        # as of the end of the last step, if the store's last commit is not its end
        self._tensors: list[torch.Tensor] | None = None
        self._counters: list[int] = []

    def watch(self, models: Iterable[nn.Module]) -> list[Any]:
        """Returns handles that remove the hooks."""
        return [model.register_forward_pre_hook(_BeforeForward(self)) for model in models]

    def end(self, *, committed: bool) -> None:
        """No step is under way; the store's last commit holds all of the last one, or not yet."""
        self.forward = self.updating = self.ended = self.over = False
        if committed and self._pieces.pack is None:
            self._tensors = None
            return
        self._compare_from_now()

    def committed(self) -> None:
        """The end of the last step is committed only now; nothing was written since."""
        if self._pieces.pack is None:
            self._tensors = None

    def _compare_from_now(self) -> None:
        self._tensors = self._pieces.tensors()
        self._counters = [tensor._version for tensor in self._tensors]

    @property
    def called(self) -> str:
        """What the program called that has begun it, in words; "": nothing that is known."""
        if self.ended:
            return ""
        if self.updating:
            return "optimizer.step() has written"
        return "the model was called in training mode" if self.forward and not self.over else ""

    @property
    def why(self) -> str:
        """What has begun it, in words; "": no step is under way."""
        if self.ended or self.called:
            return self.called
        return "its tensors were written" if self.written() else ""

    def written(self) -> bool:
        """Whether tensors were written since the last step ended."""
        if self._tensors is not None:
            return [tensor._version for tensor in self._tensors] != self._counters
        memory = self._pieces.memory()
        return bool(memory) and self._store.written(memory)
