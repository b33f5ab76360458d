"""How long does a command take to start? `python -m benchmarks.start_up [ROUNDS]`.

In each round every command once, so that all see the same machine; medians, over that of an
interpreter that does nothing, or imports numpy. Aims: `--version` at most 1.2 times the first, `ls`
at most 1.2 times the second. Everything is compiled once before, as it is where a package was
installed. It is no question of `python -m benchmarks`: it has no peers, and no table in RESULTS.md.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import pmstore

AIM = 1.2


def _once(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Seconds, and those of a core: what others do on the machine counts for less in them."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix=f"pmstore-bench-start-{os.getpid()}-") as folder:
        path = f"{folder}/run.pm"
        with pmstore.open(path, size="8MiB") as store:
            store["losses"] = np.linspace(1, 0, 1000)
            store["model/w"] = np.zeros((100, 100))
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        script = str(Path(sys.executable).with_name("pmstore"))
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "import numpy": [sys.executable, "-c", "import numpy"],
            "pmstore --version": [script, "--version"],
            "pmstore ls": [script, "ls", path],
            "pmstore info": [script, "info", path],
            "pmstore show": [script, "show", path, "losses"],
            "pmstore --help": [script, "--help"],
            "pmstore set": [script, "set", path, "x", "1"],
        }
        for command in commands.values():
            _once(command, environment)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                found[name].append(_once(command, environment))
    medians = {
        name: [statistics.median(one) for one in zip(*each, strict=True)]
        for name, each in found.items()
    }
    nothing, numpy_alone = medians["python -c pass"], medians["import numpy"]
    print(f"{'':18}  time, ms  of a core  / nothing   (core)  / numpy   (core)")
    for name, (seconds, core) in medians.items():
        print(
            f"{name:18}  {seconds * 1e3:8.1f}  {core * 1e3:9.1f}  {seconds / nothing[0]:9.2f}  "
            f"{core / nothing[1]:7.2f}  {seconds / numpy_alone[0]:7.2f}  "
            f"{core / numpy_alone[1]:7.2f}"
        )
    for name, floor in (("pmstore --version", nothing), ("pmstore ls", numpy_alone)):
        ratio = medians[name][1] / floor[1]
        print(f"{name}: {ratio:.2f} of {AIM}: {'reached' if ratio <= AIM else 'missed'}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
