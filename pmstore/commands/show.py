"""The command show: one name of a store, with what is in it. typer is not imported here
(`table.py`)."""

from __future__ import annotations

import base64
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore._base.text import counted, printable
from pmstore.commands.common import find, progress, reading, say, say_json, size
from pmstore.commands.info import STYLES, extent, shape
from pmstore.objects import dtypes
from pmstore.objects.containers import Group
from pmstore.objects.entries import Entry
from pmstore.objects.lists import List
from pmstore.objects.readonly import plain_type
from pmstore.objects.slots import Slots
from pmstore.show import picture
from pmstore.show.curve import curve
from pmstore.show.terminal import Column, Terminal

if TYPE_CHECKING:
    from pmstore.commands.app import Json, Limit, Name, StorePath

LIMIT = 12
"""Elements or items that are told."""
_LISTED = 64
_CURVE_ROWS = 8
_DRAWN = 1 << 16
"""Items of a list that are read for its curve, at most: evenly over it."""


def show(path: StorePath, name: Name, limit: Limit = LIMIT, as_json: Json = False) -> None:
    """Shows what a name holds, with a small picture of arrays.

    For an array it shows shape, dtype, statistics, the picture, and the first and last elements. A
    value is shown as it is. Arrays of one dimension, and lists of numbers, are drawn as a curve, or
    as a line of bars if there are few elements. Arrays of two dimensions are drawn in shades (means
    of neighbours). Others, and very large ones, are drawn as a histogram from the least to the
    greatest. For slots it shows the current version.

    Example: pmstore show run.pm config

    Example: pmstore show run.pm model/fc1.weight --limit 100

    Example: pmstore show run.pm losses --json | jq .mean
    """
    with reading(path, keep=True) as store:
        value = find(store, name)
        slots = isinstance(value, Slots)
        if slots:
            value = value.current
        if as_json:
            told = {"name": name, **_told(value, limit), **({"slots": True} if slots else {})}
            say_json(told)
        elif isinstance(value, Group):
            _show_group(name, value)
        elif isinstance(value, List):
            _show_list(name, value, limit)
        elif _is_array(value):
            _show_array(name, value, limit, ", the current version of slots" if slots else "")
        else:
            say(_pretty(value, Terminal().width or 80))


def _pretty(value: Any, width: int) -> str:
    if not isinstance(value, (dict, list, tuple, set, frozenset)):
        return repr(value)
    from rich.pretty import pretty_repr

    return pretty_repr(value, max_width=width)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "data_ptr")


def _about(value: Any) -> dict[str, Any]:
    """Describes a value: its kind, and what its kind has of dtype, shape, bytes, names, items,
    type."""
    if isinstance(value, Group):
        return {"kind": "group", "names": len(value)}
    if isinstance(value, List):
        return {"kind": "list", "items": len(value)}
    if isinstance(value, np.ndarray):
        return {
            "kind": "array",
            "dtype": str(value.dtype),
            "shape": list(value.shape),
            "bytes": value.nbytes,
        }
    if _is_array(value):
        dtype = str(value.dtype).removeprefix("torch.")
        nbytes = value.numel() * value.element_size()
        return {"kind": "tensor", "dtype": dtype, "shape": list(value.shape), "bytes": nbytes}
    return {"kind": "value", "type": plain_type(value).__name__}


def _statistics(value: Any) -> picture.Statistics | None:
    if not picture.is_numeric(value):
        return None
    elements = math.prod(value.shape)
    if elements <= picture.PICTURED:
        return picture.statistics(value)
    with progress("reading", 2 * elements * _item_bytes(value)) as advance:
        return picture.statistics(value, lambda done: advance(done * _item_bytes(value)))


def _item_bytes(value: Any) -> int:
    return int(value.element_size() if hasattr(value, "data_ptr") else value.itemsize)


def _some(value: Any, part: slice) -> Any:
    """Returns some of the elements as Python's own numbers; as bytes (or pairs of them) where torch
    knows no numbers."""
    if hasattr(value, "data_ptr"):
        plain = value.detach()
        import torch

        if not dtypes.has_numbers(plain.dtype):
            plain = plain.view(torch.uint8 if plain.element_size() == 1 else torch.uint16)
        elif plain.is_complex():
            plain = plain.to(torch.complex128)  # torch warns of complex32
        flat = plain.reshape(-1)[part]
        return (
            flat.tolist()
            if not flat.dtype.is_floating_point or flat.itemsize > 1
            else flat.float().tolist()
        )
    return value.reshape(-1)[part].tolist() if value.size else []


# ---- for programs ----


def plain_json(value: Any) -> Any:
    """Returns the value in terms of JSON. What JSON has no type for becomes {"type": ..., ...}."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"type": "float", "repr": repr(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"type": plain_type(value).__name__, "base64": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [plain_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain_json(item) for key, item in value.items()}
    return {"type": plain_type(value).__name__, "repr": repr(value)}


def _told(value: Any, limit: int) -> dict[str, Any]:
    about = _about(value)
    if isinstance(value, Group):
        return {**about, "names": [entry.name for entry in value.entries()]}
    if isinstance(value, List):
        return {
            **about,
            "first": [_told_item(item) for item in value[:limit]],
            "last": [_told_item(item) for item in value[-limit:]],
        }
    if not _is_array(value):
        return {**about, "value": plain_json(value)}
    found = _statistics(value)
    ends = {
        "first": plain_json(_some(value, slice(limit))),
        "last": plain_json(_some(value, slice(-limit, None))),
    }
    return {**about, **({} if found is None else plain_json(asdict(found))), **ends}


def _told_item(item: Any) -> Any:
    return _about(item) if _is_array(item) else plain_json(item)


# ---- for people ----


def _show_group(name: str, value: Group) -> None:
    out = Terminal()
    entries: list[Entry] = value.entries()
    told = f"group of {counted(len(entries), 'name')}"
    say(f"{out.paint(printable(name), 'bold')}: {told}")
    rows, styles = [], []
    for entry in entries[:_LISTED]:
        what = " ".join(filter(None, (entry.kind, entry.dtype, shape(entry))))
        rows.append((f"  {printable(entry.name)}", what, extent(entry)))
        styles.append((STYLES.get(entry.kind, ""), "", ""))
    columns = [Column("", path=True), Column("", fold=True), Column("", right=True)]
    say(*out.table(columns, rows, styles)[1:])
    if len(entries) > _LISTED:
        say(f"  and {len(entries) - _LISTED:,} more")


def _show_list(name: str, value: List, limit: int) -> None:
    out = Terminal()
    count = len(value)
    title = f"{out.paint(printable(name), 'bold')}: list of {counted(count, 'item')}"
    drawn = value[:: -(-count // _DRAWN)] if count > 1 else []
    if not all(type(item) in (int, float) for item in drawn):
        drawn = []
    if not drawn:
        say(title, *(f"  [{index}] {_line(item)}" for index, item in enumerate(value[:limit])))
        if count > limit:
            say(f"  and {count - limit:,} more")
        return
    say(title)
    try:
        numbers = np.array(drawn, np.float64)
    except OverflowError:  # integers beyond all floats
        numbers = np.empty(0)
    rows = []
    if numbers.size:
        found = picture.statistics(numbers)
        rows += _facts(found)
        if count > len(drawn):
            rows.append(("of which", f"{counted(len(drawn), 'item')}, evenly over it, were read"))
        rows += _line_picture(out, numbers, found)
    _say_rows(out, [*rows, *_ends(value[:limit], value[-limit:], count)])


def _line(item: Any) -> str:
    if not _is_array(item):
        from rich.pretty import pretty_repr

        return pretty_repr(item, max_width=10_000, max_string=100, max_length=20)
    about = _about(item)
    return f"{about['kind']} {about['dtype']} {'x'.join(map(str, about['shape'])) or 'scalar'}"


def _show_array(name: str, value: Any, limit: int, extra: str) -> None:
    out = Terminal()
    about = _about(value)
    shape = " x ".join(map(str, about["shape"])) or "scalar"
    extra += ", requires grad" if getattr(value, "requires_grad", False) else ""
    told = f"{about['kind']} of {about['dtype']}, {shape}, {size(about['bytes'])}{extra}"
    rows: list[tuple[str, str | list[str]]] = []
    found = _statistics(value)
    if found is not None and found.elements:
        rows += _facts(found)
        if found.minimum != found.maximum:  # else there is nothing to see
            rows += _picture(out, value, found)
    first, last = _some(value, slice(limit)), _some(value, slice(-limit, None))
    say(f"{out.paint(printable(name), 'bold')}: {told}")
    _say_rows(out, [*rows, *_ends(first, last, math.prod(about["shape"]))])


_Rows = list[tuple[str, str | list[str]]]
"""Titles, each with a text that folds or the lines of a picture."""


def _say_rows(out: Terminal, rows: _Rows) -> None:
    indent = max((len(title) for title, _ in rows), default=0) + 2
    for title, text in rows:
        if isinstance(text, str):
            say(*out.titled(title, text, indent))
            continue
        for number, line in enumerate(text):
            beside = title if number == 0 else ""
            painted = out.paint(beside, "cyan") + " " * (indent - len(beside))
            say((painted + out.paint(line, "green")).rstrip())


_TITLES = 18
"""Columns that the widest title, and what is behind it, take beside a picture."""


def _picture(out: Terminal, value: Any, found: picture.Statistics) -> _Rows:
    if value.ndim == 1 and found.elements <= picture.PICTURED:
        return _line_picture(out, picture.as_numbers(value), found)
    room = out.room(16, 64 if out.width is None else 100, _TITLES)
    what, lines = picture.picture(value, found, room, blocks=out.blocks)
    return [(what, lines)] if lines else []


def _line_picture(out: Terminal, numbers: Any, found: picture.Statistics) -> _Rows:
    """Draws numbers in a row: as bars if there are few, otherwise as a curve."""
    if found.minimum is None or found.minimum == found.maximum:
        return []
    room = out.room(16, 64 if out.width is None else 100, _TITLES)
    if len(numbers) <= picture.FEW or set(np.unique(numbers[:64])) <= {0.0, 1.0}:
        return [("values", [picture.sparkline(picture.shrink(numbers, room, 0), out.blocks)])]
    return [("values", curve(numbers, room, _CURVE_ROWS, out.blocks))]


def _ends(first: list[Any], last: list[Any], count: int) -> _Rows:
    if not first:
        return []
    if count <= len(first):
        return [("first", ", ".join(map(_brief, first)))]
    return [
        ("first", ", ".join(map(_brief, first)) + " ..."),
        ("last", "... " + ", ".join(map(_brief, last))),
    ]


def _facts(found: picture.Statistics) -> _Rows:
    rows: _Rows = []
    if found.minimum is not None and found.maximum is not None:
        rows.append(("range", f"{found.minimum:.6g} to {found.maximum:.6g}"))
        rows.append(("mean, std", f"{found.mean:.6g}, {found.std:.6g}"))
    odd = [(found.zeros, "zero"), (found.nan, "nan"), (found.infinite, "infinite")]
    told = [f"{count:,} {what} ({count / found.elements:.1%})" for count, what in odd if count]
    return [*rows, ("of which", ", ".join(told))] if told else rows


def _brief(item: Any) -> str:
    if type(item) is float:
        return f"{item:.6g}"
    return repr(item) if isinstance(item, (str, bytes)) else str(item)
