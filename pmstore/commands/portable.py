"""Commands that make one portable file of a store, and a store of it: dump, load."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from pmstore import portable
from pmstore.commands.app import StorePath, app, ending, fail, progress, reading, size
from pmstore.commands.change import Domain
from pmstore.errors import CorruptStoreError
from pmstore.words import counted

DumpPath = Annotated[Path, typer.Argument(metavar="DUMP", help="The dump, or - for a pipe.", show_default=False)]


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is at the path when it is whole and durable, or not at all. - is standard output."""
    if str(path) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if os.path.lexists(path):
        raise FileExistsError(17, "the file exists: give another path, or remove it first", str(path))
    part = path.with_name(f".{path.name[:200]}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, path)
    finally:
        part.unlink(missing_ok=True)


@app.command()
def dump(path: StorePath, out: DumpPath) -> None:
    """Writes all that a store holds into one portable file. For other versions and machines, archives, pipes.

    It holds names, values, descriptions and bytes in msgpack, with a checksum; no code. It is as large as what the store holds.

    Example: pmstore dump run.pm run.dump

    Example: pmstore dump run.pm - | zstd > run.dump.zst
    """
    with reading(path) as store, progress("dumping", store.stats().used_bytes) as advance, new_file(out) as file:
        objects = portable.dump(store, file, advance)
    if str(out) != "-":
        typer.echo(f"{out}: {counted(objects, 'object')}, {size(out.stat().st_size)}")


@app.command()
def load(
    dump: DumpPath,
    path: StorePath,
    size_: Annotated[
        str | None, typer.Option("--size", help="Of the new file at first. [default: what the dump needs]")
    ] = None,
    max_size: Annotated[str | None, typer.Option(help="The file never grows beyond this.")] = None,
    domain: Domain = "auto",
) -> None:
    """Makes a store of a dump. STORE must not exist, and is there only when it is whole.

    Example: pmstore load run.dump run.pm

    Example: zstd -dc run.dump.zst | pmstore load - run.pm --domain file
    """
    with ending(), contextlib.ExitStack() as stack:
        file: BinaryIO = sys.stdin.buffer if str(dump) == "-" else stack.enter_context(open(dump, "rb"))
        length = os.fstat(file.fileno()).st_size
        chosen = size_ or (max(1 << 20, int(2.1 * length) + (1 << 20)) if length else None)
        advance = stack.enter_context(progress("loading", length))
        try:
            objects = portable.load(
                file,
                path,
                size=chosen,
                max_size=max_size,
                domain=domain,  # type: ignore[arg-type]
                progress=advance,
            )
        except CorruptStoreError as error:
            raise fail(f"{'standard input' if str(dump) == '-' else dump}: {error}", 1) from None
    typer.echo(f"{path}: {counted(objects, 'object')}")
