"""The process that `test_machine` drives and kills: it holds the store, and does one operation
after another.

What it is told and what it answers is plain data; numpy arrays travel as themselves (pickled, over
a pipe of our own).
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np

import pmstore
from pmstore.testing import kill_at_primitive


def send(pipe: Connection, message: Any) -> None:
    """Not `pipe.send`: in older protocols of pickle an empty array forgets its byte order."""
    pipe.send_bytes(pickle.dumps(message, 5))


def receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


class Raised(Exception):
    """Ends a block that is to be rolled back."""


class Worker:
    def __init__(self, path: str, domain: str) -> None:
        self.path, self.domain = path, domain
        self.store = self.open()
        self.views: dict[str, Any] = {}
        self.dead: list[tuple[np.ndarray[Any, Any], bytes]] = []
        """Arrays that are in the store no more, and what they held when that was committed: nobody
        may change it."""

    def open(self) -> pmstore.Store:
        return pmstore.open(self.path, domain=self.domain, size="1MiB")  # type: ignore[arg-type]

    # ---- operations ----

    def put(self, name: str, value: Any) -> None:
        self.store[name] = value
        if isinstance(value, np.ndarray):
            self.views.setdefault(name, self.store[name])

    def write(self, name: str, start: int, step: int, number: int, declared: bool) -> None:
        array = self.store[name]
        if declared:
            self.store.will_write(array)
        array.reshape(-1)[start::step] = number

    def delete(self, name: str) -> None:
        del self.store[name]

    def list_(self, name: str, how: str, *arguments: Any) -> None:
        items = self.store.list(name)
        if how == "set":
            items[arguments[0]] = arguments[1]
        elif how == "del":
            del items[arguments[0]]
        else:
            getattr(items, how)(*arguments)

    def commit(self) -> None:
        self.store.commit()
        self._bury()

    def rollback(self) -> None:
        self.store.rollback()
        self.views.clear()

    def block(self, operations: list[tuple[Any, ...]], fails: bool) -> None:
        try:
            with self.store.transaction():
                for method, *arguments in operations:
                    getattr(self, method)(*arguments)
                if fails:
                    raise Raised
        except Raised:
            self.views.clear()
        else:
            self._bury()

    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()
        assert self.store.recovery.clean
        self.views.clear()

    def arm(self, primitive: int) -> None:
        kill_at_primitive(primitive)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    # ---- looking ----

    def _bury(self) -> None:
        for name, view in list(self.views.items()):
            if name not in self.store or self.store[name] is not view:
                self.dead.append((view, view.tobytes()))
                del self.views[name]

    def content(self) -> dict[str, Any]:
        """Everything, by path; and that the store is sound, and views of what is gone still are
        what they were."""
        problems = self.store.check().problems
        assert not problems, problems
        for view, held in self.dead:
            assert view.tobytes() == held
        return dict(self._walk(self.store, ""))

    def _walk(self, group: Any, prefix: str) -> Any:
        for name in group:
            item = group[name]
            if isinstance(item, pmstore.Group):
                yield from self._walk(item, f"{prefix}{name}/")
            else:
                yield prefix + name, self._plain(item)

    def _plain(self, item: Any) -> Any:
        if isinstance(item, pmstore.List):
            return ("items", [self._plain(one) for one in item])
        return item.copy() if isinstance(item, np.ndarray) else item


def live(acknowledge: object, address: str, path: str, domain: str) -> None:
    """Runs in a child of a fork server until it is told to stop, or killed."""
    pipe = Client(address)
    worker: Worker | None = None
    while True:
        method, *arguments = receive(pipe)
        if method == "stop":
            assert worker is not None
            worker.store.close()
            return
        try:
            if worker is None:
                worker = Worker(path, domain)
            call: Callable[..., Any] = getattr(worker, method)
            answer: Any = (True, call(*arguments))
        except BaseException as error:
            answer = (False, repr(error))
        send(pipe, answer)
