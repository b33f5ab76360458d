"""The tiers of an open store: remembered in it, flushed from it, drained when it closes."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary, ref

from pmstore._base.text import counted
from pmstore._base.weak_registry import alive
from pmstore._base.workers import Worker, time_left
from pmstore._engine.pool import Pool
from pmstore.errors import ClosedStoreError, ForkedStoreError, TierError
from pmstore.objects.containers import Group
from pmstore.tiers import trust
from pmstore.tiers._epochs.kept_epochs import Keeping
from pmstore.tiers._flush.flush import Flush, TierState
from pmstore.tiers._flush.flusher import Flusher, start_thread
from pmstore.tiers.config import TierConfig

GROUP = ".pmstore/tiers"
"""The group in which a store remembers its tiers."""
POLL_SECONDS = 0.02
SIGTERM_SECONDS = 25.0
"""Less than what batch systems commonly leave between SIGTERM and SIGKILL."""

_all: WeakValueDictionary[int, Tiers] = WeakValueDictionary()


class Tiers:
    """The tiers of a store. It makes them when it is first asked for them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._process = os.getpid()
        self._flushers: dict[str, Flusher] = {}
        self._configs: dict[str, TierConfig] = {}
        # those that this file had not added here, and that nobody named since it was opened
        self._strange: set[str] = set()
        self._seen: dict[str, int] = {}  # epoch that was flushed by itself last
        self._lock = threading.RLock()
        self._watcher: Worker | None = None
        self._closed = threading.Event()
        _all[id(self)] = self

    # ---- what there is ----

    def load(self, store: Group) -> None:
        """Reads what the store remembers. Tiers that this file had not added here are known, and
        not flushed to by themselves."""
        for name in _remembered(store):
            try:
                value = store[f"{GROUP}/{name}"]
                config = TierConfig.from_value(value)
                if config.run is not None and value.get("uuid") != self._pool.info.uuid.hex():
                    # a restored store: its epochs are not that run's; it has to be added anew
                    continue
            except (KeyError, ValueError, TypeError) as error:
                raise TierError(
                    f"{self._pool.path}: what the store remembers of tier {name!r} is damaged: "
                    f"{error}. Remove it with del store[{f'{GROUP}/{name}'!r}], open the store "
                    "again, and add the tier anew"
                ) from error
            self._seen[name] = self._pool.epoch()
            self._configs[name] = config
            if not trust.sealed(self._pool.info, name, value):
                self._strange.add(name)
                if config.every is not None and not self._pool.info.read_only:
                    self._warn_of(name, "every", 5)
        if self._configs.keys() - self._strange:
            _install_sigterm()
        self._watch()

    def _warn_of(self, name: str, what: str, stacklevel: int) -> None:
        config, path = self._configs[name], self._pool.path
        told = f"{path}: the store remembers tier {name!r} at {config.url!r}"
        why = (
            "this file did not have it added here (it was copied, moved, restored, or made by "
            "somebody else)"
        )
        remedy = (
            f"To flush to it, store.add_tier({name!r}, ...), or `pmstore trust {path}`; else "
            f"store.remove_tier({name!r})"
        )
        if what == "every":
            told += (
                f", every {counted(config.every or 0, 'commit')}. It is not flushed to: {why}. "
                f"{remedy}"
            )
        else:
            told += (
                f", and {why}. It is flushed to, because the program names it. If this store is a "
                "copy of one that goes on, the two replace each other's epochs there: give this "
                f"one a tier of its own. {remedy}"
            )
        warnings.warn(told, stacklevel=stacklevel)

    def _take_up(self, name: str) -> None:
        """Takes up a tier that the program names: it is flushed to from now on, whoever had it
        added; its URL is told."""
        if name in self._strange:
            self._warn_of(name, "named", 5)  # first: where warnings are errors it is not flushed to
            with self._lock:
                self._strange.discard(name)
                self._seen[name] = self._pool.epoch()
            _install_sigterm()
            self._watch()

    @property
    def strange(self) -> tuple[str, ...]:
        """The names of tiers that this file had not added here, and that nobody named since."""
        return tuple(name for name in self._configs if name in self._strange)

    def trust(self, store: Group, names: Iterable[str]) -> None:
        """Seals tiers as if they were added here. Pending, until the commit that follows."""
        self._require()
        for name in names:
            store[f"{GROUP}/{name}"] = trust.seal(self._pool.info, name, store[f"{GROUP}/{name}"])
            self._strange.discard(name)

    def add(self, store: Group, name: str, tier: TierConfig | str | os.PathLike[str]) -> None:
        places = (str, bytes, os.PathLike, TierConfig)  # bytes: TierConfig says why not
        if not isinstance(name, str) or not isinstance(tier, places):
            raise TypeError(
                "add_tier(name, tier): a str, and a URL, a path or a pmstore.TierConfig, not "
                f"{type(name).__name__} and {type(tier).__name__}"
            )
        config = tier if isinstance(tier, TierConfig) else TierConfig(tier)
        if not name or "/" in name:
            raise ValueError(f"{name!r} is no name of a tier: it is not empty and has no '/'")
        self._require()
        with self._lock:
            flusher = Flusher(name, config, self._pool)
            value = trust.seal(
                self._pool.info, name, {**config.to_value(), "uuid": self._pool.info.uuid.hex()}
            )
            if not self._pool.info.read_only and store.get(f"{GROUP}/{name}") != value:
                store[f"{GROUP}/{name}"] = value  # first: there may be no room
            before = self._flushers.get(name)
            if before is not None:
                before.drain(None)
                before.close()
            self._seen.setdefault(name, self._pool.epoch())
            self._configs[name] = config
            self._strange.discard(name)
            self._flushers[name] = flusher
        if before is not None:
            before.drain_callbacks(None)  # without the lock: they may want it
        _install_sigterm()
        self._watch()

    def remove(self, store: Group, name: str) -> None:
        self._require()
        with self._lock:
            if name not in self._configs:
                raise self._no_tier(name)
            if f"{GROUP}/{name}" in store:
                del store[f"{GROUP}/{name}"]  # first: it may be open for reading
            del self._configs[name]
            self._strange.discard(name)
            flusher = self._flushers.get(name)
            if flusher is not None:
                flusher.drain(None)
                flusher.close()
                del self._flushers[name]
        if flusher is not None:
            flusher.drain_callbacks(None)  # without the lock: they may want it

    @property
    def configs(self) -> Mapping[str, TierConfig]:
        return dict(self._configs)

    def states(self) -> list[TierState]:
        """Says how far flushes are, of tiers that this process has flushed to. Waits for
        nothing."""
        flushers = list(self._flushers.items())
        return [one.state() for name, one in flushers if name in self._configs and one.last]

    def _require(self) -> None:
        """Raises: ForkedStoreError, ClosedStoreError."""
        # where its threads are not there, and its locks may be another thread's for ever
        if os.getpid() != self._process:
            raise ForkedStoreError(
                f"{self._pool.path}: a fork child cannot flush the store: the process that opened "
                "it does"
            )
        if self._pool.handle.closed:
            raise ClosedStoreError(f"{self._pool.path}: the store is closed: open it again")

    # ---- flushing ----

    def flusher(self, name: str) -> Flusher:
        with self._lock:
            if name not in self._configs:
                raise self._no_tier(name)
            if name not in self._flushers:
                self._flushers[name] = Flusher(name, self._configs[name], self._pool)
            return self._flushers[name]

    def _no_tier(self, name: str) -> TierError:
        there = ", ".join(map(repr, self._configs)) or "none"
        return TierError(
            f"{self._pool.path}: there is no tier {name!r} (there are: {there}). store.add_tier "
            "adds one"
        )

    def idle(self, name: str) -> bool:
        """Says whether the last flush is over: while it deletes old epochs another one would only
        hold its commit, and wait."""
        self._require()
        self._take_up(name)
        last = self.flusher(name).last
        return last is None or last.over

    def flush(
        self, name: str, full: bool, progress: Callable[[int, int], object] | None = None
    ) -> Flush:
        self._require()
        self._take_up(name)
        with self._lock:
            return self.flusher(name).flush(full, progress)

    def keeper(self, config: TierConfig) -> Flusher:
        """Returns the flusher of a place that is the library's own: the store does not remember it.
        Its name is its place, which no tier has for a name."""
        self._require()
        with self._lock:
            if config.place not in self._flushers:
                self._flushers[config.place] = Flusher(config.place, config, self._pool)
                _install_sigterm()
            return self._flushers[config.place]

    def _watch(self) -> None:
        """Starts the thread that flushes tiers with `every`: it looks how many commits there have
        been."""
        wanted = any(
            config.every
            for name, config in list(self._configs.items())
            if name not in self._strange
        )
        watched = self._watcher is not None and self._watcher.alive
        if wanted and not watched and not self._pool.info.read_only:
            self._watcher = start_thread("pmstore tiers", _flush_regularly, ref(self), self._closed)

    def keep(self, flusher: Flusher, keeping: Keeping) -> Flush:
        """Flushes the last commit, to stay. Raises: as `flush`."""
        self._require()
        with self._lock:
            return flusher.flush(False, None, keeping)

    def take_up(self, name: str) -> Flusher:
        """Returns the flusher of a tier that the program names."""
        self._require()
        self._take_up(name)
        return self.flusher(name)

    def flush_those_due(self) -> None:
        """Flushes tiers whose `every` is reached, unless they are still busy."""
        seen, epoch = self._seen, self._pool.epoch()
        for name, config in list(self._configs.items()):
            if not config.every or name in self._strange or epoch - seen[name] < config.every:
                continue
            try:
                flusher = self.flusher(name)
                if flusher.last is None or flusher.last.over:
                    # after a failure, too, the next try is `every` commits later
                    seen[name] = epoch
                    flusher.warn_untold()
                    self.flush(name, False)
            except Exception as error:  # a thread has nobody to raise to
                seen[name] = epoch
                if not self._closed.is_set():
                    try:
                        warnings.warn(f"tier {name!r} cannot be flushed: {error}", stacklevel=1)
                    # they are errors here; the next commits are to be flushed all the same
                    except Warning:
                        threading.excepthook(
                            threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                        )

    # ---- ending ----

    def drain(self, timeout: float | None) -> None:
        """Waits for all flushes under way.

        Raises: TimeoutError; what they raised, if nobody has been told.
        """
        if os.getpid() != self._process:
            return
        end = None if timeout is None else time.monotonic() + timeout
        for flusher in list(self._flushers.values()):
            if not flusher.drain(time_left(end)):
                raise TimeoutError(f"a flush to {flusher.name!r} is still under way")
        for flusher in list(self._flushers.values()):
            if not flusher.drain_callbacks(time_left(end)):
                raise TimeoutError(f"a callback of a flush to {flusher.name!r} is still under way")
        for flusher in list(self._flushers.values()):
            if flusher.last is not None:
                flusher.last.raise_once()

    def close(self) -> None:
        """Ends regular flushing, waits for what is under way. In a fork child nothing happens: its
        threads are not there."""
        if os.getpid() != self._process:
            return
        self._closed.set()
        if self._watcher is not None and not self._watcher.current:
            self._watcher.join()
        with self._lock:  # nobody begins another flush
            for flusher in list(self._flushers.values()):
                flusher.drain(None)
            for flusher in list(self._flushers.values()):
                flusher.close()
        for flusher in list(self._flushers.values()):
            flusher.drain_callbacks(None)  # without the lock: they may want it
            flusher.warn_untold()

    def abandon(self) -> None:
        """Cancels what is under way, after a `close` that an interrupt ended: without waiting, so
        that the tiers are free for the next store."""
        if os.getpid() == self._process:
            self._closed.set()
            for flusher in list(self._flushers.values()):
                flusher.abandon()


def _remembered(store: Group) -> list[str]:
    """Names of tiers. Raises: TierError."""
    if GROUP not in store:
        return []
    group = store[GROUP]
    if not isinstance(group, Group):
        raise TierError(
            f"{store._core.path}: {GROUP!r} is no group: what the store remembers of tiers was "
            "overwritten"
        )
    return list(group)


def hand_over(old: Group, new: Group) -> None:
    """Adds the tiers of a store to one that takes its place with all that it holds: those that were
    added there are added here."""
    for name in _remembered(old):
        value = old[f"{GROUP}/{name}"]
        if isinstance(value, dict) and trust.sealed(old._core.pool.info, name, value):
            new[f"{GROUP}/{name}"] = trust.seal(new._core.pool.info, name, value)


def _flush_regularly(tiers: ref[Tiers], closed: threading.Event) -> None:
    """Flushes tiers with `every`. The thread keeps nothing alive while it waits: a store that
    nobody holds any more is closed, and ends it."""
    while not closed.wait(POLL_SECONDS):
        alive = tiers()
        if alive is None:
            return
        alive.flush_those_due()
        del alive


# ---- SIGTERM -------------------------------------------------------------------------------------


def drain_all(timeout: float | None = None) -> None:
    """Waits for the flushes of all stores of this process, at most timeout seconds; errors stay
    with the handles."""
    end = None if timeout is None else time.monotonic() + timeout
    for tiers in alive(_all):
        if tiers._process != os.getpid():  # a fork child has none of the threads
            continue
        for flusher in list(tiers._flushers.values()):
            if flusher.drain(time_left(end)):
                flusher.drain_callbacks(time_left(end))


_drained: Any = None
"""Released when what SIGTERM waits for has ended; None before the signal."""


def _drain_and_tell() -> None:
    try:
        drain_all(SIGTERM_SECONDS)
    finally:
        _drained.release()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """The waiting is done by another thread: this one may hold, wherever the signal found it, a
    lock that it takes."""
    global _drained
    if _drained is not None:
        return  # a second signal: the first one's time goes on
    _drained = _thread.allocate_lock()
    _drained.acquire()
    with suppress(RuntimeError):  # no thread to be had
        _thread.start_new_thread(_drain_and_tell, ())
        _drained.acquire(timeout=SIGTERM_SECONDS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _install_sigterm() -> None:
    """A program that leaves SIGTERM alone would be ended by it at once: flushes under way are
    finished first. One that handles it is left alone; it may call `drain_all`."""
    if threading.current_thread() is not threading.main_thread():
        return
    with suppress(ValueError):  # a subinterpreter
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _on_sigterm)
