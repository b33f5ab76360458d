"""Commands that write and read the files of others: export, import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pmstore import exchange
from pmstore._base.newfile import PRIVATE
from pmstore._base.sizes import parse_size
from pmstore._base.text import counted
from pmstore.commands import completion
from pmstore.commands.app import InGroup, Json, Mode, StorePath, app, text_word
from pmstore.commands.common import (
    ending,
    fail,
    find,
    making,
    progress,
    reading,
    reading_all,
    regular,
    size,
    tell,
    writing,
)
from pmstore.formats.run_log import export_log, export_tensorboard
from pmstore.objects.containers import Group
from pmstore.objects.job_record import stored_runs
from pmstore.opening import open as open_store

if TYPE_CHECKING:
    from pmstore.store import Store

Separator = Annotated[
    str | None,
    typer.Option(
        help='Between groups in names. [default: "." in safetensors, "/" in npz]',
        autocompletion=completion.one_of(".", "/", "-", "_"),
    ),
]


def _format(path: Path, *kinds: str) -> str:
    kind = path.suffix.removeprefix(".").lower()
    if kind in kinds:
        return kind
    told = ", ".join(f".{one}" for one in kinds[:-1]) + f" or .{kinds[-1]}"
    raise fail(f"{path}: the name of FILE says what it is: {told}", 2)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMES]) + ", ..." * (len(names) > _NAMES)


_NAMES = 10


def _run_of(store: Store, named: str) -> str:
    """Returns the name of the run that is meant. Ends the command if there are several, or none."""
    found = stored_runs(store)
    if named in found or (len(found) == 1 and not named):
        return named or found[0]
    if named:
        raise fail(f"{store.path}: {named!r} is no run; there are: {_some(found) or 'none'}", 2)
    told = f"several runs: --group says which: {_some(found)}" if found else "it has no run"
    raise fail(f"{store.path}: {told}", 2)


@app.command("export")
def export_(
    path: StorePath,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="To write: *.safetensors, *.npz, or *.csv or *.parquet of a log.",
            show_default=False,
        ),
    ] = None,
    group: InGroup = "",
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            "--tensorboard",
            metavar="DIR",
            help="Instead of FILE: a folder for TensorBoard, of this run alone.",
            show_default=False,
        ),
    ] = None,
    separator: Separator = None,
    compress: Annotated[bool, typer.Option("--compress", help="npz: compressed.")] = False,
    mode: Mode = PRIVATE,
    as_json: Json = False,
) -> None:
    """Writes arrays as safetensors or npz, or a log for others.

    With arrays, plain values and lists go along as metadata. Of a log, CSV and Parquet have a line
    for each step, and a column for each name that was logged; --tensorboard makes an event file.
    --group says which run it is. Of a tier: restore it first.

    Example: pmstore export run.pm model.safetensors --group model

    Example: pmstore export run.pm losses.csv

    Example: pmstore export run.pm --tensorboard logs/run

    Example: pmstore export run.pm arrays.npz --compress
    """
    given = [place for place in (file, tensorboard) if place is not None]
    if len(given) != 1:
        raise fail("give FILE, or --tensorboard DIR", 2)
    (to,) = given
    kind = "log" if tensorboard else _format(to, "safetensors", "npz", "csv", "parquet")
    if kind not in ("safetensors", "npz"):
        if compress or separator is not None:
            raise fail("--compress and --separator are for arrays, and a log is none", 2)
        write = export_tensorboard if tensorboard else export_log
        with reading(path, keep=True) as store:
            count = write(store, to, run=_run_of(store, group), mode=mode)
        _tell_written(to, count, "step", as_json)
        return
    with reading_all(path) as store:
        place: Any = find(store, group) if group else store
        if not isinstance(place, Group):
            raise fail(f"{path}: {group!r} is no group", 2)
        if kind == "safetensors":
            count = exchange.export_safetensors(
                place, to, separator="." if separator is None else separator, mode=mode
            )
        else:
            with progress("writing", store.stats().used_bytes) as advance:
                count = exchange.export_npz(
                    place,
                    to,
                    separator="/" if separator is None else separator,
                    compress=compress,
                    mode=mode,
                    progress=advance,
                )
    _tell_written(to, count, "array", as_json)


def _tell_written(path: Path, count: int, what: str, as_json: bool) -> None:
    """Says what was written. path: of a file, or of the folder that has it."""
    bytes_ = sum(one.stat().st_size for one in (path.iterdir() if path.is_dir() else [path]))
    tell(
        f"{path}: {counted(count, what)}, {size(bytes_)}",
        {"path": str(path), f"{what}s": count, "bytes": bytes_},
        as_json,
    )


@app.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="To read: *.safetensors or *.npz.", show_default=False),
    ],
    path: StorePath,
    group: Annotated[
        str,
        typer.Option(
            "--group",
            metavar="GROUP",
            help="Into this group of the store.",
            show_default=False,
            parser=text_word,
            autocompletion=completion.groups,
        ),
    ] = "",
    separator: Separator = None,
    replace: Annotated[bool, typer.Option("--replace", help="What has the same names.")] = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="As torch tensors, where the file does not say.")
    ] = False,
    inflated: Annotated[
        str | None,
        typer.Option(
            help=(
                "npz: bytes, as 4GiB, that compressed members may take. [default: 16 times theirs, "
                "and 64MiB]"
            )
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Copies arrays of a safetensors or npz file into a store. It is one commit. The store is made
    if there is none.

    Example: pmstore import model.safetensors run.pm --group pretrained --tensors

    Example: pmstore import arrays.npz run.pm --replace
    """
    kind = _format(file, "safetensors", "npz")
    if inflated is not None and kind != "npz":
        raise fail("--inflated is for npz: nothing in safetensors is compressed", 2)
    fresh = not path.exists()
    with ending():
        bytes_ = regular(file)
        if fresh:
            size_ = max(1 << 20, int(2.2 * bytes_) + (1 << 20))
            with making(path, size_):
                open_store(path, "x", size=size_).close()
    try:
        with writing(path) as store, progress("reading", bytes_) as advance:
            place = store.group(group) if group else store
            read: Any = exchange.import_safetensors
            chosen: dict[str, Any] = {} if separator is None else {"separator": separator}
            if kind == "npz":
                read, chosen["inflated_most"] = (
                    exchange.import_npz,
                    None if inflated is None else parse_size(inflated),
                )
            count = read(place, file, replace=replace, tensors=tensors, progress=advance, **chosen)
    except SystemExit:
        if fresh:  # nothing was imported into a store that was made for it
            path.unlink(missing_ok=True)
        raise
    tell(
        f"{path}: {counted(count, 'array')} imported", {"path": str(path), "arrays": count}, as_json
    )
