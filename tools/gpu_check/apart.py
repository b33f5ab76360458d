"""Each check in a process of its own: what it does to the device, or to itself, is not the next
one's. After some errors of CUDA nothing more can be done with a device in the process that met
them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from tools.gpu_check.device import Settings
from tools.gpu_check.outcome import NotCheckedError, Outcome, WrongError

Check = Callable[[Settings, Outcome], None]


def carry_out(name: str, check: Check, settings: Settings) -> Outcome:
    outcome = Outcome(name)
    start = time.perf_counter()
    try:
        check(settings, outcome)
    except NotCheckedError as why:
        outcome.status, outcome.why = "not checked", str(why)
    except WrongError as wrong:
        outcome.status, outcome.why = "failed", str(wrong)
    except torch.cuda.OutOfMemoryError as error:  # somebody else uses the device
        outcome.status, outcome.why = "not checked", f"{error} (--bytes: for a smaller state)"
    except Exception:
        outcome.status, outcome.why = "failed", traceback.format_exc()
    outcome.seconds = time.perf_counter() - start
    return outcome


def _work(answer: Connection, name: str, check: Check, settings: Settings) -> None:
    os.setsid()  # it ends with all that it started
    answer.send(carry_out(name, check, settings))


def apart(name: str, check: Check, settings: Settings, limit_seconds: float) -> Outcome:
    """What came of it, whatever it met: also if it died, or never ended."""
    new = multiprocessing.get_context("spawn")
    answer, theirs = new.Pipe(duplex=False)
    worker = new.Process(target=_work, args=(theirs, name, check, settings))
    start = time.perf_counter()
    worker.start()
    theirs.close()
    try:
        if not answer.poll(limit_seconds):
            why = f"it was not over after {limit_seconds:g} seconds"
        else:
            try:
                found: Outcome = answer.recv()
                return found
            except EOFError:
                worker.join()
                why = f"its process ended with status {worker.exitcode}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid or 0, signal.SIGKILL)
        worker.kill()
        worker.join()
        answer.close()
    return Outcome(name, "failed", why, time.perf_counter() - start)
