"""Writes the stores of tests/golden, and what the rest of each run gives.

    PYTHONPATH=. python tests/golden/write.py            all kinds
    PYTHONPATH=. python tests/golden/write.py plain job  these

They were written by the package of commit 979bde5. `first_format` was written by that of b8e0739,
the last whose runs had format 1: there `run.end_step(loss)` was `run.commit(loss)`, and
`policy=None` the default. To write them again, run this file on a checkout of that commit, with
tests/golden as it was when the files were added. Programs, seeds and steps are fixed; what differs
from one time to the next is a store's uuid, times, and what depends on them.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pmstore.portable
from golden.life import HERE, pack
from golden.lives import go_on, server
from golden.programs import KINDS
from pmstore.testing import ForkServer


def write(name: str, forks: ForkServer) -> None:
    """The first life of a kind, killed; then the rest, from what was kept."""
    kind = KINDS[name]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if kind.memory else None) as folder:
        home, kept = Path(folder, "home"), Path(folder, "kept")
        home.mkdir()
        kept.mkdir()
        ended = forks.run("golden.programs:live", [name, str(home), kind.kill_in])
        assert ended.killed if kind.ranks == 0 else ended.exit_code == 0, ended
        if kind.kept == "run.dump":
            with pmstore.open(home / "run.pm", "r") as store, (home / kind.kept).open("wb") as out:
                pmstore.portable.dump(store, out)
        for path in home.rglob(kind.kept):
            place = kept / path.relative_to(home)
            place.parent.mkdir(exist_ok=True)
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, place)
        pack(kept, name)
    text = json.dumps(go_on(name, forks), indent=1)
    (HERE / f"{name}.json").write_text(text + "\n")
    print(name, (HERE / f"{name}.tar.xz").stat().st_size, flush=True)


def main(names: list[str]) -> None:
    with server() as forks:
        for name in names or [one for one in KINDS if one != "first_format"]:
            write(name, forks)


if __name__ == "__main__":
    main(sys.argv[1:])
