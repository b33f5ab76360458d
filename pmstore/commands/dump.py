"""Commands that make one portable file of a store, and a store of it: dump, load."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from pmstore import portable
from pmstore._base.newfile import PRIVATE, new_file
from pmstore._base.text import counted
from pmstore.commands.app import Domain, Json, Mode, StorePath, app
from pmstore.commands.common import (
    answering,
    ending,
    fail,
    making,
    progress,
    reading_all,
    size,
    tell,
)

DumpPath = Annotated[
    Path, typer.Argument(metavar="DUMP", help="The dump, or - for a pipe.", show_default=False)
]


@app.command()
def dump(path: StorePath, out: DumpPath, mode: Mode = PRIVATE, as_json: Json = False) -> None:
    """Writes all that a store holds into one portable file. Use it for other versions and machines,
    archives and pipes.

    It holds names, values, descriptions and bytes in msgpack, with a checksum; no code. It is as
    large as what the store holds.

    Example: pmstore dump run.pm run.dump

    Example: pmstore dump run.pm - | zstd > run.dump.zst
    """
    piped = str(out) == "-"
    if piped and as_json:
        raise fail("--json and a dump both go to the output: name a file", 2)
    with (
        reading_all(path) as store,
        progress("dumping", store.stats().used_bytes) as advance,
        contextlib.nullcontext(sys.stdout.buffer) if piped else new_file(out, mode) as file,
        answering() if piped else contextlib.nullcontext(),
    ):
        objects = portable.dump(store, file, advance)
        file.flush()
    if not piped:
        length = out.stat().st_size
        tell(
            f"{out}: {counted(objects, 'object')}, {size(length)}",
            {"path": str(out), "objects": objects, "bytes": length},
            as_json,
        )


@app.command()
def load(
    dump: DumpPath,
    path: StorePath,
    size_: Annotated[
        str | None,
        typer.Option("--size", help="Of the new file at first. [default: what the dump needs]"),
    ] = None,
    max_size: Annotated[str | None, typer.Option(help="The file never grows beyond this.")] = None,
    domain: Domain = "auto",
    as_json: Json = False,
) -> None:
    """Makes a store of a dump. STORE must not exist, and is there only when it is whole.

    Example: pmstore load run.dump run.pm

    Example: zstd -dc run.dump.zst | pmstore load - run.pm --domain file
    """
    with ending(), making(path, size_), contextlib.ExitStack() as stack:
        file: BinaryIO = (
            sys.stdin.buffer if str(dump) == "-" else stack.enter_context(open(dump, "rb"))
        )
        length = os.fstat(file.fileno()).st_size
        chosen = size_ or (max(1 << 20, int(2.1 * length) + (1 << 20)) if length else None)
        advance = stack.enter_context(progress("loading", length))
        objects = portable.load(
            file,
            path,
            size=chosen,
            max_size=max_size,
            domain=domain,  # type: ignore[arg-type]
            progress=advance,
        )
    tell(f"{path}: {counted(objects, 'object')}", {"path": str(path), "objects": objects}, as_json)
