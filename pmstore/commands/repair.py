"""The command repair: what can be mended of a store, said first, and done only when it is
wanted."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import pmstore
from pmstore._base.text import counted
from pmstore._engine import inspection
from pmstore._engine.store_info import CheckReport
from pmstore.commands.app import Json, StorePath, app
from pmstore.commands.common import confirmed, ending, fail, opened, progress, say, say_json, size
from pmstore.errors import UncleanMachineCrashError

_BOTH = 0b11


@dataclass(frozen=True)
class _Plan:
    """Says what is wrong with a store that can be mended."""

    unclean: bool
    report: CheckReport

    def steps(self) -> list[str]:
        report = self.report
        found = []
        if self.unclean:
            found.append(
                "accept the content as it is: the machine went down while the store was open, so "
                "that it may hold a mixture of old and new bytes; its structure is sound, of its "
                "data nobody can know"
            )
        if report.leaks:
            found.append(
                f"free {counted(report.leaks, 'block')} ({size(report.leaked_bytes)}), owned by "
                "nobody"
            )
        if report.sound_copies != _BOTH:
            found.append(
                f"restore copy {0 if report.sound_copies == 0b10 else 1} of the superblock from "
                "the other one"
            )
        return found

    def sound(self) -> bool:
        """Returns whether the store is sound but for what can be mended."""
        return len(self.report.problems) == 0 or self.report.leaks > 0


@app.command()
def repair(
    path: StorePath,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only say what would be done.")
    ] = False,
    backup: Annotated[bool, typer.Option(help="Copy the file beside it first.")] = True,
    as_json: Json = False,
) -> None:
    """Says what can be mended of a store, and mends it. Keeps a copy of the file unless told
    otherwise.

    It can accept a store that was open when the machine went down, free blocks that belong to
    nobody, and restore a damaged copy of the superblock from its twin. It invents nothing: a store
    that is damaged otherwise is to be restored from a tier, a dump or a copy. Exit code 1 if the
    store is not sound afterwards, or the repair was declined.

    Example: pmstore repair run.pm --dry-run

    Example: pmstore repair run.pm --yes --no-backup
    """
    with ending():
        plan = _examine(path)
        steps = plan.steps()
        if not plan.sound():
            _tell(as_json, path, steps, "damaged", plan.report.problems)
            raise fail(
                f"{path}: damaged beyond repair ({plan.report.problems[0]}): restore it from a "
                "tier, a dump or a copy",
                1,
            )
        if not steps:
            _tell(as_json, path, steps, "sound", ())
            return
        if not as_json:
            say(
                f"{path}: to be repaired, "
                f"{'a copy of the file kept' if backup else 'no copy kept'}:"
            )
            for step in steps:
                say(f"  - {step}")
        if dry_run:
            _tell(as_json, path, steps, "to be repaired", ())
            return
        if not yes and (as_json or not confirmed("Do it?")):
            raise fail("nothing was done: --yes does it without asking", 1)
        kept = _copy(path) if backup else None
        report = _mend(path, plan)
        done = "repaired" if not report.problems else "damaged"
        _tell(as_json, path, steps, done, report.problems, kept)
    if report.problems:
        raise SystemExit(1)


def _examine(path: Path) -> _Plan:
    unclean = False
    try:
        store = opened(path, "r", lock=True)
    except UncleanMachineCrashError:
        unclean = True
        store = pmstore.open(path, "r", force=True, lock=True)
    with store:
        return _Plan(unclean, store.check())


def _copy(path: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    kept = path.with_name(f"{path.name}.{stamp}.backup")
    # Opened, so that nobody writes meanwhile.
    with (
        pmstore.open(path, "r", force=True, lock=True),
        open(path, "rb") as source,
        open(kept, "xb") as copy,
    ):
        length = os.fstat(source.fileno()).st_size
        shutil.copystat(path, kept)
        with progress("copying", length) as advance:
            while piece := source.read(1 << 22):
                copy.write(piece)
                advance(len(piece))
        copy.flush()
        os.fsync(copy.fileno())
    return kept


def _mend(path: Path, plan: _Plan) -> CheckReport:
    with pmstore.open(path, "r+", force=plan.unclean) as store:
        pool = store._core.pool
        if plan.report.leaks:
            with store.transaction():
                inspection.free_leaks(pool)
        if plan.report.sound_copies != _BOTH:
            inspection.mend_superblock(pool)
    with pmstore.open(path, "r") as store:
        return store.check()


def _tell(
    as_json: bool,
    path: Path,
    steps: list[str],
    state: str,
    problems: tuple[str, ...],
    kept: Path | None = None,
) -> None:
    if as_json:
        told = {
            "path": str(path),
            "state": state,
            "steps": steps,
            "problems": list(problems),
            "backup": kept and str(kept),
        }
        say_json(told)
    elif state in ("sound", "repaired"):
        say(
            f"{path}: "
            + ("sound, nothing to repair" if state == "sound" else "repaired, and sound")
        )
        if kept:
            say(f"the file as it was: {kept}")
    else:
        for problem in problems:
            say(problem)
