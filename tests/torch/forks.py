"""Training programs in forked children that are killed at each step."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

# which the first optimizer of a process imports: here once, in the parent
import torch._dynamo


class Steps:
    """Counts what a child has done; kills it before the step after the last it may do."""

    def __init__(self, limit: int | None) -> None:
        self._left = limit

    def before_commit(self) -> None:
        if self._left is not None:
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1


def in_child(program: Callable[[Steps], None], limit: int | None) -> bool:
    """Runs the program in a forked child. Returns whether it came to its end; else it was
    killed."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            program(Steps(limit))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), "the child failed: see its stderr"
    return status == 0


def killed_at_each_step(program: Callable[[Steps], None], each: int = 1) -> int:
    """Runs it in as many children as it takes, each of which is killed after so many commits and
    before the next. Returns how many."""
    children = 1
    while not in_child(program, each):
        children += 1
        assert children < 400
    return children


def bits(state: Any) -> Any:
    """A structure of tensors that can be compared."""
    if isinstance(state, torch.Tensor):
        return (tuple(state.shape), state.detach().contiguous().numpy().tobytes())
    if isinstance(state, dict):
        return {key: bits(part) for key, part in state.items()}
    if isinstance(state, (list, tuple)):
        return [bits(part) for part in state]
    return state
