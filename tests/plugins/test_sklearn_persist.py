"""Estimators of scikit-learn that a store keeps: what is the same, what goes back, what is
refused."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

from estimators import MADE, digest, feed, never_stopped
from sklearn.base import BaseEstimator, clone
from sklearn.cluster import Birch, MiniBatchKMeans
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import SGDClassifier, SGDRegressor
from sklearn.neural_network import MLPClassifier
from sklearn.utils import all_estimators

import pmstore
from pmstore.errors import (
    ClosedStoreError,
    CorruptStoreError,
    PmstoreError,
    ReadOnlyStoreError,
    TransactionError,
)
from pmstore.integrations import versions
from pmstore.integrations.sklearn import persist
from pmstore.integrations.state_errors import DifferentError

X = np.random.default_rng(0).normal(size=(40, 6))
Y = np.arange(40) % 3


def learning() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [one for _, one in all_estimators() if hasattr(one, "partial_fit")]


@pytest.mark.parametrize("kind", learning(), ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore")
def test_all_that_learn_by_batches_go_on_or_are_refused(shm: Path, kind: Any) -> None:
    """Also with pickle between the same batches."""

    def make() -> Any:
        if "estimator" not in inspect.signature(kind).parameters:
            return kind()
        inner = SGDRegressor if kind.__name__ == "MultiOutputRegressor" else SGDClassifier
        return kind(inner(random_state=1))

    def learn(estimator: Any, batch: int) -> None:
        rows = np.random.default_rng(batch)
        many = kind.__name__.startswith("MultiOutput")
        x, y = abs(rows.normal(size=(60, 5))), rows.integers(3, size=(60, 2) if many else 60)
        y[:3] = [[0, 0], [1, 1], [2, 2]] if many else [0, 1, 2]
        classes: Any = [[0, 1, 2]] * 2 if many else [0, 1, 2]
        takes = inspect.signature(estimator.partial_fit).parameters
        named = "classes" in takes or kind.__name__ == "SelectFromModel"
        x = x.astype(int) if kind.__name__ == "CategoricalNB" else x
        estimator.partial_fit(x, y, **({"classes": classes} if named else {}))

    np.random.seed(1)
    plain = make()
    for batch in range(4):
        learn(plain, batch)
    np.random.seed(1)
    for _ in range(2):
        with pmstore.open(shm / "store.pm") as store:
            kept = persist(make(), store)
            done = store["estimator/batches"]
            if kind is Birch:
                with pytest.raises(TypeError, match=r"Birch cannot be kept.*_CFNode.*no data"):
                    learn(kept, 0)
                assert not hasattr(kept, "root_")
                return
            for batch in range(done, done + 2):
                learn(kept, batch)
                store.commit()
        np.random.seed(2)
    with pmstore.open(shm / "store.pm", "r") as store:
        read = persist(make(), store)
    assert digest(kept) == digest(plain) == digest(read)
    asked = np.random.default_rng(9).integers(0, 3, size=(40, 5))
    for method in ("predict", "transform", "decision_function", "predict_proba"):
        if hasattr(plain, method) and kind.__name__ != "HashingVectorizer":
            told = np.asarray(getattr(plain, method)(asked)).tobytes()
            for one in (kept, read):  # sums depend on how arrays lie in memory
                assert np.asarray(getattr(one, method)(asked)).tobytes() == told
    assert digest(pickle.loads(pickle.dumps(kept))) == digest(plain)


@pytest.mark.parametrize("kind", MADE)
def test_an_error_in_a_batch_changes_nothing(store: pmstore.Store, kind: str) -> None:
    kept = persist(MADE[kind](), store)
    feed(kept, kind, 0)
    before = digest(kept)
    with pytest.raises(ValueError, match=r"NaN|features"):
        kept.partial_fit(np.full((40, 6), np.nan), Y)
    with pytest.raises(ValueError, match=r"NaN|features"):
        kept.partial_fit(X[:, :3], Y)
    assert digest(kept) == before
    assert store["estimator/batches"] == 1


def test_interrupted_in_a_batch(store: pmstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the update of one class and the next."""
    np.random.seed(7)
    kept = persist(MADE["sgd"](), store)
    feed(kept, "sgd", 0)
    calls = []
    module = sys.modules[SGDClassifier.__module__]
    original = module.fit_binary

    def interrupted(*args: Any, **given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **given)

    monkeypatch.setattr(module, "fit_binary", interrupted)
    with pytest.raises(KeyboardInterrupt):
        feed(kept, "sgd", 1)
    store.commit()
    for batch in (1, 2):
        feed(kept, "sgd", batch)
    assert digest(kept) == digest(never_stopped("sgd", 3))


@pytest.mark.parametrize("kind", MADE)
def test_roll_backs_take_it_back(store: pmstore.Store, kind: str) -> None:
    np.random.seed(7)
    kept = persist(MADE[kind](), store)
    feed(kept, kind, 0)
    store.commit()
    feed(kept, kind, 1)
    store.rollback()
    assert digest(kept) == digest(never_stopped(kind, 1))
    with pytest.raises(RuntimeError, match="mine"), store.transaction():
        feed(kept, kind, 1)
        raise RuntimeError("mine")
    np.random.seed(0)
    store.rollback()
    with store.transaction():
        feed(kept, kind, 1)
    assert digest(kept) == digest(never_stopped(kind, 2))
    with store.transaction(), pytest.raises(RuntimeError), store.transaction():
        raise RuntimeError  # an inner one undoes nothing
    assert digest(kept) == digest(never_stopped(kind, 2))


def test_back_to_before_the_first_batch(store: pmstore.Store) -> None:
    kept = persist(MADE["mlp"](), store)
    feed(kept, "mlp", 0)
    store.rollback()
    assert not hasattr(kept, "coefs_")
    feed(kept, "mlp", 0)
    assert digest(kept) == digest(never_stopped("mlp", 1))


def test_whatever_partial_fit_is_called_from(store: pmstore.Store) -> None:
    kept = persist(MADE["pca"](), store)
    kept.fit(X)  # calls partial_fit
    assert store["estimator/batches"] == 0
    kept.fit_transform(X)
    kept.set_params(whiten=True)
    store.commit()
    other = pmstore.open(store.path, "r")
    with other:
        assert digest(persist(MADE["pca"](), other)) == digest(kept)
        assert kept.whiten


def test_names_of_columns_and_classes(store: pmstore.Store) -> None:
    frame = pytest.importorskip("pandas").DataFrame(X, columns=[f"column {i}" for i in range(6)])
    kept = persist(SGDClassifier(random_state=0), store)
    kept.partial_fit(frame, np.array(["a", "bb", "c"], object)[Y], classes=["a", "bb", "c"])
    before = digest(kept)
    store.rollback()
    kept.partial_fit(frame, np.array(["a", "bb", "c"], object)[Y], classes=["a", "bb", "c"])
    assert digest(kept) == before
    store.commit()
    with pmstore.open(store.path, "r") as other:
        assert digest(persist(SGDClassifier(random_state=0), other)) == before


def test_copies_are_plain(store: pmstore.Store) -> None:
    kept = persist(MADE["sgd"](), store)
    feed(kept, "sgd", 0)
    assert isinstance(kept, SGDClassifier)
    assert repr(kept).partition(" at ")[0] == repr(MADE["sgd"]()).partition(" at ")[0]
    before = digest(kept)
    for made in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept)), clone(kept)):
        assert type(made) is SGDClassifier
        feed(made, "sgd", 1)
    assert (digest(kept), store["estimator/batches"]) == (before, 1)
    assert not hasattr(persist(MLPClassifier(solver="sgd"), store, "b"), "no")
    assert not hasattr(MLPClassifier(solver="lbfgs"), "partial_fit")


def test_a_long_history_grows_by_what_is_new(store: pmstore.Store) -> None:
    kept = persist(MLPClassifier((2,), random_state=0), store)
    for _ in range(140):
        kept.partial_fit(X[:3], Y[:3], classes=[0, 1, 2])
        store.commit()
    curve = list(kept.loss_curve_)
    held = store["estimator/arrays/loss_curve_"]
    kept.partial_fit(X[:3], Y[:3])
    assert store["estimator/arrays/loss_curve_"] is held
    assert len(held) == 256
    store.rollback()
    assert kept.loss_curve_ == curve
    assert set(map(type, kept.loss_curve_)) == set(map(type, curve))


def test_the_file_does_not_grow(store: pmstore.Store) -> None:
    kept = persist(MiniBatchKMeans(5, random_state=0, n_init=1), store)
    used = set()
    for batch in range(12):
        feed(kept, "kmeans", batch)
        store.commit()
        used.add(store.stats().used_bytes)
    assert len(used) <= 2  # the first commit, and all others


# ---- bad input ----


def test_other_settings(path: Path) -> None:
    with pmstore.open(path) as store:
        persist(SGDClassifier(random_state=0), store)
    with pmstore.open(path) as store:
        given = SGDClassifier(random_state=1, alpha=0.5)
        with pytest.raises(DifferentError) as raised:
            persist(given, store)
        told = str(raised.value)
        assert "alpha: stored 0.0001, given 0.5" in told
        assert "random_state: stored 0, given 1" in told
        assert "accept=['alpha', 'random_state']" in told
        assert not hasattr(given, "_pmstore")
        with pytest.raises(ValueError, match=r"no settings of .*: no such"):
            persist(given, store, accept=["no such"])
        persist(given, store, accept=["alpha", "random_state"])
        assert (given.alpha, given.random_state) == (0.5, 1)
    with pmstore.open(path) as store:
        persist(SGDClassifier(random_state=1, alpha=0.5), store)
    with pmstore.open(path) as store, pytest.raises(DifferentError, match=r"class: stored .*SGDC"):
        persist(SGDRegressor(), store)


def test_settings_that_are_arrays(path: Path) -> None:
    start = X[:5].copy()
    with pmstore.open(path) as store:
        persist(MiniBatchKMeans(5, init=start, n_init=1), store)
    with pmstore.open(path) as store:
        persist(MiniBatchKMeans(5, init=start.copy(), n_init=1), store)
    with pmstore.open(path) as store, pytest.raises(DifferentError, match="init: stored an array"):
        persist(MiniBatchKMeans(5, init=start + 1, n_init=1), store)


def test_what_set_params_did_goes_on(path: Path) -> None:
    with pmstore.open(path) as store:
        persist(SGDClassifier(random_state=0), store).set_params(alpha=0.25)
    with pmstore.open(path) as store:
        assert persist(SGDClassifier(random_state=0), store).alpha == 0.25


def test_a_generator_of_the_program_is_kept(path: Path) -> None:
    """And is the same object."""
    with pmstore.open(path) as store:
        chance = np.random.RandomState(5)
        kept = persist(SGDClassifier(random_state=chance), store)
        feed(kept, "sgd", 0)
    expected = chance.rand()
    with pmstore.open(path) as store:
        chance = np.random.RandomState(5)
        kept = persist(SGDClassifier(random_state=chance), store)
        assert kept.random_state is chance
        assert chance.rand() == expected


@pytest.mark.parametrize("chance", [None, np.random.RandomState(5)], ids=["default", "given"])
def test_a_commit_has_what_others_drew(path: Path, chance: np.random.RandomState | None) -> None:
    """Estimators that share a generator, and the program. The last to draw is not the last to be
    kept."""
    numbers = np.random if chance is None else chance
    with pmstore.open(path) as store:
        first = persist(SGDClassifier(random_state=chance), store, "first")
        second = persist(SGDClassifier(random_state=chance), store, "second")
        feed(second, "sgd", 0)
        feed(first, "sgd", 0)
        numbers.rand()
        store.commit()
        expected = numbers.rand()
        for kept in (first, second):
            store.rollback()
            assert numbers.rand() == expected
            numbers.rand()
            with pytest.raises(ValueError, match="sample"):
                kept.partial_fit(np.zeros((0, 6)), [])
            store.commit()
            expected = numbers.rand()
        state = numbers.get_state()
    numbers.seed(6)
    with pmstore.open(path) as store:
        persist(SGDClassifier(random_state=chance), store, "first")
        persist(SGDClassifier(random_state=chance), store, "second")
        found = numbers.rand()
        numbers.set_state(state)
        assert found == numbers.rand()


def test_a_failed_call_leaves_what_others_drew(path: Path) -> None:
    chance = np.random.RandomState(5)
    with pmstore.open(path) as store:
        kept = persist(SGDClassifier(random_state=chance), store, "a")
        feed(kept, "sgd", 0)
        chance.permutation(10)
        before = chance.get_state()[2]
        with pytest.raises(ValueError, match="sample"):
            kept.partial_fit(np.zeros((0, 6)), [])
        assert chance.get_state()[2] == before
        del store["a"]
        store["a"] = 3  # the name is free for others
        chance.rand()
        store.commit()
        assert store["a"] == 3


def test_one_that_was_removed(path: Path) -> None:
    with pmstore.open(path) as store:
        kept = persist(MADE["sgd"](), store, "a")
        feed(kept, "sgd", 0)
        store.commit()
        del store["a"]
        store["a"] = 3
        store.commit()
        with pytest.raises(PmstoreError, match="was removed"):
            feed(kept, "sgd", 1)
        store.rollback()
        store.commit()
        assert store["a"] == 3
        del store["a"]
        store["a/state"] = 7
        with pytest.raises(PmstoreError, match="was removed"):
            feed(kept, "sgd", 1)
        del store["a"]
        other = persist(MADE["sgd"](), store, "a")
        feed(other, "sgd", 0)
        with pytest.raises(PmstoreError, match="was removed"):
            feed(kept, "sgd", 1)
        del store["a"]
        assert persist(kept, store, "a") is kept
        feed(kept, "sgd", 1)
        assert store["a/batches"] == 1
        store.commit()
        of_another_class = MADE["pca"]()
        with suppress(KeyError), store.transaction():
            del store["a"]
            persist(of_another_class, store, "a")
            raise KeyError  # what lies there is not its own
        with pytest.raises(PmstoreError, match="was removed"):
            feed(of_another_class, "pca", 0)
        assert store["a/batches"] == 1


def test_given_twice(path: Path) -> None:
    with pmstore.open(path) as store:
        kept = persist(MADE["pca"](), store, "a")
        with pytest.raises(ValueError, match="is kept already, as 'a' of"):
            persist(kept, store, "b")
        with pytest.raises(ValueError, match="another estimator of this program is kept as 'a'"):
            persist(MADE["pca"](), store, "a")
        store["c"] = 3
        with pytest.raises(ValueError, match=r"'c' of .* is something else"):
            persist(MADE["pca"](), store, "c")
        del kept
        persist(MADE["pca"](), store, "a")


def test_what_cannot_be_kept(store: pmstore.Store) -> None:
    with pytest.raises(TypeError, match="RandomForestClassifier does not learn by partial_fit"):
        persist(RandomForestClassifier(), store)
    with pytest.raises(TypeError, match="list does not learn"):
        persist([], store)  # type: ignore[type-var]

    class Own(BaseEstimator):  # type: ignore[misc]
        def partial_fit(self, value: Any) -> Any:
            self.value_ = value
            return self

    kept = persist(Own(), store)
    kept.partial_fit({"a": [np.ones(3)]})
    with pytest.raises(TypeError, match=r"Own cannot be kept.*value_\.0 is a builtins\.object"):
        kept.partial_fit([object()])
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contains itself"):
        kept.partial_fit(loop)
    assert kept.value_["a"][0].tolist() == [1, 1, 1]
    assert store["estimator/batches"] == 1


def test_after_the_store(path: Path) -> None:
    with pmstore.open(path) as store:
        kept = persist(MADE["pca"](), store)
        kept.partial_fit(X)
    with pytest.raises(ClosedStoreError, match=r"copy\.deepcopy\(estimator\)"):
        kept.partial_fit(X)
    copy.deepcopy(kept).partial_fit(X)
    with pmstore.open(path, "r") as store:
        read = persist(MADE["pca"](), store)
        assert read.transform(X).tobytes() == kept.transform(X).tobytes()
        with pytest.raises(ReadOnlyStoreError, match="nothing can be learned"):
            read.partial_fit(X)
        with pytest.raises(KeyError, match="no estimator 'other'"):
            persist(MADE["pca"](), store, "other")
    with pmstore.open(path) as store:
        kept = persist(MADE["pca"](), store)
        del store["estimator"]
        with pytest.raises(PmstoreError, match="was removed"):
            kept.partial_fit(X)


def test_no_room(path: Path) -> None:
    with pmstore.open(path, size="2MiB", max_size="2MiB") as store:
        kept = persist(SGDRegressor(), store)
        kept.partial_fit(np.ones((2, 10)), [0, 1])
        store.commit()
        before = digest(kept)
        with pytest.raises(pmstore.StoreFullError):
            kept.fit(np.ones((2, 100_000)), [0, 1])
        with pytest.raises(TransactionError, match=r"a part of the new 'estimator'.*rollback"):
            store.commit()
        with pytest.raises(TransactionError, match="a part of the new"):
            kept.partial_fit(np.ones((2, 10)), [0, 1])
        store.rollback()
        assert digest(kept) == before
        kept.partial_fit(np.ones((2, 10)), [0, 1])


def test_another_version_is_told_once(path: Path) -> None:
    with pmstore.open(path) as store:
        persist(MADE["pca"](), store)
        store["estimator/about"] = {**store["estimator/about"], "sklearn": "1.0"}
    with (
        pmstore.open(path) as store,
        pytest.warns(RuntimeWarning, match=r"scikit-learn 1\.0, this"),
    ):
        persist(MADE["pca"](), store)
    with pmstore.open(path) as store:
        persist(MADE["pca"](), store)


def test_damaged(path: Path) -> None:
    with pmstore.open(path) as store:
        kept = persist(MADE["mlp"](), store)
        feed(kept, "mlp", 0)
        about, state = store["estimator/about"], store["estimator/state"]
    evil = {"pmstore": "object", "module": "os", "name": "system", "attributes": {}}
    losses = {"pmstore": "loss", "module": "os", "name": "system", "arguments": ["true"]}
    inside = {"pmstore": "object", "module": "sklearn.base", "name": "warnings", "attributes": {}}
    wrong: list[tuple[str, Any]] = [
        *(("state", {"attributes": {"a": one}}) for one in (evil, losses, inside)),
        ("state", {"attributes": {"a": {"pmstore": "array", "path": "gone"}}}),
        (
            "state",
            {"attributes": {"a": {"pmstore": "array", "path": "coefs_.0", "steps": [9**9] * 2}}},
        ),
        ("state", {"attributes": {"a": {"pmstore": "__init__"}}}),
        ("state", 3),
        ("about", {}),
        ("about", [1]),
    ]
    for name, value in wrong:
        with pmstore.open(path) as store:
            store[f"estimator/{name}"] = value
            with pytest.raises(CorruptStoreError, match="not as an estimator was stored"):
                persist(MADE["mlp"](), store)
            store["estimator/about"], store["estimator/state"] = about, state
    with pmstore.open(path) as store:
        assert digest(persist(MADE["mlp"](), store)) == digest(kept)
        store["estimator/about"] = {**about, "format": 2}
        store.commit()
    with pmstore.open(path) as store, pytest.raises(pmstore.FormatVersionError):
        persist(MADE["mlp"](), store)


def test_old_libraries_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_told", set())
    with pytest.warns(RuntimeWarning, match=r"numpy .* is older than .* \(99 to 100\)"):
        versions.tested("numpy", "99", "100")
    versions.tested("numpy", "99", "100")
    versions.tested("numpy", "1.0", "1.2")


def test_frameworks_are_not_imported() -> None:
    code = (
        "import sys, pmstore, pmstore.integrations, pmstore.integrations.versions\n"
        "print([name for name in ('sklearn', 'jax', 'ray', 'lightning', 'torch') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
