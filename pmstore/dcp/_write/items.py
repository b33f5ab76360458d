"""Makes a part of the items of a save plan."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from pmstore.dcp._format import copies, folder_layout
from pmstore.dcp._format.folder_layout import PIECE_BYTES, Chunk
from pmstore.dcp._format.metadata import dtype_name
from pmstore.dcp._write.save_part import Part

_BATCH_BYTES = 1 << 30
"""So much is copied before the planner is asked for more tensors: it may make them for us."""


def check(name: str, tensor: Any) -> torch.Tensor:
    """Returns the tensor without its graph, if it can be stored.

    Raises: TypeError that names it.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name!r}: the planner gives a {type(tensor).__name__}, not a tensor")
    what = None
    if tensor.device.type == "meta":
        what = "a meta tensor, which has no values: materialize it, as by module.to_empty()"
    elif tensor.is_nested:
        what = "a nested tensor: save the tensors of tensor.unbind()"
    elif tensor.layout != torch.strided:
        what = f"a tensor of layout {tensor.layout}: save tensor.to_dense(), or indices and values"
    elif tensor.is_quantized:
        what = "a quantized tensor: save tensor.int_repr(), its scale and its zero point"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not _is_waiting(tensor):
        what = f"a {type(tensor).__name__}: save the plain tensors that it is made of"
    if what is not None:
        raise TypeError(f"{name!r} cannot be saved: it is {what}")
    return tensor.detach()


def _is_waiting(tensor: torch.Tensor) -> bool:
    """Returns whether a subclass of Tensor is no more than its memory: it differs in name only."""
    return type(tensor).__name__ in ("Buffer", "UninitializedBuffer", "AsyncCollectiveTensor")


class Filling:
    """Fills a part with the items of a plan."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._copies: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # number in `_made`
        self._pending = 0
        self._made: list[tuple[Chunk, torch.Tensor]] = []
        self._crcs: dict[int, tuple[int, ...]] = {}  # of what was copied; by number in `_made`
        self.chunks: list[Chunk] = []

    def fill(self, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        """Copies all into the part, and computes CRCs.

        Raises: TypeError: what cannot be saved; StoreFullError.
        """
        for item in items:
            if item.type == WriteItemType.BYTE_IO:
                self._add_object(item, planner.resolve_data(item))
            else:
                self._add_tensor(item, planner.resolve_data(item))
            if self._pending >= _BATCH_BYTES:
                self._copy()
        self._copy()
        self.chunks = self._with_crcs()

    def _add_object(self, item: WriteItem, data: Any) -> None:
        if not isinstance(data, io.BytesIO):
            raise TypeError(
                f"{item.index.fqn!r}: the planner gives a {type(data).__name__}, not bytes"
            )
        view = data.getbuffer()
        source = (
            torch.frombuffer(view, dtype=torch.uint8)
            if view.nbytes
            else torch.empty(0, dtype=torch.uint8)
        )
        self._place(item, None, source)

    def _add_tensor(self, item: WriteItem, tensor: Any) -> None:
        source = check(item.index.fqn, tensor)
        assert item.tensor_data is not None
        planned = item.tensor_data.chunk
        if source.shape != planned.sizes:
            raise ValueError(
                f"{item.index.fqn!r}: the plan says {tuple(planned.sizes)}, and the planner gives "
                f"{tuple(source.shape)}"
            )
        offset = planned.offsets if item.index.offset is None else item.index.offset
        self._place(item, tuple(offset), source)

    def _place(self, item: WriteItem, offset: tuple[int, ...] | None, source: torch.Tensor) -> None:
        nbytes = source.numel() * source.element_size()
        number, start, data = self._part.take(nbytes)
        target = copies.from_bytes(data, source.dtype, source.shape)
        self._copies.append((len(self._made), source, target))
        self._pending += nbytes
        chunk = Chunk(
            fqn=item.index.fqn,
            offset=offset,
            dtype=dtype_name(source.dtype),
            shape=tuple(source.shape),
            array=number,
            start=start,
            nbytes=nbytes,
            crcs=(),
        )
        self._made.append((chunk, data))

    def _copy(self) -> None:
        waiting, self._copies, self._pending = self._copies, [], 0
        self._crcs |= self._part.bring_home(
            {number: (source, target) for number, source, target in waiting if source.numel()}
        )
        left = [both for number, *both in waiting if number not in self._crcs]
        pairs = [pair for both in left for pair in copies.slices(*both)]
        copies.by_all_cores(lambda pair: copies.copy(*pair), pairs)

    def _with_crcs(self) -> list[Chunk]:
        spans = [
            (number, at)
            for number, (chunk, _) in enumerate(self._made)
            if number not in self._crcs
            for at in range(0, chunk.nbytes, copies.SLICE_BYTES)
        ]
        assert copies.SLICE_BYTES % PIECE_BYTES == 0
        found = copies.by_all_cores(
            lambda span: folder_layout.crcs_of(
                self._made[span[0]][1][span[1] : span[1] + copies.SLICE_BYTES].numpy()
            ),
            spans,
        )
        crcs = dict(self._crcs)
        for (number, _), of_span in zip(spans, found, strict=True):
            crcs[number] = crcs.get(number, ()) + of_span
        return [
            replace(chunk, crcs=crcs.get(number, ()))
            for number, (chunk, _) in enumerate(self._made)
        ]
