"""Says of a row of figures whether what it is about has changed since it was measured. A row is a
section of benchmarks/RESULTS.md, crashtests/RUNS.md or docs/gallery/index.md, whose first line is

    Measured at 7b86d6f: `native` `crashtests`.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent.parent
ROW = re.compile(r"^Measured at ([0-9a-f]{7,40}): (`.*`)\.$", re.MULTILINE)


def git(*words: str) -> str:
    """Empty where there is no history: in a source package, for example."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def whole_history() -> bool:
    return git("rev-parse", "--is-shallow-repository", "--show-prefix") == "false\n\n"


def stale(row: re.Match[str]) -> bool:
    files = re.findall(r"`(.*?)`", row[2])
    return bool(git("log", "-1", "--format=%h", f"{row[1]}..HEAD", "--", *files))


def add(app: Sphinx | None, docname: str, content: list[str]) -> None:
    """To the page of the site: the documents themselves stay as they are."""

    def said(row: re.Match[str]) -> str:
        return f"{row[0]} **Stale**: they have changed since." if stale(row) else row[0]

    content[0] = ROW.sub(said, content[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", add)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
