"""Says what this process is: its command line, machine, versions, and the revision of its program.
It asks files alone, and starts no other process."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from pmstore._base.version import VERSION
from pmstore.course.records import COMMAND_MAX

_SECRET = re.compile(r"passw|secret|credential|(token|key)([^a-z]|$)", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_REVISION = re.compile("[0-9a-f]{40,64}")


@cache
def this_process() -> dict[str, str]:
    """Returns what this process is, in words."""
    return {
        "command": command_line(sys.orig_argv),
        "host": os.uname().nodename,
        "revision": _revision_here(),
        "python": sys.version.split()[0],
        "pmstore": VERSION,
    }


def command_line(words: list[str]) -> str:
    """Returns the words of a command line as one text, as a shell takes them. The values of options
    that are named like a secret are masked.

    >>> command_line(["python", "train.py", "--lr", "0.1", "--hf-token", "abc", "api_key=def"])
    "python train.py --lr 0.1 --hf-token '***' 'api_key=***'"
    >>> command_line(["train", "--max-tokens=512", "s3://me:pass@host/data"])
    "train --max-tokens=512 's3://***@host/data'"
    """
    import shlex

    told, hidden = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = _SECRET.search(name) is not None
        if hidden and not word.startswith("-"):
            word = "***"
        elif secret and equals:
            word = f"{name}=***"
        told.append(_IN_URL.sub("***", word))
        hidden = secret and not equals and word.startswith("-")
    return shlex.join(told)[:COMMAND_MAX]


def _revision_here() -> str:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    with suppress(OSError, ValueError):
        return (revision(Path(main).resolve().parent) if main else "") or revision(Path.cwd())
    return ""


def revision(folder: Path) -> str:
    """Returns the commit that git has checked out where the folder lies; "": none is known.

    Raises: OSError, ValueError: what is there cannot be read.
    """
    for place in (folder, *folder.parents):
        git = place / ".git"
        if git.is_file():  # of a worktree or a submodule
            git = place / git.read_text().removeprefix("gitdir:").strip()
        if not (git / "HEAD").is_file():
            continue
        head = (git / "HEAD").read_text().strip()
        if head.startswith("ref:"):
            name = head.removeprefix("ref:").strip()
            common = git / "commondir"
            shared = git / common.read_text().strip() if common.is_file() else git
            head = _tip(shared, name)
        return head if _REVISION.fullmatch(head) else ""
    return ""


def _tip(git: Path, name: str) -> str:
    """Returns what the ref points to."""
    if (git / name).is_file():
        return (git / name).read_text().strip()
    if (git / "packed-refs").is_file():
        for line in (git / "packed-refs").read_text().splitlines():
            found, _, of = line.partition(" ")
            if of == name:
                return found
    return ""
