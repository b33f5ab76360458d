"""Answers the plain forms of what is asked most, without typer: to import typer takes as long as
the answer.

Words that are not plain (an option that is not known here, a missing store, `--help`) are left to
the application, which knows all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_JSON = {"--json": "as_json"}
FORMS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "info": ("answers", ("path",), _JSON),
    "ls": ("answers", ("path", "group"), {**_JSON, "-r": "recursive", "--recursive": "recursive"}),
    "check": ("answers", ("path",), _JSON),
    "show": ("showing", ("path", "name"), _JSON),
}
"""For each command: the module whose function of the command's name answers, the arguments by
position (the first is a path, and needed), and the flags."""
_NEEDED = {"show": 2}
"""How many arguments a command needs, where it is not one. With fewer, typer says what is
missing."""


def understood(words: Sequence[str]) -> Callable[[], None] | None:
    """Returns the function that answers the words; None if they are left to typer."""
    if not words or words[0] not in FORMS:
        return None
    name = words[0]
    module, all_places, flags = FORMS[name]
    given: dict[str, Any] = {}
    places = []
    for word in words[1:]:
        if word in flags:
            given[flags[word]] = True
        elif word.startswith("-"):
            return None
        else:
            places.append(word)
    if not _NEEDED.get(name, 1) <= len(places) <= len(all_places):
        return None
    given |= dict(zip(all_places, places, strict=False))
    given["path"] = Path(given["path"])

    def answer() -> None:
        from pmstore.commands.common import ending, utf8

        with ending():
            for place in all_places[1:]:
                if place in given:
                    given[place] = utf8(given[place])
        getattr(importlib.import_module(f"pmstore.commands.{module}"), name)(**given)

    return answer
