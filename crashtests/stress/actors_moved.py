"""What programs do to tensors that takes them out of the heap: an error, or what is written to them
is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pmstore
from crashtests.stress import board as b
from crashtests.stress.actors import FIRST, Actor
from crashtests.stress.content import WrongError
from crashtests.stress.life import PATIENCE_SECONDS, Session
from crashtests.stress.unit import TORCH, WORDS, Tensor, Unit

if TORCH:
    import torch.multiprocessing

if TYPE_CHECKING:
    from crashtests.stress.life import Life


class Mover(Actor):
    """Moves its tensor to shared or private memory, sends it through a queue, and then writes it by
    its name."""

    HOW = ("share", "queue", "module", "data", "data", "resize", "")

    def __init__(self, life: Life, index: int) -> None:
        super().__init__(life, index)
        self.unit = Unit(
            f"moved{index}", index, self.words[FIRST : FIRST + WORDS], (Tensor,), stays=False
        )
        self.units = (self.unit,)
        self.tensor = self.unit.parts[0]
        self.others: list[Any] = []

    def start(self, store: Any) -> None:
        self.queue = torch.multiprocessing.get_context("fork").SimpleQueue()

    def step(self, session: Session) -> None:
        store = session.store
        how = self.random.choice(self.HOW)
        try:
            self._move(store, how)
        except (pmstore.PmstoreError, RuntimeError, TypeError):
            self.words[b.REFUSED] += 1
        generation = self.unit.begin()
        try:
            with store.transaction(timeout=PATIENCE_SECONDS):
                self.unit.write(store, generation)
        except (pmstore.CorruptStoreError, pmstore.ClosedStoreError):
            raise
        except (pmstore.PmstoreError, RuntimeError) as error:
            self.words[b.REFUSED] += 1
            self._replace(session, how, error)
        else:
            self.unit.done(generation)
            self.words[b.COMMITS] += 1
            self.life.note_commit(store)
        found = self.unit.read(store)
        if found != self.unit.acknowledged:
            raise WrongError(
                f"{self.unit.path}, after {how}: expected {self.unit.acknowledged} (acknowledged), "
                f"found {found}"
            )
        self.has_read()

    def _move(self, store: Any, how: str) -> None:
        tensor = store[self.tensor.path]
        self.others = [*self.others[-3:], tensor]
        if how == "share":
            tensor.share_memory_()
        elif how == "queue":
            self.queue.put(tensor)
            self.queue.get()
        elif how == "module":
            module = torch.nn.Linear(1, 1)
            module.weight = torch.nn.Parameter(tensor, requires_grad=False)
            module.share_memory()
        elif how == "data":
            tensor.data = tensor.data.clone()
        elif how == "resize":
            tensor.resize_(5000)

    def _replace(self, session: Session, how: str, error: BaseException) -> None:
        """The way out of an error: the name is given another tensor. The one that was moved is let
        go."""
        del self.others[:]
        session.kept.clear()
        session.store[self.tensor.path] = self.tensor.fresh(self.unit.acknowledged)  # type: ignore[attr-defined]
        try:
            session.store.commit()
        except pmstore.TransactionError:
            raise
        except pmstore.PmstoreError as again:
            raise WrongError(
                f"{self.unit.path}: after {how} and {error}: no way out: {again}"
            ) from again
        found = self.unit.settle(session.store)
        assert found == self.unit.acknowledged
