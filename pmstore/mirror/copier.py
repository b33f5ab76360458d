"""The seam between a device and host memory, and its two implementations: host memory itself, and
CUDA.

A copier starts copies and says how the engine learns that they have landed. The engine waits in a
thread of its own, which the interpreter's lock does not stop: so a copier that copies
asynchronously gives it the address of a word in host memory, which becomes non-zero when the copies
are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from pmstore._engine.landing import LandCopy
from pmstore.errors import MirrorError
from pmstore.mirror.pending_commit import Batch
from pmstore.mirror.pinned_memory import PinnedBlocks

# smaller blocks share pages with others, and are never written by a device
_DIRECT_BYTES = 64 << 10
# of small tensors that cross the bus together: a copy of each would hold the program, one by one
_TOGETHER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor that is to be copied, and the place where it goes."""

    tensor: torch.Tensor
    """Dense."""
    data: int
    """Offset of the block in the store,"""
    at: int
    """and where in it."""
    block: torch.Tensor | None
    """The whole block, as bytes, if a device may write it: it is the idle slot and has pages of its
    own."""

    live: bool = True
    """The program goes on writing the tensor."""

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class Copier(Protocol):
    """Copies tensors of one device to the host."""

    def start(self, pieces: Sequence[Piece]) -> tuple[list[LandCopy], Batch]:
        """Starts to copy what the tensors hold when all that the device was given to do until now
        is done."""
        ...

    def close(self) -> None:
        """Waits until no copy is under way: the store's memory goes."""
        ...


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor's elements in the order in which they lie in memory, in one dimension,
    over its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor's bytes as `flat` returns its elements."""
    return flat(tensor).view(torch.uint8)


class _HostBatch:
    """Copies that need no device: the engine reads the tensors itself."""

    __slots__ = ("_live", "_tensors")
    may_fail = False

    def __init__(self, tensors: list[torch.Tensor], live: bool) -> None:
        self._tensors = tensors
        self._live = live

    def fence(self) -> bool:
        return not self._live

    def check(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def release(self) -> None:
        self._tensors = []


class HostCopier:
    """Copies tensors in host memory: the engine's thread copies them, past the caches, while the
    program goes on."""

    def start(self, pieces: Sequence[Piece]) -> tuple[list[LandCopy], Batch]:
        tensors = [piece.tensor.detach() for piece in pieces]
        live = any(piece.live for piece in pieces)
        copies = [
            LandCopy(piece.data, piece.at, piece.nbytes, piece.tensor.data_ptr(), 0)
            for piece in pieces
            if piece.nbytes
        ]
        return copies, _HostBatch(tensors, live)

    def close(self) -> None:
        pass


class _CudaBatch:
    __slots__ = ("_copier", "_event", "_kept")
    may_fail = True

    def __init__(
        self, copier: CudaCopier, event: torch.cuda.Event, kept: list[torch.Tensor]
    ) -> None:
        self._copier = copier
        self._event = event
        self._kept = kept

    def fence(self) -> bool:
        torch.cuda.current_stream(self._copier.device).wait_event(self._event)
        return True

    def check(self) -> None:
        # a thread that asks while device 0 is current makes a context there, of hundreds of MB
        with torch.cuda.device(self._copier.device):
            self._event.query()  # type: ignore[no-untyped-call]  # raises what the device failed at

    def synchronize(self) -> None:
        with torch.cuda.device(self._copier.device):
            self._event.synchronize()

    def release(self) -> None:
        self._kept = []


def staging(like: torch.Tensor, *, once: bool = False) -> torch.Tensor:
    """Returns host memory for a copy of the tensor. It is pinned, or pageable where no more can be
    had that is locked. Copies into pageable memory are made before the call that starts them
    returns: the program waits for them, and all else is the same.

    once: as much is not wanted again. To pin memory takes longer than to wait for one copy, and
    torch keeps for good what it has pinned.
    """
    try:
        return torch.empty_like(like, device="cpu", pin_memory=not once)
    except RuntimeError:
        return torch.empty_like(like, device="cpu")


def _together(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Generates the small pieces in lists, each of which crosses the bus as one copy."""
    held: list[Piece] = []
    nbytes = 0
    for piece in pieces:
        if 0 < piece.nbytes < _DIRECT_BYTES:
            held.append(piece)
            nbytes += piece.nbytes
        if nbytes >= _TOGETHER_BYTES:
            yield held
            held, nbytes = [], 0
    if held:
        yield held


class CudaCopier:
    """Copies tensors of a CUDA device on a stream of its own, behind what the current stream was
    given so far. Large ones go into the slots themselves where their pages can be pinned
    (cudaHostRegister). The others go through staging memory, which the engine's thread copies on;
    small ones are joined on the device before.

    The word that the engine waits for is the last copy on the stream, behind an event. A stream
    does one thing after another, and what came before an event that is reached can be seen by the
    host: so it is there when the word is.
    """

    def __init__(self, device: torch.device, pinned: PinnedBlocks | None) -> None:
        """Makes the stream. pinned: of the store. None: devices may not write the store's memory,
        which is no shared mapping."""
        self.device = device
        self._pinned = pinned
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        torch.cuda.current_stream(device).synchronize()  # the one is there

    def start(self, pieces: Sequence[Piece]) -> tuple[list[LandCopy], Batch]:
        """Raises: MirrorError: a CUDA graph is being captured, in which nothing may be copied
        out."""
        if torch.cuda.is_current_stream_capturing():
            raise MirrorError(
                "a CUDA graph is being captured, which only records the copies: commit before "
                "torch.cuda.graph(...) or after it"
            )
        word = staging(self._one).zero_()
        kept, copies = [word], []
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for piece in pieces:
                if piece.nbytes < _DIRECT_BYTES:
                    continue
                source, target, staged = flat(piece.tensor), self._target(piece), 0
                if target is None:
                    # the commits after this one will write the slot itself
                    pins = self._pinned is not None and not self._pinned.refused
                    target = staging(source, once=pins and piece.block is None)
                    staged = target.data_ptr()
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
                kept.append(target)
                copies.append(LandCopy(piece.data, piece.at, piece.nbytes, staged, word.data_ptr()))
            for together in _together(pieces):
                sources = [flat_bytes(piece.tensor) for piece in together]
                joined = torch.cat(sources)
                target = staging(joined)
                target.copy_(joined, non_blocking=True)
                kept.append(target)
                staged = target.data_ptr()
                for piece, source in zip(together, sources, strict=True):
                    source.record_stream(self._stream)
                    copies.append(
                        LandCopy(piece.data, piece.at, piece.nbytes, staged, word.data_ptr())
                    )
                    staged += piece.nbytes
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            word.copy_(self._one, non_blocking=True)
        return copies, _CudaBatch(self, event, kept)

    def _target(self, piece: Piece) -> torch.Tensor | None:
        """Returns the place in the slot, pinned; None if it cannot be had."""
        block = piece.block
        if self._pinned is None or block is None or not self._pinned.pin(block, self.device):
            return None
        return block[piece.at : piece.at + piece.nbytes].view(piece.tensor.dtype)

    def close(self) -> None:
        with suppress(RuntimeError):  # of the device: it copies no more, and its program was told
            self._stream.synchronize()


def copier_for(device: torch.device, pinned: PinnedBlocks | None) -> Copier:
    """Makes the copier for a device. Raises: MirrorError for a device that there is no copier
    for."""
    if device.type == "cpu":
        return HostCopier()
    if device.type == "cuda":
        return CudaCopier(device, pinned)
    if device.type == "meta":
        raise MirrorError(
            "a tensor on the meta device has no data to mirror: initialise it first, "
            "model.to_empty(device=...)"
        )
    raise MirrorError(
        f"tensors on {device} cannot be mirrored: there are copiers for cuda and cpu. Move it with "
        ".to('cpu')"
    )
