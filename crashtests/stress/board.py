"""What a program acknowledges: words in shared memory that outlive its kill. They are beside the
store, not in it."""

from __future__ import annotations

import mmap

HEADER_WORDS = 16
ACTOR_WORDS = 64
ACTORS = 24
TEXT_BYTES = 1 << 15

# Words of the header.
PHASE, FAILED, EPOCH, LOOKED = range(4)
# Phases of a life.
STARTED, OPENED, RUNNING = 1, 2, 3
# Words of an actor; what follows is its own.
STEPS, COMMITS, READS, REFUSED, OWN = range(5)


class Board:
    """Words of 64 bits, each written by one store, and a text: what went wrong.

    Forked children share it. Each word has one thread that writes it.
    """

    def __init__(self) -> None:
        self._words_bytes = 8 * (HEADER_WORDS + ACTOR_WORDS * ACTORS)
        self._memory = mmap.mmap(-1, self._words_bytes + TEXT_BYTES)
        self.words = memoryview(self._memory)[: self._words_bytes].cast("q")

    def actor(self, index: int) -> memoryview:
        """The words of one actor."""
        begin = HEADER_WORDS + ACTOR_WORDS * index
        return self.words[begin : begin + ACTOR_WORDS]

    def total(self, word: int) -> int:
        """Sum over all actors."""
        return sum(self.actor(i)[word] for i in range(ACTORS))

    def fail(self, text: str) -> None:
        """Says what went wrong. The first one counts."""
        if not self.words[FAILED]:
            raw = text.encode(errors="replace")[:TEXT_BYTES]
            self._memory[self._words_bytes : self._words_bytes + len(raw)] = raw
            self.words[FAILED] = max(len(raw), 1)

    @property
    def failure(self) -> str:
        """The text of `fail`, "" if nothing went wrong."""
        length = self.words[FAILED]
        return self._memory[self._words_bytes : self._words_bytes + length].decode(errors="replace")
