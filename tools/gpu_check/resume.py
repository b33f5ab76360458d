"""A mirrored run is killed at random moments, goes on, and ends with the bits of one that never
stopped."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tools.gpu_check.device import Settings
from tools.gpu_check.outcome import Aim, NotCheckedError, Outcome, require

_STEPS = 150
_LIVES = 4  # of a training that are killed, before one that ends
_LIMIT = 600.0  # seconds that a training may take


class _Training:
    """A process that trains."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tools.gpu_check.training",
                str(path),
                str(_STEPS),
                str(settings.device),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent.parent,
        )
        self._late = threading.Timer(_LIMIT, self._process.kill)
        self._late.daemon = True
        self._late.start()
        assert self._process.stdout is not None
        self._first = self._process.stdout.readline()
        """"ready", once a step of this life is committed; its result, if none was left to train."""

    def _end(self) -> tuple[str, str]:
        """What it wrote, and what it said of errors."""
        out, err = self._process.communicate()
        in_time = self._late.is_alive()
        self._late.cancel()
        require(in_time, f"a training was not over after {_LIMIT:g} seconds: {err[-2000:]}")
        return self._first + out, err

    def result(self) -> str:
        """Raises: WrongError: it failed."""
        out, err = self._end()
        require(self._process.returncode == 0, f"a training failed: {err[-2000:]}")
        return out.split()[-1]

    def killed_after(self, seconds: float) -> bool:
        """Whether it was still under way."""
        killer = threading.Timer(seconds, self._process.kill)
        killer.start()
        _, err = self._end()
        killer.cancel()
        killer.join()
        status = self._process.returncode
        require(status in (0, -signal.SIGKILL), f"a training failed ({status}): {err[-2000:]}")
        return status != 0


def check(settings: Settings, outcome: Outcome) -> None:
    begun = time.perf_counter()
    whole = _Training(settings.folder / "whole.pm", settings)
    after_first = time.perf_counter()
    reference = whole.result()
    span = time.perf_counter() - after_first
    outcome.figures["seconds of a training"] = time.perf_counter() - begun
    if _Training(settings.folder / "again.pm", settings).result() != reference:
        raise NotCheckedError(
            "the same training has other bits when it is run again, without a kill: this device's "
            "kernels are not repeatable here"
        )
    kills, trainings = 0, 0
    with ThreadPoolExecutor(settings.jobs) as pool:
        while kills < settings.kills:
            some = _shares(settings.kills - kills, settings.jobs)
            numbers = range(trainings, trainings + len(some))
            kills += sum(pool.map(partial(_killed, settings, span, reference), numbers, some))
            trainings += len(some)
    outcome.figures |= {"kills": kills, "trainings": trainings, "steps of each": _STEPS}
    if settings.cuda:
        outcome.aims.append(Aim("kills, resumed bit for bit", kills, 1000, at_least=True))


def _shares(kills: int, jobs: int) -> list[int]:
    """Returns how often each of the next trainings is killed.

    >>> _shares(10, 8), _shares(3, 8), _shares(1000, 2)
    ([4, 4, 2], [3], [4, 4])
    """
    shares = [_LIVES] * (kills // _LIVES) + ([kills % _LIVES] if kills % _LIVES else [])
    return shares[:jobs]


def _killed(settings: Settings, span: float, reference: str, number: int, lives: int) -> int:
    """Kills a training as often, unless it ends before, and lets it end. Returns the kills. Raises:
    WrongError: it ended with other bits."""
    chance = random.Random(f"{settings.seed} {number}")
    path = settings.folder / f"killed-{number}.pm"
    kills = 0
    while kills < lives and _Training(path, settings).killed_after(chance.uniform(0, span)):
        kills += 1
    found = _Training(path, settings).result()
    require(found == reference, f"training {number} resumed to other bits ({kills} kills)")
    path.unlink()
    return kills
