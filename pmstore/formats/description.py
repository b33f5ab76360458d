"""Describes a store's content beside the arrays in a file of others, so that what was exported
comes back as it was: takes a group apart, and checks what a file says of itself."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pmstore._base.text import is_own_name
from pmstore.objects import values
from pmstore.objects.containers import Group
from pmstore.objects.lists import List
from pmstore.objects.names import split_name
from pmstore.objects.slots import Slots

OURS = "pmstore"
"""The metadata key of safetensors, and the member of npz, that hold what the format has no place
for."""

_EMPTY: dict[str, Any] = {
    "groups": [],
    "tensors": [],
    "order": [],
    "values": {},
    "paths": {},
    "lists": {},
}
"""What describes a file that is not ours."""


def is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr")


def _flat(group: Group, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name in group:
        if not group.name and is_own_name(name):
            continue
        item = group[name]
        if isinstance(item, Slots):
            item = item.current  # the version before is nobody's concern
        if isinstance(item, Group):
            yield (*prefix, name), item
            yield from _flat(item, (*prefix, name))
        else:
            yield (*prefix, name), item


class Parts:
    """A group taken apart: arrays by their names in the file, and the description of the rest."""

    def __init__(self, group: Group, separator: str) -> None:
        self.arrays: dict[str, Any] = {}
        self.texts: dict[str, str] = {}
        description: dict[str, Any] = {"version": 1, "separator": separator}
        description.update({key: type(empty)() for key, empty in _EMPTY.items()})
        for path, value in _flat(group):
            key, joined = separator.join(path), "/".join(path)
            description["order"].append(joined)
            if isinstance(value, Group):
                description["groups"].append(joined)
            elif isinstance(value, List):
                description["lists"][joined] = len(value)
                for index, item in enumerate(value):
                    self._add(f"{key}{separator}{index}", f"{joined}/{index}", item, description)
            else:
                self._add(key, joined, value, description)
        self.description = description

    def _add(self, key: str, joined: str, value: Any, description: dict[str, Any]) -> None:
        if is_tensor(value) or isinstance(value, np.ndarray):
            if key in self.arrays or key == OURS:
                raise ValueError(
                    f"two names of the store are {key!r} in the file: choose another --separator"
                )
            self.arrays[key] = value
            self._note_path(key, joined, description)
            if is_tensor(value):
                kinds = (
                    "requires_grad" if value.requires_grad else "",
                    "parameter" if type(value).__name__ == "Parameter" else "",
                )
                description["tensors"].append([key, *filter(None, kinds)])
            return
        description["values"][joined] = base64.b64encode(values.encode(value)).decode()
        if type(value) is str and key != OURS:
            self.texts[key] = value
            self._note_path(key, joined, description)

    def _note_path(self, key: str, joined: str, description: dict[str, Any]) -> None:
        if key.replace(description["separator"], "/") != joined:
            description["paths"][key] = joined


class Items(list[Any]):
    """A list that becomes a persistent list of the store."""


@dataclass(frozen=True)
class Description:
    """The description that a file of ours has of itself, checked. A file of others has none."""

    separator: str
    order: Mapping[str, int]
    groups: Sequence[str]
    lists: Mapping[str, int]
    values: Mapping[str, str]
    paths: Mapping[str, str]
    tensors: Mapping[str, Sequence[str]]
    """The tensors by their names in the file, each with "parameter" and "requires_grad" where it is
    so."""

    @classmethod
    def of(cls, said: Any, separator: str) -> Description:
        """Checks what a file says of itself. Raises: ValueError."""

        def must(right: bool, what: str) -> None:
            if not right:
                raise ValueError(f"the metadata {OURS!r} are damaged: {what}")

        def is_texts(each: Any) -> bool:
            return isinstance(each, list) and all(type(text) is str for text in each)

        must(isinstance(said, dict), "no map")
        said = {**_EMPTY, "separator": separator, **said}
        must(type(said["separator"]) is str and said["separator"] != "", "the separator")
        for key in ("order", "groups"):
            must(is_texts(said[key]), key)
        for key, kind in (("lists", int), ("values", str), ("paths", str)):
            entries = said[key]
            must(
                isinstance(entries, dict)
                and all(type(k) is str and type(v) is kind for k, v in entries.items()),
                key,
            )
        must(all(length >= 0 for length in said["lists"].values()), "the length of a list")
        tensors = said["tensors"]
        must(
            isinstance(tensors, list) and all(is_texts(entry) and entry for entry in tensors),
            "tensors",
        )
        return cls(
            said["separator"],
            {path: at for at, path in enumerate(said["order"])},
            said["groups"],
            said["lists"],
            said["values"],
            said["paths"],
            {entry[0]: entry[1:] for entry in tensors},
        )

    def place(self, key: str) -> str:
        """Returns the path in the store for what has that name in the file."""
        return self.paths.get(key, key.replace(self.separator, "/"))


class Plan:
    """Says what an import puts where: by path in the group, in order. All names are checked before
    anything is put.

    Raises: ValueError.
    """

    def __init__(
        self,
        description: Description,
        texts: Mapping[str, str],
        arrays: Mapping[str, Callable[[], Any]],
    ) -> None:
        """Makes the plan. texts: of other programs. arrays: functions that read them, by their
        names in the file."""
        found: dict[str, Callable[[], Any] | None] = {}

        def add(path: str, read: Callable[[], Any] | None) -> None:
            if path in found:
                raise ValueError(f"the name {path!r} occurs twice")
            found[path] = read

        for key, read in arrays.items():
            add(description.place(key), read)
        for path, encoded in description.values.items():
            add(path, partial(_value, encoded))
        taken = set(found)
        for key, text in texts.items():
            if description.place(key) not in taken:  # else it is ours, there for other programs
                add(description.place(key), partial(str, text))
        for path, length in description.lists.items():
            missing = next((at for at in range(length) if f"{path}/{at}" not in found), None)
            if missing is not None:
                raise ValueError(
                    f"the metadata {OURS!r} are damaged: the list {path!r} lacks item {missing}"
                )
            add(path, partial(_items, [found.pop(f"{path}/{at}") for at in range(length)]))
        for path in description.groups:
            add(path, None)
        for path in found:
            split_name(path)
        self.steps: list[tuple[str, Callable[[], Any] | None]] = sorted(
            found.items(), key=lambda step: description.order.get(step[0], len(description.order))
        )


def _value(encoded: str) -> Any:
    return values.decode(base64.b64decode(encoded))


def _items(reads: list[Any]) -> Items:
    return Items(read() for read in reads)
