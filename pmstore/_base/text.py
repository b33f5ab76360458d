"""Words of messages, and names that are the library's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

OWN_NAMES = (".pmstore", "pmstore.scheduler", "pmstore.course")
"""Groups at a store's top in which the library remembers what it is to do with this store on this
machine, and how its runs went here."""


def counted(count: int, noun: str) -> str:
    """Writes a number of things.

    >>> counted(1, "commit"), counted(20_000, "name")
    ('1 commit', '20,000 names')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def printable(text: str) -> str:
    """Returns a text as it may go to a terminal: what is in a file that somebody else made must not
    steer the terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def is_own_name(path: str) -> bool:
    """Returns whether the path, from the store's top, is the library's own. What a stranger's file
    says under such a name would be obeyed, as by a tier that is flushed to. So such names are
    neither imported nor loaded, and not exported or dumped for others.

    >>> (
    ...     is_own_name(".pmstore/tiers/disk"),
    ...     is_own_name("pmstore.scheduler"),
    ...     is_own_name("run/.pmstore"),
    ... )
    (True, True, False)
    """
    return path.split("/", 1)[0] in OWN_NAMES


def warn_of_own_names(source: str, left_out: Iterable[str], stacklevel: int = 2) -> None:
    """Tells which names of a file were left out, if there are any."""
    names = sorted({path.split("/", 1)[0] for path in left_out})
    if names:
        warnings.warn(
            f"{source}: what it has under {', '.join(map(repr, names))} was left out: there a "
            "store remembers its tiers and its scheduler. Add tiers anew with store.add_tier",
            stacklevel=stacklevel + 1,
        )


def encode_name(name: str) -> str:
    """Returns any name as one component of a store path: the separator "/" and "%" are escaped.

    >>> encode_name("encoder.layers.0.weight"), encode_name("a/b")
    ('encoder.layers.0.weight', 'a%2Fb')
    """
    return name.replace("%", "%25").replace("/", "%2F")


def decode_name(component: str) -> str:
    """Returns the name that `encode_name` was given.

    >>> decode_name("a%2Fb"), decode_name(encode_name("100%2F"))
    ('a/b', '100%2F')
    """
    return component.replace("%2F", "/").replace("%25", "%")
