"""What is not supported says so, and what to do instead."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from test_repair import PAGE, crc32c

import pmstore


def test_a_device_is_refused() -> None:
    """devdax is a character device: no file operations to format it with."""
    with pytest.raises(ValueError, match="fsdax"):
        pmstore.open("/dev/zero", "r+")
    with pytest.raises(ValueError, match="fsdax"):
        pmstore.open("/dev/zero")


def test_dax_where_there_is_none(shm: Path) -> None:
    with pytest.raises(pmstore.DomainError, match=r"MAP_SYNC"):
        pmstore.open(shm / "store.pm", domain="dax")
    assert os.listdir(shm) == []


def test_a_store_made_for_dax_that_was_copied_elsewhere(path: Path) -> None:
    """The file asks for `dax`, the default goes by the file: the message names a domain that does
    open it."""
    with pmstore.open(path, domain="file", size="1MiB") as store:
        store["x"] = 1
    data = bytearray(path.read_bytes())
    for copy in (0, PAGE):
        struct.pack_into("<I", data, copy + 84, 1)
        struct.pack_into("<I", data, copy + PAGE - 4, crc32c(bytes(data[copy : copy + PAGE - 4])))
    path.write_bytes(data)
    with pytest.raises(pmstore.DomainError, match=r"MAP_SYNC.*domain='file'"):
        pmstore.open(path)
    with pmstore.open(path, "r") as store:
        assert store["x"] == 1
    with pmstore.open(path, domain="file") as store:
        assert store["x"] == 1


WITHOUT_TORCH = """
import os, sys
import numpy as np
sys.modules["torch"] = None
import pmstore
assert dir(pmstore) == sorted(pmstore.__all__) and "torch" not in pmstore.__all__
import pydoc
assert "bytes are in the heap" in pydoc.render_doc(pmstore)
from pmstore import *
del open
store = pmstore.open(sys.argv[1])
def attach():
    import pmstore.torch
def pymm_tensor():
    from pmstore import pymm
    pymm.torch_tensor
get, make = lambda: store["t"], lambda: store.tensor("u", 3)
mirror = lambda: store.mirror("m", None)
for use in (get, make, mirror, attach, pymm_tensor):
    try:
        use()
    except ModuleNotFoundError as error:
        assert str(error) == "this needs torch: pip install 'pmstore[torch]'", error
        assert error.name == "torch"
    else:
        raise AssertionError
sys.modules["safetensors"] = None
from pmstore import exchange
plain = pmstore.open(sys.argv[1] + ".plain", size="1MiB")  # tensors would need torch before
plain["x"] = np.ones(3)
for use in (exchange.export_safetensors, exchange.import_safetensors):
    try:
        use(plain, sys.argv[1] + ".safetensors")
    except ModuleNotFoundError as error:
        assert str(error) == "this needs safetensors: pip install 'pmstore[export]'", error
    else:
        raise AssertionError
assert list(store) == ["t"]
store.close()
"""


def test_a_package_that_is_missing_is_named_with_its_extra(path: Path) -> None:
    torch = pytest.importorskip("torch")
    with pmstore.open(path, size="1MiB") as store:
        store["t"] = torch.ones(3)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_subinterpreter_is_refused() -> None:
    program = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
number = interpreters.create()
code = '''
import importlib.util
spec = importlib.util.spec_from_file_location("pmstore._engine._binding", PATH)
try:
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
except ImportError as error:
    print("refused:", error, flush=True)
else:
    print("imported", flush=True)
'''
import sys
interpreters.run_string(number, code.replace("PATH", repr(sys.argv[1])))
"""
    from pmstore._engine import _binding

    done = subprocess.run(
        [sys.executable, "-c", program, str(_binding.__file__)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "refused: " in done.stdout, (done.stdout, done.stderr)
    if sys.version_info < (3, 12):
        assert "main interpreter" in done.stdout


def test_memory_of_what_nobody_writes(tmp_path: Path) -> None:
    """In domain file an array that is only allocated takes none, and one that is written all over
    is copied once."""

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

    size = 64 << 20
    with pmstore.open(tmp_path / "s.pm", domain="file", size="300MiB") as store:
        before = anonymous()
        store.empty("a", size, "uint8")
        assert anonymous() - before < size // 4
        store.rollback()
        store.zeros("b", size, "uint8")
    with pmstore.open(tmp_path / "s.pm", domain="file") as store:
        array, before = store["b"], anonymous()
        with store.transaction(writes=[array]):
            array[:] = 1
        assert size * 0.9 < anonymous() - before < size * 1.5  # its pre-image is at home
