"""Finds by name where notices of a process's end come from."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pmstore.scheduler._notices.cloud import Aws, Gcp

Look: TypeAlias = Callable[[], "float | None"]
SourceName: TypeAlias = Literal["sigterm", "slurm", "aws", "gcp"]
_FILE = "file:"
_TORCHRUN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Source:
    """A source of notices.

    Attributes:
        name: in words.
        notice_seconds: from a signal, or a notice without a time, to the end, if nobody says.
        signals: that are notices.
        look: asks whether there is a notice: seconds left, or None. None: signals alone tell.
        every_seconds: how often it is asked.
        remote: it asks over a network: never in a step, and with the reason if it fails.
        planned: what it tells is the end that the process has had from the start; a notice only
            when that is near.
        ends_at: that end, in seconds since 1970; None: not known.
        about: what to say when the guard begins, as something is missing; "": nothing.
    """

    name: str
    notice_seconds: float = 30.0
    signals: tuple[int, ...] = (signal.SIGTERM,)
    look: Look | None = None
    every_seconds: float = 1.0
    remote: bool = False
    planned: bool = False
    ends_at: float | None = None
    about: str = ""


def source_of(source: object, notice_seconds: float | None) -> Source:
    """Returns the source that `PreemptionGuard(source=)` means.

    Raises: TypeError, ValueError: it is none.
    """
    if callable(source):
        return Source("a callable", look=source)
    if not isinstance(source, str):
        raise TypeError(
            f"source={source!r}: 'sigterm', 'slurm', 'aws', 'gcp', 'file:<path>', or a callable "
            "that returns the seconds left, or None (notice_seconds is given by name)"
        )
    if source.startswith(_FILE) and len(source) > len(_FILE):
        path = source[len(_FILE) :]
        return Source(source, look=lambda: _seconds_left(path, notice_seconds or 30.0))
    if source == "sigterm":
        return Source(source, about=_torchrun(os.environ, notice_seconds))
    if source == "slurm":
        return _slurm(os.environ)
    if source == "aws":
        return Source(source, 120.0, look=Aws(), every_seconds=5.0, remote=True)
    if source == "gcp":
        return Source(source, look=Gcp(), remote=True)
    raise ValueError(f"source={source!r}: use 'sigterm', 'slurm', 'aws', 'gcp' or 'file:<path>'")


def _slurm(environment: Mapping[str, str]) -> Source:
    """Returns the source for a job of Slurm. SIGTERM is a preemption, scancel or the end: KillWait
    (30 s) later comes SIGKILL. SIGUSR1 is what `--signal=USR1@120` asks for."""
    about, ends_at = "", None
    signals = (signal.SIGTERM, signal.SIGUSR1)
    try:
        ends_at = float(environment["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        about = (
            "source='slurm': this is no job of Slurm, so only SIGTERM and SIGUSR1 are notices"
            if "SLURM_JOB_ID" not in environment
            else "source='slurm': SLURM_JOB_END_TIME is not set (Slurm before 22.05), so that the "
            "end of the job is not known ahead: submit it with --signal=USR1@120"
        )
    if ends_at is None:
        return Source("slurm", signals=signals, about=about)
    end = ends_at
    return Source(
        "slurm", signals=signals, look=lambda: end - time.time(), planned=True, ends_at=end
    )


def _torchrun(environment: Mapping[str, str], notice_seconds: float | None) -> str:
    """Says that the time given is longer than torchrun gives; "" if it is not, or this is no
    process of torchrun. Its agent passes SIGTERM on, and sends SIGKILL after 30 s; no option of
    torchrun changes that."""
    if "TORCHELASTIC_RUN_ID" not in environment or (notice_seconds or 0.0) <= _TORCHRUN_SECONDS:
        return ""
    return (
        f"notice_seconds={notice_seconds:g}, but torchrun ends its processes "
        f"{_TORCHRUN_SECONDS:g} s after SIGTERM: what is counted on later is lost"
    )


def _seconds_left(path: str, default: float) -> float | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read(64).strip()
    except OSError:
        return None
    try:
        left = float(text) - time.time()
    except ValueError:
        return default
    return left if -math.inf < left < math.inf else default
