"""The reference has every public name of a store once, in a group of what it is for."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from pmstore import Store

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "store.md"


def groups() -> dict[str, list[tuple[str, str]]]:
    """Returns the groups of the page's section on stores: kind and name of what is in each."""
    section = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    title, *parts = re.split(r"^### ", section, flags=re.MULTILINE)
    assert title.startswith("Store\n")
    return {
        part.partition("\n")[0]: re.findall(r"^\.\. auto(\w+):: Store\.(\w+)$", part, re.MULTILINE)
        for part in parts
    }


def test_every_public_name_of_a_store_is_in_one_group() -> None:
    """A new one goes into the group of docs/reference/store.md where a user looks for it."""
    told = [name for named in groups().values() for _, name in named]
    public = {name for name in dir(Store) if not name.startswith("_")}
    assert public - {*told} == set(), "these are in no group"
    assert {name for name in told if not hasattr(Store, name)} == set()
    assert [name for name, count in Counter(told).items() if count > 1] == []


def test_every_group_says_something_and_every_name_of_it_too() -> None:
    for title, named in groups().items():
        assert named, title
        for kind, name in named:
            thing = getattr(Store, name)
            assert kind == ("property" if isinstance(thing, property) else "method"), name
            assert thing.__doc__, name
