"""Reads npy and npz files that strangers made. What a file declares is believed only as far as its
bytes bear it out: no more memory is taken than the file has bytes, or than the limit for compressed
members says. Nothing is unpickled."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from pmstore._base.untrusted import sound
from pmstore.errors import CorruptStoreError
from pmstore.objects.array import Array, bytes_of

_HEADER_MOST = 10_000  # numpy's own limit for files that are not trusted
_MAGIC = b"\x93NUMPY"
_HEAD = {(1, 0): "<H", (2, 0): "<I", (3, 0): "<I"}  # format version: length of the header
_PUBLIC = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_PIECE_BYTES = 1 << 20
_INFLATED_FACTOR = 16
_INFLATED_FREE = 64 << 20


# ---- one array -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Header:
    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]
    header_bytes: int
    """The place in the file where the elements begin."""

    @property
    def data_bytes(self) -> int:
        return bytes_of(self.shape, self.dtype.itemsize)


def read_header(file: IO[bytes]) -> Header:
    """Reads the header of an npy file, or of a member of an npz file.

    Raises: ValueError, and whatever numpy and Python's parser raise: call it in `sound`.
    """
    magic = file.read(8)
    version = (magic[6], magic[7]) if len(magic) == 8 and magic.startswith(_MAGIC) else (0, 0)
    if version == (0, 0):
        raise ValueError("no array of numpy's: its magic is missing")
    if version not in _HEAD:
        raise ValueError(
            f"an array in version {version[0]}.{version[1]} of numpy's format, which is not known"
        )
    prefix = file.read(struct.calcsize(_HEAD[version]))
    (length,) = struct.unpack(_HEAD[version], prefix)
    if length > 4 * _HEADER_MOST:  # characters of UTF-8
        raise ValueError(f"a header of {length} bytes: numpy reads {_HEADER_MOST}")
    text = file.read(length)
    if len(text) != length:
        raise ValueError("the header is cut off")
    try:
        shape, fortran_order, dtype = _parse(version, prefix, text)
    except (MemoryError, RecursionError):  # the parser's stack has no room
        raise ValueError("a header nested too deep") from None
    if dtype.hasobject:
        raise ValueError(
            "its elements are Python objects, pickled, which might run any code: they are not read"
        )
    if type(shape) is not tuple or not all(type(each) is int and each >= 0 for each in shape):
        raise ValueError(f"{str(shape)[:100]} is no shape")
    return Header(shape, fortran_order is True, dtype, 8 + len(prefix) + length)


def _parse(version: tuple[int, int], prefix: bytes, text: bytes) -> tuple[Any, Any, np.dtype[Any]]:
    if version in _PUBLIC:  # numpy's readers know what Python 2 wrote, too
        return _PUBLIC[version](io.BytesIO(prefix + text), max_header_size=_HEADER_MOST)
    parts = ast.literal_eval(text.decode())
    if set(parts) != {"descr", "fortran_order", "shape"}:
        raise ValueError("a header with other keys than descr, fortran_order and shape")
    return parts["shape"], parts["fortran_order"], np.lib.format.descr_to_dtype(parts["descr"])


# ---- a file of them ------------------------------------------------------------------------------


class NpzFile:
    """The members of an npz file, by name.

    inflated_most: bytes that compressed members may have together, uncompressed; None: 16 times as
        many as compressed, and 64 MiB. Members that are not compressed cannot have more than the
        file.

    Raises: CorruptStoreError.
    """

    def __init__(self, path: str | os.PathLike[str], inflated_most: int | None = None) -> None:
        self.path: str = os.fspath(path)
        self._stack = contextlib.ExitStack()
        with self._stack:  # closes what is open if the rest fails
            file = self._stack.enter_context(open(path, "rb"))  # noqa: SIM115
            if file.read(len(_MAGIC)) == _MAGIC:
                raise CorruptStoreError(
                    f"{self.path}: not an npz file but a single array: pmstore set --file stores it"
                )
            if not zipfile.is_zipfile(file):
                raise CorruptStoreError(
                    f"{self.path}: not an npz file: it is not a zip file, or was cut short"
                )
            with sound(self.path):
                self._zip = self._stack.enter_context(zipfile.ZipFile(file))
                self._members = self._checked(os.fstat(file.fileno()).st_size, inflated_most)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> NpzFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _checked(self, file_bytes: int, inflated_most: int | None) -> dict[str, zipfile.ZipInfo]:
        members: dict[str, zipfile.ZipInfo] = {}
        stored = packed = inflated = 0
        for info in self._zip.infolist():
            name = info.filename.removesuffix(".npy")
            if name in members:
                raise ValueError(f"{name!r} occurs twice")
            members[name] = info
            if info.flag_bits & 1:
                raise ValueError(f"{name!r} is encrypted")
            if info.compress_type == zipfile.ZIP_STORED:
                if info.file_size != info.compress_size:
                    raise ValueError(f"{name!r} is not compressed, and has two lengths")
                stored += info.file_size
            elif info.compress_type == zipfile.ZIP_DEFLATED:
                packed, inflated = packed + info.compress_size, inflated + info.file_size
            else:
                raise ValueError(f"{name!r} is compressed otherwise than numpy does it (deflate)")
        if stored + packed > file_bytes:
            raise ValueError("its members have more bytes than the file")
        most = (
            _INFLATED_FACTOR * packed + _INFLATED_FREE if inflated_most is None else inflated_most
        )
        if inflated > most:
            raise ValueError(
                f"its compressed members ({packed:,} bytes) would take {inflated:,} bytes, and "
                f"{most:,} are allowed. If you know who made it: pmstore import --inflated "
                f"{inflated}, or inflated_most={inflated} in Python"
            )
        return members

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def read(self, name: str) -> Array:
        """Returns the member as a new array. Its memory is what its bytes need, and those are in
        the file.

        Raises: ValueError, and what numpy, zipfile and zlib raise: call it in `sound`.
        """
        info = self._members[name]
        with self._zip.open(info) as member:
            header = read_header(member)
            if header.header_bytes + header.data_bytes != info.file_size:
                raise ValueError(
                    f"an array of shape {header.shape} and {header.dtype} in {info.file_size} bytes"
                )
            flat = np.empty(header.data_bytes, np.uint8)
            at = 0
            while at < flat.size:
                got = member.readinto(flat[at : at + _PIECE_BYTES].data)  # type: ignore[attr-defined]
                if not got:
                    raise ValueError("it is cut off")
                at += got
            if member.read(1):  # at the end its checksum is looked at
                raise ValueError("it is longer than it says")
            made: Array = np.ndarray(
                header.shape, header.dtype, flat.data, order="F" if header.fortran_order else "C"
            )
            return made
