"""Peers through the same harness: what a crash leaves of a checkpoint, by how it was saved.

    python -m crashtests.peers                          all: `make nightly WHAT=crashtest-peers`
    python -m crashtests.peers --only dcp --only lmdb --images 5000 --seed 7

Each peer (peer_savers.py) saves a few steps under a recorder (native/watch.c) that sees every
system call and every store into a mapped file. From the record images are made: model (i), the
program dies at any operation, byte or store; model (iii), the power fails, and of each file any
version of each sector since its last sync is there, or noise, its size old or new, of each
directory any of the changes of names since its last sync. A child process reads each image as the
peer does:

  old or new   the step that was acknowledged last, or the one being saved, whole
  lost         an older step, whole: a save that had returned is gone
  unreadable   an error, or the death of the reader
  wrong        read without an error, and of no one step
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from crashtests import built
from crashtests.disk import MARK, SECTOR, STORE, WRITE, Disk, Event, Image, events
from crashtests.jobs import BUILD, MEMORY, ROOT
from crashtests.peer_savers import PEERS, Peer, state_of, step_of
from crashtests.report import commit_id

MODELS = ("i", "iii")
OUTCOMES = ("old or new", "lost", "unreadable", "wrong")
TIMEOUT_SECONDS = 30


@dataclass
class Result:
    peer: str
    model: str
    images: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Of what is not old or new: the first words of each error."""
    events: int = 0

    def broken(self) -> bool:
        """pmstore does not do what it promises. Domain process promises nothing after a power
        failure but to say so."""
        may_refuse = (self.peer, self.model) == ("pmstore-process", "iii")
        held = self.outcomes["old or new"] + (self.outcomes["unreadable"] if may_refuse else 0)
        return self.peer.startswith("pmstore") and held != self.images


def build() -> Path:
    """The recorder. Raises: CalledProcessError."""
    return built.compiled("watch.c", BUILD / "watch", "-I", str(ROOT / "native"))


def record(watch: Path, peer: Peer, model: str, folder: Path, steps: int) -> list[Event]:
    """What the peer does when it saves. Under (iii) it is told another boot id than the reader will
    be."""
    where, target = folder / "recorded", folder / "record"
    where.mkdir()
    boot = "other" if model == "iii" else "same"
    program = [sys.executable, "-m", "crashtests.peer_savers", peer.name, str(where), str(steps)]
    done = subprocess.run(
        [watch, where, target, boot, *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    if done.returncode != 0:
        raise RuntimeError(f"recording {peer.name}: {done.stderr}")
    shutil.rmtree(where)
    return list(events(target.read_bytes()))


Cut = tuple[int, Image]
"""The last mark, and what a crash left."""


def killed(record: list[Event], root: str, count: int, rng: random.Random) -> Iterator[Cut]:
    """Model (i): after each event and each byte of a write; if that is too much, after a sample and
    all ends of sectors."""
    disk, mark = Disk(root), 0
    points: list[tuple[int, int]] = []  # event, bytes of it
    first = next(i for i, event in enumerate(record) if event.kind == MARK)
    for at, event in enumerate(record[first:], first):
        must = event.kind != STORE
        inside = range(1, len(event.rest)) if event.kind == WRITE else ()
        points += [(at, n) for n in inside if n % SECTOR]
        points += [(at, len(event.rest))] * (not must and not event.more)
    chosen = set(points if len(points) <= count else rng.sample(points, count))
    for at, event in enumerate(record):
        if at >= first and event.kind == WRITE:
            name = event.path
            number = disk.names[name]
            before = disk.now()
            for n in range(1, len(event.rest)):
                if n % SECTOR == 0 or (at, n) in chosen:
                    content = bytearray(disk.file[number].now)
                    content[len(content) : event.offset + n] = bytes(
                        max(0, event.offset + n - len(content))
                    )
                    content[event.offset : event.offset + n] = event.rest[:n]
                    yield mark, {**before, name: bytes(content)}
        if event.kind == MARK:
            mark = event.offset
        else:
            disk.apply(event)
        if (
            at >= first
            and not event.more
            and (event.kind != STORE or (at, len(event.rest)) in chosen)
        ):
            yield mark, disk.now()


def power_failed(record: list[Event], root: str, count: int, rng: random.Random) -> Iterator[Cut]:
    """Model (iii): between any two events; of stores, which are many, a sample."""
    disk, mark = Disk(root), 0
    first = next(i for i, event in enumerate(record) if event.kind == MARK)
    must = [
        at for at in range(first, len(record)) if record[at].kind != STORE and not record[at].more
    ]
    stores = [
        at for at in range(first, len(record)) if record[at].kind == STORE and not record[at].more
    ]
    room = max(0, count // 4 - len(must))
    chosen = set(must) | set(stores if len(stores) <= room else rng.sample(stores, room))
    each = max(1, -(-count // len(chosen)) - 3)
    for at, event in enumerate(record):
        if event.kind == MARK:
            mark = event.offset
        else:
            disk.apply(event)
        if at in chosen:
            for how in ["none", "all", "names", *["some"] * each]:
                yield mark, disk.after(how, rng)


MAKERS: dict[str, Callable[[list[Event], str, int, random.Random], Iterator[Cut]]] = {
    "i": killed,
    "iii": power_failed,
}


class Reader:
    """Reads images in a child process, which may die of them."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self._child = peer, 0

    def _start(self) -> None:
        (asked, self._ask), (self._answer, answered) = os.pipe(), os.pipe()
        self._child = os.fork()
        if self._child == 0:
            with contextlib.suppress(BaseException):
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a library says as it dies
                while folder := os.read(asked, 4096):
                    os.write(answered, json.dumps(self._look(Path(folder.decode()))).encode())
            os._exit(0)
        os.close(asked)
        os.close(answered)

    def _look(self, folder: Path) -> tuple[int | None, str]:
        """The step, or none and why. -1: no one step."""
        try:
            saver = self._peer.make(folder)
            state = saver.load()
            step = step_of(state)
        except BaseException as error:  # what torch.distributed.checkpoint raises is no Exception
            return None, f"{type(error).__name__}: {error}"
        if step is None:
            return -1, "of no one step"
        try:
            saver.save(state_of(99, self._peer.grows))
            after = step_of(saver.load())
            saver.close()
        except BaseException as error:
            return None, f"the next save: {type(error).__name__}: {error}"
        return (step, "") if after == 99 else (-1, "the next save is not what is read then")

    def look(self, folder: Path) -> tuple[int | None, str]:
        if not self._child:
            self._start()
        os.write(self._ask, str(folder).encode())
        ready, _, _ = select.select([self._answer], [], [], TIMEOUT_SECONDS)
        answer = os.read(self._answer, 65536) if ready else b""
        if answer:
            step, why = json.loads(answer)
            return step, why
        status = self.stop()
        return (
            None,
            f"the reader dies of {signal.Signals(os.WTERMSIG(status)).name}"
            if ready
            else "the reader hangs",
        )

    def stop(self) -> int:
        if not self._child:
            return 0
        os.close(self._ask)
        os.close(self._answer)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
        _, status = os.waitpid(self._child, 0)
        self._child = 0
        return status


def lay_out(image: Image, root: str, folder: Path) -> str:
    """Writes an image. Returns its digest."""
    digest = hashlib.blake2b(digest_size=16)
    for name, content in image.items():
        path = folder / os.path.relpath(name, root)
        digest.update(
            f"{path.name} {-1 if content is None else len(content)} ".encode() + (content or b"")
        )
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
    return digest.hexdigest()


def classify(mark: int, step: int | None) -> str:
    acknowledged, begun = (mark - 1) // 2 if mark % 2 else mark // 2 - 1, mark // 2
    if step is None:
        return "unreadable"
    if acknowledged <= step <= begun:
        return "old or new"
    return "lost" if 0 <= step < acknowledged else "wrong"


def try_peer(watch: Path, name: str, model: str, images: int, seed: int, steps: int) -> Result:
    """One peer under one model."""
    peer, result = PEERS[name], Result(name, model)
    rng = random.Random(f"{seed} {name} {model}")
    with tempfile.TemporaryDirectory(prefix="pmstore-peers-", dir=MEMORY) as scratch:
        folder = Path(scratch)
        recorded = record(watch, peer, model, folder, steps)
        root, reader, seen = str(folder / "recorded"), Reader(peer), set()
        result.events = len(recorded)
        for mark, image in MAKERS[model](recorded, root, images, rng):
            shutil.rmtree(folder / "image", ignore_errors=True)
            (folder / "image").mkdir()
            key = (mark, lay_out(image, root, folder / "image"))
            if key in seen:
                continue
            seen.add(key)
            step, why = reader.look(folder / "image")
            outcome = classify(mark, step)
            result.images += 1
            result.outcomes[outcome] += 1
            if outcome != "old or new":
                result.reasons[
                    why.replace(str(folder), "").split("\n")[0][:90] or f"step {step}, mark {mark}"
                ] += 1
        reader.stop()
    return result


def table(results: list[Result]) -> str:
    """Markdown: a row for each peer, and for each model how many images ended how."""
    lines = [
        "| saved by | model | images | " + " | ".join(OUTCOMES) + " |",
        "|---|---|--:|" + "--:|" * len(OUTCOMES),
    ]
    by_peer = {(r.peer, r.model): r for r in results}
    for name, peer in PEERS.items():
        for model in MODELS:
            if found := by_peer.get((name, model)):
                counts = " | ".join(
                    f"{found.outcomes[o]:,}" if found.outcomes[o] else "-" for o in OUTCOMES
                )
                lines.append(f"| {peer.title} | ({model}) | {found.images:,} | {counts} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m crashtests.peers",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=list(PEERS))
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument(
        "--images",
        type=int,
        default=3000,
        help="about so many for each peer and model; some are the same",
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    watch = build()
    planned = [(n, m) for m in arguments.model or MODELS for n in arguments.only or PEERS]
    # whose recording takes long
    planned.sort(key=lambda job: not job[0].startswith(("pmstore-process", "lmdb")))
    results = []
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=fork) as pool:
        rest = (arguments.images, arguments.seed, arguments.steps)
        jobs = [pool.submit(try_peer, watch, name, model, *rest) for name, model in planned]
        for job in concurrent.futures.as_completed(jobs):
            results.append(found := job.result())
            print(
                f"{found.peer} ({found.model}): {found.images:,} images of {found.events:,} events",
                file=sys.stderr,
            )
            for why, count in found.reasons.most_common(4):
                print(f"    {count:6,}  {why}", file=sys.stderr)
    print(table(results))
    report = {
        "seed": arguments.seed,
        "commit": commit_id(),
        "steps": arguments.steps,
        "peers": [vars(r) for r in results],
    }
    (BUILD / "peers.json").write_text(json.dumps(report, indent=1))
    broken = [f"{r.peer} ({r.model}): {dict(r.outcomes)}" for r in results if r.broken()]
    for failure in broken:
        print(f"FAILED {failure}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
