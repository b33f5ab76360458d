"""The command top: runs while they train, in the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from pmstore.commands.app import Json, app
from pmstore.commands.common import answering, ending, existing, has_folder, remark, say_json
from pmstore.show.live import frame
from pmstore.show.terminal import Terminal
from pmstore.show.watcher import Watched


@app.command()
def top(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="STORE...", help="A store, or those of several ranks.", show_default=False
        ),
    ],
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.1, help="Seconds from look to look.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="For stores that are not there yet.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Shows runs while they train, in the terminal.

    Steps, loss, commits and what they cost, the scheduler's last decision, tiers, memory. It ends
    when nobody writes to any of the stores any more, and says how each run ended: exit code 1 if a
    process died. Ctrl-C ends it before. Where the output is no terminal, and with --json,
    it looks once.

    Example: pmstore top /dev/shm/rank0.pm /dev/shm/rank1.pm

    Example: pmstore top --wait run.pm
    """
    with ending():
        for path in paths:
            if not wait or path.exists():
                existing(path)
            else:
                has_folder(path)
        stores = [Watched(path) for path in dict.fromkeys(paths)]
        console = Console()
        if once or as_json or not console.is_terminal:
            interrupted = False
            for store in stores:
                if not store.path.exists():
                    remark(f"waiting for {store.path}")
                while not store.path.exists():
                    time.sleep(interval)
                store.look()
        else:
            interrupted = _follow(stores, console, interval, wait)
        with answering():
            if as_json:
                say_json([one.as_dict() for one in stores])
            else:
                console.print(_frame(stores, console))
        if not interrupted and any(one.bad_news for one in stores):
            raise SystemExit(1)


def _follow(stores: list[Watched], console: Console, interval: float, wait: bool) -> bool:
    """Shows the stores again and again. Returns False when nobody writes to any of them, True at
    Ctrl-C. wait: for those that were not there yet."""
    try:
        with answering(), Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                for store in stores:
                    store.look()
                live.update(_frame(stores, console), refresh=True)
                awaited = any(store.told is None and not store.path.exists() for store in stores)
                if not any(store.live for store in stores) and not (wait and awaited):
                    return False
                time.sleep(interval)
    except KeyboardInterrupt:
        return True


def _frame(stores: list[Watched], console: Console) -> RenderableType:
    return frame(stores, console.width, console.height, Terminal().blocks)
