"""A KeyboardInterrupt at a chosen bytecode, or line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any


def interrupt() -> None:
    raise KeyboardInterrupt


class Interrupter:
    """Raises KeyboardInterrupt, or calls another signal handler, before the n-th bytecode that runs
    under `run`, in any Python frame."""

    def __init__(self, at: int, handler: Callable[[], object] = interrupt) -> None:
        self.at = at
        self.seen = 0
        self.handler = handler

    def trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_name in ("remove", "_remove"):
            # callbacks of weak references: Python can only report an exception there, not raise it
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.seen += 1
            if self.seen == self.at:
                self.handler()
        return self.trace

    def run(self, work: Callable[[], None]) -> bool:
        """Whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return self.seen >= self.at


class LineInterrupter(Interrupter):
    """Raises KeyboardInterrupt before the n-th line that runs of these functions."""

    def __init__(self, at: int, functions: Iterable[Any]) -> None:
        super().__init__(at)
        self._code = {function.__code__ for function in functions}

    def trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code not in self._code:
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.at:
                self.handler()
        return self.trace
