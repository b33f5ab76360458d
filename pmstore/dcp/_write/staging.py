"""Copies what `async_save` needs while the program waits: tensors of a state dict, into memory that
is used again by each save. From there they are saved as any others."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any, NoReturn, SupportsIndex
from weakref import finalize, ref

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor

from pmstore.dcp._format import copies
from pmstore.dcp._write.committed_tensors import Pin, pin
from pmstore.dcp._write.items import check
from pmstore.errors import PmstoreError

_BEGIN_SECONDS = 60.0
"""How long a staged state dict is waited for until its save begins; torch begins at once."""
_LOOK_SECONDS = 0.02
_numbers = itertools.count()
"""Of what is staged: a save waits for those before it alone, lest two wait for each other."""
_AFTER_SECONDS = 0.0005
"""So long the thread that saves lets the one that called go on first: both want the interpreter's
lock, and all cores copy when the save begins."""

PROCESS = (
    "AsyncCheckpointerType.PROCESS does not work with a StoreWriter: a store has one writing "
    "process, which is this one. Use AsyncCheckpointerType.THREAD (the default): the training goes "
    "on meanwhile just as well, as copies and writes run without the interpreter's lock"
)


class Staged(dict[str, Any]):
    """A staged state dict. The thread that first looks into it is the one that saves it: see
    `Staging`. Each method of a dict that gives values is a look: what is pinned has none before."""

    def __init__(self, content: Mapping[str, Any], first_look: Callable[[], None]) -> None:
        super().__init__(content)
        self._first_look = first_look

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        self._first_look()  # so that the next save knows when this one is over
        raise TypeError(PROCESS)

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.copy(), memo)


def _looking(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def look(self: Staged, *arguments: Any, **named: Any) -> Any:
        self._first_look()
        return method(self, *arguments, **named)

    return look


_NO_LOOK = ("__contains__", "__getattribute__", "__init__", "__len__", "__sizeof__")
for _name, _method in vars(dict).items():
    _of_content = isinstance(_method, (WrapperDescriptorType, MethodDescriptorType))
    if _of_content and _name not in _NO_LOOK:
        setattr(Staged, _name, _looking(_method))


def _unpin(pins: list[Pin]) -> None:
    while pins:
        pins.pop().close()


class Memory:
    """The memory of one staged state dict. The next one has the same blocks: new memory is slower
    to write to than to copy to."""

    def __init__(self) -> None:
        self._taken: dict[int, list[torch.Tensor]] = {}
        self._free: dict[int, list[torch.Tensor]] = {}

    def begin(self) -> None:
        """Frees what was taken before, and lets go of what was not taken again."""
        self._free, self._taken = self._taken, {}

    def take(self, nbytes: int) -> torch.Tensor:
        """Returns so many bytes, of unspecified content."""
        free = self._free.get(nbytes)
        made = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._taken.setdefault(nbytes, []).append(made)
        return made


class Staging:
    """One staged state dict, from `stage` to the end of the thread that saves it."""

    def __init__(self, memory: Memory) -> None:
        self.number: int = next(_numbers)
        self._memory = memory
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._first = threading.Lock()
        self._thread: threading.Thread | None = None
        self._staged: ref[Staged] | None = None
        self._memo: dict[Any, torch.Tensor] = {}
        self._without_memory: dict[torch.dtype, torch.Tensor] = {}
        self._pins: list[Pin] = []
        self._error: Exception | None = None

    def stage(self, state: Mapping[str, Any]) -> Staged:
        """Returns a copy of the state that no later write to the tensors reaches.

        Raises: TypeError: what cannot be saved; RuntimeError: no memory.
        """
        self._memory.begin()
        content = {key: self._walk(str(key), value) for key, value in state.items()}
        self._pins, unpinned = pin(self._copies)
        try:
            for _, made in unpinned:
                self._place(made)
            pairs = [pair for both in unpinned for pair in copies.slices(*both)]
            copies.by_all_cores(lambda pair: copies.copy(*pair), pairs)
        except BaseException:
            _unpin(self._pins)
            raise
        self._copies, self._memo = [], {}
        staged = Staged(content, self._begun)
        self._staged = ref(staged)
        finalize(staged, _unpin, self._pins)  # nobody saves it: commits must not wait for that
        return staged

    def _begun(self) -> None:
        """Copies what is pinned, at the first look of the thread that saves. An error waits for
        `require`: it would be raised before the ranks tell each other of errors, and the others
        would wait for this one."""
        with self._first:
            if self._thread is None:
                self._thread = threading.current_thread()
                time.sleep(_AFTER_SECONDS)
            try:
                for each in self._pins:
                    for made in each.targets:
                        self._place(made)
                    each.copy()
            except Exception as error:
                self._error = error
            finally:
                _unpin(self._pins)

    def require(self) -> None:
        """Raises what was raised while pinned tensors were copied, if anything was."""
        if self._error is not None:
            raise self._error

    def begin(self) -> None:
        """Says that this thread saves it, if no thread was seen to. The main thread does not: it
        says nothing of when it is done."""
        if self._thread is None and threading.current_thread() is not threading.main_thread():
            self._begun()

    def wait(self) -> bool:
        """Waits until the save is over, however it ends. Torch does each save in a thread of its
        own, and tells nobody of an error. Returns whether it is known to be over: nobody knows of
        one in the main thread, nor of what was dropped before it began.

        Raises: PmstoreError: nobody saves it.
        """
        until = time.monotonic() + _BEGIN_SECONDS
        while self._thread is None:
            if self._staged is None or self._staged() is None:
                return False
            if time.monotonic() > until:
                raise PmstoreError(
                    "a state dict that was staged before is still there, and nobody saves it: let "
                    "go of what stage() returned, or save it"
                )
            time.sleep(_LOOK_SECONDS)
        if self._thread in (threading.current_thread(), threading.main_thread()):
            return False
        self._thread.join()
        return True

    def is_of_this_thread(self) -> bool:
        return self._thread is threading.current_thread()

    # ---- the walk ----

    def _walk(self, name: str, value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            shards = copy.copy(value)
            shards._local_shards = [
                Shard(self._tensor(name, shard.tensor), shard.metadata)
                for shard in value.local_shards()
            ]
            return shards
        if isinstance(value, DTensor):
            local: Any = value._local_tensor
            whole = self._tensor(name, local)
            return DTensor.__new__(DTensor, whole, value._spec, requires_grad=False)
        if isinstance(value, torch.Tensor):
            return self._tensor(name, value)
        if isinstance(value, dict):
            return {key: self._walk(f"{name}.{key}", each) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._each(name, value))
        if value is None or isinstance(value, (int, float, str, bytes)):
            return value
        if isinstance(value, io.BytesIO):
            return io.BytesIO(value.getvalue())
        return copy.deepcopy(value)

    def _each(self, name: str, values: Iterable[Any]) -> list[Any]:
        return [self._walk(f"{name}.{number}", value) for number, value in enumerate(values)]

    def _tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        source = check(name, tensor)
        key = (
            *(source.data_ptr(), source.shape, source.stride(), source.dtype, source.device),
            *(source.is_conj(), source.is_neg()),
        )
        made = self._memo.get(key)
        if made is None or not source.numel():
            # Of the tensor's shape already, and without memory: see `_place`. To make an array in
            # the heap for each takes most of the time that the program would wait.
            made = self._empty(source.dtype).expand(source.shape)
            self._memo[key] = made
            self._copies.append((source, made))
        return made

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._without_memory:
            with torch.inference_mode(False):  # another thread sets what is made of it
                self._without_memory[dtype] = torch.empty((), dtype=dtype, device="cpu")
        return self._without_memory[dtype]

    def _place(self, made: torch.Tensor) -> None:
        """Gives what a copy will be its memory. Raises: RuntimeError: there is none."""
        data = self._memory.take(copies.size_of(made))
        there = copies.from_bytes(data, made.dtype, made.shape)
        made.set_(there.untyped_storage(), there.storage_offset(), there.shape, there.stride())
