"""The command show: one name of a store, with what is in it."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
import typer
from rich.pretty import pretty_repr
from rich.text import Text

from pmstore.base.words import counted
from pmstore.commands.app import (
    Json,
    Name,
    StorePath,
    app,
    console,
    find,
    printable,
    progress,
    reading,
    size,
)
from pmstore.objects import dtypes
from pmstore.objects.containers import Group
from pmstore.objects.entries import Entry
from pmstore.objects.lists import List
from pmstore.objects.slots import Slots
from pmstore.show import picture

_LISTED = 64


@app.command()
def show(
    path: StorePath,
    name: Name,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Elements or items to print.")
    ] = 12,
    as_json: Json = False,
) -> None:
    """Shows what a name holds, with a small picture of arrays.

    Of an array shape, dtype, statistics, the picture and its first elements; a value as it is. The
    picture is a line of bars (1-d), shades (2-d, means of neighbours), or a histogram from the
    least to the greatest. Of slots it shows the current version.

    Example: pmstore show run.pm config

    Example: pmstore show run.pm model/fc1.weight --limit 100

    Example: pmstore show run.pm losses --json | jq .mean
    """
    with reading(path) as store:
        value = find(store, name)
        slots = isinstance(value, Slots)
        if slots:
            value = value.current
        if as_json:
            typer.echo(
                json.dumps(
                    {"name": name, **_told(value, limit), **({"slots": True} if slots else {})},
                    indent=2,
                )
            )
        elif isinstance(value, (Group, List)):
            _show_container(name, value, limit)
        elif _is_array(value):
            _show_array(name, value, limit, ", the current version of slots" if slots else "")
        else:
            typer.echo(pretty_repr(value))


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "data_ptr")


def _about(value: Any) -> dict[str, Any]:
    """kind, dtype, shape, bytes."""
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
    return {"kind": "value", "type": type(value).__name__}


def _statistics(value: Any) -> picture.Statistics | None:
    if not picture.is_numeric(value):
        return None
    elements = math.prod(value.shape)
    with progress("reading", 2 * elements) as advance:
        return picture.statistics(value, advance)


def _first(value: Any, count: int) -> Any:
    """The first elements, as Python's own; as bytes (or pairs of them) where torch knows no
    numbers."""
    if hasattr(value, "data_ptr"):
        plain = value.detach()
        import torch

        if not dtypes.has_numbers(plain.dtype):
            plain = plain.view(torch.uint8 if plain.element_size() == 1 else torch.uint16)
        elif plain.is_complex():
            plain = plain.to(torch.complex128)  # of complex32 torch warns
        flat = plain.reshape(-1)[:count]
        return (
            flat.tolist()
            if not flat.dtype.is_floating_point or flat.itemsize > 1
            else flat.float().tolist()
        )
    return value.reshape(-1)[:count].tolist() if value.size else []


# ---- for programs ----


def plain_json(value: Any) -> Any:
    """The value in terms of JSON; what JSON has no type for as {"type": ..., ...}."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"type": "float", "repr": repr(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"type": type(value).__name__, "base64": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [plain_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain_json(item) for key, item in value.items()}
    return {"type": type(value).__name__, "repr": repr(value)}


def _told(value: Any, limit: int) -> dict[str, Any]:
    about = _about(value)
    if isinstance(value, Group):
        return {**about, "names": [entry.name for entry in value.entries()]}
    if isinstance(value, List):
        return {**about, "first": [_told_item(item) for item in value[:limit]]}
    if not _is_array(value):
        return {**about, "value": plain_json(value)}
    found = _statistics(value)
    first = plain_json(_first(value, limit))
    return {**about, **({} if found is None else plain_json(asdict(found))), "first": first}


def _told_item(item: Any) -> Any:
    return _about(item) if _is_array(item) else plain_json(item)


# ---- for people ----


def _show_container(name: str, value: Any, limit: int) -> None:
    if isinstance(value, List):
        typer.echo(f"{name}: list of {counted(len(value), 'item')}")
        for index, item in enumerate(value[:limit]):
            typer.echo(f"  [{index}] {_line(item)}")
        if len(value) > limit:
            typer.echo(f"  and {len(value) - limit:,} more")
        return
    entries: list[Entry] = value.entries()
    typer.echo(f"{name}: group of {counted(len(entries), 'name')}")
    for entry in entries[:_LISTED]:
        shape = (
            ""
            if entry.shape is None
            else f" {entry.dtype} {'x'.join(map(str, entry.shape)) or 'scalar'}"
        )
        typer.echo(f"  {printable(entry.name)}: {entry.kind}{shape}")
    if len(entries) > _LISTED:
        typer.echo(f"  and {len(entries) - _LISTED:,} more")


def _line(item: Any) -> str:
    if not _is_array(item):
        return pretty_repr(item, max_width=10_000, max_string=100, max_length=20)
    about = _about(item)
    return f"{about['kind']} {about['dtype']} {'x'.join(map(str, about['shape'])) or 'scalar'}"


def _show_array(name: str, value: Any, limit: int, extra: str) -> None:
    about = _about(value)
    shape = " x ".join(map(str, about["shape"])) or "scalar"
    extra += ", requires grad" if getattr(value, "requires_grad", False) else ""
    rows = [("", f"{about['kind']} of {about['dtype']}, {shape}, {size(about['bytes'])}{extra}")]
    found = _statistics(value)
    if found is not None and found.elements:
        rows += _facts(found)
        if found.minimum != found.maximum:  # else there is nothing to see
            what, lines = picture.picture(value, found)
            rows += [(what if number == 0 else "", line) for number, line in enumerate(lines)]
    first = _first(value, limit)
    if first:
        more = " ..." if math.prod(about["shape"]) > len(first) else ""
        rows.append(("first", ", ".join(_brief(item) for item in first) + more))
    out = console()
    width = max(len(title) for title, _ in rows)
    out.print(Text(name, style="bold"), end="")
    for title, text in rows:
        out.print(
            Text(f"{title:<{width}}  {text}" if title or text != rows[0][1] else f": {text}"),
            soft_wrap=True,
        )


def _facts(found: picture.Statistics) -> list[tuple[str, str]]:
    rows = []
    if found.minimum is not None and found.maximum is not None:
        rows.append(("range", f"{found.minimum:.6g} to {found.maximum:.6g}"))
        rows.append(("mean, std", f"{found.mean:.6g}, {found.std:.6g}"))
    odd = [(found.zeros, "zero"), (found.nan, "nan"), (found.infinite, "infinite")]
    told = [f"{count:,} {what} ({count / found.elements:.1%})" for count, what in odd if count]
    return [*rows, ("of which", ", ".join(told))] if told else rows


def _brief(item: Any) -> str:
    return (
        f"{item:.6g}"
        if type(item) is float
        else str(item)
        if not isinstance(item, (str, bytes))
        else repr(item)
    )
