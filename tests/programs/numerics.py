"""Training without torch: arrays of the store, and transactions."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

import pmstore
import pmstore.torch

from .registry import State, program


def blobs(count: int = 200) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Points around four centers, and which one: (count, 2) float64 and (count,) int64."""
    drawn = np.random.default_rng(6)
    kinds = drawn.integers(0, 4, count)
    return np.array([[0, 0], [4, 0], [0, 4], [4, 4]])[kinds] + drawn.normal(size=(count, 2)), kinds


@program(quick=True)
def k_means(path: str) -> State:
    """Small batches, drawn from a generator whose state is a value of the store."""
    points, _ = blobs()
    drawn = np.random.default_rng(1)
    with pmstore.open(path) as store:
        centers = store.require("centers", (4, 2))
        counts = store.require("counts", (4,), "int64")
        if "drawn" in store:
            drawn.bit_generator.state = store["drawn"]
        else:
            with store.transaction():
                centers[:] = points[:4]
                store["drawn"], store["step"] = drawn.bit_generator.state, 0
        while store["step"] < 40:
            some = points[drawn.integers(0, len(points), 20)]
            near = ((some[:, None] - centers) ** 2).sum(2).argmin(1)
            with store.transaction():
                for point, center in zip(some, near, strict=True):
                    counts[center] += 1
                    centers[center] += (point - centers[center]) / counts[center]
                store["drawn"] = drawn.bit_generator.state
                store["step"] += 1
        return {"centers": centers.copy(), "counts": counts.copy(), "drawn": store["drawn"]}


@program()
def gaussian_mixture(path: str) -> State:
    """Expectation and maximization, each in place; the likelihoods are a list."""
    points, _ = blobs()
    with pmstore.open(path) as store:
        if "means" not in store:
            with store.transaction():
                store["means"], store["spreads"] = points[:4].copy(), np.ones(4)
                store["shares"] = np.full(4, 0.25)
        means, spreads, shares = store["means"], store["spreads"], store["shares"]
        seen = store.list("seen")
        while len(seen) < 30:
            square = ((points[:, None] - means) ** 2).sum(2)
            dense = shares * np.exp(-square / (2 * spreads)) / spreads
            parts = dense / dense.sum(1, keepdims=True)
            with store.transaction():
                total = parts.sum(0)
                means[:] = parts.T @ points / total[:, None]
                square = ((points[:, None] - means) ** 2).sum(2)
                spreads[:] = (parts * square).sum(0) / (2 * total)
                shares[:] = total / len(points)
                seen.append(float(np.log(dense.sum(1)).sum()))
        found = [means.copy(), spreads.copy(), shares.copy()]
        return {"found": found, "seen": list(seen)}


@program(needs="sklearn.linear_model")
def partial_fit(path: str) -> State:
    """scikit-learn, batch by batch: its attributes are arrays of the store between the steps."""
    from sklearn.linear_model import SGDClassifier

    points, kinds = blobs()
    model = SGDClassifier(random_state=3, learning_rate="adaptive", eta0=0.1)
    model.partial_fit(points[:10], kinds[:10], classes=range(4))
    with pmstore.open(path) as store:
        if "step" in store:
            model.coef_, model.intercept_ = store["coef"].copy(), store["intercept"].copy()
            model.t_ = store["t"]
        for step in range(store.get("step", 0), 40):
            some = slice(5 * step % 200, 5 * step % 200 + 5)
            model.partial_fit(points[some], kinds[some])
            with store.transaction():
                store["coef"], store["intercept"] = model.coef_, model.intercept_
                store["t"], store["step"] = model.t_, step + 1
        return {"coef": model.coef_, "intercept": model.intercept_, "t": model.t_}


@program()
def markov_chain(path: str) -> State:
    """Metropolis: the chain and the generator go on together."""
    points, _ = blobs()
    drawn = np.random.default_rng(5)
    with pmstore.open(path) as store:
        chain = store.require("chain", (60, 2))
        if "drawn" in store:
            drawn.bit_generator.state = store["drawn"]
        for step in range(store.get("step", 1), 60):
            with store.transaction():
                tried = chain[step - 1] + drawn.normal(0, 0.3, 2)
                gain = ((points - chain[step - 1]) ** 2).sum() - ((points - tried) ** 2).sum()
                chain[step] = tried if np.log(drawn.random()) < gain / 2 else chain[step - 1]
                store["drawn"], store["step"] = drawn.bit_generator.state, step + 1
        return {"chain": chain.copy(), "drawn": drawn.bit_generator.state}


@program()
def evolution(path: str) -> State:
    """A population in slots: each generation is written beside the last one, and flipped."""
    points, kinds = blobs()
    with pmstore.open(path) as store:
        people = store.require("people", (16, 3))
        best = store.list("best")
        while len(best) < 30:
            drawn = np.random.default_rng([4, len(best)])
            guess = points @ people[:, :2].T + people[:, 2] > 0
            right = (guess == (kinds > 1)[:, None]).mean(0)
            order = right.argsort(kind="stable")[::-1]
            with store.transaction():
                parents = people[order[:4]]
                children = parents[drawn.integers(0, 4, 12)] + drawn.normal(0, 0.5, (12, 3))
                people[:4] = parents
                people[4:] = children
                best.append(float(right.max()))
        return {"people": people.copy(), "best": list(best)}


@program()
def factors(path: str) -> State:
    """Ratings by two matrices, in place, in blocks within blocks."""
    drawn = np.random.default_rng(8)
    people, things = drawn.integers(0, 20, 200), drawn.integers(0, 15, 200)
    ratings = drawn.normal(size=200)
    with pmstore.open(path) as store:
        if "left" not in store:
            with store.transaction():
                store["left"], store["right"] = np.full((20, 3), 0.1), np.eye(15, 3)
        left, right, errors = store["left"], store["right"], store.list("errors")
        while len(errors) < 30:
            some = slice(len(errors) * 20 % 200, len(errors) * 20 % 200 + 20)
            with store.transaction():
                total = 0.0
                for one, other, rating in zip(
                    people[some], things[some], ratings[some], strict=True
                ):
                    missed = rating - left[one] @ right[other]
                    total += missed**2
                    with store.transaction():
                        row = left[one].copy()
                        left[one] += 0.1 * missed * right[other]
                        right[other] += 0.1 * missed * row
                errors.append(float(total))
        return {"left": left.copy(), "right": right.copy(), "errors": list(errors)}


@program(needs="xgboost", stops=("kill", "term", "raise"))
def boosting(path: str) -> State:
    """A tree a step; a callback puts the model so far into the store. (No loop to break out of.
    Without subsample: xgboost itself does not go on as it would have.)"""
    import xgboost

    points, kinds = blobs()
    with pmstore.open(path) as store:

        class Keep(xgboost.callback.TrainingCallback):
            def after_iteration(self, model: Any, epoch: int, log: Any) -> bool:
                raw = bytes(model.save_raw("ubj"))
                with store.transaction():
                    store["model"] = raw
                return False

        data = xgboost.DMatrix(points, kinds > 1)
        given = {"nthread": 1, "max_depth": 2, "learning_rate": 0.1}
        model, left = None, 20
        if "model" in store:
            model = xgboost.Booster(given)
            model.load_model(bytearray(store["model"]))
            left -= model.num_boosted_rounds()
        xgboost.train(given, data, left, xgb_model=model, callbacks=[Keep()])
        return {"model": store["model"]}


@program(needs="sklearn.ensemble")
def warm_start(path: str) -> State:
    """A forest that grows by a tree a step, pickled."""
    from sklearn.ensemble import GradientBoostingClassifier

    points, kinds = blobs()
    forest = GradientBoostingClassifier(
        n_estimators=0, warm_start=True, subsample=0.7, max_depth=2, random_state=1
    )
    with pmstore.open(path) as store:
        if "model" in store:
            forest = pickle.loads(store["model"])
        while forest.n_estimators < 20:
            forest.n_estimators += 1
            forest.fit(points, kinds > 1)
            with store.transaction():
                store["model"] = pickle.dumps(forest)
        return {"chances": forest.predict_proba(points), "trees": forest.n_estimators}
