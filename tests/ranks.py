"""Programs of several ranks, each a process of its own, with gloo.

`launch` starts them: `python ranks.py MODULE PROGRAMS FOLDER RANK WORLD` runs one rank of functions
of a module, one after the other, each in a folder of its own, and prints what they found.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TIMEOUT = 600.0


Program = Callable[[Path, int, dict[str, Any]], None]
"""Called with its folder, the rank, and where to put what it finds."""


def start(file: str, names: str, folder: Path, world: int) -> list[Any]:
    """Ranks under way, as `subprocess.Popen` has them. file: the module that has the programs."""
    import pythons  # in the tests' process alone: a fork server of tests does not find it

    words = [__file__, file, names, str(folder)]
    here = Path(file).parent
    return [pythons.start([*words, str(rank), str(world)], cwd=here) for rank in range(world)]


def launch(
    programs: Sequence[Program], folder: Path, world: int, killed: bool = False
) -> dict[str, list[Any]]:
    """What each program found, by its name: a list by rank. killed: the last one kills every rank,
    and nothing is found.

    Raises: AssertionError: a rank ended with another status than 0 (killed: than by SIGKILL).
    """
    names = ",".join(program.__name__ for program in programs)
    started = start(programs[0].__globals__["__file__"], names, folder, world)
    try:
        ended = [process.communicate(timeout=TIMEOUT) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.communicate()
    told = "\n".join(error[-2500:] for _, error in ended)
    assert [process.returncode for process in started] == [-9 if killed else 0] * world, told
    if killed:
        return {}
    ranks = [json.loads(out.strip().splitlines()[-1]) for out, _ in ended]
    return {one.__name__: [rank[one.__name__] for rank in ranks] for one in programs}


def main(file: str, programs: str, folder: str, rank: str, world: str) -> None:
    import importlib

    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(Path(file).parent))
    module = importlib.import_module(Path(file).stem)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=int(rank), world_size=int(world)
    )
    results: dict[str, Any] = {}
    try:
        for name in programs.split(","):
            own = Path(folder, name)
            own.mkdir(exist_ok=True)
            results[name] = {}
            getattr(module, name)(own, int(rank), results[name])
            dist.barrier()
    finally:
        print(json.dumps(results), flush=True)
        dist.destroy_process_group()
    # gloo's threads may drop tensors while the interpreter ends, which aborts (torch 2.13)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
