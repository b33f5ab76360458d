"""Runs the programs of docs/gallery, kills them, draws what they log, and measures what a commit
costs. It writes the pictures, docs/gallery/measured.json, and the lines of the pages that have
figures. It takes about three minutes.

    python docs/site/gallery.py               # all programs
    python docs/site/gallery.py cnn rl        # these
    python docs/site/gallery.py --pages       # the pages anew, of what was measured last
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

import pmstore  # noqa: E402
from benchmarks.harness import machine, size_text  # noqa: E402
from benchmarks.rows import time_text  # noqa: E402
from pmstore.course import reader  # noqa: E402
from pmstore.exchange import export_log  # noqa: E402
from pmstore.testing import ForkServer, kill_at_primitive, primitives_seen  # noqa: E402

GALLERY = ROOT / "docs" / "gallery"
PICTURES = ROOT / "docs" / "pictures" / "gallery"
MEASURED = GALLERY / "measured.json"
ABOUT = ("examples", "pmstore/torch", "native")
"""What the figures are about: they are stale when it has changed."""

ROUNDS = 5
NEVER = 2**62
"""A primitive that no life reaches: those before it are counted."""
MARK = "<!-- made by docs/site/gallery.py -->"
END = "<!-- end -->"
FRAMEWORKS = {"lightning_run": "lightning", "trainer": "transformers"}
PRELOAD = ("torch", "torch._dynamo", "sklearn.datasets", "pmstore.torch")


def _torch(module: ModuleType, folder: str, count: int) -> None:
    module.train(f"{folder}/run.pm", count)


def _em(module: ModuleType, folder: str, count: int) -> None:
    module.main(f"{folder}/run.pm", count)


def _lightning(module: ModuleType, folder: str, count: int) -> None:
    module.main(Path(folder, "run.pm"), count)


def _in_folder(module: ModuleType, folder: str, count: int) -> None:
    module.train(folder, count)


@dataclass(frozen=True)
class Program:
    """One of examples/.

    Attributes:
        title: of it in the table. kept: what its commits hold, in a few words.
        start: runs it, to so many epochs or steps. drawn, timed: how many, for the picture and for
            the figures.
        curve: what is drawn: a name that it logs.
        updates: of an optimizer in a step.
        page: where it stands, if not under its own name.
        store: in its folder.
    """

    title: str
    kept: str
    drawn: int
    timed: int
    curve: str = "loss"
    updates: int = 1
    start: Callable[[ModuleType, str, int], None] = _torch
    page: str = ""
    store: str = "run.pm"
    ranks: int = 1


PROGRAMS = {
    "cnn": Program(
        "CNN",
        "weights, batch statistics, momentum, learning rate, place in the data, generators",
        *(12, 4),
    ),
    "transformer": Program(
        "Transformer", "weights, moments, warm-up, generators", *(400, 100)
    ),
    "lora": Program("LoRA", "the adapters and their moments; the base was kept once", *(8, 5)),
    "gan": Program(
        "GAN", "two models, two optimizers, generators", *(1000, 200), curve="critic", updates=2
    ),
    "rl": Program(
        "Reinforcement learning",
        "policy, moments, the environments, generators",
        *(60, 10),
        curve="balanced",
        updates=16,
    ),
    "diffusion": Program(
        "Diffusion",
        "weights, their average, moments, place in the data, generators",
        *(60, 20),
    ),
    "gmm": Program(
        "EM: Gaussian mixture",
        "weights, means, covariances, likelihoods",
        *(60, 40),
        curve="likelihoods",
        start=_em,
        page="em",
    ),
    "kmeans": Program(
        "EM: KMeans", "the centres", *(0, 40), start=_em, page="em"
    ),
    "ddp": Program(
        "DDP", "at each rank: all of it, of one step", *(8, 4),
        start=_in_folder, store="ddp0.pm", ranks=2,
    ),
    "lightning_run": Program(
        "Lightning", "module, optimizers, schedulers, loops, callbacks", *(5, 4),
        start=_lightning, page="lightning",
    ),
    "trainer": Program(
        "Hugging Face Trainer", "model, optimizer, schedule, the Trainer's state, its log", *(3, 2),
        start=_in_folder, store="trainer.pm",
    ),
}  # fmt: skip


# ---- a life of a program, in a process of its own


def live(ack: Callable[[int], None], name: str, folder: str, count: int, way: str) -> None:
    """Runs a program to its end, and acknowledges how many primitives of the engine it took. way:
    "kept"; "timed": writes the median time of a step into the folder, too; "plain": so does this,
    without pmstore."""
    import torch

    torch.set_num_threads(1)
    program, module = PROGRAMS[name], importlib.import_module(f"examples.{name}")
    if way == "plain":
        _without_pmstore(module)
    ends: list[float] = []
    with _ends_of_steps(program, ends) if way != "kept" else contextlib.nullcontext():
        program.start(module, folder, count)
    if way != "kept":
        ends = ends[len(ends) // 2 :: program.updates]  # what comes first is warmer later
        apart = [later - sooner for sooner, later in zip(ends, ends[1:], strict=False)]
        Path(folder, "seconds").write_text(str(statistics.median(apart)))
    ack(primitives_seen())


def live_as_rank(
    ack: Callable[[int], None],
    rank: int,
    port: int,
    kill_at: int,
    *program: Any,
) -> None:
    """Does the same as one rank of a job."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    kill_at_primitive(kill_at)

    def note(primitives: int) -> None:
        Path(program[1], f"primitives{rank}").write_text(str(primitives))

    live(note, *program)


def _without_pmstore(module: ModuleType) -> None:
    from tests.programs import plain

    given: Any = module
    if hasattr(module, "PmstoreCallback"):
        given.PmstoreCallback = lambda path: module.L.Callback()
    elif hasattr(module, "PmstoreTrainerCallback"):
        from transformers import TrainerCallback

        class Nothing(TrainerCallback):
            def folder(self) -> None: ...

            export = folder

        given.PmstoreTrainerCallback = lambda path: Nothing()
    else:
        given.pmstore = plain


@contextlib.contextmanager
def _ends_of_steps(program: Program, ends: list[float]) -> Iterator[None]:
    """Notes when optimizers have updated; without one, when transactions have ended."""
    from tests.programs import plain
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    if program.start is _em:
        for kind in (pmstore.Store, plain.Store):
            kind.transaction = _noting(kind.transaction, ends)  # type: ignore[assignment]
    yield


def _noting(transaction: Any, ends: list[float]) -> Any:
    @contextlib.contextmanager
    def noted(store: Any) -> Iterator[None]:
        with transaction(store):
            yield
        ends.append(time.perf_counter())

    return noted


def _lived(forks: ForkServer, name: str, folder: Path, count: int, way: str, kill_at: int = NEVER) -> int:
    """One life. Returns: how many primitives it took; -1 if it was killed. A job's are those of its
    last rank, which is the one that is killed."""
    program, ranks = [name, str(folder), count, way], PROGRAMS[name].ranks
    if ranks == 1:
        ran = forks.run("gallery:live", program, kill_at=kill_at, timeout_seconds=300)
        assert ran.exit_code == 0, name
        return -1 if ran.killed else ran.acknowledged
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = [
        forks.start(
            "gallery:live_as_rank", [rank, port, kill_at if rank == ranks - 1 else NEVER, *program]
        )
        for rank in range(ranks)
    ]
    ended: dict[int, int] = {}
    while len(ended) < ranks:
        ended |= forks.ended([pid for pid in pids if pid not in ended])
        time.sleep(0.01)
    if kill_at != NEVER:
        assert ended[pids[-1]] == -9, name
        return -1
    assert not any(ended.values()), name
    return int(Path(folder, f"primitives{ranks - 1}").read_text())


# ---- pictures


def draw(forks: ForkServer, name: str) -> list[int]:
    """Draws a run that is killed twice, over one that is not. Returns: the steps that were
    committed when it was killed."""
    from kills import draw as drawn

    program = PROGRAMS[name]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        whole, killed = Path(made, "whole"), Path(made, "killed")
        whole.mkdir()
        killed.mkdir()
        primitives = _lived(forks, name, whole, program.drawn, "kept")
        ends = []
        for _ in range(2):
            assert _lived(forks, name, killed, program.drawn, "kept", primitives // 3) == -1
            ends.append(int(curve(program, killed)[0][-1]))
        _lived(forks, name, killed, program.drawn, "kept")
        undisturbed, found = curve(program, whole), curve(program, killed)
        assert found == undisturbed, name
    label = {"critic": "loss of the critic", "balanced": "steps balanced"}
    drawn(
        PICTURES / f"{program.page or name}.svg",
        undisturbed,
        found,
        [(end, "") for end in ends],
        label.get(program.curve, program.curve.rstrip("s")),
    )
    return ends


def curve(program: Program, folder: Path) -> tuple[list[int], list[float]]:
    """What was logged, and in which steps."""
    with pmstore.open(folder / program.store, "r") as store:
        if program.start is _em:
            values = list(store[f"gmm/{program.curve}"])
            return list(range(1, len(values) + 1)), values
        run = "lora" if "lora/progress" in store else "base" if "base/progress" in store else "run"
        export_log(store, folder / "log.csv", run=run)
    with (folder / "log.csv").open(newline="") as file:
        rows = [(int(r["step"]), float(r[program.curve])) for r in csv.DictReader(file)
                if r[program.curve]]  # fmt: skip
    (folder / "log.csv").unlink()
    return [step for step, _ in rows], [value for _, value in rows]


# ---- figures


def measure(forks: ForkServer, name: str) -> dict[str, Any]:
    """Runs it with a commit of every step and without pmstore, in turn. Returns: medians."""
    program = PROGRAMS[name]
    rounds = []
    for _ in range(ROUNDS):
        seconds = {}
        for way in ("plain", "timed"):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                _lived(forks, name, Path(folder), program.timed, way)
                seconds[way] = float(Path(folder, "seconds").read_text())
                if way == "timed":
                    with pmstore.open(Path(folder, program.store), "r") as store:
                        about = _about(store)
        rounds.append(seconds)
    plain, timed = (statistics.median(one[way] for one in rounds) for way in ("plain", "timed"))
    ratio = statistics.median(one["timed"] / one["plain"] for one in rounds)
    return {"plain_us": plain * 1e6, "kept_us": timed * 1e6, "ratio": ratio, **about}


def _about(store: pmstore.Store) -> dict[str, Any]:
    """Bytes of the store; for each run in it, those that one of its last commits wrote."""
    runs = [name for name in store if f"{name}/progress" in store]
    written = {}
    for run in runs:
        course = reader.read(store, run)
        assert course is not None
        commits = [one.bytes for one in course.whole() if one.commits]
        written[run] = statistics.median(commits[len(commits) // 2 :])
    return {"used_bytes": store.stats().used_bytes, "written_bytes": written}


# ---- pages


def blocks(measured: dict[str, Any]) -> dict[str, str]:
    """By page: the lines that are made of what was measured."""
    made = {
        name: f"{MARK}\n{_figures(name, measured)}\n{END}" for name in {*map(_page, PROGRAMS)}
    }
    return {**made, "index": f"{MARK}\n{_table(measured)}\n{END}"}


def _page(name: str) -> str:
    return PROGRAMS[name].page or name


def _table(measured: dict[str, Any]) -> str:
    about, files = measured["about"], " ".join(f"`{one}`" for one in ABOUT)
    lines = [
        "## Ten programs",
        "",
        f"Measured at {about['commit']}: {files}.",
        "",
        "| program | a step, without a commit and with one | what is kept |",
        "|---|---|---|",
    ]
    for name, program in PROGRAMS.items():
        one = measured["programs"][name]
        lines.append(
            f"| [{program.title}]({_page(name)}.md) | {time_text(one['plain_us'])}, "
            f"{time_text(one['kept_us'])}: **{one['ratio']:.2f} times** | {program.kept} |"
        )
    machine = about["machine"]
    words = (
        f"Times are medians of {ROUNDS} rounds, with a commit at every step, in memory "
        f"(`/dev/shm`). In a round the program runs without pmstore and with it, one after the "
        f"other, on one thread. The machine: {machine['cpu']}, {machine['cores']} cores, Python "
        f"{machine['python']}; its load was {about['load']:.1f}. "
        "`python docs/site/gallery.py` measures anew."
    )
    return "\n".join([*lines, "", *_wrapped(words)])


def _figures(page: str, measured: dict[str, Any]) -> str:
    lines = []
    for name in (name for name in PROGRAMS if _page(name) == page):
        one, program = measured["programs"][name], PROGRAMS[name]
        step = "An iteration" if program.start is _em else "A step"
        whose = f" of {program.title.rpartition(': ')[2]}" if program.page == "em" else ""
        words = (
            f"{step}{whose} takes {time_text(one['plain_us'])} without pmstore, and "
            f"{time_text(one['kept_us'])} with a commit: **{one['ratio']:.2f} times** as long. The "
            f"store has {size_text(one['used_bytes'])}."
        )
        written = {run: size_text(count) for run, count in one["written_bytes"].items()}
        if len(written) == 1:
            words += f" A commit writes {next(iter(written.values()))}."
        elif written:
            several = ", ".join(f"{size} in the run `{run}`" for run, size in written.items())
            words += f" A commit writes {several}."
        if "killed" in one:
            first, second = one["killed"]
            words += f" In the picture it is killed after step {first} and after step {second}."
        lines += [*_wrapped(words), ""]
    return "\n".join(lines).strip()


def _wrapped(words: str) -> list[str]:
    import textwrap

    return textwrap.wrap(words, 100, break_on_hyphens=False, break_long_words=False)


def write_pages() -> None:
    for page, block in blocks(json.loads(MEASURED.read_text())).items():
        path = GALLERY / f"{page}.md"
        text = path.read_text(encoding="utf-8")
        before, _, rest = text.partition(MARK)
        path.write_text(before + block + rest.partition(END)[2], encoding="utf-8")


def main(words: list[str]) -> None:
    if words != ["--pages"]:
        measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else {"programs": {}}
        commit = os.popen(f"git -C {ROOT} rev-parse --short HEAD").read().strip()
        load = os.getloadavg()[0]
        frameworks = [FRAMEWORKS[name] for name in words or PROGRAMS if name in FRAMEWORKS]
        folders = [str(ROOT), str(Path(__file__).parent)]
        with ForkServer(folders, preload=[*PRELOAD, *frameworks]) as forks:
            for name in words or PROGRAMS:
                began = time.monotonic()
                found = measure(forks, name)
                if PROGRAMS[name].drawn:
                    found["killed"] = draw(forks, name)
                measured["programs"][name] = found
                print(f"{name}: {found['ratio']:.2f}, {time.monotonic() - began:.0f} s", flush=True)
        measured["about"] = {"commit": commit, "machine": machine(), "load": load}
        MEASURED.write_text(json.dumps(measured, indent=1) + "\n")
    write_pages()


if __name__ == "__main__":
    main(sys.argv[1:])
