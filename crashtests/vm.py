"""Real media: the engine in a virtual machine whose plug is pulled.

    python -m crashtests.vm                             `make nightly WHAT=crashtest-vm`
    python -m crashtests.vm --kills 200 --images 2000 --seed 7

dax: a machine with an NVDIMM (ext4 with -o dax, so that MAP_SYNC is real) commits for ever. It is
    killed (SIGKILL of QEMU) or reset at random, also while it recovers, started again, and has to
    find at least what it had acknowledged, whole.

file: a machine with a disk that writes down every block write and flush (QEMU's blklogwrites).
    Images of what a power failure may leave between flushes are mounted here, by ext4, and the
    store in each has to be at least what was acknowledged when the power failed, whole.

Needs root and Debian's packages (it installs what is missing), no KVM. The guest is Debian's
kernel, busybox and native/guest.c.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from crashtests.jobs import BUILD, MEMORY, ROOT, build
from crashtests.report import commit_id

WORK = BUILD / "vm"
PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "ndctl": "ndctl",
    "cpio": "cpio",
    "mke2fs": "e2fsprogs",
}
MODULES = [
    *("libnvdimm", "nd_btt", "nd_pmem", "nfit"),
    *(
        "virtio_ring",
        "virtio",
        "virtio_pci_modern_dev",
        "virtio_pci_legacy_dev",
        "virtio_pci",
        "virtio_blk",
    ),
]
FILESYSTEM_BYTES = 64 << 20
PATIENCE_SECONDS = 300
SECTOR = 512


def run(*words: str | Path, **options: object) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, **options).stdout  # type: ignore[call-overload,no-any-return]


def install() -> Path:
    """Packages, and a kernel unpacked in the build folder. Returns its folder."""
    missing = [package for program, package in PACKAGES.items() if not shutil.which(program)]
    if missing:
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "--no-install-recommends", *missing)
    kernel = WORK / "kernel"
    if not kernel.exists():
        said = run("apt-cache", "depends", "linux-image-cloud-amd64")
        package = next(
            line.split()[-1] for line in said.splitlines() if "Depends: linux-image-" in line
        )
        run("apt-get", "download", package, cwd=WORK)
        deb = next(WORK.glob("linux-image-*.deb"))
        run("dpkg", "-x", deb, WORK / "unpacking")
        (WORK / "unpacking").rename(kernel)
        deb.unlink()
    return kernel


def build_guest() -> Path:
    return build(goal="guest")


def initial_ramdisk(kernel: Path) -> Path:
    root, target = WORK / "root", WORK / "initrd.gz"
    shutil.rmtree(root, ignore_errors=True)
    for name in ("bin", "modules", "tools"):
        (root / name).mkdir(parents=True)
    shutil.copy(str(shutil.which("busybox")), root / "bin")
    for path in (*(Path(str(shutil.which(name))) for name in ("ndctl", "mke2fs")), build_guest()):
        shutil.copy(path, root / "tools")
        found = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
        for library in (word for word in found.split() if word.startswith("/")):
            (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, root / library[1:])
    for name in MODULES:
        shutil.copy(next(kernel.rglob(f"{name}.ko")), root / "modules")
    (root / "modules" / "order").write_text(" ".join(MODULES))
    (root / "modules" / "marks").write_text(str(FILESYSTEM_BYTES))
    shutil.copy(ROOT / "crashtests" / "native" / "init.sh", root / "init")
    (root / "init").chmod(0o755)
    (root / "etc").mkdir(exist_ok=True)
    run("sh", "-c", f"find . | cpio --quiet -o -H newc | gzip -1 > {target}", cwd=root)
    return target


class Machine:
    """One virtual machine that runs. What it says comes a line at a time."""

    def __init__(self, task: str, *devices: str, commits: int = 0) -> None:
        vmlinuz = next((WORK / "kernel" / "boot").glob("vmlinuz-*"))
        self._monitor = Path(tempfile.mkdtemp(prefix="pmstore-vm-")) / "monitor"
        command = [
            "qemu-system-x86_64",
            "-accel",
            "tcg",
            "-cpu",
            "max",
            "-smp",
            "1",
            "-machine",
            "pc,nvdimm=on",
        ]
        command += [
            "-m",
            "512M,slots=2,maxmem=2G",
            "-kernel",
            str(vmlinuz),
            "-initrd",
            str(WORK / "initrd.gz"),
        ]
        command += [
            "-append",
            f"console=ttyS0 quiet panic=-1 task={task} commits={commits}",
            "-nographic",
            "-nodefaults",
        ]
        command += ["-serial", "stdio", "-monitor", f"unix:{self._monitor},server,nowait", *devices]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.put(line.strip())
        self.lines.put(None)

    def say(self, until: float) -> Iterator[str]:
        """Lines until the time given (monotonic), or the end of the machine."""
        while (left := until - time.monotonic()) > 0:
            try:
                line = self.lines.get(timeout=left)
            except queue.Empty:
                return
            if line is None:
                return
            yield line

    def wait_for(self, word: str) -> list[str]:
        """Raises: RuntimeError if it does not come, or the machine says BROKEN."""
        said = []
        for line in self.say(time.monotonic() + PATIENCE_SECONDS):
            said.append(line)
            if "BROKEN" in line:
                break
            if line.startswith(word):
                return said
        raise RuntimeError(f"the machine did not say {word!r}: {said[-10:]}")

    def reset(self) -> None:
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.connect(str(self._monitor))
            monitor.settimeout(PATIENCE_SECONDS)
            said = b""
            for command in (b"system_reset\n", b""):
                # the second prompt: it was carried out
                while said.count(b"(qemu) ") < (1 if command else 2):
                    said += monitor.recv(4096)
                monitor.sendall(command)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._monitor.parent, ignore_errors=True)

    def wait(self) -> None:
        self._process.wait(PATIENCE_SECONDS)
        shutil.rmtree(self._monitor.parent, ignore_errors=True)


@dataclass
class Outcome:
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def last_ack(lines: list[str], before: int) -> int:
    return max(
        [
            before,
            *(
                int(line.split()[1])
                for line in lines
                if line.startswith("ack ") and line[4:].isdigit()
            ),
        ]
    )


def dax(kills: int, seed: int) -> Outcome:
    """Domain dax, killed at random."""
    rng, outcome = random.Random(seed), Outcome()
    medium = WORK / "nvdimm.img"
    medium.unlink(missing_ok=True)
    with medium.open("wb") as file:
        file.truncate(256 << 20)
    backend = f"memory-backend-file,id=m1,share=on,mem-path={medium},size=256M"
    devices = ("-object", backend, "-device", "nvdimm,id=nv1,memdev=m1")
    formatter = Machine("format", *devices, "-no-reboot")
    formatter.wait_for("formatted")
    formatter.wait()
    acknowledged, machine = 0, None
    try:
        for kill in range(kills):
            machine = machine or Machine("dax", *devices)
            machine.wait_for("opening")
            outcome.counts["starts"] += 1
            early = kill % 4 == 2  # while it opens the store
            said: list[str] = []
            if not early:
                said = machine.wait_for("found ")
                said += machine.say(time.monotonic() + rng.uniform(0, 3))
            else:
                said += machine.say(time.monotonic() + rng.uniform(0, 0.1))
            if kill % 2:
                machine.reset()
                outcome.counts["resets"] += 1
                while not machine.lines.empty():  # said before the reset took place
                    said.append(machine.lines.get_nowait() or "")
            else:
                machine.kill()
                machine = None
                outcome.counts["kills of QEMU"] += 1
            note(said, acknowledged, outcome)
            outcome.counts["killed before it had opened"] += not any(
                line.startswith("found ") for line in said
            )
            acknowledged = last_ack(said, acknowledged)
        machine = machine or Machine("dax", *devices)
        note(machine.wait_for("found "), acknowledged, outcome)
    except RuntimeError as error:
        outcome.failures.append(f"after kill {kill} (seed {seed}): {error}")
    finally:
        if machine:
            machine.kill()
    outcome.counts["commits acknowledged"] = acknowledged
    return outcome


def note(said: list[str], acknowledged: int, outcome: Outcome) -> None:
    """found N domain D map_sync 1 undone U ..."""
    for line in said:
        if "BROKEN" in line:
            outcome.failures.append(" / ".join(said[-5:]))
        if not line.startswith("found "):
            continue
        words = line.split()
        found = dict(zip(words[::2], map(int, words[1::2]), strict=False))
        outcome.counts["recoveries checked"] += 1
        outcome.counts["recoveries that undid something"] += found["undone"] > 0
        if found["found"] < acknowledged:
            outcome.failures.append(
                f"commit {acknowledged} was acknowledged, {found['found']} is there"
            )
        if found["domain"] != 1 or found["map_sync"] != 1:
            outcome.failures.append(f"not a mapping with MAP_SYNC: {line}")


@dataclass(frozen=True)
class Block:
    """What the log of writes says: data at a sector, or a flush."""

    sector: int
    data: bytes
    flush: bool
    mark: int
    """Of data: the commit whose acknowledgement it is. Of a flush: whether of the write before it
    alone (FUA)."""


FLUSH, FUA, DISCARD = 1, 2, 4


def blocks(log: Path) -> Iterator[Block]:
    """The format of dm-log-writes."""
    with log.open("rb") as file:
        magic, version, entries, size = struct.unpack("<QQQI", file.read(28))
        if magic != 0x6A736677736872 or version != 1 or size != SECTOR:
            raise RuntimeError(f"not a log of writes: {magic:x} {version} {size}")
        file.seek(SECTOR)
        for _ in range(entries):
            sector, count, flags, _ = struct.unpack("<QQQQ", file.read(SECTOR)[:32])
            data = b"" if flags & DISCARD else file.read(count * SECTOR)
            if flags & DISCARD:
                raise RuntimeError("a discard, which is not modelled")
            if flags & FLUSH:
                yield Block(0, b"", True, 0)
            if data:
                mark = sector * SECTOR >= FILESYSTEM_BYTES and data.startswith(b"acknowledged ")
                yield Block(sector, data, False, int(data[13:40].rstrip(b"\0")) if mark else 0)
            if flags & FUA and data:
                yield Block(0, b"", True, 1)


def power_failures(
    record: list[Block], base: bytearray, count: int, seed: int
) -> Iterator[tuple[int, str, bytearray, int]]:
    """(number of the write, how, image, commits acknowledged): what is there after a power
    failure."""
    rng = random.Random(seed)
    first = next(i for i, block in enumerate(record) if block.mark and not block.flush)
    chosen = Counter(rng.randrange(first, len(record)) for _ in range(count))
    pending: list[Block] = []
    acknowledged = 0
    for at, block in enumerate(record):
        if block.flush:
            durable, pending = (pending[-1:], pending[:-1]) if block.mark else (pending, [])
            for done in durable:
                base[done.sector * SECTOR : done.sector * SECTOR + len(done.data)] = done.data
        else:
            pending.append(block)
            acknowledged = block.mark or acknowledged
        for number in range(chosen[at]):
            how = ("none", "all", "sectors", "writes")[(at + number) % 4] if pending else "none"
            image = bytearray(base)
            for write in pending:
                whole = how == "all" or (how == "writes" and rng.random() < 0.5)
                for offset in range(0, len(write.data), SECTOR):
                    if whole or (how == "sectors" and rng.random() < 0.5):
                        start = write.sector * SECTOR + offset
                        image[start : start + SECTOR] = write.data[offset : offset + SECTOR]
            yield at, how, image, acknowledged


def file(images: int, commits: int, seed: int) -> Outcome:
    """Domain file on ext4, power failures between and within block writes."""
    outcome = Outcome()
    disk, log = WORK / "disk.img", WORK / "log.img"
    for path in (disk, log):
        path.unlink(missing_ok=True)
        path.touch()
    with disk.open("r+b") as made:
        made.truncate(FILESYSTEM_BYTES + (1 << 20))
    run(
        "mke2fs",
        "-q",
        "-t",
        "ext4",
        "-b",
        "4096",
        "-E",
        "nodiscard",
        "-F",
        disk,
        str(FILESYSTEM_BYTES // 4096),
    )
    base = bytearray(disk.read_bytes())
    drives = [
        f"driver=file,node-name=d0,filename={disk}",
        f"driver=file,node-name=l0,filename={log}",
    ]
    drives.append("driver=blklogwrites,node-name=lw,file=d0,log=l0,log-sector-size=512")
    devices = [word for drive in drives for word in ("-blockdev", drive)]
    machine = Machine(
        "file",
        *devices,
        "-device",
        "virtio-blk-pci,drive=lw,write-cache=on",
        "-no-reboot",
        commits=commits,
    )
    machine.wait_for("unmounted")
    machine.wait()
    record = list(blocks(log))
    outcome.counts["block writes"] = sum(bool(block.data) for block in record)
    outcome.counts["flushes"] = sum(block.flush for block in record)
    outcome.counts["commits acknowledged"] = max(block.mark for block in record if not block.flush)
    with tempfile.TemporaryDirectory(prefix="pmstore-vm-", dir=MEMORY) as folder:
        image, mounted = Path(folder) / "image", Path(folder) / "mounted"
        mounted.mkdir()
        for at, how, content, acknowledged in power_failures(record, base, images, seed):
            image.write_bytes(content)
            outcome.counts[f"images, {how} of the pending writes"] += 1
            try:
                run("mount", "-o", "loop", image, mounted)
                try:
                    run(BUILD / "guest", "check", mounted / "store", "2", str(acknowledged))
                finally:
                    run("umount", mounted)
            except subprocess.CalledProcessError as error:
                outcome.failures.append(
                    f"after write {at}, {how} (seed {seed}): {error.stdout}{error.stderr}"
                )
                kept = WORK / f"failed-{at}-{how}.img"
                shutil.copy(image, kept)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m crashtests.vm",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=60, help="of the machine with an NVDIMM")
    parser.add_argument("--images", type=int, default=600, help="of the disk")
    parser.add_argument("--commits", type=int, default=150, help="to the disk")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("needs root: to install packages and to mount images")
    WORK.mkdir(parents=True, exist_ok=True)
    initial_ramdisk(install())
    outcomes = {}
    if arguments.kills:
        outcomes["dax"] = dax(arguments.kills, arguments.seed)
    if arguments.images:
        outcomes["file"] = file(arguments.images, arguments.commits, arguments.seed)
    print("| domain | | |\n|---|---|--:|")
    for domain, outcome in outcomes.items():
        for name, count in outcome.counts.items():
            print(f"| `{domain}` | {name} | {count:,} |")
        print(f"| `{domain}` | **failures** | {len(outcome.failures)} |")
    report = {
        domain: {"counts": outcome.counts, "failures": outcome.failures}
        for domain, outcome in outcomes.items()
    }
    (BUILD / "vm.json").write_text(
        json.dumps({"seed": arguments.seed, "commit": commit_id(), **report}, indent=1)
    )
    failures = [failure for outcome in outcomes.values() for failure in outcome.failures]
    for failure in failures[:20]:
        print(f"FAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
