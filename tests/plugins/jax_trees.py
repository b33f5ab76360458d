"""Pytrees of JAX in a store: what goes in comes out, nothing shares memory, and what does not fit
is named. Run by test_jax.py in a process of its own."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pmstore
from pmstore.errors import CorruptStoreError, ReadOnlyStoreError, TransactionError
from pmstore.integrations.jax import get, put
from pmstore.integrations.state_errors import DifferentError


class Own(NamedTuple):
    weight: Any
    count: Any


def leaves() -> dict[str, Any]:
    return {
        "f32": jnp.linspace(0, 1, 7),
        "bf16": jnp.linspace(0, 1, 5, dtype=jnp.bfloat16),
        "f8": jnp.ones(3, jnp.float8_e4m3fn),
        "i4": jnp.array([1, -2, 7], jnp.int4),
        "bool": jnp.array([True, False]),
        "complex": jnp.array([1 + 2j]),
        "empty": jnp.zeros((0, 3)),
        "scalar": jnp.float32(3),
        "weak": jnp.asarray(2.0),
        "weak row": jax.lax.full((3,), 2.0),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
        "old key": jax.random.PRNGKey(1),
        "float0": np.zeros((2,), jax.dtypes.float0),
        "numpy": np.arange(6, dtype=">i8").reshape(2, 3),
        "number": 3,
        "rate": np.float64(0.1),
        "text": "adam",
    }


def containers() -> dict[str, Any]:
    params = {"a/b": [jnp.ones(3), (None, jnp.zeros(2))], "": Own(jnp.ones((2, 2)), 0)}
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3), optax.trace(0.9))
    return {"params": params, "opt": optimizer.init(params["a/b"]), "o": OrderedDict(z=1, a=())}


def same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert type(a) is type(b)
        if isinstance(a, jax.Array):
            assert (a.dtype, a.shape, a.sharding) == (b.dtype, b.shape, b.sharding)
            assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None)
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        if hasattr(a, "shape"):
            assert a.dtype == b.dtype
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        else:
            assert a == b


@pytest.mark.parametrize("make", [leaves, containers])
def test_there_and_back(path: Path, make: Any) -> None:
    tree = make()
    with pmstore.open(path) as store:
        put(store, "state", tree)
        same(get(store, "state", like=make()), tree)
    with pmstore.open(path, "r") as store:
        same(get(store, "state", like=make()), tree)
        with pytest.raises(ReadOnlyStoreError):
            put(store, "state", tree)


def test_without_like(store: pmstore.Store) -> None:
    put(store, "plain", leaves())
    same(get(store, "plain"), leaves())
    put(store, "one", jnp.ones(3))
    same(get(store, "one"), jnp.ones(3))
    put(store, "own", {"x": Own(1, 2)})
    with pytest.raises(TypeError, match=r"has a Own in it: give get.*like="):
        get(store, "own")


def test_like_may_be_shapes(store: pmstore.Store) -> None:
    tree = {"a": jnp.ones((2, 3)), "key": jax.random.key(0), "step": jnp.int32(4)}
    put(store, "state", tree)
    shapes = jax.eval_shape(lambda: tree)
    same(get(store, "state", like={**shapes, "step": 0}), tree)


def test_writes_in_place(store: pmstore.Store) -> None:
    tree = {"w": jnp.ones(100_000), "b": jnp.zeros(3, jnp.bfloat16), "step": 0}
    put(store, "state", tree)
    store.commit()
    held, before = store["state/arrays/w"], store.stats()
    for step in range(30):
        tree = {"w": tree["w"] + 1, "b": tree["b"] - 1, "step": step}
        put(store, "state", tree)
        store.commit()
    assert store["state/arrays/w"] is held
    after = store.stats()
    assert (after.used_bytes, after.file_bytes) == (before.used_bytes, before.file_bytes)
    same(get(store, "state"), tree)


def test_nothing_is_shared(store: pmstore.Store) -> None:
    """64-byte aligned memory is what JAX aliases."""
    put(store, "state", {"w": jnp.ones(1000)})
    one = get(store, "state")["w"]
    sharded = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
    two = get(store, "state", like={"w": jax.ShapeDtypeStruct((1000,), "f4", sharding=sharded)})
    put(store, "state", {"w": jnp.zeros(1000)})
    store["state/arrays/w"][:] = 7
    store.rollback()
    assert float(one.sum()) == float(two["w"].sum()) == 1000


def test_what_does_alias(store: pmstore.Store) -> None:
    """If this fails, the warning in the documentation may go."""
    put(store, "state", {"w": jnp.ones(1000)})
    w = store["state/arrays/w"]
    alias, copy = jax.device_put(w, may_alias=False), jnp.array(w)
    w[:] = 5
    assert (float(alias[0]), float(copy[0])) == (5, 1)
    with pytest.raises(TypeError, match=r"w looks at the store's own memory.*jax\.get"):
        put(store, "state", {"w": alias})
    with pytest.raises(TypeError, match="looks at"):
        put(store, "state", {"w": jnp.from_dlpack(w)})
    put(store, "state", {"w": copy})


def test_sharded(store: pmstore.Store) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    for spec in (PartitionSpec("x", "y"), PartitionSpec("y"), PartitionSpec()):
        tree = {"w": jax.device_put(jnp.arange(16.0).reshape(4, 4), NamedSharding(mesh, spec))}
        put(store, "state", tree)
        same(get(store, "state", like=tree), tree)
        plain = get(store, "state")["w"]
        assert plain.device == jax.devices()[0]
        assert plain.tolist() == tree["w"].tolist()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"a": jnp.ones(3)}, "b.0: stored, but not given"),
        ({"a": jnp.ones(3), "b": [1, 2], "c": 0}, "b.1: given, but not stored"),
        ({"a": jnp.ones(4), "b": [1]}, r"a: stored float32 \(3,\), given float32 \(4,\)"),
        ({"a": jnp.ones(3, "bfloat16"), "b": [1]}, r"stored float32 \(3,\), given bfloat16"),
        ({"a": jax.random.key(0), "b": [1]}, r"a: stored float32 .*, given key<fry> \(\)"),
        ({"a": jnp.ones(3), "b": (1,)}, "b: stored list, given tuple"),
        ({"a": jnp.ones(3), "b": ["x"]}, "b.0: stored a int, given a str"),
        ({"a": jnp.ones(3), "b": Own(1, None)}, "b.weight: given, but not stored"),
    ],
)
def test_another_tree(store: pmstore.Store, given: Any, told: str) -> None:
    tree = {"a": jnp.ones(3), "b": [1]}
    put(store, "state", tree)
    store.commit()
    for refused in (lambda: put(store, "state", given), lambda: get(store, "state", like=given)):
        with pytest.raises(DifferentError, match=told):
            refused()
    assert not store.written()
    same(get(store, "state"), tree)


def test_numbers_become_arrays(store: pmstore.Store) -> None:
    """The first step of a jitted program makes one of a counter."""
    put(store, "state", {"step": 0})
    put(store, "state", {"step": jnp.int32(1)})
    same(get(store, "state", like={"step": 0}), {"step": jnp.int32(1)})
    put(store, "state", {"step": 2})
    same(get(store, "state"), {"step": 2})
    assert list(store["state/arrays"]) == []


def test_what_is_no_leaf(store: pmstore.Store) -> None:
    with pytest.raises(TypeError, match=r"f is a function: leaves are"):
        put(store, "state", {"f": lambda: 0})
    with pytest.raises(TypeError, match=r"x is being traced: call put outside of jit"):
        jax.jit(lambda x: put(store, "state", {"x": x}))(1.0)
    gone = jnp.ones(8)
    gone.delete()
    with pytest.raises(TypeError, match=r"w was given away \(donate_argnums\)"):
        put(store, "state", {"w": gone})
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        put(store, "state", jax.eval_shape(lambda: {"w": jnp.ones(3)}))
    assert "state" not in store
    store["other"] = 3
    with pytest.raises(ValueError, match="is no tree of JAX"):
        put(store, "other", {})
    with pytest.raises(KeyError, match="no tree of JAX"):
        get(store, "other")


def test_wide_numbers_need_x64(store: pmstore.Store) -> None:
    with jax.enable_x64(True):
        tree = {"w": jnp.arange(3, dtype="float64")}
        put(store, "state", tree)
        same(get(store, "state"), tree)
    with pytest.raises(TypeError, match=r"w is float64.*jax_enable_x64"):
        get(store, "state")


def test_broken_off(store: pmstore.Store) -> None:
    """A half of a tree is not committed."""
    small_path = f"{store.path}.small"
    with pmstore.open(small_path, size="2MiB", max_size="2MiB") as small:
        small["x"] = 1
        small.commit()
        with pytest.raises(pmstore.StoreFullError):
            put(small, "state", {"a": jnp.ones(3), "z": jnp.ones(1_000_000)})
        with pytest.raises(TransactionError, match=r"a part of the new 'state'.*rollback"):
            small.commit()
        with pytest.raises(TransactionError, match="a part of the new"):
            put(small, "state", {"a": jnp.ones(3)})
        small.rollback()
        assert list(small) == ["x"]
        put(small, "state", {"a": jnp.ones(3)})
    os.unlink(small_path)


def test_damaged(store: pmstore.Store) -> None:
    put(store, "state", leaves())
    about = store["state/about"]
    for wrong in (
        {**about, "leaves": 3},
        {**about, "leaves": [{}]},
        {**about, "tree": {"kind": "dict"}},
        {**about, "tree": None},
        {"format": 1},
        [],
    ):
        store["state/about"] = wrong
        with pytest.raises(CorruptStoreError, match="not as a tree of JAX was stored"):
            get(store, "state")
        with pytest.raises((CorruptStoreError, DifferentError)):
            get(store, "state", like=leaves())
    store["state/about"] = {**about, "format": 2}
    with pytest.raises(pmstore.FormatVersionError):
        get(store, "state")
    store["state/about"] = about
    store["state/arrays/f32"] = np.ones(3)
    with pytest.raises(CorruptStoreError):
        get(store, "state")
