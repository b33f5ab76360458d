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

_SECRET = re.compile(
    r"passw|pwd|secret|credential|auth(?!ors?(?![a-z]))|bearer|signature|(token|keys?)(?![a-z])",
    re.IGNORECASE,
)
_OPTION = re.compile("--?[A-Za-z][^=:]*")
_VALUE = re.compile(r"[=:].*", re.DOTALL)
_IN_URL = re.compile(r"(?<=://)\S+(?=@)")
_LONG = 10_000
_REVISION = re.compile("[0-9a-f]{40,64}")


@cache
def this_process() -> dict[str, str]:
    """Returns what this process is, in words. What is not known is left out: a training does not
    fail because of it, whatever a launcher has made of `sys`."""
    told = {"python": sys.version.split()[0], "pmstore": VERSION}
    with suppress(Exception):
        told["host"] = os.uname().nodename
    with suppress(Exception):
        told["command"] = command_line([*map(str, getattr(sys, "orig_argv", None) or sys.argv)])
    for of in (_of_program, Path.cwd):
        with suppress(Exception):
            if found := revision(of()):
                return {**told, "revision": found}
    return told


def command_line(words: list[str]) -> str:
    """Returns the words of a command line as one text, as a shell takes them. What stands behind a
    name like that of a secret is masked.

    >>> command_line(["python", "train.py", "--lr", "0.1", "--hf-token", "abc", "api_key=def"])
    "python train.py --lr 0.1 --hf-token '***' 'api_key=***'"
    >>> command_line(["train", "--max-tokens=512", "s3://me:p@ss@host/data"])
    "train --max-tokens=512 's3://***@host/data'"
    """
    import shlex

    told, hidden = [], False
    for word in words[:COMMAND_MAX]:
        word = word[:_LONG]
        found = _SECRET.search(word)
        if hidden and not word.startswith("--"):
            word, found = "***", None
        hidden = found is not None and _OPTION.fullmatch(word) is not None
        if found is not None and not hidden:
            name = found.end()
            word = word[:name] + _VALUE.sub(lambda value: f"{value[0][0]}***", word[name:])
        told.append(_IN_URL.sub("***", word))
    return shlex.join(told)[:COMMAND_MAX]


def _of_program() -> Path:
    """Returns the folder of the program. Raises: KeyError, TypeError: it is no file."""
    return Path(vars(sys.modules["__main__"])["__file__"]).resolve().parent


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
