"""scikit-learn estimators that learn by `partial_fit`, kept in a store.

clf = persist(SGDClassifier(random_state=0), store, "clf")
for X, y in islice(batches(), store["clf/batches"], None):
    clf.partial_fit(X, y, classes=classes)
    store.commit()
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any, TypeVar

import numpy as np

from pmstore import Store
from pmstore._engine.failures import damaged
from pmstore.errors import (
    ClosedStoreError,
    FormatVersionError,
    NoSuchNameError,
    PmstoreError,
    ReadOnlyStoreError,
    TransactionError,
)
from pmstore.extras import optional
from pmstore.integrations.array_writes import put, put_history
from pmstore.integrations.state_errors import DifferentError
from pmstore.integrations.unfinished_writes import broken_off, check_store, written_whole
from pmstore.integrations.versions import tested
from pmstore.objects import dtypes
from pmstore.objects.guards import Guard

with optional:
    from sklearn.base import BaseEstimator
    from sklearn.utils.metaestimators import available_if

    from pmstore.integrations.estimator_state import (
        GLOBAL,
        Join,
        Split,
        drawn,
        draws_from_global,
        generator_state,
        set_generator,
        settings_of,
    )

tested("scikit-learn", "1.3", "1.9")

_Estimator = TypeVar("_Estimator", bound=BaseEstimator)
_KEEPER = "_pmstore"
"""The attribute of an estimator that is kept."""
_CHANGING = (
    *("partial_fit", "fit", "fit_transform", "fit_predict"),
    *("set_params", "sparsify", "densify"),
)
"""Methods after which the store gets the estimator's new state."""
_FORMAT = 1
_GLOBAL = "numpy's default generator"
_kept: weakref.WeakValueDictionary[tuple[int, str], _Keeper] = weakref.WeakValueDictionary()


def persist(
    estimator: _Estimator, store: Store, name: str = "estimator", *, accept: Iterable[str] = ()
) -> _Estimator:
    """Keeps the estimator in the store, under the group `name`, or makes it the one that is stored
    there. Returns it.

    Its state is all that `joblib.dump` would write: fitted arrays, counters, moments of Adam,
    generators. `partial_fit`, `fit` and `set_params` copy it into the store before they return:
    what differs, into arrays that stay where they are. So the store always holds the state between
    two batches, and `store.commit()`, or leaving a transaction block, makes that durable. A call
    that raises leaves estimator and store as they were. `store.rollback()`, and an error that
    leaves a transaction block, take the estimator back too.

    `store[f"{name}/batches"]` is the number of calls of `partial_fit` that the state has seen:
    the place in the data, to go on from (`fit` makes it 0). Fitted arrays are in
    `store[f"{name}/arrays"]`, for looking; the estimator's own are ordinary memory.

    With random_state=None an estimator draws from numpy's default generator: that is kept too,
    and set by persist. Copies of the estimator, and pickles of it, are plain ones.

    Args:
        estimator: with `partial_fit`, and attributes that are data. Where the store has one, what
            it has learned already is dropped.
        store: open for writing. With mode "r" the estimator gets the stored state, and learns no
            more.
        accept: names of settings (as in `get_params`) whose given value counts, though another
            is stored.

    Durable on return; what is pending is committed with it.

    Raises: DifferentError: the stored one is of another class, or was made with other settings;
        TypeError: it cannot be kept; ValueError: it is kept already, or the name is in use;
        CorruptStoreError: what is stored is not as an estimator was stored.
    """
    check_store(store, "persist(estimator, store)")
    if isinstance(estimator, type):
        raise TypeError(f"persist keeps an estimator, not a class: write {estimator.__name__}(...)")
    if not isinstance(estimator, BaseEstimator) or not hasattr(estimator, "partial_fit"):
        raise TypeError(
            f"{type(estimator).__qualname__} does not learn by partial_fit, so there is nothing "
            "to go on with: store what it has learned, as arrays and values, once it is fitted"
        )
    if (before := vars(estimator).get(_KEEPER)) is not None:
        if not before.removed:
            raise ValueError(f"this estimator is kept already, as {before.where}")
        estimator.__class__ = estimator.__class__.__base__
        del vars(estimator)[_KEEPER]
    if (other := _kept.get((id(store), name))) is not None and other.alive:
        if not other.removed:
            raise ValueError(f"another estimator of this program is kept as {other.where}")
        del _kept[id(store), name]
    keeper = _Keeper(estimator, store, name)
    keeper.begin(frozenset(accept))
    vars(estimator)[_KEEPER] = keeper
    estimator.__class__ = _kept_class(estimator.__class__)
    _kept[id(store), name] = keeper
    return estimator


class _Keeper(Guard):
    """Stands between one estimator and the store, which tells it of roll backs."""

    def __init__(self, estimator: BaseEstimator, store: Store, name: str) -> None:
        self._estimator = weakref.ref(estimator)  # the estimator holds this keeper
        self._store = store
        self._name = name
        self._class = f"{type(estimator).__module__}.{type(estimator).__qualname__}"
        self._given = frozenset(estimator.get_params(deep=False))
        self._depth = threading.local()
        self._running = 0
        self._back = False  # the store went back while a call was under way
        self._rollbacks = store.rollbacks
        self._generators: list[Any] = []
        self._drawn = b""  # of them, as the store has it, if that is known

    @property
    def where(self) -> str:
        return f"{self._name!r} of {self._store.path}"

    @property
    def alive(self) -> bool:
        return not self._store.closed

    @property
    def removed(self) -> bool:
        """Whether the program has removed it from the store, or another one lies there under its
        name. The name is free for others."""
        if not self.alive:
            return False
        about = self._store.get(f"{self._name}/about")
        known = _kept.get((id(self._store), self._name)) is self
        return not known or not isinstance(about, dict) or about.get("class") != self._class

    # ---- the first and the last of it

    def begin(self, accept: frozenset[str]) -> None:
        estimator, store = self._here(), self._store
        settings = settings_of(estimator)
        if unknown := accept - settings.keys():
            raise ValueError(f"no settings of {self._class}: {', '.join(sorted(unknown))}")
        if f"{self._name}/about" in store:
            given = {key: v for key, v in estimator.get_params().items() if key in accept}
            with self._reading():
                about = dict(store[f"{self._name}/about"])
                self._compare(about, settings, accept)
            self._restore(accept)
            estimator.set_params(**given)
        elif self._name in store:
            raise ValueError(f"{self.where} is something else: use another name, or del it first")
        elif store.mode == "r":
            raise NoSuchNameError(f"there is no estimator {self.where}")
        else:
            about = {}
        if store.mode == "r":
            return
        version = metadata.version("scikit-learn")
        now = {"format": _FORMAT, "class": self._class, "sklearn": version, "settings": settings}
        if now != about:
            with store.transaction():
                store[f"{self._name}/about"] = now
                store.setdefault(f"{self._name}/batches", 0)
                self._write(self._split())
            if about and about["sklearn"] != version:
                warnings.warn(
                    f"{self.where} was written with scikit-learn {about['sklearn']}, this is "
                    f"{version}: what it learns from here on may differ from what the older one "
                    "would have learned",
                    RuntimeWarning,
                    stacklevel=4,
                )
        self._rollbacks = store.rollbacks
        store._guard_commits(self)

    def _compare(
        self, about: dict[str, Any], settings: dict[str, Any], accept: frozenset[str]
    ) -> None:
        if about["format"] != _FORMAT:
            raise FormatVersionError(
                f"{self.where} is of format {about['format']!r}, which this pmstore does not know"
            )
        if about["class"] != self._class:
            raise DifferentError(
                f"{self.where} is another estimator:",
                [f"class: stored {about['class']}, given {self._class}"],
                "Give that one, or another name",
            )
        stored = about["settings"]
        names = [
            name
            for name in sorted(stored.keys() | settings.keys())
            if name not in accept
            and (name not in stored or name not in settings or stored[name] != settings[name])
        ]
        if names:
            raise DifferentError(
                f"{self.where} was made with other settings:",
                [
                    f"{name}: stored {stored.get(name, 'nothing')}, "
                    f"given {settings.get(name, 'nothing')}"
                    for name in names
                ],
                f"Give the stored ones; or, if the new ones are meant: persist(..., "
                f"accept={names})",
            )

    # ---- calls that change the estimator

    @contextmanager
    def call(self, method: str) -> Iterator[None]:
        """Wraps a method that changes the estimator. Afterwards the estimator's state is in the
        store; if the method fails, it is as before."""
        if getattr(self._depth, "inside", False):  # fit calls partial_fit
            yield
            return
        self._ready()
        self._depth.inside = True
        self._running += 1
        before = [(one, generator_state(one)) for one in self._generators]
        try:
            yield
            split = self._split()
            self._refuse_gone_back(method)
            with written_whole(self._store, repr(self._name)):
                if method in ("partial_fit", "fit"):
                    done = self._store[f"{self._name}/batches"] if method == "partial_fit" else -1
                    self._store[f"{self._name}/batches"] = done + 1
                self._write(split)
                self._refuse_gone_back(method)
        except BaseException:
            gone_back = self._back
            self._after_failure()
            if not gone_back:  # others may have drawn since the state was written
                for generator, state in before:
                    set_generator(generator, state)
            raise
        finally:
            self._running -= 1
            self._depth.inside = False

    def _refuse_gone_back(self, method: str) -> None:
        if self._back:
            raise TransactionError(
                f"the store was rolled back while {method} of {self.where} was under way in "
                "another thread: call store.rollback() again"
            )

    def _ready(self) -> None:
        store = self._store
        if store.closed:
            raise ClosedStoreError(
                f"{store.path}: the store that keeps this estimator is closed. To go on without "
                "it: copy.deepcopy(estimator)"
            )
        if store.mode == "r":
            raise ReadOnlyStoreError(
                f"{store.path} was opened with mode 'r': nothing can be learned"
            )
        if why := broken_off(store, repr(self._name)):
            raise TransactionError(why)
        if store.rollbacks != self._rollbacks:
            self.went_back()
        if self.removed:
            raise PmstoreError(f"{self.where} was removed: persist the estimator anew")

    def _after_failure(self) -> None:
        """Makes the estimator what the store holds, unless that is half written."""
        self._back = False
        if self._store.closed or broken_off(self._store, repr(self._name)):
            return
        if not self.removed:
            self._restore(program=False)

    # ---- state

    def _here(self) -> BaseEstimator:
        estimator = self._estimator()
        assert estimator is not None  # the estimator, or its caller, is at work
        return estimator

    def _split(self) -> tuple[dict[str, Any], Split]:
        """Returns the estimator's state, taken apart. Raises: TypeError."""
        estimator = self._here()
        split = Split()
        state = {name: v for name, v in vars(estimator).items() if name != _KEEPER}
        try:
            skeleton: dict[str, Any] = {"attributes": split.attributes(state, self._given)}
        except TypeError as error:
            raise TypeError(
                f"{self._class} cannot be kept in a store: {error}, which is no data"
            ) from None
        if draws_from_global(estimator):
            # under a name that no attribute has
            skeleton |= split.attributes({_GLOBAL: generator_state(GLOBAL)}, frozenset())
            split.generators.append(GLOBAL)
        return skeleton, split

    def _write(self, state: tuple[dict[str, Any], Split]) -> None:
        """Writes what differs from the stored state."""
        skeleton, split = state
        group = self._store.group(f"{self._name}/arrays")
        for path in set(group) - split.arrays.keys():
            del group[path]
        for path, array in split.arrays.items():
            if path in split.histories:
                put_history(group, path, array)
            else:
                put(group, path, array)
        if self._store.get(f"{self._name}/state") != skeleton:
            self._store[f"{self._name}/state"] = skeleton
        self._generators, self._drawn = split.generators, drawn(split.generators)

    def _restore(self, accept: frozenset[str] = frozenset(), program: bool = True) -> None:
        """Gives the estimator the stored state, but for what is accepted. program: also sets
        numpy's default generator, if that is a part of the state."""
        attributes = vars(self._here())
        own = {name: value for name, value in attributes.items() if name not in accept}
        with self._reading():
            group = self._store[f"{self._name}/arrays"]
            arrays = {path: np.array(group[path], order="K") for path in group}
            skeleton = self._store[f"{self._name}/state"]
            state = Join(arrays, own).attributes(skeleton["attributes"])
            if program and _GLOBAL in skeleton:
                made = Join(arrays, {}).attributes({_GLOBAL: skeleton[_GLOBAL]})
                set_generator(GLOBAL, made[_GLOBAL])
        if _KEEPER in attributes:
            state[_KEEPER] = attributes[_KEEPER]
        attributes.clear()
        attributes.update(state)
        self._generators = self._split()[1].generators
        self._drawn = drawn(self._generators) if program and not accept else b""

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except PmstoreError:
            raise
        except dtypes.UNDECODABLE as error:
            raise damaged(
                self._store.path, f"{self._name!r} is not as an estimator was stored: {error!r}"
            ) from error

    # ---- the store tells (see `pmstore.objects.guards.Guard`)

    def capture(self) -> None:
        """Writes generators that the program, or another estimator, has drawn from since."""
        store, name = self._store, self._name
        if self._running or self._estimator() is None or self.removed:
            return
        if not broken_off(store, repr(name)) and drawn(self._generators) != self._drawn:
            with written_whole(store, repr(name)):
                self._write(self._split())

    def leaving(self) -> bool:
        self.capture()
        return False

    def went_back(self) -> None:
        self._rollbacks = self._store.rollbacks
        if self._running:
            self._back = True
        elif self._estimator() is not None and not self.removed:
            self._restore()


# ---- the estimator's class -----------------------------------------------------------------------


def _changing(base: Any, name: str) -> Any:
    original = getattr(base, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **given: Any) -> Any:
        plain = getattr(super(_kept_class(base), self), name)
        keeper = vars(self).get(_KEEPER)
        if keeper is None:  # a clone
            return plain(*args, **given)
        with keeper.call(name):
            return plain(*args, **given)

    return available_if(lambda self: hasattr(super(_kept_class(base), self), name))(method)


@functools.cache
def _kept_class(base: Any) -> Any:
    """Makes the class of a kept estimator: its own, but that the store learns of what changes
    it."""

    def plain(self: Any) -> Any:
        made = base.__new__(base)
        vars(made).update((key, v) for key, v in vars(self).items() if key != _KEEPER)
        return made

    def reduce(self: Any, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(1)  # later ones refuse an object of another class

    def clone(self: Any) -> Any:
        return plain(self).__sklearn_clone__()

    members: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce,
        "__sklearn_clone__": clone,
    }
    members.update((name, _changing(base, name)) for name in _CHANGING if hasattr(base, name))
    return type(base.__name__, (base,), members)
