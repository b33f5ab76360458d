"""Stores to and from the files of others: safetensors and npz. Nothing is pickled or unpickled.

Groups become parts of the names, with "." between them in safetensors (as torch names parameters)
and "/" in npz. What the formats have no place for (plain values, lists, which of array and tensor
it was, names that contain the separator) goes into the file's metadata, so that what was exported
comes back as it was; other programs see the arrays, and str values as metadata.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgpack
import numpy as np

from pmstore._base.newfile import PRIVATE, new_file
from pmstore._base.text import is_own_name, warn_of_own_names
from pmstore._base.untrusted import sound
from pmstore.errors import NameExistsError
from pmstore.extras import optional
from pmstore.formats.description import OURS, Description, Items, Parts, Plan, is_tensor
from pmstore.formats.npz import NpzFile
from pmstore.objects.containers import Group
from pmstore.objects.lists import List

Progress = Callable[[int], None]

_SAFETENSORS = {
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64"),
}


def _nothing(done: int) -> None:
    pass


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
    parts = Parts(group, separator)
    metadata = {**parts.texts, OURS: json.dumps(parts.description)}
    return write_safetensors(parts.arrays, metadata, path, mode)


def write_safetensors(
    arrays: Mapping[str, Any], metadata: Mapping[str, str], path: str | os.PathLike[str], mode: int
) -> int:
    """Writes arrays and tensors by name, as `export_safetensors` writes those of a store."""
    with optional:
        import safetensors

    _refuse(
        [
            f"{key} ({_dtype_name(value)})"
            for key, value in arrays.items()
            if _dtype_name(value) not in _SAFETENSORS
        ],
        "safetensors",
    )
    kept, specs = [], {}
    for key, value in arrays.items():
        dense: Any = (
            value.detach().contiguous() if is_tensor(value) else np.ascontiguousarray(value)
        )
        kept.append(dense)
        address = dense.data_ptr() if is_tensor(dense) else dense.ctypes.data
        nbytes = dense.numel() * dense.element_size() if is_tensor(dense) else dense.nbytes
        specs[key] = safetensors.TensorSpec(
            dtype=_dtype_name(dense), shape=list(value.shape), data_ptr=address, data_len=nbytes
        )
    with new_file(path, mode) as file:
        safetensors.serialize_file(specs, file.name, dict(metadata))
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
    parts = Parts(group, separator)
    arrays: dict[str, Any] = {}
    wrong = []
    for key, value in parts.arrays.items():
        try:
            arrays[key] = value.detach().numpy() if is_tensor(value) else value
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


# ---- import --------------------------------------------------------------------------------------


def _put(group: Group, name: str, value: Any, replace: bool) -> None:
    if name in group:
        if not replace:
            raise NameExistsError(
                f"{name!r} is in the store already: --replace replaces it, --group imports beside "
                "it"
            )
        if isinstance(group[name], (Group, List)) or isinstance(value, Items):
            del group[name]
    if isinstance(value, Items):
        group.list(name).extend(value)
    else:
        group[name] = value


def _import(group: Group, source: str, plan: Plan, replace: bool, progress: Progress) -> None:
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

    What `export_safetensors` wrote comes back as it was. In other files, separators in names become
    groups. Arrays become numpy arrays, or torch tensors where numpy lacks the dtype or `tensors` is
    set. Metadata become str values.

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
            description = Description.of(json.loads(metadata.pop(OURS, "{}")), separator)
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
            plan = Plan(description, metadata, arrays)
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
            description = Description.of(said, separator)
        arrays: dict[str, Callable[[], Any]] = {}
        for key in file:
            if key in description.tensors or (tensors and key != OURS):
                arrays[key] = partial(
                    _tensor, partial(file.read, key), description.tensors.get(key, ())
                )
            elif key != OURS:
                arrays[key] = partial(file.read, key)
        with sound(source):
            plan = Plan(description, {}, arrays)
        _import(group, source, plan, replace, progress)
        return len(arrays)
