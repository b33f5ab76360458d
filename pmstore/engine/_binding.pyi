"""Types of the C extension pmstore.engine._binding. See _binding.c."""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, final

from typing_extensions import Buffer, Self

def bind(*functions: int) -> None: ...
def exchange_with(exchange: object, look: Callable[[Any], tuple[Any, ...]], /) -> None: ...

@final
class Found(tuple[int, int, int, bytes, int, Memory | None]):
    def __new__(cls, fields: tuple[int, int, int, bytes, int, Memory | None], /) -> Self: ...
    @property
    def kind(self) -> int: ...
    @property
    def data(self) -> int:
        """Offset of its block (0: none), or the directory of a group, or the list."""
    @property
    def data_bytes(self) -> int: ...
    @property
    def meta(self) -> bytes: ...
    @property
    def node(self) -> int: ...
    @property
    def memory(self) -> Memory | None:
        """Of an array that was found to be used: its block, pinned."""

@final
class Memory(Buffer):
    data: int
    read_only: bool
    meta: bytes | None
    name: str | None
    def give(self, object_: Any, meta: bytes, name: str, dtype: object, /) -> Any: ...
    def moved(self) -> Any: ...
    def settle(self, forget: bool, /) -> None: ...

@final
class Transaction:
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> Literal[False]: ...
    def __aenter__(self) -> Coroutine[Any, Any, Self]: ...
    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> Coroutine[Any, Any, Literal[False]]: ...
    def enter_if_free(self, last: bool, /) -> bool: ...

@final
class Handle:
    pool: int
    closed: bool
    hook: Callable[[int], None] | None
    lock: object
    take_in: Callable[[list[Memory]], None] | None
    base: int
    read_only: bool
    def __new__(
        cls,
        path: bytes,
        options: int,
        lock_timeout: float | None,
        fail: Callable[[int], NoReturn],
        ranges: Callable[[Any], Iterable[tuple[int, int]]],
        /,
    ) -> Self: ...
    def close(
        self,
        commit: bool,
        wait_seconds: float,
        asking: Callable[[], bool],
        ending: Callable[[], None],
        /,
    ) -> None: ...
    def commit(self) -> None: ...
    def take_in_moved(self) -> None: ...
    def will_write(self, writes: Sequence[Any], /) -> None: ...
    def written(self, arrays: Sequence[Any], /) -> bool: ...
    def transaction(self, writes: Sequence[Any], timeout: float | None, /) -> Transaction: ...
    def rollbacks(self) -> int: ...
    def find(self, directory: int, path: bytes, /) -> Found | None: ...
    def next(self, directory: int, node: int, /) -> tuple[bytes, Found] | None: ...
    def get(self, directory: int, path: bytes, describe: bool, /) -> Any: ...
    def item(self, directory: int, path: bytes, index: int, describe: bool, /) -> Any: ...
    def slot(self, directory: int, path: bytes, which: int, /) -> Any: ...
    def put_value(self, directory: int, path: bytes, value: bytes, /) -> None: ...
    def flip(self, directory: int, path: bytes, turn: bytearray, /) -> bool: ...
    def flipped(self, turn: bytearray, /) -> bool: ...
    def splice(
        self,
        directory: int,
        path: bytes,
        index: int,
        remove: int,
        step: int,
        new: Sequence[tuple[Any, ...]],
        /,
    ) -> None: ...
