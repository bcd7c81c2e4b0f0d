"""Reads a GGUF file (versions 2 and 3, little endian): metadata, tensor table, raw tensor bytes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file is memory mapped; tensor
bytes are never copied here. A file is hostile until read: every length is checked against the bytes
that are left before anything is allocated, so a damaged file costs one line, never memory or time.

A mapped file must not be shortened while it is in use: the operating system answers a read beyond
the new end with SIGBUS, which Python cannot catch.
"""

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUFValueType

from reference.model.errors import InputError, Unsupported
from reference.model.quant import BlockFormat, format_of_type

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4  # ggml: GGML_MAX_DIMS
_SMALLEST_PAIR_NBYTES = 8 + 4 + 1  # length of an empty key, value type, a 1-byte value
_SMALLEST_TENSOR_NBYTES = (
    8 + 4 + 8 + 4 + 8
)  # empty name, dimension count, one dimension, type, offset

_SCALARS: Mapping[int, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("u1"),
    GGUFValueType.INT8: np.dtype("i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is.

    `shape` is in NumPy order (rows first, the contiguous dimension last; a GGUF file stores the
    reverse), `offset` counts bytes from the start of the file.
    """

    name: str
    format: BlockFormat
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A parsed file. Metadata values are Python scalars, str, list[str], or a NumPy array."""

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data: npt.NDArray[np.uint8]

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, (*shape[:-1], row_nbytes): a read-only view of the mapped file.

        Raises InputError where the file has no such tensor.
        """
        info = self.tensors.get(name)
        if info is None:
            raise InputError(
                f"raw: {name} is not one of the {len(self.tensors)} tensors of {self.path}"
            )
        row_nbytes = info.format.row_nbytes(info.shape[-1], name)
        flat = self.data[info.offset : info.offset + info.nbytes]
        return flat.reshape(*info.shape[:-1], row_nbytes)

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the whole file; computed at the first call (about 1 s for each GB)."""
        with self.path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


def read_gguf(path: str | Path) -> GGUFFile:
    """Parses the file at `path`.

    Raises InputError where it is absent, damaged or not GGUF, and Unsupported for a version, byte
    order, value type or tensor type that is known but not read; always one line naming the file.
    """
    path = Path(path)
    reader = _Reader(path, _map_file(path))
    version = reader.header()
    n_tensors, n_pairs = reader.count("tensor count"), reader.count("metadata count")
    metadata = reader.metadata(n_pairs)
    tensors = reader.tensors(n_tensors, metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT))
    return GGUFFile(
        path, version, MappingProxyType(metadata), MappingProxyType(tensors), reader.data
    )


def _map_file(path: Path) -> npt.NDArray[np.uint8]:
    try:
        if not path.exists():
            raise InputError(f"read_gguf: {path} does not exist")
        if not path.is_file():
            raise InputError(f"read_gguf: {path} is not a regular file")
        if path.stat().st_size < len(MAGIC):
            raise InputError(
                f"read_gguf: {path} has {path.stat().st_size} bytes, expected a GGUF file"
            )
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise InputError(f"read_gguf: {str(path)!r} cannot be read: {error}") from None


class _Reader:
    """A cursor over the mapped bytes; every method checks before it reads and moves `at` on."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.path = path
        self.data = data
        self.view = data.data
        self.at = 0

    def fail(self, what: str, kind: type[InputError] | type[Unsupported] = InputError) -> NoReturn:
        what = what if len(what) <= 300 else what[:300] + "..."  # a key may be megabytes long
        raise kind(f"read_gguf: {self.path}: at byte {self.at}: {what}")

    def need(self, nbytes: int, what: str) -> None:
        left = len(self.view) - self.at
        if nbytes > left:
            self.fail(f"{what} needs {nbytes} bytes, but only {left} are left")

    def number(self, code: str, what: str) -> Any:
        nbytes = struct.calcsize(code)
        self.need(nbytes, what)
        value = struct.unpack_from(code, self.view, self.at)[0]
        self.at += nbytes
        return value

    def count(self, what: str) -> int:
        return int(self.number("<Q", what))

    def text(self, what: str) -> str:
        """A string that must be UTF-8: keys, tensor names, single values."""
        length = self.count(f"length of {what}")
        self.need(length, what)
        try:
            value = str(self.view[self.at : self.at + length], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error.reason} at its byte {error.start}")
        self.at += length
        return value

    def header(self) -> int:
        if bytes(self.view[:4]) != MAGIC:
            self.fail(f"magic is {bytes(self.view[:4])!r}, expected {MAGIC!r}: not a GGUF file")
        self.at = 4
        version = int(self.number("<I", "version"))
        if version not in VERSIONS:
            self.at = 4
            if version and version & 0xFFFF == 0:
                self.fail("the file is big endian, expected little endian", Unsupported)
            self.fail(f"version is {version}, expected one of {VERSIONS}", Unsupported)
        return version

    def metadata(self, n_pairs: int) -> dict[str, Any]:
        self.need(n_pairs * _SMALLEST_PAIR_NBYTES, f"{n_pairs} metadata pairs")
        pairs: dict[str, Any] = {}
        for index in range(n_pairs):
            start = self.at
            key = self.text(f"metadata key {index}")
            if key in pairs:
                self.at = start
                self.fail(f"metadata key {key!r} appears twice")
            pairs[key] = self.value(key)
        return pairs

    def value(self, key: str) -> Any:
        kind = self.number("<I", f"type of {key!r}")
        if kind == GGUFValueType.STRING:
            return self.text(f"value of {key!r}")
        if kind == GGUFValueType.ARRAY:
            item_kind = self.number("<I", f"item type of {key!r}")
            length = self.count(f"length of {key!r}")
            if item_kind == GGUFValueType.STRING:
                return self.strings(key, length)
            return self.numbers(key, item_kind, length)
        return self.numbers(key, kind, 1)[0].item()

    def numbers(self, key: str, kind: int, count: int) -> npt.NDArray[Any]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            name = "array inside an array" if kind == GGUFValueType.ARRAY else f"type {kind}"
            self.fail(f"{key!r} holds {name}, expected a GGUF scalar or string type", Unsupported)
        nbytes = count * dtype.itemsize
        self.need(nbytes, f"{count} values of {key!r}")
        values = self.data[self.at : self.at + nbytes].copy()
        if kind == GGUFValueType.BOOL and np.any(values > 1):
            self.fail(f"{key!r} holds {values.max()}, expected 0 or 1 because it is boolean")
        self.at += nbytes
        values = values.view(dtype)
        values.flags.writeable = False
        return values

    def strings(self, key: str, count: int) -> list[str]:
        """Tokens may be cut in mid-character, so bytes that are not UTF-8 become surrogates."""
        self.need(count * 8, f"{count} strings of {key!r}")
        view, at, end = self.view, self.at, len(self.view)
        length_at = struct.Struct("<Q").unpack_from
        values: list[str] = []
        for _ in range(count):  # inlined: a vocabulary has 262,144 of them
            if at + 8 > end:
                self.at = at
                self.need(8, f"length of string {len(values)} of {key!r}")
            start = at + 8
            at = start + length_at(view, at)[0]
            if at > end:
                self.at = start
                self.need(at - start, f"string {len(values)} of {key!r}")
            values.append(str(view[start:at], "utf-8", "surrogateescape"))
        self.at = at
        return values

    def tensors(self, n_tensors: int, alignment: Any) -> dict[str, TensorInfo]:
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self.fail(f"general.alignment is {alignment!r}, expected a power of two")
        self.need(n_tensors * _SMALLEST_TENSOR_NBYTES, f"{n_tensors} tensor descriptions")
        found: dict[str, TensorInfo] = {}
        for index in range(n_tensors):
            start = self.at
            info = self.tensor(index)
            if info.name in found:
                self.at = start
                self.fail(f"tensor {info.name!r} appears twice")
            if info.offset % alignment:
                self.at = start
                self.fail(
                    f"{info.name!r} has offset {info.offset}, expected a multiple of "
                    f"general.alignment {alignment}"
                )
            found[info.name] = info
        data_start = -(-self.at // alignment) * alignment
        placed = {
            name: TensorInfo(name, info.format, info.shape, data_start + info.offset, info.nbytes)
            for name, info in found.items()
        }
        self.check_extents(list(placed.values()))
        return placed

    def tensor(self, index: int) -> TensorInfo:
        """One description, its offset still relative to the data section."""
        name = self.text(f"name of tensor {index}")
        n_dimensions = self.number("<I", f"dimension count of {name!r}")
        if not 1 <= n_dimensions <= MAX_DIMENSIONS:
            self.fail(f"{name!r} has {n_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        dimensions = [self.count(f"dimension {i} of {name!r}") for i in range(n_dimensions)]
        if 0 in dimensions:
            self.fail(f"{name!r} has dimensions {dimensions}, expected none to be 0")
        block_format = format_of_type(
            self.number("<I", f"type of {name!r}"), f"{self.path}: {name!r}"
        )
        offset = self.count(f"offset of {name!r}")
        row_nbytes = block_format.row_nbytes(dimensions[0], f"{self.path}: {name!r}")
        nbytes = row_nbytes * math.prod(dimensions[1:])
        return TensorInfo(name, block_format, tuple(reversed(dimensions)), offset, nbytes)

    def check_extents(self, infos: list[TensorInfo]) -> None:
        end, previous = 0, ""
        for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
            self.at = info.offset
            if info.offset < end:
                self.fail(f"tensor {info.name!r} overlaps {previous!r}, which ends at byte {end}")
            end, previous = info.offset + info.nbytes, info.name
            if end > len(self.view):
                self.fail(
                    f"tensor {info.name!r} ends at byte {end}, but the file has {len(self.view)}"
                )
