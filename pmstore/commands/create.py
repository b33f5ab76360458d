"""Commands that change a store: create, set, rm, compact."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from pmstore._base.untrusted import sound
from pmstore.commands import completion
from pmstore.commands.app import Domain, Json, Name, Names, StorePath, app, text_word
from pmstore.commands.common import (
    ending,
    existing,
    fail,
    find,
    making,
    progress,
    regular,
    say_json,
    size,
    tell,
    writing,
)
from pmstore.commands.json_arrays import DTYPES, exact_array
from pmstore.errors import CorruptStoreError
from pmstore.formats.compaction import compact as compact_store
from pmstore.formats.npz import read_header
from pmstore.objects.containers import Group
from pmstore.opening import open as open_store


@app.command()
def create(
    path: StorePath,
    size_: Annotated[
        str | None,
        typer.Option(
            "--size", help="Of the new file, as 4GiB. It grows by itself. [default: 64MiB]"
        ),
    ] = None,
    max_size: Annotated[str | None, typer.Option(help="The file never grows beyond this.")] = None,
    domain: Domain = "auto",
    as_json: Json = False,
) -> None:
    """Makes an empty store. The file takes its room at once, so that it is there when it is needed.

    A store takes about twice the bytes of what it holds, for its log.

    Example: pmstore create run.pm --size 4GiB

    Example: pmstore create /dev/shm/run.pm --domain process --max-size 8GiB
    """
    made: dict[str, Any] = {"size": size_, "max_size": max_size, "domain": domain}
    with ending(), making(path, size_), open_store(path, "x", **made) as store:
        info = store.info()
    tell(
        f"{path}: {size(info.file_bytes)}, domain {info.domain}: a commit survives {info.survives}",
        {
            "path": str(path),
            "file_bytes": info.file_bytes,
            "domain": info.domain,
            "survives": info.survives,
        },
        as_json,
    )


@app.command("set", context_settings={"ignore_unknown_options": True})  # -1.5 is a value
def set_value(
    path: StorePath,
    name: Name,
    value: Annotated[
        str,
        typer.Argument(
            metavar="VALUE",
            help="JSON, or - to read it from standard input.",
            show_default=False,
            parser=text_word,
        ),
    ],
    text: Annotated[
        bool, typer.Option("--text", "-t", help="VALUE is text, and is stored as it is.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Make an array of it, of this dtype of numpy. What it cannot hold is refused.",
            autocompletion=completion.one_of(*DTYPES),
        ),
    ] = None,
    file: Annotated[
        bool, typer.Option("--file", "-f", help="VALUE is a .npy file, to be stored as an array.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Stores a value under a name, replacing what was there. It is one commit. Groups on the path
    are created.

    Example: pmstore set run.pm config/lr 0.001

    Example: pmstore set run.pm note --text "third try"

    Example: pmstore set run.pm start --dtype float32 "[[0, 1], [2, 3]]"

    Example: pmstore set run.pm embedding --file embedding.npy
    """
    with ending():
        stored = _parse(_piped() if value == "-" and not file else value, text, dtype, file)
    with writing(path) as store:
        store[name] = stored
    if as_json:
        say_json({"path": str(path), "name": name})


def _piped() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise ValueError("standard input is not UTF-8") from None


def _parse(value: str, text: bool, dtype: str | None, file: bool) -> Any:
    if text + file + (dtype is not None) > 1:
        raise ValueError("--text, --file and --dtype say what VALUE is: give one of them")
    if text:
        return value
    if file:
        return _load(value)
    try:
        parsed = json.loads(value, parse_float=_finite, object_pairs_hook=_distinct)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"VALUE is not JSON ({error}): quote it twice, '\"text\"', or give --text"
        ) from None
    return parsed if dtype is None else exact_array(parsed, dtype)


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text} is beyond all floats: write Infinity if it is meant")
    return number


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"VALUE has the key {twice!r} twice")
    return made


def _load(path: str) -> Any:
    bytes_ = regular(Path(path))
    with open(path, "rb") as file:
        if file.read(len(np.lib.format.MAGIC_PREFIX)) != np.lib.format.MAGIC_PREFIX:
            raise CorruptStoreError(
                f"{path}: not a .npy file (numpy.save writes them; for .npz and .safetensors: "
                "pmstore import)"
            )
        file.seek(0)
        with sound(path):
            header = read_header(file)
        if header.header_bytes + header.data_bytes > bytes_:
            raise CorruptStoreError(
                f"{path}: an array of shape {header.shape} and {header.dtype} has more bytes than "
                "the file"
            )
        if not header.data_bytes:
            return np.ndarray(header.shape, header.dtype)
        return np.memmap(
            file,
            header.dtype,
            "r",
            header.header_bytes,
            header.shape,
            "F" if header.fortran_order else "C",
        )


@app.command()
def rm(
    path: StorePath,
    names: Names,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Groups too, with all they hold.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Removes names: all of them, or none if one is wrong. It is one commit, and works when the
    store is full.

    Room is reused by the store. To make the file smaller: pmstore compact.

    Example: pmstore rm run.pm old/weights note

    Example: pmstore rm -r run.pm old
    """
    with writing(path) as store:
        for name in names:
            if isinstance(find(store, name), Group) and not recursive:
                raise fail(f"{path}: {name!r} is a group: -r removes it with all it holds", 2)
            del store[name]
    if as_json:
        say_json({"path": str(path), "removed": names})


@app.command()
def compact(path: StorePath, as_json: Json = False) -> None:
    """Gives free space back: writes the store anew, and small.

    The new file then takes the place of the old one. A crash leaves the old or the new file, whole.
    Needs room for both. The store must not be open elsewhere.

    Example: pmstore compact run.pm
    """
    with ending():
        existing(path)
        total = path.stat().st_size
        with progress("compacting", total) as advance:
            before = 0

            def show(done: int, of: int) -> None:
                nonlocal before
                now = done * total // max(of, 1)
                advance(now - before)
                before = now

            done = compact_store(path, progress=show)
    tell(f"{path}: {done}", {"path": str(path), **asdict(done)}, as_json)
