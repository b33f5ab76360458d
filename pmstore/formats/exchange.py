"""Stores to and from the files of others: safetensors and npz. Nothing is pickled or unpickled.

Groups become parts of the names, with "." between them in safetensors (as torch names parameters)
and "/" in npz. What the formats have no place for (plain values, lists, which of array and tensor
it was, names that contain the separator) goes into the file's metadata, so that what was exported
comes back as it was; other programs see the arrays, and str values as metadata.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
import numpy as np

from pmstore.base.newfile import PRIVATE, new_file
from pmstore.base.untrusted import sound
from pmstore.base.words import is_own_name, warn_of_own_names
from pmstore.errors import NameExistsError
from pmstore.extras import optional
from pmstore.formats.npz import NpzFile
from pmstore.objects import values
from pmstore.objects.containers import Group
from pmstore.objects.lists import List
from pmstore.objects.names import split_name
from pmstore.objects.slots import Slots

OURS = "pmstore"
"""The metadata key of safetensors, and the member of npz, that hold what the format has no place
for."""

Progress = Callable[[int], None]

_EMPTY: dict[str, Any] = {
    "groups": [],
    "tensors": [],
    "values": {},
    "paths": {},
    "lists": {},
    "order": [],
}
"""What describes a file that is not ours."""

_SAFETENSORS = frozenset(
    (
        *(
            "bool",
            "uint8",
            "int8",
            "uint16",
            "int16",
            "uint32",
            "int32",
            "uint64",
            "int64",
            "complex64",
        ),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    )
)


def _nothing(done: int) -> None:
    pass


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr")


# ---- what a store holds, flat --------------------------------------------------------------------


def _flat(group: Group, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name in group:
        if not group.name and is_own_name(name):
            continue
        item = group[name]
        if isinstance(item, Slots):
            item = item.current  # the version before is nobody's concern
        if isinstance(item, Group):
            yield (*prefix, name), item
            yield from _flat(item, (*prefix, name))
        else:
            yield (*prefix, name), item


class _Parts:
    """A group taken apart: arrays by their names in the file, and the description of the rest."""

    def __init__(self, group: Group, separator: str) -> None:
        self.arrays: dict[str, Any] = {}
        self.texts: dict[str, str] = {}
        description: dict[str, Any] = {"version": 1, "separator": separator}
        description.update({key: type(empty)() for key, empty in _EMPTY.items()})
        for path, value in _flat(group):
            key, joined = separator.join(path), "/".join(path)
            description["order"].append(joined)
            if isinstance(value, Group):
                description["groups"].append(joined)
            elif isinstance(value, List):
                description["lists"][joined] = len(value)
                for index, item in enumerate(value):
                    self._add(f"{key}{separator}{index}", f"{joined}/{index}", item, description)
            else:
                self._add(key, joined, value, description)
        self.description = description

    def _add(self, key: str, joined: str, value: Any, description: dict[str, Any]) -> None:
        if _is_tensor(value) or isinstance(value, np.ndarray):
            if key in self.arrays or key == OURS:
                raise ValueError(
                    f"two names of the store are {key!r} in the file: choose another --separator"
                )
            self.arrays[key] = value
            self._note_path(key, joined, description)
            if _is_tensor(value):
                kinds = (
                    "requires_grad" if value.requires_grad else "",
                    "parameter" if type(value).__name__ == "Parameter" else "",
                )
                description["tensors"].append([key, *filter(None, kinds)])
            return
        description["values"][joined] = base64.b64encode(values.encode(value)).decode()
        if type(value) is str and key != OURS:
            self.texts[key] = value
            self._note_path(key, joined, description)

    def _note_path(self, key: str, joined: str, description: dict[str, Any]) -> None:
        if key.replace(description["separator"], "/") != joined:
            description["paths"][key] = joined


def _dtype_name(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _refuse(wrong: list[str], what: str) -> None:
    if wrong:
        names = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise TypeError(
            f"{what} has no dtype for {names}: `pmstore dump` carries every dtype, or convert them"
        )


# ---- export --------------------------------------------------------------------------------------


def export_safetensors(
    group: Group, path: str | os.PathLike[str], *, separator: str = ".", mode: int = PRIVATE
) -> int:
    """Writes the store, or one of its groups, as safetensors. Returns the number of arrays. Nothing
    is copied on the way but arrays that are not in C order. The file is durable on return. mode:
    its permissions.

    Raises: TypeError naming arrays of a dtype that safetensors has not; FileExistsError;
        ModuleNotFoundError.
    """
    with optional:
        import safetensors

    parts = _Parts(group, separator)
    _refuse(
        [
            f"{key} ({_dtype_name(value)})"
            for key, value in parts.arrays.items()
            if _dtype_name(value) not in _SAFETENSORS
        ],
        "safetensors",
    )
    kept, specs = [], {}
    for key, value in parts.arrays.items():
        dense: Any = (
            value.detach().contiguous() if _is_tensor(value) else np.ascontiguousarray(value)
        )
        kept.append(dense)
        address = dense.data_ptr() if _is_tensor(dense) else dense.ctypes.data
        nbytes = dense.numel() * dense.element_size() if _is_tensor(dense) else dense.nbytes
        specs[key] = safetensors.TensorSpec(
            dtype=_dtype_name(dense), shape=list(value.shape), data_ptr=address, data_len=nbytes
        )
    metadata = {**parts.texts, OURS: json.dumps(parts.description)}
    with new_file(path, mode) as file:
        safetensors.serialize_file(specs, file.name, metadata)
    return len(specs)


def export_npz(
    group: Group,
    path: str | os.PathLike[str],
    *,
    separator: str = "/",
    compress: bool = False,
    mode: int = PRIVATE,
    progress: Progress = _nothing,
) -> int:
    """Writes the store, or one of its groups, as npz. Returns the number of arrays. Tensors become
    arrays. The file is durable on return.

    mode: its permissions. progress: called with bytes written since.
    Raises: TypeError naming tensors of a dtype that numpy has not; FileExistsError.
    """
    parts = _Parts(group, separator)
    arrays: dict[str, Any] = {}
    wrong = []
    for key, value in parts.arrays.items():
        try:
            arrays[key] = value.detach().numpy() if _is_tensor(value) else value
        except (TypeError, RuntimeError):
            wrong.append(f"{key} ({_dtype_name(value)})")
    _refuse(wrong, "npz")

    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with new_file(path, mode) as out, zipfile.ZipFile(out, "w", method, allowZip64=True) as file:
        described = np.frombuffer(msgpack.packb(parts.description), np.uint8)
        for key, value in [*arrays.items(), (OURS, described)]:
            with file.open(f"{key}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, value, allow_pickle=False)
            progress(value.nbytes)
    return len(arrays)


# ---- import: what the file says ------------------------------------------------------------------


class _Items(list[Any]):
    """What becomes a persistent list."""


@dataclass(frozen=True)
class _Description:
    """What a file that is ours says of itself, checked: of another, nothing."""

    separator: str
    order: Mapping[str, int]
    groups: Sequence[str]
    lists: Mapping[str, int]
    values: Mapping[str, str]
    paths: Mapping[str, str]
    tensors: Mapping[str, Sequence[str]]
    """By their names in the file; "parameter" and "requires_grad" of those that are."""

    @classmethod
    def of(cls, said: Any, separator: str) -> _Description:
        """Raises: ValueError."""

        def must(right: bool, what: str) -> None:
            if not right:
                raise ValueError(f"the metadata {OURS!r} are damaged: {what}")

        def is_texts(each: Any) -> bool:
            return isinstance(each, list) and all(type(text) is str for text in each)

        must(isinstance(said, dict), "no map")
        said = {**_EMPTY, "separator": separator, **said}
        must(type(said["separator"]) is str and said["separator"] != "", "the separator")
        for key in ("order", "groups"):
            must(is_texts(said[key]), key)
        for key, kind in (("lists", int), ("values", str), ("paths", str)):
            entries = said[key]
            must(
                isinstance(entries, dict)
                and all(type(k) is str and type(v) is kind for k, v in entries.items()),
                key,
            )
        must(all(length >= 0 for length in said["lists"].values()), "the length of a list")
        tensors = said["tensors"]
        must(
            isinstance(tensors, list) and all(is_texts(entry) and entry for entry in tensors),
            "tensors",
        )
        return cls(
            said["separator"],
            {path: at for at, path in enumerate(said["order"])},
            said["groups"],
            said["lists"],
            said["values"],
            said["paths"],
            {entry[0]: entry[1:] for entry in tensors},
        )

    def place(self, key: str) -> str:
        """Where in the store it goes what has that name in the file."""
        return self.paths.get(key, key.replace(self.separator, "/"))


class _Plan:
    """What an import puts where: by path in the group, in order. All names are checked before
    anything is put.

    Raises: ValueError.
    """

    def __init__(
        self,
        description: _Description,
        texts: Mapping[str, str],
        arrays: Mapping[str, Callable[[], Any]],
    ) -> None:
        """texts: of other programs. arrays: functions that read them, by their names in the
        file."""
        found: dict[str, Callable[[], Any] | None] = {}

        def add(path: str, read: Callable[[], Any] | None) -> None:
            if path in found:
                raise ValueError(f"the name {path!r} occurs twice")
            found[path] = read

        for key, read in arrays.items():
            add(description.place(key), read)
        for path, encoded in description.values.items():
            add(path, partial(_value, encoded))
        taken = set(found)
        for key, text in texts.items():
            if description.place(key) not in taken:  # else it is ours, there for other programs
                add(description.place(key), partial(str, text))
        for path, length in description.lists.items():
            missing = next((at for at in range(length) if f"{path}/{at}" not in found), None)
            if missing is not None:
                raise ValueError(
                    f"the metadata {OURS!r} are damaged: the list {path!r} lacks item {missing}"
                )
            add(path, partial(_items, [found.pop(f"{path}/{at}") for at in range(length)]))
        for path in description.groups:
            add(path, None)
        for path in found:
            split_name(path)
        self.steps = sorted(
            found.items(), key=lambda step: description.order.get(step[0], len(description.order))
        )


def _value(encoded: str) -> Any:
    return values.decode(base64.b64decode(encoded))


def _items(reads: list[Any]) -> _Items:
    return _Items(read() for read in reads)


def _put(group: Group, name: str, value: Any, replace: bool) -> None:
    if name in group:
        if not replace:
            raise NameExistsError(
                f"{name!r} is in the store already: --replace replaces it, --group imports beside "
                "it"
            )
        if isinstance(group[name], (Group, List)) or isinstance(value, _Items):
            del group[name]
    if isinstance(value, _Items):
        group.list(name).extend(value)
    else:
        group[name] = value


def _import(group: Group, source: str, plan: _Plan, replace: bool, progress: Progress) -> None:
    left_out: list[str] = []
    for path, read in plan.steps:
        if is_own_name(f"{group.name}/{path}" if group.name else path):
            left_out.append(path)
        elif read is None:
            group.group(path)
        else:
            with sound(f"{source}: {path!r}"):
                value = read()
            _put(group, path, value, replace)
            progress(getattr(value, "nbytes", 0))
    warn_of_own_names(source, left_out, 3)


def _tensor(read: Callable[[], Any], kinds: Sequence[str]) -> Any:
    with optional:
        import torch

    value = read()
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if "parameter" in kinds:
        return torch.nn.Parameter(value, "requires_grad" in kinds)
    return value.requires_grad_("requires_grad" in kinds)


# ---- import --------------------------------------------------------------------------------------


def import_safetensors(
    group: Group,
    path: str | os.PathLike[str],
    *,
    separator: str = ".",
    replace: bool = False,
    tensors: bool = False,
    progress: Progress = _nothing,
) -> int:
    """Copies a safetensors file into the store or group. Returns the number of arrays. Call it
    inside a transaction.

    What `export_safetensors` wrote comes back as it was. Of other files, separators in names become
    groups, the arrays numpy arrays, but torch tensors where numpy lacks the dtype or tensors is
    set, and the metadata str values.

    Raises: NameExistsError unless replace is set; CorruptStoreError that names the file and the
        place; PmstoreError if there is not enough memory for an array; OSError; ModuleNotFoundError
        for torch, where it is needed.
    """
    with optional:
        from safetensors import safe_open

    source = os.fspath(path)
    with contextlib.ExitStack() as stack:
        with sound(source):
            file = stack.enter_context(safe_open(path, "numpy"))
            metadata = dict(file.metadata() or {})
            dtypes = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # no mapping  # noqa: SIM118
            description = _Description.of(json.loads(metadata.pop(OURS, "{}")), separator)
        arrays: dict[str, Callable[[], Any]] = {}
        torch_file: Any = None
        for key, dtype in dtypes.items():
            if tensors or key in description.tensors or dtype == "BF16" or dtype.startswith("F8"):
                torch_file = torch_file or stack.enter_context(safe_open(path, "pt"))
                arrays[key] = partial(
                    _tensor, partial(torch_file.get_tensor, key), description.tensors.get(key, ())
                )
            else:
                arrays[key] = partial(file.get_tensor, key)
        with sound(source):
            plan = _Plan(description, metadata, arrays)
        _import(group, source, plan, replace, progress)
        return len(arrays)


def import_npz(
    group: Group,
    path: str | os.PathLike[str],
    *,
    separator: str = "/",
    replace: bool = False,
    tensors: bool = False,
    inflated_most: int | None = None,
    progress: Progress = _nothing,
) -> int:
    """Copies an npz file into the store or group, as `import_safetensors` does. Members that are
    pickles are refused.

    inflated_most: bytes that its compressed members may have together, uncompressed; None: 16 times
        as many as compressed, and 64 MiB. A file of zeros that a friend compressed may need more; a
        stranger's may be made to fill the memory.

    Raises: as `import_safetensors`.
    """
    source = os.fspath(path)
    with NpzFile(path, inflated_most) as file:
        with sound(f"{source}: {OURS!r}"):
            said = msgpack.unpackb(file.read(OURS).tobytes()) if OURS in file else {}
        with sound(source):
            description = _Description.of(said, separator)
        arrays: dict[str, Callable[[], Any]] = {}
        for key in file:
            if key in description.tensors or (tensors and key != OURS):
                arrays[key] = partial(
                    _tensor, partial(file.read, key), description.tensors.get(key, ())
                )
            elif key != OURS:
                arrays[key] = partial(file.read, key)
        with sound(source):
            plan = _Plan(description, {}, arrays)
        _import(group, source, plan, replace, progress)
        return len(arrays)
