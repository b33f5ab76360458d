"""Writes rules in words: ranks of a job compare these, and are shown them where they differ."""

from __future__ import annotations

import enum
import hashlib
import numbers
import types
from typing import Any

from pmstore.scheduler._rules.outlook import CommitPolicy


def policy_words(policy: CommitPolicy | None) -> str:
    """Writes the kind and the parameters of a rule: its public attributes that are numbers,
    strings, members of an Enum, None, or lists, tuples and dicts of these. The words are the same
    in all processes and versions of Python.

    >>> from pmstore.scheduler import EveryN
    >>> policy_words(EveryN(10))
    'EveryN(interval=10)'
    """
    if policy is None:
        return "every step"
    kind = type(policy)
    name = kind.__qualname__
    if not kind.__module__.startswith("pmstore.scheduler."):
        # a process that multiprocessing made calls the program's own module so
        name = f"{kind.__module__.replace('__mp_main__', '__main__')}.{name}"
    given = [
        f"{key}={word}"
        for key, value in sorted(attributes(policy).items())
        if not key.startswith("_") and (word := _word(value)) is not None
    ]
    return f"{name}({', '.join(given)})"


def policy_digest(policy: CommitPolicy | None) -> str:
    """Returns a digest of `policy_words`: 16 hexadecimal digits."""
    return hashlib.sha256(policy_words(policy).encode()).hexdigest()[:16]


def attributes(policy: CommitPolicy) -> dict[str, Any]:
    """Returns the rule's own attributes, but for the reason of its last commit."""
    slots = [
        name
        for kind in type(policy).__mro__
        for name, slot in vars(kind).items()
        if isinstance(slot, types.MemberDescriptorType) and hasattr(policy, name)
    ]
    found = {name: getattr(policy, name) for name in slots} | getattr(policy, "__dict__", {})
    found.pop("reason", None)
    return found


def changeless(value: Any) -> bool:
    """Returns whether it is what nobody can change: a number, a string, a function without state,
    ..."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(changeless, value))
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None
    given = (str, bytes, numbers.Number, enum.Enum, type, types.BuiltinFunctionType)
    return value is None or isinstance(value, given)


def _word(value: Any) -> str | None:
    """Writes a value in words; None if it is none of those that mean the same everywhere."""
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):  # 10.0 is the setting that 10 is
        number = float(value)
        return str(int(number)) if number.is_integer() else repr(number)
    if isinstance(value, dict):
        pairs = [(_word(key), _word(one)) for key, one in value.items()]
        told = sorted(f"{key}: {one}" for key, one in pairs if key is not None and one is not None)
        return f"{{{', '.join(told)}}}" if len(told) == len(value) else None
    if isinstance(value, (list, tuple)):
        words = [_word(one) for one in value]
        return f"[{', '.join(map(str, words))}]" if None not in words else None
    return None
