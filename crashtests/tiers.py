"""Storage tiers under power failure, and with system calls that fail.

    python -m crashtests --kind tiers                  quick
    python -m crashtests --kind tiers --size 20000

A recorder (native/recorder.c) writes down what flushes and restores do to files and names. From
that record images are made of what a power failure may leave between any two operations: of each
file any version of each sector since it was last synced, with noise, its size old or new; of each
directory any of the changes of names since it was last synced. In every image the newest epoch that
was acknowledged, or a later one, has to restore, whole, with nothing passed over; and a restored
store that has its name has to be whole. Then each operation of a flush and of a restore fails with
EIO and with ENOSPC.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pmstore
from crashtests import built, cases, tier_driver
from crashtests.disk import MARK, Disk, Event, Image, events
from crashtests.jobs import BUILD, MEMORY, ROOT
from crashtests.report import leave


def images(
    record: list[Event], root: str, count: int, seed: int
) -> Iterator[tuple[int, int, Image]]:
    """(operations done, mark acknowledged, image), each different."""
    rng = random.Random(seed)
    variants = max(1, count // len(record))
    disk, acknowledged, seen = Disk(root), 0, set()
    for done, event in enumerate(record):
        if event.kind == MARK:
            acknowledged = event.offset
        else:
            disk.apply(event)
        for how in ["none", "all", "names", *["some"] * max(1, variants - 3)][
            : max(variants, 1) + 3
        ]:
            image = disk.after(how, rng)
            digest = hashlib.blake2b(repr((acknowledged, sorted(image))).encode(), digest_size=16)
            for name in sorted(image):
                digest.update(image[name] or b"")
            if digest.digest() not in seen:
                seen.add(digest.digest())
                yield done, acknowledged, image


def lay_out(folder: Path, root: str, image: Image) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in image.items():
        path = folder / os.path.relpath(name, root)
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)


def verify_store(folder: Path, acknowledged: int, steps: int) -> None:
    """Of a store that was being made, written or compacted.

    Raises: AssertionError; what open raises.
    """
    if not (folder / "run.pm").exists():
        assert acknowledged == 0, (
            f"step {acknowledged} was acknowledged, and the store is not there"
        )
        return
    # an image, not a copy of a running store
    with pmstore.open(folder / "run.pm", "r+", force=True) as store:
        if "step" not in store:
            assert (acknowledged, len(store)) == (0, 0), "a step is there in part, or lost"
            return
        found = tier_driver.check(store)
        assert acknowledged <= found <= steps, (
            f"step {found} was found, {acknowledged} was acknowledged"
        )
        tier_driver.one_step(store, found + 1)


def verify(folder: Path, acknowledged: int, steps: int) -> None:
    """Of flushes and restores. Raises: AssertionError; what restore and open raise."""
    step = acknowledged % tier_driver.RESTORED
    if (folder / "restored.pm").exists():
        with pmstore.open(folder / "restored.pm") as store:
            assert tier_driver.check(store) == steps
    else:
        assert acknowledged < tier_driver.RESTORED, (
            "a restore was acknowledged, and the store is not there"
        )
    try:
        report = pmstore.restore(folder / "again.pm", folder / "deep" / "tier")
    except pmstore.errors.TierError:
        if step > 0:
            raise
        return
    assert report.skipped == (), str(report)
    with pmstore.open(folder / "again.pm") as store:
        found = tier_driver.check(store)
        assert step <= found <= steps, f"step {found} was restored, {step} was acknowledged"
        if acknowledged % 3 == 0:  # and it goes on
            tier_driver.one_step(store, found + 1)
            store.add_tier(
                "t",
                pmstore.TierConfig(folder / "deep" / "tier", keep=2, chunk_bytes=tier_driver.CHUNK),
            )
            store.commit()
            tier_driver.flush(store, folder / "deep" / "tier", folder / "last.pm")


def build() -> Path:
    """The recorder. Raises: CalledProcessError."""
    flags = "-shared", "-fPIC", "-pthread"
    return built.compiled("recorder.c", BUILD / "recorder.so", *flags, last=("-ldl",))


def drive(recorder: Path, *words: str, program: str = "crashtests.tier_driver") -> str:
    """What a program says that runs under the recorder. Raises: AssertionError: it failed."""
    command = [sys.executable, "-m", program, str(recorder), *words]
    environment = {**os.environ, "LD_PRELOAD": str(recorder)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode != 0:
        raise AssertionError(f"the driver failed: {done.stderr}")
    return done.stdout.strip()


VERIFIED = {"trace": verify, "store": verify_store}
"""What the driver does, and how an image of it is looked at."""


def power(
    recorder: Path, scratch: Path, count: int, seed: int, what: str = "trace", steps: int = 6
) -> tuple[int, list[str]]:
    """Checks images. Returns how many, and what failed."""
    root, recorded = scratch / what, scratch / f"record-{what}"
    drive(recorder, what, str(root), str(recorded), str(steps))
    record = list(events(recorded.read_bytes()))
    checked, failures = 0, []
    for done, acknowledged, image in images(record, str(root), count, seed):
        checked += 1
        # The directory has the name it had: a store remembers where its tiers are.
        try:
            lay_out(root, str(root), image)
            VERIFIED[what](root, acknowledged, steps)
        except (AssertionError, OSError, pmstore.PmstoreError) as error:
            failures.append(f"{what}: after operation {done} of {len(record)}: {error!r}")
    return checked, failures


def _examine(seed: int, size: int, _: None) -> cases.Found:
    """The more images, the more operations fail: each from 5,000 on, every fifth for 1,000."""
    recorder, failures, counts = build(), [], Counter[str]()
    with tempfile.TemporaryDirectory(prefix="pmstore-tiers-", dir=MEMORY) as folder:
        for what in VERIFIED:
            checked, failed = power(recorder, Path(folder), size, seed, what)
            failures += failed
            counts["images"] += checked
        for error in (errno.EIO, errno.ENOSPC):
            where = str(Path(folder) / f"faults{error}")
            try:
                stride = str(max(1, 5000 // size))
                counts["faults"] += int(drive(recorder, "faults", where, str(error), stride))
            except AssertionError as problem:
                failures.append(f"{errno.errorcode[error]}: {problem}")
    leave("tiers", seed, **counts, failures=len(failures))
    return cases.Found(counts, failures[:20])


CASES = cases.Kind(
    1000,
    "images",
    lambda: 1,
    lambda seed, size: ("flushes and restores, power failures and failing calls", seed),
    _examine,
)
