"""Offers the shell what an argument or option can be: names and groups of the store that was given,
its tiers, epochs of a tier, words of a closed set.

A stranger chose the names in a stranger's store: see `_offered`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import typer

from pmstore._base.text import is_own_name
from pmstore.opening import open as open_store

if TYPE_CHECKING:
    from pmstore.store import Store

_PLAIN = re.compile(r"[\w./@%+,][\w./@%+,=-]*")
"""Names that mean themselves to every shell."""


def _offered(name: str) -> str | None:
    """Returns the name as the shell that asks may have it on its command line: in a stranger's
    store, a stranger chose the names.

    bash inserts what it gets, so it is quoted here. Other shells quote by themselves, but there
    typer's scripts evaluate what they get: a name is plain, or has blanks, or is not offered. Nor
    is one with control characters, or like an option.
    """
    if _PLAIN.fullmatch(name):
        return name
    if not name.isprintable() or name.startswith("-"):
        return None
    if os.environ.get("_PMSTORE_COMPLETE") != "complete_bash":
        return (
            name if _PLAIN.fullmatch(name.replace(" ", "_")) and not name.startswith(" ") else None
        )
    try:
        shlex.split(os.environ.get("COMP_WORDS", ""))
    except ValueError:  # a quote is open, where a backslash means something else
        return None
    # not within quotes: typer wants it to begin as the word does
    return re.sub(r"([^\w./@%+,=-])", r"\\\1", name)


def _safe(found: Iterable[str], incomplete: str) -> list[str]:
    return [
        told
        for name in found
        if name.startswith(incomplete) and (told := _offered(name)) is not None
    ]


Completer = Callable[[typer.Context, str], list[str]]
"""What typer asks: with what was given before, and the beginning of the word."""


def _quietly(look: Callable[[dict[str, Any], str], Iterable[str]]) -> Completer:
    """Makes a completer that says nothing when it fails: a shell that completes is no place for
    messages."""

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        try:
            return _safe(look(_given(context), incomplete), incomplete)
        except Exception:
            return []

    return complete


def _given(context: typer.Context) -> dict[str, Any]:
    """Returns the arguments and options before the word. While an option waits for its value, typer
    has not given the arguments out yet: they are taken from the words."""
    given = dict(context.params)
    words = list(context.args)
    for one in context.command.params:
        if one.param_type_name == "argument" and given.get(one.name or "") is None and words:
            given[one.name or ""] = words.pop(0)
    return given


def one_of(*words: str) -> Completer:
    """Makes a completer that offers the words of a closed set."""
    return _quietly(lambda given, incomplete: words)


def _entries(store: Store, incomplete: str) -> list[str]:
    """Returns the names that begin so; those of groups end with a slash. What is pmstore's own is
    left out unless it is asked for."""
    folder, slash, _ = incomplete.rpartition("/")
    place = store[folder] if folder else store
    names = [
        folder + slash + entry.name + "/" * (entry.kind == "group") for entry in place.entries()
    ]
    return [
        name
        for name in names
        if name.startswith(incomplete) and (folder or incomplete or not is_own_name(name))
    ]


def _names(given: dict[str, Any], incomplete: str) -> list[str]:
    """Offers what is in a group beside the group that is the only answer: a shell takes an only
    answer for the whole word, and adds a blank."""
    with open_store(given["path"], mode="r") as store:
        found = _entries(store, incomplete)
        only = found[0] if len(found) == 1 and found[0].endswith("/") else None
        return found if only is None else found + _entries(store, only)


def _groups(given: dict[str, Any], incomplete: str) -> list[str]:
    """Offers groups with and without the slash: a group is an answer, and a way to those in it."""
    with open_store(given["path"], mode="r") as store:
        found = [name for name in _entries(store, incomplete) if name.endswith("/")]
    return [told for name in found for told in (name.removesuffix("/"), name)]


def _tiers(given: dict[str, Any], incomplete: str) -> list[str]:
    with open_store(given["path"], mode="r") as store:
        return list(store.tiers)


def _told_epochs(given: dict[str, Any]) -> list[Any]:
    """Returns the epochs of a tier in a directory; of a tier elsewhere, none: to ask a network
    takes longer than a person waits for a completion."""
    from pmstore import tiers

    url = str(given["url"])
    return [] if "://" in url and not url.startswith("file://") else tiers.epochs(url)


names: Completer = _quietly(_names)
groups: Completer = _quietly(_groups)
tiers_of_store: Completer = _quietly(_tiers)
epoch_numbers: Completer = _quietly(
    lambda given, _: [str(one.epoch) for one in _told_epochs(given)]
)
runs: Completer = _quietly(lambda given, _: dict.fromkeys(one.run for one in _told_epochs(given)))
kept: Completer = _quietly(
    lambda given, _: dict.fromkeys(
        told
        for one in _told_epochs(given)
        for reason in one.kept
        for told in (str(reason.step), *[reason.name] * (reason.series == "named"))
    )
)


def answer_the_first_tab() -> None:
    """Makes the script for zsh answer the first completion of a shell. It is loaded by that, and
    as typer has it, says only who answers the others."""
    with suppress(ImportError, AttributeError, KeyError):  # another typer may have it elsewhere
        from typer import _completion_shared

        _completion_shared._completion_scripts["zsh"] += (
            '[[ $zsh_eval_context[-1] == loadautofunc ]] && %(complete_func)s "$@"\n'
        )
