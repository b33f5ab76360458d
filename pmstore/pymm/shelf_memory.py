"""The memory of shelves and of their arrays, under PyMM's names, as far as programs use them."""

from __future__ import annotations

from typing import Any

from pmstore.objects.tensor import is_tensor
from pmstore.pymm.shelf_names import HIDDEN, Core, ShelvedCommon


class MemoryReference:
    """The memory of an array or a tensor on a shelf."""

    __slots__ = ("_member",)

    def __init__(self, member: Any) -> None:
        self._member = member

    def addr(self) -> tuple[str, int]:
        """Returns the address of the first byte, in hexadecimal, and the number of bytes."""
        member = self._member
        # `addr` of a tensor is torch's, and something else
        address = member.data_ptr() if is_tensor(member) else member.addr
        return hex(address), member.nbytes

    def persist(self) -> None:
        """Commits what was written past the member, as `persist` of the member does."""
        self._member.persist()


class ShelvedMemory(ShelvedCommon):
    """Base of the members that are memory."""

    __slots__ = ()

    @property
    def namedmemory(self) -> MemoryReference:
        return MemoryReference(self)

    _value_named_memory = namedmemory  # PyMM's own programs use this one

    @property
    def memory(self) -> tuple[str, int]:
        """The address of the first byte, in hexadecimal, and the number of bytes."""
        return self.namedmemory.addr()


class MemoryResource:
    """The room of a shelf, `shelf.mr`. It gives no memory that belongs to no variable.

    Raises: TypeError: a program makes none.
    """

    __slots__ = ("_core", "_room_bytes")

    def __init__(self, core: Core, room_bytes: int) -> None:
        if not isinstance(core, Core):
            raise TypeError(_INSTEAD)
        self._core, self._room_bytes = core, room_bytes

    def list_items(self) -> list[str]:
        """Returns the names of all variables, in order of insertion."""
        return [name for name in self._core.store if name != HIDDEN]

    def get_percent_used(self) -> float:
        """Returns how much of the room is taken, in per cent of size_mb, or of what the file has
        grown to if that is more."""
        stats = self._core.store.stats()
        return 100.0 * stats.used_bytes / max(stats.data_bytes, self._room_bytes)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            _INSTEAD if "named_memory" in name else f"a MemoryResource has no {name!r}"
        )


_INSTEAD = "memory of a shelf is that of its variables: shelf.x = pymm.ndarray(bytes, dtype='u1')"
