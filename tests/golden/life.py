"""A life of a program: what it finds, when it is killed, and where that is kept."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import tarfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from programs.bits import bits_of

HERE = Path(__file__).parent
Digests = dict[str, str]
"""By path."""


def digests(value: Any) -> Digests:
    """Of everything in it."""
    return {
        path: f"{kind} {hashlib.sha256(raw).hexdigest()[:16]}"
        for path, (kind, raw) in bits_of(value).items()
    }


def draws() -> dict[str, Any]:
    """The next numbers of the default generators."""
    return {"torch": torch.rand(3), "numpy": np.random.random(3), "python": random.random()}


@dataclass
class Life:
    """kill_in: the step of this life that is not finished; 0: none."""

    kill_in: int = 0
    opened: Digests = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    ended: Digests = field(default_factory=dict)
    before_kill: Callable[[], object] = lambda: None

    def begin(self, value: Any) -> None:
        """What is there before the first step of this life."""
        self.opened = digests(value)

    def trained(self, loss: float) -> None:
        """A step has done all that it does, and is not over."""
        self.losses.append(loss.hex())
        if len(self.losses) == self.kill_in:
            self.before_kill()
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, value: Any) -> None:
        """What is there after the last step."""
        self.ended = digests(value)

    def found(self) -> dict[str, Any]:
        """For JSON."""
        return {key: one for key, one in asdict(self).items() if key in FOUND}


FOUND = ("opened", "losses", "ended")


def pack(folder: Path, kind: str) -> None:
    """Keeps what lies in the folder. The same files make the same archive."""
    with tarfile.open(HERE / f"{kind}.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                about = tarfile.TarInfo(str(path.relative_to(folder)))
                about.size = path.stat().st_size
                archive.addfile(about, io.BytesIO(path.read_bytes()))


def unpack(kind: str, folder: Path) -> None:
    """Each file with holes where there is nothing in it."""
    with tarfile.open(HERE / f"{kind}.tar.xz") as archive:
        for about in archive:
            content = archive.extractfile(about)
            assert content is not None
            path = folder / about.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                while block := content.read(4096):
                    file.seek(len(block), os.SEEK_CUR) if not any(block) else file.write(block)
                file.truncate(about.size)


def expected(kind: str) -> list[dict[str, Any]]:
    """What the rest of the run gives, by rank."""
    found: list[dict[str, Any]] = json.loads((HERE / f"{kind}.json").read_text())
    return found
