"""Names of pieces and tensors, and where they lie under a run's name."""

from __future__ import annotations

from pmstore._base.text import encode_name


def under(path: str, key: str) -> str:
    """Where the piece with that key lies. A lone piece has the key "".

    >>> under("run/model", ""), under("run/model", "g")
    ('run/model', 'run/model/g')
    """
    return f"{path}/{encode_name(key)}" if key else path


def full_name(key: str, name: str) -> str:
    """A tensor's name among several models. Of a lone one, whose key is "", it is the model's own.

    >>> full_name("", "a/b.weight"), full_name("g", "a/b.weight")
    ('a/b.weight', 'g/a%2Fb.weight')
    """
    return f"{encode_name(key)}/{encode_name(name)}" if key else name


def called(what: str, key: str) -> str:
    """A piece in a message.

    >>> called("optimizer", ""), called("optimizer", "g")
    ('the optimizer', "the optimizer 'g'")
    """
    return f"the {what} {key!r}" if key else f"the {what}"
