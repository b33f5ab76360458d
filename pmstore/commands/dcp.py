"""The commands dcp: checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pmstore.base.newfile import absent
from pmstore.base.words import counted
from pmstore.commands.app import app, text_word
from pmstore.commands.common import ending, fail, progress, say, size
from pmstore.extras import optional

if TYPE_CHECKING:
    from pmstore.dcp.source import Source

dcp: typer.Typer = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Converts checkpoints of torch.distributed.checkpoint.",
)
app.add_typer(dcp, name="dcp")


class Form(str, Enum):
    STORE = "store"
    TORCH = "torch"
    FILE = "file"


_FILES = (".pt", ".pth", ".ckpt", ".bin")


@dcp.callback()
def _group() -> None: ...


@dcp.command()
def convert(
    places: Annotated[
        list[str], typer.Argument(metavar="FROM... TO", show_default=False, parser=text_word)
    ],
    to: Annotated[
        Form | None,
        typer.Option(
            "--to",
            help="What is made: a folder of stores, torch's own folder, a file of torch.save. "
            "[default: a file where TO ends in .pt, .pth, .ckpt or .bin; else a folder of the "
            "kind that FROM is not]",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Of the run, in stores.", parser=text_word)] = "run",
    model: Annotated[str, typer.Option(help="Key of a run's model.", parser=text_word)] = "model",
    optimizer: Annotated[
        str, typer.Option(help="Key of a run's optimizer.", parser=text_word)
    ] = "optim",
    epoch: Annotated[
        int | None, typer.Option(help="Of a tier. [default: the newest]", show_default=False)
    ] = None,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="Objects may be any code: you made FROM yourself.")
    ] = False,
) -> None:
    """Converts a checkpoint, one tensor after another.

    FROM is a folder of torch's FileSystemWriter or of pmstore's StoreWriter, a file of torch.save,
    the stores of all ranks of a run, or a tier. TO must not exist, and is there only when it is
    whole.

    Example: pmstore dcp convert run-*.pm checkpoint

    Example: pmstore dcp convert checkpoints/step-100 model.pt
    """
    if len(places) < 2:
        raise fail("give what is converted, and what is made: pmstore dcp convert FROM TO", 2)
    *given, last = places
    target = Path(last)
    with ending():
        with optional:
            from pmstore.dcp import converting
            from pmstore.dcp.layout import path_of
        absent(target)
        if to is None and target.suffix in (".safetensors", ".npz"):
            raise ValueError(f"{target}: pmstore export writes such files")
        path_of(last, "give a path; pmstore flush writes to tiers")
        with _opened(given, name, (model, optimizer), epoch, trusted) as (source, ours):
            metadata = converting.all_of(source)
            total = converting.total_bytes(metadata)
            form = to or (
                Form.FILE if target.suffix in _FILES else Form.TORCH if ours else Form.STORE
            )
            with progress("converting", total) as advance:
                if form is Form.FILE:
                    converting.to_file(source, target, metadata, advance, trusted)
                elif form is Form.TORCH:
                    converting.to_torch(source, target, metadata, advance)
                else:
                    converting.to_store(source, target, metadata, advance)
    what = metadata.state_dict_metadata.values()
    tensors = sum(hasattr(one, "size") for one in what)
    objects = counted(len(what) - tensors, "object")
    say(f"{target}: {counted(tensors, 'tensor')}, {size(total)}, {objects}")


@contextmanager
def _opened(
    given: list[str], name: str, prefixes: tuple[str, str], epoch: int | None, trusted: bool
) -> Iterator[tuple[Source, bool]]:
    """What the words name, and whether it is pmstore's."""
    opens, ours = _kind(given, name, prefixes, epoch, trusted)
    with closing(opens()) as source:
        yield source, ours


def _kind(
    given: list[str], name: str, prefixes: tuple[str, str], epoch: int | None, trusted: bool
) -> tuple[Callable[[], Source], bool]:
    from pmstore.dcp.epochs import open_epoch
    from pmstore.dcp.folder import FolderSource
    from pmstore.dcp.foreign import TorchFile, TorchFolder
    from pmstore.dcp.keys import Prefixes
    from pmstore.dcp.ranks import find
    from pmstore.dcp.runs import open_run
    from pmstore.tiers.choosing import Wanted

    of_run = Prefixes(*prefixes)
    first = given[0]
    if len(given) == 1:
        if os.path.exists(os.path.join(first, ".metadata")):
            return lambda: TorchFolder(first, trusted), False
        if FolderSource.is_one(first):
            return lambda: FolderSource(first), True
        if os.path.isdir(first) and not os.listdir(first):
            raise FileNotFoundError(2, "there is no checkpoint and no epoch in it", first)
        if "://" in first or os.path.isdir(first):
            return lambda: open_epoch(first, Wanted(epoch), name, of_run), True
        if os.path.isfile(first) and not _is_store(first):
            return lambda: TorchFile(first, trusted), False
        if not os.path.exists(first) and not glob.has_magic(first):
            raise FileNotFoundError(2, "no such file or directory", first)
    return lambda: open_run(find(given), name, of_run), True


def _is_store(path: str) -> bool:
    """Whether the file is a store, or one that was."""
    with open(path, "rb") as file:
        return file.read(8) == b"PMSTORE\n"
