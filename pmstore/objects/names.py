"""Names of objects: what a path may be, and what is in the way of a new one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pmstore._engine.constants import GROUP, GROUPS_MAX, LIST, ROOT
from pmstore._engine.pool import Pool
from pmstore.errors import NameExistsError

NAME_MAX_BYTES = 4096


def split_name(name: Any) -> list[bytes]:
    """Returns the components of a path, encoded.

    Raises: TypeError, ValueError.
    """
    if type(name) is str and name.isidentifier() and len(name) < 1000:
        return [name.encode()]  # the usual case
    if not isinstance(name, str):
        raise TypeError(f"names of a store are str, not {type(name).__name__}: {name!r}")
    try:
        parts = name.encode().split(b"/")
    except UnicodeEncodeError as error:
        raise ValueError(f"a name must be encodable as UTF-8: {name!r} ({error.reason})") from None
    if len(parts) > GROUPS_MAX + 1:
        raise ValueError(
            f"a name lies in at most {GROUPS_MAX} groups within each other, this path in "
            f"{len(parts) - 1}"
        )
    for part in parts:
        if not part:
            raise ValueError(
                "a name is not empty, and '/' separates groups, so that none may stand first, last "
                f"or twice: {name!r}"
            )
        if len(part) > NAME_MAX_BYTES:
            raise ValueError(
                f"a name has at most {NAME_MAX_BYTES} bytes between slashes, this one has "
                f"{len(part)}: {name[:40]!r}..."
            )
        if b"\0" in part:
            raise ValueError(f"a name has no NUL character: {name!r}")
    return parts


def in_the_way(pool: Pool, parts: Sequence[bytes], error: NameExistsError) -> NameExistsError:
    """Returns an error that says what is in the way, where the engine refused to put something.
    parts: of the path."""
    path = pool.path
    for at in range(1, len(parts)):
        found = pool.find(ROOT, b"\0".join(parts[:at]))
        if found is not None and found.kind != GROUP:
            return NameExistsError(
                f"{path}: {parts[at - 1].decode()!r} is no group, so nothing can be stored "
                "under it: choose another name, or del it first"
            )
        if found is not None and found.meta:
            return NameExistsError(
                f"{path}: {parts[at - 1].decode()!r} is a pair of slots, and names below it "
                "are its own: write .next and flip(), or del the pair first"
            )
    found = pool.find(ROOT, b"\0".join(parts))
    if found is None or found.kind not in (GROUP, LIST):
        return error
    what = "list: assign to its items"
    if found.kind == GROUP:
        what = (
            "pair of slots: write .next and flip()"
            if found.meta
            else "group: assign to names in it"
        )
    return NameExistsError(
        f"{path}: {parts[-1].decode()!r} is a {what}, or del it and all it holds first"
    )
