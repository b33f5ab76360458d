"""The rest of a run, in a process of its own, from what was kept of its first life."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from golden.life import unpack
from golden.programs import KINDS
from pmstore.testing import ForkServer

_TESTS = Path(__file__).resolve().parent.parent


def server() -> ForkServer:
    """Has imported the programs, and forks."""
    return ForkServer([str(_TESTS)])


def go_on(name: str, forks: ForkServer, prefix: str = "pmstore-golden-") -> list[dict[str, Any]]:
    """What each rank finds; of one process, one."""
    kind = KINDS[name]
    where = "/dev/shm" if kind.memory else None
    with tempfile.TemporaryDirectory(prefix=prefix, dir=where) as folder:
        unpack(name, Path(folder))
        ended = forks.run("golden.programs:live", [name, folder, 0])
        assert (ended.killed, ended.exit_code) == (False, 0)
        found = sorted(Path(folder).rglob("found.json"))
        assert len(found) == max(kind.ranks, 1), os.listdir(folder)
        return [json.loads(path.read_text()) for path in found]
