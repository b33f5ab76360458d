"""Types of the C extension pmstore._block. See _block.c."""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, final

from typing_extensions import Buffer, Self

def bind(open: int, close: int, release: int, begin: int, end: int, will_write: int, pin: int, unpin: int, /) -> None: ...

@final
class Memory(Buffer): ...

@final
class Transaction:
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> Literal[False]: ...

@final
class Handle:
    pool: int
    closed: bool
    mirrors: Callable[[int], None] | None
    lock: object
    def __new__(
        cls,
        path: bytes,
        options: int,
        lock_timeout: float | None,
        fail: Callable[[int], NoReturn],
        ranges: Callable[[Any], Iterable[tuple[int, int]]],
        /,
    ) -> Self: ...
    def close(self, commit: bool, /) -> None: ...
    def pin(self, data: int, address: int, nbytes: int, read_only: bool, /) -> Memory: ...
    def will_write(self, writes: Sequence[Any], /) -> None: ...
    def transaction(self, writes: Sequence[Any], timeout: float | None, /) -> Transaction: ...
