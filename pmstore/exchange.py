"""Stores to and from the files of others: safetensors and npz. Nothing is pickled or unpickled.

Groups become parts of the names, with "." between them in safetensors (as torch names parameters) and "/" in npz. What the
formats have no place for (plain values, lists, which of array and tensor it was, names that contain the separator) goes into
the file's metadata, so that what was exported comes back as it was; other programs see the arrays, and str values as metadata.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from pmstore import values
from pmstore.containers import Group
from pmstore.errors import CorruptStoreError, NameExistsError
from pmstore.extras import optional
from pmstore.lists import List
from pmstore.slots import Slots
from pmstore.words import is_own_name, warn_of_own_names

OURS = "pmstore"
"""The metadata key of safetensors, and the member of npz, that hold what the format has no place for."""

Progress = Callable[[int], None]

_EMPTY: dict[str, Any] = {"groups": [], "tensors": [], "values": {}, "paths": {}, "lists": {}, "order": []}
"""What describes a file that is not ours."""

_SAFETENSORS = frozenset(
    (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "complex64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    )
)


def _nothing(done: int) -> None:
    pass


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr")


# ---- what a store holds, flat ----------------------------------------------------------------------------------------------


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
                raise ValueError(f"two names of the store are {key!r} in the file: choose another --separator")
            self.arrays[key] = value
            if key.replace(description["separator"], "/") != joined:
                description["paths"][key] = joined
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


def _dtype_name(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _new_file(path: str | os.PathLike[str], write: Callable[[Path], None]) -> None:
    """The file is at the path when it is whole and durable, or not at all."""
    target = Path(path)
    if os.path.lexists(target):
        raise FileExistsError(17, "the file exists: give another path, or remove it first", str(target))
    part = target.with_name(f".{target.name[:200]}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        write(part)
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.rename(part, target)
    finally:
        part.unlink(missing_ok=True)


def _refuse(wrong: list[str], what: str) -> None:
    if wrong:
        names = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise TypeError(f"{what} has no dtype for {names}: `pmstore dump` carries every dtype, or convert them")


# ---- export ----------------------------------------------------------------------------------------------------------------


def export_safetensors(group: Group, path: str | os.PathLike[str], *, separator: str = ".") -> int:
    """Writes the store, or one of its groups, as safetensors. Returns the number of arrays. Nothing is copied on the way but
    arrays that are not in C order.

    Raises: TypeError naming arrays of a dtype that safetensors has not; FileExistsError; ModuleNotFoundError.
    """
    with optional:
        import safetensors

    parts = _Parts(group, separator)
    _refuse(
        [f"{key} ({_dtype_name(value)})" for key, value in parts.arrays.items() if _dtype_name(value) not in _SAFETENSORS],
        "safetensors",
    )
    kept, specs = [], {}
    for key, value in parts.arrays.items():
        dense: Any = value.detach().contiguous() if _is_tensor(value) else np.ascontiguousarray(value)
        kept.append(dense)
        address = dense.data_ptr() if _is_tensor(dense) else dense.ctypes.data
        nbytes = dense.numel() * dense.element_size() if _is_tensor(dense) else dense.nbytes
        specs[key] = safetensors.TensorSpec(
            dtype=_dtype_name(dense), shape=list(value.shape), data_ptr=address, data_len=nbytes
        )
    metadata = {**parts.texts, OURS: json.dumps(parts.description)}
    _new_file(path, lambda part: safetensors.serialize_file(specs, part, metadata))
    return len(specs)


def export_npz(
    group: Group, path: str | os.PathLike[str], *, separator: str = "/", compress: bool = False, progress: Progress = _nothing
) -> int:
    """Writes the store, or one of its groups, as npz. Returns the number of arrays. Tensors become arrays.

    progress: called with bytes written since.
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

    def write(part: Path) -> None:
        method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
        with zipfile.ZipFile(part, "x", method, allowZip64=True) as file:
            described = np.frombuffer(msgpack.packb(parts.description), np.uint8)
            for key, value in [*arrays.items(), (OURS, described)]:
                with file.open(f"{key}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, value, allow_pickle=False)
                progress(value.nbytes)

    _new_file(path, write)
    return len(arrays)


# ---- import ----------------------------------------------------------------------------------------------------------------


def _place(description: Mapping[str, Any], separator: str, key: str) -> str:
    path = description.get("paths", {}).get(key)
    return path if isinstance(path, str) else key.replace(description.get("separator", separator), "/")


def _put(group: Group, name: str, value: Any, replace: bool) -> None:
    if name in group:
        if not replace:
            raise NameExistsError(f"{name!r} is in the store already: --replace replaces it, --group imports beside it")
        if isinstance(group[name], (Group, List)) or isinstance(value, _Items):
            del group[name]
    if isinstance(value, _Items):
        group.list(name).extend(value)
    else:
        group[name] = value


class _Items(list[Any]):
    """What becomes a persistent list."""


def _import(
    group: Group,
    description: Any,
    texts: Mapping[str, str],
    arrays: Mapping[str, Callable[[], Any]],
    separator: str,
    replace: bool,
    progress: Progress,
) -> int:
    """arrays: by their names in the file, functions that read them."""
    try:
        order = {path: at for at, path in enumerate(description.get("order", ()))}
        placed: dict[str, Callable[[], Any]] = {_place(description, separator, key): read for key, read in arrays.items()}
        for path, encoded in description.get("values", {}).items():
            placed[path] = partial(values.decode, base64.b64decode(encoded))
        for key, text in texts.items():  # those of other programs
            placed.setdefault(_place(description, separator, key), partial(str, text))
        items = {path: [placed.pop(f"{path}/{at}") for at in range(length)] for path, length in description["lists"].items()}
        groups = list(description["groups"])
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise CorruptStoreError(f"the file's metadata {OURS!r} is damaged: {error!r}") from error
    left_out: list[str] = []
    for path in sorted({*placed, *items, *groups}, key=lambda path: order.get(path, len(order))):
        if is_own_name(f"{group.name}/{path}" if group.name else path):
            left_out.append(path)
        elif path in placed:
            value = placed[path]()
            _put(group, path, value, replace)
            progress(getattr(value, "nbytes", 0))
        elif path in items:
            _put(group, path, _Items(read() for read in items[path]), replace)
        else:
            group.group(path)
    warn_of_own_names("the file", left_out, 4)
    return len(arrays)


def import_safetensors(
    group: Group,
    path: str | os.PathLike[str],
    *,
    separator: str = ".",
    replace: bool = False,
    tensors: bool = False,
    progress: Progress = _nothing,
) -> int:
    """Copies a safetensors file into the store or group. Returns the number of arrays. Call it inside a transaction.

    What `export_safetensors` wrote comes back as it was. Of other files, separators in names become groups, the arrays numpy
    arrays, but torch tensors where numpy lacks the dtype or tensors is set, and the metadata str values.

    Raises: NameExistsError unless replace is set; CorruptStoreError; ModuleNotFoundError for torch, where it is needed.
    """
    with optional:
        from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            metadata = dict(file.metadata() or {})
            dtypes = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 # no mapping
            description = {**_EMPTY, **json.loads(metadata.pop(OURS, "{}"))}
            recorded = {entry[0]: entry[1:] for entry in description["tensors"]}
            arrays: dict[str, Callable[[], Any]] = {}
            with contextlib.ExitStack() as stack:
                torch_file: Any = None
                for key, dtype in dtypes.items():
                    if tensors or key in recorded or dtype == "BF16" or dtype.startswith("F8"):
                        torch_file = torch_file or stack.enter_context(safe_open(path, "pt"))
                        arrays[key] = partial(_tensor, partial(torch_file.get_tensor, key), recorded.get(key, ()))
                    else:
                        arrays[key] = partial(file.get_tensor, key)
                return _import(group, description, metadata, arrays, separator, replace, progress)
    except (SafetensorError, json.JSONDecodeError, LookupError, AttributeError) as error:
        raise CorruptStoreError(f"{os.fspath(path)}: not a sound safetensors file: {error}") from error


def _tensor(read: Callable[[], Any], kinds: Any) -> Any:
    with optional:
        import torch

    value = read()
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if "parameter" in kinds:
        return torch.nn.Parameter(value, "requires_grad" in kinds)
    return value.requires_grad_("requires_grad" in kinds)


def import_npz(
    group: Group,
    path: str | os.PathLike[str],
    *,
    separator: str = "/",
    replace: bool = False,
    tensors: bool = False,
    progress: Progress = _nothing,
) -> int:
    """Copies an npz file into the store or group, as `import_safetensors` does. Members that are pickles are refused.

    Raises: as `import_safetensors`.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise CorruptStoreError(f"{os.fspath(path)}: not an npz file but a single array: pmstore set --file stores it")
            description = {**_EMPTY, **(msgpack.unpackb(file[OURS].tobytes()) if OURS in file.files else {})}
            recorded = {entry[0]: entry[1:] for entry in description["tensors"]}
            arrays: dict[str, Callable[[], Any]] = {}
            for key in file.files:
                if key in recorded or (tensors and key != OURS):
                    arrays[key] = partial(_tensor, partial(file.__getitem__, key), recorded.get(key, ()))
                elif key != OURS:
                    arrays[key] = partial(file.__getitem__, key)
            return _import(group, description, {}, arrays, separator, replace, progress)
    except (zipfile.BadZipFile, msgpack.UnpackException, EOFError, LookupError, AttributeError) as error:
        raise CorruptStoreError(f"{os.fspath(path)}: not a sound npz file: {error}") from error
