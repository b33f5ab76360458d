"""What a test may leave behind in the process that all tests share: read before it and after it."""

from __future__ import annotations

import gc
import locale
import logging
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import compress
from operator import is_not
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pythons

SIGNALS = sorted(signal.valid_signals())
LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
TASKS = Path("/proc/self/task")


def seed() -> None:
    """Each test draws the same numbers, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        # torch.manual_seed notes, for each kind of device that is not in use, who calls it
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


def _umask() -> str:
    # os.umask would have to set it: another thread could make a file meanwhile
    status = Path("/proc/self/status").read_text()
    return status[status.index("\nUmask:") + 1 :].partition("\n")[0]


def _children() -> set[int]:
    """Processes that have not ended. Those that multiprocessing keeps for itself, and the one
    that starts programs, are no test's."""
    trackers = {
        getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None),
        getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None),
        pythons.server_pid(),
    }
    found = set()
    for task in os.listdir(TASKS):
        try:
            found |= {int(pid) for pid in (TASKS / task / "children").read_text().split()}
        except OSError:  # the thread has ended, or this kernel has no such files
            continue
    return {pid for pid in found - trackers if _runs(pid)}


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    name, _, rest = stat.partition("(")[2].rpartition(")")
    return rest.split()[0] not in "ZX" and not name.startswith(
        "torch_shm_manag"
    )  # torch's, for good


def _threads() -> set[threading.Thread]:
    """Daemons are left out: libraries keep some for ever."""
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _signals() -> dict[int, Any]:
    """torch's DataLoader has a handler for its workers from the first of them on, for good."""
    found: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    if getattr(found[signal.SIGCHLD], "__module__", "").startswith("torch."):
        del found[signal.SIGCHLD]
    return found


def _start_method() -> str:
    """The default, also as long as nobody has asked for it."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


def _of_pytest(handler: logging.Handler) -> bool:
    return type(handler).__module__.startswith("_pytest")


def _handlers() -> dict[str, tuple[int, tuple[logging.Handler, ...]]]:
    """pytest's own come and go with each phase of a test."""
    loaded = ["torch"] if "torch" in sys.modules else []  # it sets its own up when it is imported
    loggers = {name: logging.getLogger(name) for name in (None, "pmstore", *loaded)}
    return {
        name or "root": (logger.level, tuple(h for h in logger.handlers if not _of_pytest(h)))
        for name, logger in loggers.items()
    }


def _torch() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    distributed = torch.distributed
    return {
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "process group": distributed.is_available() and distributed.is_initialized(),
    }


READ: Mapping[str, Callable[[], Any]] = {
    "working directory": os.getcwd,
    "signal handlers": _signals,
    "blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
    "timers": lambda: signal.getitimer(signal.ITIMER_REAL)[1],
    "umask": _umask,
    "limits": lambda: {name: resource.getrlimit(number) for name, number in LIMITS.items()},
    "locale": lambda: locale.setlocale(locale.LC_ALL),
    "sys.path": lambda: list(sys.path),
    "hooks": lambda: (sys.excepthook, sys.gettrace(), sys.getrecursionlimit()),
    "garbage collection": lambda: (gc.isenabled(), gc.get_threshold()),
    "errors of numpy": np.geterr,
    "logging": _handlers,
    "start of processes": _start_method,
    "torch": _torch,
    "threads": _threads,
    "child processes": _children,
}


ENDING = ("threads", "child processes")
END_SECONDS = 60.0  # a busy machine is no failure


def _stayed(read: Callable[[], Any], before: set[Any]) -> set[Any]:
    """What is there besides, and does not end by itself."""
    until = time.monotonic() + END_SECONDS
    while (more := set(read()) - before) and time.monotonic() < until:
        time.sleep(0.01)
    return more


def now() -> dict[str, Any]:
    return {what: read() for what, read in READ.items()} | {"modules": dict(sys.modules)}


def changes(before: dict[str, Any]) -> list[str]:
    """What is not as it was, in words. A thread, a process and a module may also have ended."""
    found = []
    loaded = before["modules"]
    if modules := set(compress(loaded, map(is_not, map(sys.modules.get, loaded), loaded.values()))):
        found.append(f"modules: other ones, or none: {sorted(modules)}")
    for what, read in READ.items():
        old, new = before[what], read()
        if what in ENDING:
            old, new = set(), _stayed(read, old)
        elif isinstance(old, dict):
            new = {key: value for key, value in new.items() if key in old and value != old[key]}
            old = {key: old[key] for key in new}
        if new != old:
            found.append(f"{what}: {old!r} before, {new!r} now")
    return found


def put_back(before: dict[str, Any]) -> None:
    """What can be, so that the tests after the guilty one are not judged by it."""
    os.chdir(before["working directory"])
    sys.path[:] = before["sys.path"]
    for number, handler in before["signal handlers"].items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, before["blocked signals"])
    for name in before["modules"]:
        if sys.modules.get(name) is not before["modules"][name]:
            sys.modules[name] = before["modules"][name]
    for name, (level, handlers) in before["logging"].items():
        logger = logging.getLogger(None if name == "root" else name)
        logger.setLevel(level)
        logger.handlers = [h for h in logger.handlers if h in handlers or _of_pytest(h)]
    np.seterr(**before["errors of numpy"])
    os.umask(int(before["umask"].split()[1], 8))
    if before["torch"]:
        torch = sys.modules["torch"]
        torch.set_default_dtype(before["torch"]["default dtype"])
        torch.set_num_threads(before["torch"]["threads"])
        torch.use_deterministic_algorithms(before["torch"]["deterministic algorithms"])
        torch.set_grad_enabled(before["torch"]["gradients"])


def _take_back_what_is_for_good(before: dict[str, Any]) -> None:
    """A process has a handler of SIGTERM from its first tier on, and torch's hook from its first
    process group on. The next test's process has neither yet."""
    handler = signal.getsignal(signal.SIGTERM)
    if getattr(handler, "__module__", "") == "pmstore.tiers.tiers":
        signal.signal(signal.SIGTERM, before["signal handlers"][signal.SIGTERM])
    sys.excepthook = before["hooks"][0]  # torch and typer put in their own


def watch() -> Iterator[None]:
    """Around one test: the body of a fixture."""
    environment = dict(os.environ)
    seed()
    before = now()
    yield
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    _take_back_what_is_for_good(before)
    changed = changes(before)
    if changed:
        put_back(before)
        pytest.fail("This test leaves behind: " + "; ".join(changed), pytrace=False)
