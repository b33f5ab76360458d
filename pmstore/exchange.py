"""Stores to and from the files of others: safetensors and npz. Nothing is pickled or unpickled.

Groups become parts of the names, with "." between them in safetensors (as torch names parameters) and "/" in npz. What the
formats have no place for (plain values, lists, which of array and tensor it was, names that contain the separator) goes into
the file's metadata, so that what was exported comes back as it was; other programs see the arrays, and str values as metadata.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from pmstore import values
from pmstore.containers import Group
from pmstore.errors import CorruptStoreError, NameExistsError
from pmstore.lists import List

OURS = "pmstore"
"""The metadata key of safetensors, and the member of npz, that hold what the format has no place for."""

Progress = Callable[[int], None]

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
        item = group[name]
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
        description: dict[str, Any] = {
            "version": 1,
            "separator": separator,
            "groups": [],
            "tensors": [],
            "values": {},
            "paths": {},
        }
        description["lists"] = {}
        for path, value in _flat(group):
            key, joined = separator.join(path), "/".join(path)
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
        if isinstance(group[name], (Group, List)):
            del group[name]
    group[name] = value


def _put_rest(group: Group, description: Mapping[str, Any], texts: Mapping[str, str], separator: str, replace: bool) -> None:
    try:
        for path in description.get("groups", []):
            group.group(path)
        described = {path: values.decode(base64.b64decode(value)) for path, value in description.get("values", {}).items()}
        of_lists = tuple(f"{path}/" for path in description.get("lists", {}))
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptStoreError(f"the file's metadata {OURS!r} is damaged: {error}") from error
    for path, value in described.items():
        if not path.startswith(of_lists) or not of_lists:
            _put(group, path, value, replace)
    for key, text in texts.items():  # of other programs
        path = _place(description, separator, key)
        if path not in described:
            _put(group, path, text, replace)


def _put_lists(group: Group, description: Mapping[str, Any], found: Mapping[str, Any], replace: bool) -> None:
    for path, length in description.get("lists", {}).items():
        items: list[Any] = []
        for index in range(length):
            place = f"{path}/{index}"
            if place in found:
                items.append(found[place])
            else:
                items.append(values.decode(base64.b64decode(description["values"][place])))
        if path in group:
            if not replace:
                raise NameExistsError(f"{path!r} is in the store already: --replace replaces it, --group imports beside it")
            del group[path]
        group.list(path).extend(items)


def _import(
    group: Group,
    description: Mapping[str, Any],
    texts: Mapping[str, str],
    arrays: Iterator[tuple[str, Any]],
    separator: str,
    replace: bool,
    progress: Progress,
) -> int:
    if not isinstance(description, dict):
        raise CorruptStoreError(f"the file's metadata {OURS!r} is damaged")
    of_lists = tuple(f"{path}/" for path in description.get("lists", {}))
    in_lists: dict[str, Any] = {}
    count = 0
    for key, value in arrays:
        path = _place(description, separator, key)
        if of_lists and path.startswith(of_lists):
            in_lists[path] = value
        else:
            _put(group, path, value, replace)
        progress(value.nbytes)
        count += 1
    _put_rest(group, description, texts, separator, replace)
    _put_lists(group, description, in_lists, replace)
    return count


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
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            metadata = dict(file.metadata() or {})
            keys = list(file.keys())
            dtypes = {key: file.get_slice(key).get_dtype() for key in keys}
        description = json.loads(metadata.pop(OURS, "{}"))
        recorded = {entry[0]: entry[1:] for entry in description.get("tensors", [])}
        torch_keys = {
            key for key in keys if key in recorded or dtypes[key] in ("BF16",) or dtypes[key].startswith("F8") or tensors
        }

        def arrays() -> Iterator[tuple[str, Any]]:
            with safe_open(path, "numpy") as plain:
                for key in keys:
                    if key not in torch_keys:
                        yield key, plain.get_tensor(key)
            if torch_keys:
                import torch

                with safe_open(path, "pt") as file:
                    for key in keys:
                        if key in torch_keys:
                            value, kinds = file.get_tensor(key), recorded.get(key, ())
                            if "parameter" in kinds:
                                value = torch.nn.Parameter(value, "requires_grad" in kinds)
                            yield key, value.requires_grad_("requires_grad" in kinds)

        return _import(group, description, metadata, arrays(), separator, replace, progress)
    except (SafetensorError, json.JSONDecodeError, LookupError, AttributeError) as error:
        raise CorruptStoreError(f"{os.fspath(path)}: not a sound safetensors file: {error}") from error


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
            description = msgpack.unpackb(file[OURS].tobytes()) if OURS in file.files else {}
            recorded = {entry[0]: entry[1:] for entry in description.get("tensors", [])}

            def arrays() -> Iterator[tuple[str, Any]]:
                for key in file.files:
                    if key == OURS:
                        continue
                    value: Any = file[key]
                    if key in recorded or tensors:
                        import torch

                        kinds = recorded.get(key, ())
                        value = torch.from_numpy(value)
                        if "parameter" in kinds:
                            value = torch.nn.Parameter(value, "requires_grad" in kinds)
                        value.requires_grad_("requires_grad" in kinds)
                    yield key, value

            return _import(group, description, {}, arrays(), separator, replace, progress)
    except (zipfile.BadZipFile, msgpack.UnpackException, EOFError, LookupError, AttributeError) as error:
        raise CorruptStoreError(f"{os.fspath(path)}: not a sound npz file: {error}") from error
