"""The engine against libpmemobj, in C, in one process: small transactions and a 256 MiB overwrite.

Needs a C compiler and Debian's libpmemobj-dev (`apt-get install libpmemobj-dev`); says so and goes on without if it is missing.
"""

from __future__ import annotations

import json
import os
import subprocess

from benchmarks.harness import ROOT, Row, report, scratch

YARDSTICK = {"8 B add_range + commit": "libpmemobj", "empty": "libpmemobj", "256 MiB overwrite": "memcpy"}
TARGET = {
    "pmstore emulated, pms_write": 0.75,
    "pmstore emulated declared": 2.0,
    "pmstore process declared": 2.0,
    "pmstore process undeclared": 2.5,
    "pmstore emulated undeclared": 2.5,
}


def _compile() -> str | None:
    out = ROOT / "build" / "bench" / "engine_vs_pmdk"
    out.parent.mkdir(parents=True, exist_ok=True)
    sources = [str(p) for p in sorted((ROOT / "native").glob("*.c"))]
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-I", str(ROOT / "native")]
    main = str(ROOT / "benchmarks" / "native" / "engine_vs_pmdk.c")
    done = subprocess.run(
        ["cc", *flags, *sources, main, "-o", str(out), "-lpmemobj", "-lpthread"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0 and "libpmemobj" in done.stderr:
        print("engine: libpmemobj is not installed (Debian: apt-get install libpmemobj-dev); question left out")
        return None
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return str(out)


def main(quick: bool = False) -> None:
    program = _compile()
    if program is None:
        return
    with scratch("memory") as folder:
        environment = {**os.environ, "PMEM_IS_PMEM_FORCE": "1"}
        done = subprocess.run(
            [program, str(folder), "30" if quick else "120"], env=environment, capture_output=True, text=True, check=True
        )
    raw = [json.loads(line) for line in done.stdout.splitlines()]
    base = {(r["case"], r["method"]): r["median_us"] for r in raw}
    rows = [
        Row(**r, ratio=r["median_us"] / base[r["case"], YARDSTICK[r["case"]]], target=TARGET.get(r["method"])) for r in raw
    ]
    report("engine", "Engine against libpmemobj (C, tmpfs)", rows)
