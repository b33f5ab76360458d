"""Runs what stands in a document: its blocks of Python, and its sessions of commands.

A block of Python runs as it stands, in a folder of its own; names that it uses and does not make
are given (`GIVEN`); on a page of docs/howto only what docs/howto/try.md makes, each time anew.
One that begins with `# name.py` is a file of that name. A session (`console`)
has to print what stands there, where `...` is anything. Blocks of a page of SESSIONS share one
folder. `<!-- not run: why -->` above a block leaves it out.
"""

from __future__ import annotations

import contextlib
import doctest
import gc
import os
import re
import shlex
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pythons
import torch
from typer.testing import CliRunner

import pmstore
import pmstore.torch
from pmstore.commands.application import app

ROOT = Path(__file__).resolve().parent.parent
SESSIONS = {
    "README.md",
    "docs/CLI.md",
    "docs/tutorial.md",
    "docs/howto/data.md",
    "docs/howto/deploying.md",
    "docs/howto/from_torch_save.md",
    "docs/howto/readers.md",
    "docs/howto/try.md",
}
PROGRAMS = {
    "docs/howto/from_lightning.md",
    "docs/howto/from_orbax.md",
    "docs/howto/from_transformers.md",
    "docs/howto/from_wandb.md",
}
"""Pages whose pieces run in a process of their own: their frameworks would change this one."""
PLACES = ("/mnt/", "/shared/", "/local/disk/", "s3://")
"""What is in a folder of the test's instead."""

FENCE = re.compile(
    r"(?:^<!-- not run: (?P<why>.+?) -->\n)?^```(?P<kind>python|console)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    line: int
    """Of its first line, in the document."""
    why_not: str | None


def pages() -> list[str]:
    """Every document with such blocks."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found if blocks(str(path.relative_to(ROOT)))]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(m["kind"], m["text"], text.count("\n", 0, m.start("text")) + 1, m["why"])
        for m in FENCE.finditer(text)
    ]


# ---- what a fragment may use without making it ----


class Names(dict[str, Any]):
    """Names of a fragment: what it makes, and what is given when it is asked for."""

    def __missing__(self, name: str) -> Any:
        made = self[name] = GIVEN[name](self)  # KeyError: Python says which name is not defined
        return made


def _model(names: Names) -> Any:
    torch = names["torch"]
    torch.manual_seed(0)
    return torch.nn.Linear(20, 1)


def _loader(names: Names) -> Any:
    torch = names["torch"]
    x = torch.ones(40, 20)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return torch.utils.data.DataLoader(data, batch_size=10)


def _step(names: Names) -> Callable[..., Any]:
    """A step of the model, with a batch or without: its loss."""

    def step(*batch: Any) -> Any:
        torch = names["torch"]
        loss = names["model"](torch.ones(3, 20)).square().mean()
        names["optimizer"].zero_grad()
        loss.backward()
        names["optimizer"].step()
        return loss

    return step


def _one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    held = next(batches)
    for batch in batches:
        yield held
        held = batch
    yield held


def _dist(names: Names) -> Any:
    """torch.distributed, whose only rank this process is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    return names["torch"].distributed


def _run(names: Names) -> Any:
    """It has gone through the data once."""
    run = pmstore.torch.attach(
        names["store"], model=names["model"], optimizer=names["optimizer"], loader=names["loader"]
    )
    for _ in run.batches():
        run.log(loss=names["step"]())
    return run


GIVEN: dict[str, Callable[[Names], Any]] = {
    "os": lambda names: os,
    "np": lambda names: np,
    "pmstore": lambda names: pmstore,
    "torch": lambda names: torch,
    "model": _model,
    "optimizer": lambda names: names["torch"].optim.AdamW(names["model"].parameters()),
    "scheduler": lambda names: names["torch"].optim.lr_scheduler.StepLR(names["optimizer"], 5),
    "loader": _loader,
    "store": lambda names: pmstore.open("given.pm", size="16MiB"),
    "run": _run,
    "step": _step,
    "loss": lambda names: names["step"](),
    "batches": lambda names: [None] * 3,
    "train": lambda names: lambda batch: 0.5,
    "update": lambda names: 1.0,
    "state_dict": lambda names: names["model"].state_dict(),
    "prefetch": lambda names: _one_ahead,
    "rank": lambda names: 0,
    "n": lambda names: 1,
    "url": lambda names: "tier",
    "dist": _dist,
}


# ---- running ----


BEGIN = "docs/howto/try.md"
"""Has what a reader of a how-to writes above each piece. Nothing else is given."""


def begin() -> str:
    (found,) = [block.text for block in blocks(BEGIN) if block.text.startswith("# begin.py\n")]
    return found


def run(page: str, folder: Path, prepare: Callable[[], None] | None = None) -> int:
    """Runs a page's blocks. Returns: how many it ran."""
    if page in PROGRAMS:
        return programs(page, folder, prepare)
    names: dict[str, Any] = Names()
    ran = 0
    for number, block in enumerate(blocks(page)):
        if block.why_not:
            continue
        here = folder / ("session" if page in SESSIONS else str(number))
        if fresh := not here.exists():
            here.mkdir()
        with inside(here):
            if fresh and prepare is not None:
                prepare()
            if block.kind == "console":
                session(page, block)
            else:
                if page.startswith("docs/howto/"):
                    exec(
                        compile(begin(), str(ROOT / BEGIN), "exec"), names := {"__name__": "begin"}
                    )
                    names["__name__"] = "piece"
                python(page, block, names, folder)
        ran += 1
    return ran


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def python(page: str, block: Block, names: dict[str, Any], folder: Path) -> None:
    if named := re.match(r"# (\w+\.py)\n", block.text):
        Path(named[1]).write_text(block.text, encoding="utf-8")
        return
    text = with_places(block.text, folder)
    for place in ("mnt/pmem0", "local/disk"):
        (folder / place).mkdir(parents=True, exist_ok=True)
    lines = "\n" * (block.line - 1)  # a traceback names the line of the document
    try:
        with warnings.catch_warnings():  # torch's, where one process saves
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            exec(compile(lines + text, str(ROOT / page), "exec"), names)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for store in [v for v in names.values() if isinstance(v, pmstore.Store)]:
            store.__exit__(None, None, None)
        for name in [*GIVEN, *[n for n, v in names.items() if isinstance(v, pmstore.Store)]]:
            names.pop(name, None)
        gc.collect()


def programs(page: str, folder: Path, prepare: Callable[[], None] | None) -> int:
    """Each as a reader runs it, below the lines of `begin.py`; all in one process and folder."""
    names = []
    with inside(folder):
        if prepare is not None:
            prepare()
        Path("begin.py").write_text(begin(), encoding="utf-8")
        for block in blocks(page):
            if block.why_not:
                continue
            named = re.match(r"# (\w+)\.py\n", block.text)
            names.append(named[1] if named else f"line{block.line}")
            text = f"from begin import *\n{with_places(block.text, folder)}"
            Path(f"{names[-1]}.py").write_text(text, encoding="utf-8")
        done = pythons.run(["-c", "".join(f"import {name}\n" for name in names)], timeout=300)
    assert not done.returncode, f"{page}:\n{done.stderr}"
    return len(names)


def with_places(text: str, folder: Path) -> str:
    for place in PLACES:
        text = text.replace(f'"{place}', f'"{folder}/{place.strip(":/")}/')
    return text


def session(page: str, block: Block) -> None:
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, expected = part.partition("\n")
        told = command(line)
        if expected:
            same = doctest.OutputChecker().check_output(expected, told, doctest.ELLIPSIS)
            assert same, f"{page}:{block.line}: {line}:\n{told}\nthe document says:\n{expected}"


def command(line: str) -> str:
    """What it prints. Of `pmstore` in this process; others in one of their own, where a program of
    Python alone has torch at once."""
    program, *words = shlex.split(line)
    if program == "cd":
        os.chdir(words[0])
        return ""
    if program == "pmstore":
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{line}: {result.output}"
        return re.sub(r" +$", "", result.stdout, flags=re.MULTILINE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if program == "python" and not set("|&;<>$") & set(line):
        done = pythons.run(words, env=environment, timeout=300)
    else:
        line = re.sub(r"\bpython\b", shlex.quote(sys.executable), line)
        done = subprocess.run(
            ["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=300
        )
    killed = done.returncode in (137, -9)  # bash, or the program in its place
    assert killed or not done.returncode, done.stderr
    return done.stdout + ("Killed\n" if killed else "")
