"""What is known of PyMM's programs: how they are begun, and which do not apply, and why.

A key is a part of a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Told = TypeVar("Told")

_POSTERIOR = (
    "shelf = pymm.shelf('posterior', 32, '/mnt/pmem0', force_new=True)\n"
    "posterior = {kind}(3, shelf)\n"
    "for _ in range(20): posterior.update(np.random.randn(3))\n"
    "posterior.finalize()\n"
)
CALLS = {
    "python/pymm/demo.py": "demo()",
    "python/pymm/pymmtest.py": "test_write_operations()",
    "src/pymmposterior.py": _POSTERIOR.format(kind="PymmPosterior"),
    "src/lazypymmposterior.py": _POSTERIOR.format(kind="LazyPymmPosterior") + "posterior.sample()",
    "src/lazypymmposterior_dramcalc.py": _POSTERIOR.format(kind="LazyPymmPosterior")
    + "posterior.sample()",
}
"""Modules that define what a program calls: a line that does. Of pymmtest, test_basic_writes has an
error of its own: it takes `array != 1` for one truth value."""

ARGUMENTS = {
    "experiments/mnist_pymm.py": ["model_2fc", "-e", "1", "-K", "4", "-b", "100", "-s", "64"],
    "dram/run_kmeans.py": ["{data}", "{out}", "{pool}", "mnist.npz", "3", "--max_iter", "5"],
    "dram/run_dbscan.py": ["{data}", "{out}", "{pool}", "mnist.npz", "2500", "3"],
}
"""{data} holds a small mnist.npz of noise."""

NOT_APPLICABLE = {
    "read_write/": "a benchmark of devices: drops the machine's caches, turns its swap off, 340 GB",
    "18_py_benchmark_write_media": "a benchmark of devices: /mnt/nvme1, /dev/dax1.0",
    "dram/run_gmm.py": "needs an accelerator, and assigns tuples, which PyMM refuses, too",
    "parallel_sort/": "needs its own module of Cython, which is to be built",
    "skimage/image_processing.py": "calls scikit-image as it was before 0.19",
}
"""Not run at all."""


def find(table: Mapping[str, Told], path: str) -> Told | None:
    return next((told for part, told in table.items() if part in path), None)
