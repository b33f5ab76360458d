"""Draws shares as shades: which parts of a store's heap are in use."""

from __future__ import annotations

from pmstore._engine.store_info import SegmentUsage

SHADES, SHADES_ASCII = " ░▒▓█", " .:+#"


def heap_line(segment: SegmentUsage, columns: int, blocks: bool) -> str:
    """Draws a segment from its first byte of data to its last: darker where more of it is in use,
    and empty only where nothing is.

    columns: of the line at most: the cells are put together until they fit.
    """
    together = -(-len(segment.cells) // max(1, columns))
    room = segment.data_bytes / len(segment.cells)
    shades = SHADES if blocks else SHADES_ASCII
    parts = [segment.cells[at : at + together] for at in range(0, len(segment.cells), together)]
    return "".join(_shade(sum(part) / (room * len(part)), shades) for part in parts)


def _shade(share: float, shades: str) -> str:
    last = len(shades) - 1
    return shades[0 if share == 0 else max(1, min(last, round(share * last)))]
