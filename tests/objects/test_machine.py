"""A store against a dict: random operations, commits, roll backs, blocks, SIGKILLs at any
primitive, and reopens.

The store lives in a child process, which dies; the model lives here. After each death the store has
to show the last commit, or, if the child died in a commit, that one or the one before: whole.
PMSTORE_EXAMPLES=1000 runs that many examples.
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import machine_worker
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_values import same, trees

from pmstore.testing import ForkServer

EXAMPLES = int(os.environ.get("PMSTORE_EXAMPLES", "80"))

names = st.sampled_from(["a", "b", "ö", "g/a", "g/b", "g/h/a"])
lists = st.sampled_from(["l", "g/l"])
arrays = st.builds(
    lambda length, dtype, start: (np.arange(length) + start).astype(dtype),
    st.sampled_from([0, 1, 7, 60, 500, 3000, 20000]),
    st.sampled_from(["i4", ">f8", "u1"]),
    st.integers(0, 100),
)
values = trees | arrays
indices = st.integers(-30, 30)
slices = st.builds(slice, indices, indices)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return (
            type(a) is type(b)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    if (
        isinstance(a, tuple)
        and isinstance(b, tuple)
        and a[:1] == b[:1] == ("items",)
        and len(a) == len(b) == 2
    ):
        return len(a[1]) == len(b[1]) and all(map(equal, a[1], b[1]))
    return same(a, b)


@st.composite
def operation(draw: st.DrawFn) -> tuple[Any, ...]:
    """One change, as the worker takes it."""
    how = draw(st.sampled_from(["put", "put", "write", "delete", "list_", "list_"]))
    if how == "put":
        return ("put", draw(names), draw(values))
    if how == "write":
        return ("write", draw(names), draw(st.integers(0, 600)), draw(st.sampled_from([1, 3, 977])),
                draw(st.integers(0, 99)), draw(st.booleans()))  # fmt: skip
    if how == "delete":
        return ("delete", draw(names | lists | st.sampled_from(["g", "g/h"])))
    change = draw(
        st.sampled_from(["append", "insert", "extend", "set", "del", "set slice", "del slice"])
    )
    name = draw(lists)
    if change == "append":
        return ("list_", name, "append", draw(values))
    if change == "insert":
        return ("list_", name, "insert", draw(indices), draw(values))
    if change == "extend":
        return ("list_", name, "extend", [draw(values)] * draw(st.sampled_from([0, 3, 100])))
    if change == "set":
        return ("list_", name, "set", draw(indices), draw(values))
    if change == "del":
        return ("list_", name, "del", draw(indices))
    if change == "set slice":
        return ("list_", name, "set", draw(slices), draw(st.lists(values, max_size=3)))
    return ("list_", name, "del", draw(slices))


def apply(model: dict[str, Any], change: tuple[Any, ...]) -> bool:
    """The change on the model. False: it cannot be done there, so it is not asked of the store
    either."""
    how, name, *arguments = change
    if how == "put":
        model[name] = copy.deepcopy(arguments[0])
    elif how == "write":
        array = model.get(name)
        if not isinstance(array, np.ndarray):
            return False
        start, step, number, _ = arguments
        array.reshape(-1)[start::step] = number
    elif how == "delete":
        gone = [key for key in model if key == name or key.startswith(name + "/")]
        if not gone:
            return False
        for key in gone:
            del model[key]
    else:
        verb, *rest = arguments
        if verb in ("set", "del") and type(rest[0]) is int:
            length = len(model[name][1]) if name in model else 0
            if not -length <= rest[0] < length:
                return False
        items = model.setdefault(name, ("items", []))[1]
        if verb == "set":
            items[rest[0]] = copy.deepcopy(rest[1])
        elif verb == "del":
            del items[rest[0]]
        else:
            getattr(items, verb)(*copy.deepcopy(rest))
    return True


class Machine(RuleBasedStateMachine):
    forks: ForkServer
    """A small process, which forks at once."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix=f"pmstore-test-{os.getpid()}-", dir="/dev/shm")
        self.model: dict[str, Any] = {}
        self.committed: dict[str, Any] = {}
        self.child = 0

    @initialize(domain=st.sampled_from(["process", "emulated", "file"]))
    def begin(self, domain: str) -> None:
        self.domain = domain
        self.start()
        assert self.ask("content") == {}

    # ---- the child ----

    def start(self) -> None:
        address = f"{self.folder}/pipe"
        with Listener(address) as listener:
            told = [address, f"{self.folder}/store.pm", self.domain]
            self.child = self.forks.start("machine_worker:live", told)
            self.pipe = listener.accept()

    def end(self) -> int:
        """Of the child: its status."""
        self.pipe.close()
        while not (ended := self.forks.ended([self.child])):
            time.sleep(0.0002)
        self.child = 0
        (status,) = ended.values()
        return status

    def ask(self, *request: Any) -> Any:
        """Raises EOFError if the child dies of it."""
        try:
            machine_worker.send(self.pipe, request)
            done, answer = machine_worker.receive(self.pipe)
        except (ConnectionResetError, BrokenPipeError):
            raise EOFError from None
        assert done, f"{request} raised {answer}"
        return answer

    def do(self, *request: Any, commits: Sequence[dict[str, Any]] = ()) -> bool:
        """Whether the child survived it. If not, a new one shows what there is: the last commit, or
        one of `commits`."""
        try:
            self.ask(*request)
        except EOFError:
            self.recover([self.committed, *commits])
            return False
        return True

    def recover(self, states: list[dict[str, Any]]) -> None:
        assert self.end() == -signal.SIGKILL, "the child died of something else"
        self.start()
        found = self.ask("content")
        state = next((one for one in states if self.shows(found, one)), None)
        assert state is not None, (found, states)
        self.model, self.committed = copy.deepcopy(state), copy.deepcopy(state)

    @staticmethod
    def shows(found: dict[str, Any], model: dict[str, Any]) -> bool:
        return found.keys() == model.keys() and all(
            equal(found[name], model[name]) for name in model
        )

    # ---- rules ----

    @rule(change=operation())
    def change(self, change: tuple[Any, ...]) -> None:
        model = copy.deepcopy(self.model)
        if apply(model, change) and self.do(*change):
            self.model = model

    @rule()
    def commit(self) -> None:
        if self.do("commit", commits=[self.model]):
            self.committed = copy.deepcopy(self.model)

    @rule()
    def rollback(self) -> None:
        if self.do("rollback"):
            self.model = copy.deepcopy(self.committed)

    @rule(changes=st.lists(operation(), max_size=5), fails=st.booleans())
    def block(self, changes: list[tuple[Any, ...]], fails: bool) -> None:
        """Commits what is pending, then all of the block or nothing of it."""
        before, model = copy.deepcopy(self.model), copy.deepcopy(self.model)
        asked = [change for change in changes if apply(model, change)]
        if self.do("block", asked, fails, commits=[before] if fails else [before, model]):
            self.model = before if fails else model
            self.committed = copy.deepcopy(self.model)

    @rule()
    def reopen(self) -> None:
        if self.do("reopen"):
            self.model = copy.deepcopy(self.committed)

    @rule()
    def kill(self) -> None:
        assert not self.do("die")

    @rule(primitive=st.integers(1, 60))
    def arm(self, primitive: int) -> None:
        """The child will die at that primitive of what comes next."""
        self.do("arm", primitive)

    @precondition(lambda self: self.child)
    @invariant()
    def is_the_model(self) -> None:
        try:
            found = self.ask("content")
        except EOFError:  # armed
            self.recover([self.committed])
            return
        assert self.shows(found, self.model), (found, self.model)

    def teardown(self) -> None:
        if self.child:
            self.end()
        shutil.rmtree(self.folder)


class TestMachine(Machine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(
        max_examples=EXAMPLES,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )

    @classmethod
    def setUpClass(cls) -> None:
        Machine.forks = ForkServer([str(Path(__file__).parents[1])], preload=["machine_worker"])

    @classmethod
    def tearDownClass(cls) -> None:
        Machine.forks.close()
