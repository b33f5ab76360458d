"""`python -m tests.upstream.one WRITER FILE RESULTS`: pytest over one of torch's test files.

WRITER is `pmstore`, which replaces `FileSystemWriter` and `FileSystemReader` wherever torch's tests
take them from, or `torch`, which replaces nothing. RESULTS gets one JSON list of a test, how it
ended, and why. torch's tests spawn their ranks: a spawned process imports the main module, this
one, before it unpickles the test, and so is changed in the same way.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _fsspec_filesystem, format_utils, hf_storage
from torch.testing._internal import common_distributed
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed._tensor import common_dtensor

SUBCLASSING = (_fsspec_filesystem, hf_storage)
"""Their classes extend torch's, and stay as they are."""


def run_on_processors() -> None:
    """On a machine without any GPU, tests that ask for some run on processors, with gloo. One whose
    number of ranks is that of the GPUs would pass without a rank: it is skipped."""
    if torch.accelerator.is_available():
        return
    asked = common_distributed.skip_if_lt_x_gpu
    init, spawn = common_dtensor.DTensorTestBase.init_pg, MultiProcessTestCase._spawn_processes

    def skip_if_lt_x_gpu(count: int, *, allow_cpu: bool = True) -> Any:
        return asked(count, allow_cpu=allow_cpu)

    def init_pg(self: Any, eager_init: Any, backend: str | None = None) -> None:
        init(self, eager_init, "gloo")

    def spawn_processes(self: Any) -> None:
        if not self.world_size:
            self.skipTest("has as many ranks as there are GPUs")
        spawn(self)

    common_distributed.skip_if_lt_x_gpu = skip_if_lt_x_gpu
    common_dtensor.skip_if_lt_x_gpu = skip_if_lt_x_gpu
    common_dtensor.DTensorTestBase.init_pg = init_pg
    MultiProcessTestCase._spawn_processes = spawn_processes


def replace_storage() -> None:
    import pmstore.dcp

    class Writer(pmstore.dcp.StoreWriter):
        """With the arguments of torch's; those about the layout of its files mean nothing here."""

        def __init__(self, path: str | os.PathLike[str], *layout: Any, **options: Any) -> None:
            super().__init__(path)

    class Reader(pmstore.dcp.StoreReader):
        def __init__(self, path: str | os.PathLike[str], *extensions: Any) -> None:
            super().__init__(path)

    Writer.__name__, Reader.__name__ = "FileSystemWriter", "FileSystemReader"
    users = [m for name, m in sys.modules.items() if name.startswith(dcp.__name__)]
    for module in users:
        for name, ours in (("FileSystemWriter", Writer), ("FileSystemReader", Reader)):
            if hasattr(module, name) and module not in SUBCLASSING:
                setattr(module, name, ours)


class Results:
    """A pytest plug-in: how each test ended."""

    def __init__(self) -> None:
        self.ends: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.partition("::")[2]
        why = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            why = report.longrepr[2]
        elif report.failed:
            why = str(report.longrepr)
        if self.ends.get(name, ("",))[0] != "failed":
            self.ends[name] = (report.outcome, why)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.ends["(import)"] = ("failed", str(report.longrepr))


torch.set_num_threads(1)
assert format_utils.FileSystemWriter is dcp.FileSystemWriter
run_on_processors()
if sys.argv[1] == "pmstore":
    replace_storage()

if __name__ == "__main__":
    _, _, file, results = sys.argv
    ends = Results()
    pytest.main(
        [
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            str(Path(file).parent),
            file,
        ],
        plugins=[ends],
    )
    Path(results).write_text(json.dumps(ends.ends))
