"""Pytrees of JAX in a store.

    state = {"params": params, "opt": optimizer.init(params), "step": 0}
    if "state" in store:
        state = get(store, "state", like=state)
    ...
    put(store, "state", state)
    store.commit()

JAX arrays do not change, arrays of a store do. So nothing is shared: `put` copies out of JAX, `get`
into it. `jax.device_put(store["w"])` and `jax.numpy.from_dlpack(store["w"])` share the memory on a
CPU, whatever `may_alias` says: a later write into "w" changes such a JAX array, and what is being
computed from it. Take `jax.numpy.array(store["w"])`, which copies, or `get`.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from pmstore import Store
from pmstore._engine.failures import damaged
from pmstore.errors import (
    CorruptStoreError,
    FormatVersionError,
    NoSuchNameError,
    PmstoreError,
    ReadOnlyStoreError,
    TransactionError,
)
from pmstore.extras import optional
from pmstore.integrations.array_writes import put as put_array
from pmstore.integrations.state_errors import DifferentError
from pmstore.integrations.unfinished_writes import broken_off, check_store, written_whole
from pmstore.integrations.versions import tested
from pmstore.objects import dtypes
from pmstore.objects.array import Array, span
from pmstore.objects.containers import Group

with optional:
    import jax
    import jax.numpy as jnp
    import ml_dtypes

    from pmstore.integrations.trees import (
        VALUES,
        Leaf,
        NeedsMore,
        differences,
        leaves_of,
        plain_tree,
    )

tested("jax", "0.4.30", "0.10")

_FORMAT = 1


def put(store: Store, name: str, tree: Any) -> None:
    """Writes the pytree under that name: a group. Its arrays lie in `store[f"{name}/arrays"]`.

    The first time they are made. From then on they are written where they are, so that the file
    does not grow. Leaves: arrays of JAX (sharded ones are put together, which takes their whole
    size in memory), typed keys of `jax.random`, arrays of numpy, numbers, text.
    Waits until they are computed. Durable after the next commit.

    Raises: DifferentError: the stored tree has another structure, or a leaf another shape or
        dtype; it names them; TypeError: a leaf is no data, a tracer (`put` inside of `jit`), an
        array of which a part is at another process, or one that looks at this store's memory;
        TransactionError: writing it was broken off before. StoreFullError: no room. Nothing was
        changed, but with StoreFullError, after which only a roll back is accepted.
    """
    check_store(store, "put(store, name, tree)")
    if store.mode == "r":
        raise ReadOnlyStoreError(f"{store.path} was opened with mode 'r': nothing can be written")
    _refuse_half(store, name)
    structure, leaves = leaves_of(tree)
    about = {"format": _FORMAT, "tree": structure, "leaves": [leaf.about for leaf in leaves]}
    there = _read_about(store, name)
    if there is not None:
        remedy = "del it from the store first, or use another name"
        _refuse_other(store, name, there, about, remedy)
    elif name in store:
        raise ValueError(f"{store.path}: {name!r} is no tree of JAX: use another name")
    if there is not None:
        _refuse_own_memory(store[f"{name}/arrays"], leaves)
    with written_whole(store, repr(name)):
        group = store.group(f"{name}/arrays")
        for leaf in leaves:
            if leaf.array is not None:
                put_array(group, leaf.about["name"], leaf.array)
        for stale in set(group) - {leaf.about["name"] for leaf in leaves if leaf.array is not None}:
            del group[stale]  # the leaf is a number now
        store[f"{name}/values"] = [leaf.value for leaf in leaves if leaf.about["kind"] in VALUES]
        if there != about:
            store[f"{name}/about"] = about


def get(store: Store, name: str, like: Any = None) -> Any:
    """Returns the pytree under that name, in memory of its own: later writes and roll backs do not
    change it.

    like: a tree of the same structure, as a program makes it before it trains: its shapes and
        dtypes are compared, its containers (named tuples of optax, dataclasses with what is static
        in them) and shardings are taken, its values are not. It may hold `jax.ShapeDtypeStruct`s
        in place of arrays. A number may stand for an array without axes. Without it the tree has
        to be made of dicts, lists, tuples and None, and lies on the default device.

    Raises: KeyError: there is no such tree; DifferentError: `like` is another one; it names the
        differences; TypeError: the tree needs `like`, or `jax_enable_x64`; CorruptStoreError: what
        is stored is not as `put` wrote it.
    """
    check_store(store, "get(store, name)")
    _refuse_half(store, name)
    about = _read_about(store, name)
    if about is None:
        raise NoSuchNameError(f"{store.path}: there is no tree of JAX {name!r}")
    own: list[Any] = []
    if like is not None:
        structure, leaves = leaves_of(like, values=False)
        given = {"tree": structure, "leaves": [leaf.about for leaf in leaves]}
        _refuse_other(store, name, about, given, "Give `like` as the stored one is")
        own = jax.tree_util.tree_leaves(like)
    try:
        group, values = store[f"{name}/arrays"], iter(store[f"{name}/values"])
        made = []
        for i, told in enumerate(about["leaves"]):
            if told["kind"] in VALUES:
                made.append(next(values))
            else:
                made.append(_made(told, group, own[i] if own else None))
        if like is None:
            return plain_tree(about["tree"], iter(made))
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), made)
    except (PmstoreError, NeedsMore):
        raise
    except dtypes.UNDECODABLE as error:
        raise _no_tree(store, name, error) from error


def _refuse_half(store: Store, name: str) -> None:
    if why := broken_off(store, repr(name)):
        raise TransactionError(why)


def _read_about(store: Store, name: str) -> dict[str, Any] | None:
    if f"{name}/about" not in store:
        return None
    about = store[f"{name}/about"]
    try:
        if about["format"] == _FORMAT:
            return dict(about)
    except dtypes.UNDECODABLE as error:
        raise _no_tree(store, name, error) from error
    raise FormatVersionError(
        f"{store.path}: {name!r} is a tree of format {about['format']!r}, which this pmstore does "
        "not know"
    )


def _no_tree(store: Store, name: str, error: Exception) -> CorruptStoreError:
    return damaged(store.path, f"{name!r} is not as a tree of JAX was stored: {error!r}")


def _refuse_other(
    store: Store, name: str, there: dict[str, Any], given: dict[str, Any], remedy: str
) -> None:
    try:
        told = differences(there, given)
    except dtypes.UNDECODABLE as error:
        raise _no_tree(store, name, error) from error
    if told:
        raise DifferentError(f"{store.path}: {name!r} is another tree:", told, remedy)


def _refuse_own_memory(group: Group, leaves: list[Leaf]) -> None:
    """Refuses leaves that look at the arrays that are about to be written: a JAX array must not
    change. Raises: TypeError."""
    held = [array for array in (group[name] for name in group) if array.size]
    spans = sorted(span(array)[0] for array in held)
    starts = [start for start, _ in spans]
    for leaf in leaves:
        if leaf.about["kind"] == "array" and leaf.array is not None and leaf.array.size:
            start = span(leaf.array)[0][0]
            at = bisect_right(starts, start) - 1
            if at >= 0 and start < spans[at][0] + spans[at][1]:
                raise TypeError(
                    f"{leaf.about['path']} looks at the store's own memory, which JAX takes to "
                    "never change (device_put and from_dlpack share it): take trees out of a "
                    "store by pmstore.integrations.jax.get, and arrays by jax.numpy.array"
                )


def _made(told: dict[str, Any], group: Group, like: Any) -> Any:
    shape = tuple(told["shape"])
    if told["kind"] == "float0":
        return np.zeros(shape, jax.dtypes.float0)
    array = np.array(group[told["name"]])
    made: Any
    if told["kind"] == "key":
        made = jax.random.wrap_key_data(jnp.asarray(array), impl=told["implementation"])
    else:
        if (other := getattr(ml_dtypes, told["dtype"], None)) is not None:
            array = array.view(np.dtype(other))
        if (array.shape, str(array.dtype)) != (shape, told["dtype"]):
            raise ValueError(f"{told['path']} is {array.dtype} {array.shape}")
        if told["kind"] == "numpy":
            return array
        made = _strong_or_weak(array, told)
    if made.shape != shape:
        raise ValueError(f"{told['path']} has the shape {made.shape}")
    sharding = getattr(like, "sharding", None)
    if sharding is None or sharding.device_set == {jax.devices()[0]}:
        return made
    return jax.device_put(made, sharding)


def _strong_or_weak(array: Array, told: dict[str, Any]) -> jax.Array:
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise NeedsMore(
            f"{told['path']} is {array.dtype}, which JAX would make another here. First call "
            'jax.config.update("jax_enable_x64", True)'
        )
    made: jax.Array = jax.device_put(array)  # may share the memory of this copy, which nobody has
    if told["weak"]:
        weak = jax.lax.full(array.shape, array.dtype.type(0).item())
        if weak.dtype == array.dtype:
            made = weak.at[...].set(array)
    return made
