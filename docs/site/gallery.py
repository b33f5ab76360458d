"""Runs the programs of docs/gallery, kills them, draws what they log, and measures what a commit
costs. It writes the pictures, docs/gallery/measured.json, and the lines of the pages that have
figures. It takes about three minutes.

    python docs/site/gallery.py               # all programs
    python docs/site/gallery.py cnn rl        # these; their pictures, and no page
    python docs/site/gallery.py --pages       # the pages anew, of what was measured last
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import stale  # noqa: E402

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
PREFIX = "pmstore-gallery-"
ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
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
        start: runs it, to so many epochs or steps. drawn, timed: how many, for the picture (0: it
            has none) and for the figures.
        curve: what is drawn: a name that it logs. label: what it is.
        updates: how many there are in a step.
        page: where it stands, if not under its own name.
        store: in its folder.
    """

    title: str
    kept: str
    drawn: int
    timed: int
    curve: str = "loss"
    label: str = "loss"
    updates: int = 1
    start: Callable[[ModuleType, str, int], None] = _torch
    page: str = ""
    store: str = "run.pm"
    ranks: int = 1


PROGRAMS = {
    "cnn": Program(
        "CNN",
        "weights, batch statistics, momentum, learning rate, place in the data, generators",
        drawn=8,
        timed=2,
    ),
    "transformer": Program(
        "Transformer", "weights, moments, learning rate, generators", drawn=300, timed=50
    ),
    "lora": Program("LoRA", "adapters, their moments; the base was kept once", drawn=8, timed=4),
    "gan": Program(
        "GAN",
        "two models, two optimizers, generators",
        drawn=800,
        timed=120,
        curve="critic",
        label="loss of the critic",
        updates=2,
    ),
    "rl": Program(
        "Reinforcement learning",
        "policy, moments, environments, generators",
        drawn=40,
        timed=20,
        curve="balanced",
        label="steps balanced",
        updates=16,
    ),
    "diffusion": Program(
        "Diffusion",
        "weights, their average, moments, place in the data, generators",
        drawn=40,
        timed=10,
    ),
    "gmm": Program(
        "EM: Gaussian mixture",
        "weights, means, covariances, likelihoods",
        drawn=60,
        timed=40,
        label="log-likelihood",
        start=_em,
        page="em",
    ),
    "kmeans": Program("EM: KMeans", "centres", drawn=0, timed=40, start=_em, page="em"),
    "ddp": Program(
        "DDP",
        "at each rank all of its state, of one and the same step",
        drawn=6,
        timed=2,
        start=_in_folder,
        store="ddp0.pm",
        ranks=2,
    ),
    "lightning_run": Program(
        "Lightning",
        "module, optimizers, schedulers, loops, callbacks, generators",
        drawn=4,
        timed=3,
        start=_lightning,
        page="lightning",
    ),
    "trainer": Program(
        "Hugging Face Trainer",
        "model, optimizer, schedule, the Trainer's state, generators",
        drawn=3,
        timed=2,
        start=_in_folder,
        store="trainer.pm",
    ),
}


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
        # a run looks for generators in its first batches
        ends = ends[len(ends) // 2 :: program.updates]
        apart = [later - sooner for sooner, later in itertools.pairwise(ends)]
        Path(folder, "seconds").write_text(str(statistics.median(apart)))
    ack(primitives_seen())


def live_as_rank(
    ack: Callable[[int], None], rank: int, port: int, kill_at: int, *program: Any
) -> None:
    """Does the same as one rank of a job."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch.distributed

    torch.distributed.destroy_process_group = lambda: None  # gloo's may hang in a fork
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
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from tests.programs import plain

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


def _lived(
    forks: ForkServer, name: str, folder: Path, count: int, way: str, kill_at: int = NEVER
) -> int:
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
    import kills  # it needs matplotlib

    program = PROGRAMS[name]
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir="/dev/shm") as made:
        one, whole, killed = (Path(made, way) for way in ("one", "whole", "killed"))
        for folder in (one, whole, killed):
            folder.mkdir()
        # what comes before the first step takes primitives, too
        first = _lived(forks, name, one, 1, "kept")
        last = _lived(forks, name, whole, program.drawn, "kept")
        third = (last - first) // 3
        ends = []
        for kill_at in (first + third, third):
            assert _lived(forks, name, killed, program.drawn, "kept", kill_at) == -1
            ends.append(curve(program, killed)[0][-1])
        _lived(forks, name, killed, program.drawn, "kept")
        undisturbed, found = curve(program, whole), curve(program, killed)
    assert found == undisturbed, name
    picture = PICTURES / f"{_page(name)}-kills.svg"
    kills.draw(picture, undisturbed, found, [(end, "") for end in ends], program.label)
    return ends


def curve(program: Program, folder: Path) -> tuple[list[int], list[float]]:
    """In which steps something was logged, and what. A run's steps come after those of the runs
    before it."""
    with pmstore.open(folder / program.store, "r") as store:
        if program.start is _em:
            values = list(store["gmm/likelihoods"])
            return list(range(1, len(values) + 1)), values
        steps: list[int] = []
        values = []
        for run in _runs(store):
            before, table = steps[-1] if steps else 0, folder / f"{run}.csv"
            export_log(store, table, run=run)
            for row in csv.DictReader(table.read_text().splitlines()):
                if row[program.curve]:
                    steps.append(before + int(row["step"]))
                    values.append(float(row[program.curve]))
            table.unlink()
        return steps, values


def _runs(store: pmstore.Store) -> list[str]:
    """Names of those that are in it, in the order in which they were made."""
    return [name for name in ("base", "lora", "run") if f"{name}/progress" in store]


# ---- figures


def measure(forks: ForkServer, name: str) -> dict[str, Any]:
    """Runs it with a commit of every step and without pmstore, in turn. Returns: the median time of
    a step, each of the round in which nothing else disturbed it; and what the store holds."""
    program = PROGRAMS[name]
    rounds = []
    for number in range(ROUNDS):
        seconds = {}
        for way in ("plain", "timed") if number % 2 else ("timed", "plain"):
            with tempfile.TemporaryDirectory(prefix=PREFIX, dir="/dev/shm") as folder:
                _lived(forks, name, Path(folder), program.timed, way)
                seconds[way] = float(Path(folder, "seconds").read_text())
                if way == "timed":
                    with pmstore.open(Path(folder, program.store), "r") as store:
                        about = _about(store)
        rounds.append(seconds)
    plain, timed = (min(one[way] for one in rounds) for way in ("plain", "timed"))
    return {"plain_us": plain * 1e6, "kept_us": timed * 1e6, "ratio": timed / plain, **about}


def _about(store: pmstore.Store) -> dict[str, Any]:
    """Bytes of the store; for each run in it, those that one of its last commits wrote."""
    written = {}
    for run in _runs(store):
        course = reader.read(store, run)
        assert course is not None
        commits = [one.bytes for one in course.whole() if one.commits]
        written[run] = statistics.median(commits[len(commits) // 2 :])
    return {"used_bytes": store.stats().used_bytes, "written_bytes": written}


# ---- pages


def blocks(measured: dict[str, Any]) -> dict[str, str]:
    """By page: the lines that are made of what was measured."""
    made = {name: f"{MARK}\n{_figures(name, measured)}\n{END}" for name in {*map(_page, PROGRAMS)}}
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
        f"A time is the median of the steps of a run, and the least of {ROUNDS} such medians. Runs "
        f"without pmstore and with a commit at every step take turns, in memory (`/dev/shm`), on "
        f"one thread. The machine: {machine['cpu']}, {machine['cores']} cores, Python "
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
            words += f" A commit copies {next(iter(written.values()))}."
        elif written:
            several = ", ".join(f"{size} in the run `{run}`" for run, size in written.items())
            words += f" A commit copies {several}."
        if "killed" in one:
            first, second = one["killed"]
            words += f" In the picture it is killed after step {first} and after step {second}."
        lines += [*_wrapped(words), ""]
    return "\n".join(lines).strip()


def _wrapped(words: str) -> list[str]:
    return textwrap.wrap(words, 100, break_on_hyphens=False, break_long_words=False)


def write_pages() -> None:
    for page, block in blocks(json.loads(MEASURED.read_text())).items():
        path = GALLERY / f"{page}.md"
        text = path.read_text(encoding="utf-8")
        before, _, rest = text.partition(MARK)
        path.write_text(before + block + rest.partition(END)[2], encoding="utf-8")


def main(words: list[str]) -> None:
    if words != ["--pages"]:
        frameworks = [FRAMEWORKS[name] for name in words or PROGRAMS if name in FRAMEWORKS]
        folders = [str(ROOT), str(Path(__file__).parent)]
        load, found = os.getloadavg()[0], {}
        with ForkServer(folders, preload=[*PRELOAD, *frameworks], environment=ALONE) as forks:
            for name in words or PROGRAMS:
                began = time.monotonic()
                found[name] = measure(forks, name)
                if PROGRAMS[name].drawn:
                    found[name]["killed"] = draw(forks, name)
                took, ratio = time.monotonic() - began, found[name]["ratio"]
                print(f"{name}: {ratio:.2f} times as long; {took:.0f} s", flush=True)
        if words:
            return
        about = {
            "commit": stale.git("rev-parse", "--short", "HEAD").strip(),
            "machine": machine(),
            "load": load,
        }
        MEASURED.write_text(json.dumps({"about": about, "programs": found}, indent=1) + "\n")
    write_pages()


if __name__ == "__main__":
    main(sys.argv[1:])
