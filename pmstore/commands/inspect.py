"""Commands that look at a store: info, ls, check."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from pmstore.commands.app import Json, StorePath, app, console, fail, reading, size


@app.command()
def info(path: StorePath, as_json: Json = False) -> None:
    """Says what a store is: domain, sizes, commits, what the last open had to undo.

    Example: pmstore info run.pm
    """
    with reading(path) as store:
        about = store.info()
    typer.echo(json.dumps(asdict(about), indent=2) if as_json else str(about))


@app.command("ls")
def list_names(
    path: StorePath,
    group: Annotated[str, typer.Argument(help="A group in it, such as run/model.", show_default=False)] = "",
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="What is in groups too.")] = False,
    as_json: Json = False,
) -> None:
    """Lists the names of a store or group, with what they hold.

    Example: pmstore ls -r run.pm run/model
    """
    with reading(path) as store:
        try:
            place: Any = store[group] if group else store
        except KeyError:
            raise fail(f"{path}: there is no {group!r}; pmstore ls {path} shows what there is", 2) from None
        if not _is_group(place):
            raise fail(f"{path}: {group!r} is no group but {_kind(place)['kind']}", 2)
        rows = list(_rows(place, f"{group}/" if group else "", recursive))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("name", "kind", "dtype", "shape"):
        table.add_column(title)
    table.add_column("size", justify="right")
    for row in rows:
        shape = "x".join(map(str, row["shape"])) if row["shape"] is not None else ""
        bytes_ = size(row["bytes"]) if row["bytes"] is not None else ""
        table.add_row(row["name"], row["kind"], row["dtype"] or "", shape, bytes_)
    console().print(table)


def _rows(group: Any, prefix: str, recursive: bool) -> Iterator[dict[str, Any]]:
    for name in group:
        item = group[name]
        yield {"name": f"{prefix}{name}", **_kind(item)}
        if recursive and _is_group(item):
            yield from _rows(item, f"{prefix}{name}/", True)


def _is_group(item: Any) -> bool:
    return hasattr(item, "keys") and not isinstance(item, dict)


def _kind(item: Any) -> dict[str, Any]:
    if _is_group(item):
        return {"kind": "group", "dtype": None, "shape": None, "bytes": None}
    if isinstance(item, np.ndarray):
        return {"kind": "array", "dtype": str(item.dtype), "shape": list(item.shape), "bytes": item.nbytes}
    if hasattr(item, "data_ptr"):
        return {
            "kind": "tensor",
            "dtype": str(item.dtype).removeprefix("torch."),
            "shape": list(item.shape),
            "bytes": item.numel() * item.element_size(),
        }
    return {"kind": type(item).__name__, "dtype": None, "shape": None, "bytes": None}


@app.command()
def check(path: StorePath, as_json: Json = False) -> None:
    """Checks every invariant of a store's file, without changing it. Exit code 1 if one is broken.

    Example: pmstore check run.pm && echo sound
    """
    with reading(path) as store:
        problems = [str(problem) for problem in store.check().problems]
    if as_json:
        typer.echo(json.dumps({"path": str(path), "sound": not problems, "problems": problems}, indent=2))
    elif problems:
        for problem in problems:
            typer.echo(problem)
    else:
        typer.echo(f"{path}: sound")
    if problems:
        raise typer.Exit(1)
