"""Gives warnings that come once, or from a thread."""

from __future__ import annotations

import sys
import threading
import warnings


class OnceWarner:
    """Warns once about each thing, until it is forgotten."""

    def __init__(self) -> None:
        self._things: set[str] = set()

    def __call__(self, about: str, message: str) -> None:
        if about not in self._things:
            self._things.add(about)
            warnings.warn(f"pmstore scheduler: {message}", RuntimeWarning, stacklevel=4)

    def forget(self, about: str) -> None:
        self._things.discard(about)


def tell(message: str) -> None:
    """Gives a warning. A filter that makes errors of warnings ends no thread of pmstore's: there
    the warning is written to stderr."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        if threading.current_thread() is threading.main_thread():
            raise
        print(f"pmstore: {message}", file=sys.stderr)
