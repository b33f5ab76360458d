"""One of PyMM's programs, in a process of its own: `python -m tests.upstream_pymm.child`.

`import pymm` finds `pmstore.pymm`, and the pool's folder is another. `unittest.main` writes down
what became of each test.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import numpy as np

from pmstore import pymm

POOL = "/mnt/pmem"
"""How the paths of PyMM's pools begin: /mnt/pmem0, /mnt/pmem1."""


class _Result(unittest.TextTestResult):
    told: dict[str, str]

    def startTest(self, test: unittest.TestCase) -> None:
        self.told = self.__dict__.setdefault("told", {})
        self.told[test.id()] = "ok"
        super().startTest(test)

    def addError(self, test: Any, error: Any) -> None:
        self.__dict__.setdefault("told", {})[test.id()] = f"{error[0].__name__}: {error[1]}"
        super().addError(test, error)

    def addFailure(self, test: Any, error: Any) -> None:
        self.told[test.id()] = f"failed: {error[1]}"
        super().addFailure(test, error)


def _main_of_unittest(report: Path) -> Any:
    def main(*args: Any, **kwargs: Any) -> None:
        suite = unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"])
        result: Any = unittest.TextTestRunner(resultclass=_Result, verbosity=2).run(suite)
        report.write_text(json.dumps(result.__dict__.get("told", {})))
        sys.exit(not result.wasSuccessful())

    return main


def _older_numpy() -> None:
    """PyMM's programs use names that numpy has removed since."""
    for kind in (float, int, bool):
        if not hasattr(np, kind.__name__):
            setattr(np, kind.__name__, kind)


def _torchvision() -> types.ModuleType:
    """Stands in for it where it is not installed, with pictures of noise for MNIST, which would be
    downloaded."""
    import torch

    class MNIST(torch.utils.data.Dataset[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            del args, kwargs

        def __len__(self) -> int:
            return 2000

        def __getitem__(self, index: int) -> Any:
            picture = torch.rand(1, 28, 28, generator=torch.Generator().manual_seed(index))
            return picture, index % 10

    def nothing(*args: Any) -> None:
        del args

    made = types.ModuleType("torchvision")
    transforms = {"ToTensor": nothing, "Normalize": nothing, "Compose": nothing}
    for name, content in (("datasets", {"MNIST": MNIST}), ("transforms", transforms)):
        part = types.ModuleType(f"torchvision.{name}")
        part.__dict__.update(content)
        setattr(made, name, part)
        sys.modules[part.__name__] = part
    return made


def main() -> None:
    program, pools, report, call, *arguments = sys.argv[1:]
    sys.modules["pymm"] = pymm
    sys.modules["pmstore.pymm.shelf_file"].FOLDER = f"{pools}/pmem0"  # type: ignore[attr-defined]
    _older_numpy()
    text = Path(program).read_text()
    try:
        import torchvision  # noqa: F401
    except ImportError:
        if "torchvision" in text:
            sys.modules["torchvision"] = _torchvision()
    unittest.main = _main_of_unittest(Path(report))  # type: ignore[misc]
    sys.argv = [program, *arguments]
    if Path(program).parent.name != "pymm":  # PyMM's own folder has a string.py
        sys.path[0] = str(Path(program).parent)
    namespace = types.ModuleType("__main__")
    namespace.__dict__.update(__file__=program, __builtins__=__builtins__)
    if "\nfrom ." in text:  # a module of a package
        sys.path.insert(0, str(Path(program).parent.parent))
        namespace.__package__ = Path(program).parent.name
        importlib.import_module(namespace.__package__)
    sys.modules["__main__"] = namespace
    text = f"{text}\n{call}\n".replace(POOL, f"{pools}/pmem")
    exec(compile(text, program, "exec"), namespace.__dict__)


if __name__ == "__main__":
    main()
