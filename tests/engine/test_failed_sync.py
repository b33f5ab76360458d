"""A sync that fails, as a user sees it: the store can be read, not written; the errors say so, and
what to do."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pmstore

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

FAILS = """
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
int fdatasync(int fd)
{
    if (access(getenv("FAILS_WHILE"), F_OK) == 0) {
        errno = atoi(getenv("FAILS_WITH"));
        return -1;
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
"""

PROGRAM = """
import os, sys
import numpy as np
import pmstore

def refused(call, remedy):
    try:
        call()
    except pmstore.ReadOnlyStoreError as error:
        assert remedy in str(error) and "mode=" not in str(error), error
    else:
        raise AssertionError

path, failing = sys.argv[1], os.environ["FAILS_WHILE"]
calls = {
    "commit": lambda: store.commit(),
    "slots": lambda: store.slots("s", (40_000,), "f4"),
    "growth": lambda: store.zeros("large", 1_000_000),
}
store = pmstore.open(path, domain=sys.argv[3], size="2MiB")
store["a"], store["n"] = np.ones(1000), 1
store.commit()
open(failing, "w").close()
store["n"] = 2
try:
    calls[sys.argv[2]]()
except OSError as error:
    assert error.errno == int(os.environ["FAILS_WITH"]), error
    assert "open it again" in str(error) and "Nothing was changed" not in str(error), error
else:
    raise AssertionError
os.remove(failing)  # one that fails once and then works again has forgotten what it did not write
again = "Close it and open it again"
refused(store.commit, again)
refused(lambda: store.__setitem__("n", 3), again)
refused(lambda: store.zeros("z", 3), again)
refused(lambda: store.transaction().__enter__(), again)
assert store["a"].sum() == 1000 and "n" in store and store.check().problems == ()
refused(store.close, again)
assert store.closed
with pmstore.open(path) as store:
    assert store["n"] in ((1, 2) if sys.argv[2] == "commit" else (1,))
    assert store["a"].sum() == 1000 and "s" not in store and "large" not in store
    store["n"] = 4
"""


@pytest.mark.parametrize(
    ("call", "domain"), [("commit", "file"), ("slots", "file"), ("growth", "emulated")]
)
@pytest.mark.parametrize("reason", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_store_whose_sync_failed(disk: Path, call: str, domain: str, reason: int) -> None:
    (disk / "fails.c").write_text(FAILS)
    library = disk / "fails.so"
    subprocess.run(
        ["cc", "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", library, disk / "fails.c", "-ldl"],
        check=True,
    )
    preloaded = os.pathsep.join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(disk / "x.pm"), call, domain],
        env={
            **os.environ,
            "LD_PRELOAD": preloaded,
            "FAILS_WHILE": str(disk / "failing"),
            "FAILS_WITH": str(reason),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    with pmstore.open(disk / "x.pm", "r") as store:
        assert store["n"] == 4
        assert store.check().problems == ()


def test_a_store_open_for_reading_says_how_to_open_it(path: Path) -> None:
    pmstore.open(path, size="1MiB").close()
    with (
        pmstore.open(path, "r") as store,
        pytest.raises(pmstore.ReadOnlyStoreError, match=r"mode=\'r\+\'"),
    ):
        store["x"] = 1
