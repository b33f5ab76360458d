"""Pytrees of JAX as plain values: their structure, what their leaves are, and how two of them
differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_NUMBERS = (bool, int, float, complex, np.generic)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NAME_LENGTH = 200
VALUES = ("number", "text")
"""Kinds of leaves that are stored as values."""


@dataclass(frozen=True, slots=True)
class Leaf:
    about: dict[str, Any]
    """path, for people; name, of its array in the store; kind: array (of JAX), key, numpy, float0
    (which has no bytes), number or text; shape, dtype."""
    array: Array | None = None
    """What its bytes are, in numpy: mostly the leaf's own."""
    value: Any = None
    """The value of a leaf that is a number or text."""


def leaves_of(tree: Any, values: bool = True) -> tuple[Any, list[Leaf]]:
    """Returns the structure of a tree, and its leaves. values: False: the leaves only say what they
    are; they may be `jax.ShapeDtypeStruct`s then.

    Raises: TypeError: a leaf is none that can be stored.
    """
    found, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names: set[str] = set()
    leaves = []
    for keys, leaf in found:
        path = ".".join(map(_key, keys))
        name = base = (path or "leaf").replace("/", "|").replace("\0", "|")[:_NAME_LENGTH]
        number = 1
        while name in names:
            number += 1
            name = f"{base}#{number}"
        names.add(name)
        made = _leaf(leaf, path or "the tree", values)
        leaves.append(Leaf({"path": path, "name": name, **made.about}, made.array, made.value))
    return _structure(treedef), leaves


def _key(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _structure(treedef: Any) -> Any:
    node = treedef.node_data()
    if node is None:
        return "leaf" if treedef.num_leaves else "None"
    kind, more = node
    children = [_structure(child) for child in treedef.children()]
    if kind is type(None):
        return "None"
    if kind is dict and all(type(key) in _PLAIN for key in more):
        return {"kind": "dict", "keys": list(more), "children": children}
    if kind is list or kind is tuple:
        return {"kind": kind.__name__, "children": children}
    told = {"kind": "node", "type": kind.__qualname__, "children": children}
    if _is_plain(
        more
    ):  # else it is the program's: functions, or objects without a text of their own
        told["more"] = repr(more)
    return told


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _leaf(leaf: Any, path: str, values: bool) -> Leaf:
    if isinstance(leaf, _NUMBERS):
        return Leaf({"kind": "number", "shape": [], "dtype": type(leaf).__name__}, value=leaf)
    if isinstance(leaf, (str, bytes)):
        return Leaf({"kind": "text", "shape": [], "dtype": type(leaf).__name__}, value=leaf)
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(f"{path} is being traced: call put outside of jit, with what it returns")
    if isinstance(leaf, np.ndarray):
        return _numpy(leaf)
    if isinstance(leaf, jax.Array) or (isinstance(leaf, jax.ShapeDtypeStruct) and not values):
        return _jax(leaf, path, values)
    raise TypeError(
        f"{path} is a {type(leaf).__qualname__}: leaves are arrays, keys, numbers and text"
    )


def _numpy(leaf: Array) -> Leaf:
    about = {"kind": "numpy", "shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    if leaf.dtype == jax.dtypes.float0:
        return Leaf({**about, "kind": "float0", "dtype": "float0"})
    return Leaf(about, _bytes_of(leaf))


def _jax(leaf: Any, path: str, values: bool) -> Leaf:
    about: dict[str, Any] = {"kind": "array", "shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if is_key:
        about["kind"] = "key"
    if not values:
        return Leaf(about)
    if leaf.is_deleted():
        raise TypeError(f"{path} was given away (donate_argnums): put what the call returned")
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise TypeError(
            f"{path} is sharded over several processes, and a part of it is not at this one: put "
            "[shard.data for shard in array.addressable_shards] into a store of each process"
        )
    if is_key:
        about["implementation"] = str(jax.random.key_impl(leaf))
        return Leaf(about, np.asarray(jax.random.key_data(leaf)))
    about["weak"] = bool(leaf.weak_type)
    return Leaf(about, _bytes_of(np.asarray(leaf)))


def _bytes_of(array: Array) -> Array:
    """Returns an array whose dtype is not numpy's own (bfloat16) as unsigned integers, over the
    same memory. Other arrays are returned as they are."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.isbuiltin == 2 else array


# ---- differences ---------------------------------------------------------------------------------


def differences(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Says in sentences how two trees differ, each with the leaf or the container. There is none if
    both have one structure, and their leaves the same shapes and dtypes.

    stored, given: with "tree" and "leaves".
    """
    ours = {leaf["path"]: leaf for leaf in stored["leaves"]}
    theirs = {leaf["path"]: leaf for leaf in given["leaves"]}
    told = [f"{path or 'the tree'}: stored, but not given" for path in ours if path not in theirs]
    told += [f"{path or 'the tree'}: given, but not stored" for path in theirs if path not in ours]
    told += [
        f"{path or 'the tree'}: stored {_told(ours[path])}, given {_told(theirs[path])}"
        for path in ours
        if path in theirs and not _alike(ours[path], theirs[path])
    ]
    return told or list(_other_containers(stored["tree"], given["tree"], ""))


def _alike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    if "number" in (ours["kind"], theirs["kind"]):  # an array where it was computed
        return all(
            one["kind"] in ("number", "array", "numpy") and not one["shape"]
            for one in (ours, theirs)
        )
    groups = [{"numpy": "array"}.get(one["kind"], one["kind"]) for one in (ours, theirs)]
    return (groups[0], ours["shape"], ours["dtype"]) == (
        groups[1],
        theirs["shape"],
        theirs["dtype"],
    )


def _told(leaf: Mapping[str, Any]) -> str:
    if leaf["kind"] in VALUES:
        return f"a {leaf['dtype']}"
    return f"{leaf['dtype']} {tuple(leaf['shape'])}"


def _other_containers(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    if ours == theirs:
        return
    names = [
        one if isinstance(one, str) else one.get("type", one["kind"]) for one in (ours, theirs)
    ]
    if isinstance(ours, str) or isinstance(theirs, str) or names[0] != names[1]:
        yield f"{path or 'the tree'}: stored {names[0]}, given {names[1]}"
        return
    if len(ours["children"]) != len(theirs["children"]):
        counts = len(ours["children"]), len(theirs["children"])
        yield f"{path or 'the tree'}: stored {counts[0]} parts, given {counts[1]}"
        return
    for key in ("keys", "more"):
        if ours.get(key) != theirs.get(key):
            yield f"{path or 'the tree'}: stored {ours.get(key)}, given {theirs.get(key)}"
    for i, pair in enumerate(zip(ours["children"], theirs["children"], strict=True)):
        name = ours["keys"][i] if "keys" in ours else i
        yield from _other_containers(*pair, f"{path}.{name}" if path else str(name))


# ---- the way back --------------------------------------------------------------------------------


def plain_tree(structure: Any, leaves: Iterator[Any]) -> Any:
    """Returns the tree of a stored structure. Raises: TypeError: it has containers of the program's
    own."""
    if structure == "None":
        return None
    if structure == "leaf":
        return next(leaves)
    children = structure["children"]
    if structure["kind"] == "dict":
        return {
            key: plain_tree(child, leaves)
            for key, child in zip(structure["keys"], children, strict=True)
        }
    if structure["kind"] in ("list", "tuple"):
        kind = list if structure["kind"] == "list" else tuple
        return kind([plain_tree(child, leaves) for child in children])
    raise NeedsMore(
        f"the tree has a {structure['type']} in it: give get(..., like=) a tree of the program's"
    )


class NeedsMore(TypeError):
    """Says that the tree cannot be given back without something that only the program has."""
