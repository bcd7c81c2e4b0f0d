"""The block formats of GGUF tensors, each as a NumPy structured dtype.

A row of a tensor is a sequence of blocks; a block holds `block_elements` values. The dtypes restate
ggml's block structs (ggml-common.h: block_q4_0 ... block_q6_K) field for field, little endian and
without padding, so every size is derived from the fields and none is typed in. How the fields make
values stands in reference/dequant.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from reference.model.errors import InputError, Unsupported

BlockDtype = np.dtype[Any]

SMALL_BLOCK = 32  # elements in a block of Q4_0 ... Q8_0 (ggml: QK4_0, QK8_0, ...)
SUPER_BLOCK = 256  # elements in a block of the K formats (ggml: QK_K)


@dataclass(frozen=True)
class BlockFormat:
    """One ggml tensor type: `ggml_type` is its number in a file, `dtype` one block's layout."""

    name: str
    ggml_type: int
    block_elements: int
    dtype: BlockDtype

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block."""
        return self.dtype.itemsize

    def row_nbytes(self, columns: int, tensor_name: str) -> int:
        """Bytes of a row of `columns` values.

        Raises InputError where the row is not a whole number of blocks; `tensor_name` is only for
        that text.
        """
        if columns % self.block_elements:
            raise InputError(
                f"row_nbytes: {tensor_name} has rows of {columns} values, expected a multiple of "
                f"{self.block_elements} because it is {self.name}"
            )
        return columns // self.block_elements * self.block_nbytes


def _f(name: str, code: str, count: int = 0) -> tuple[Any, ...]:
    """One field of a block: a scalar, or an array of `count`."""
    return (name, code, (count,)) if count else (name, code)


# Fields shared by formats: `d` scales the quants, `m` is added, `dmin` (K formats) subtracted.
_D = _f("d", "<f2")
_M = _f("m", "<f2")
_DMIN = _f("dmin", "<f2")

# name: (ggml type number, elements in a block, fields in file order)
_LAYOUTS: dict[str, tuple[int, int, list[tuple[Any, ...]]]] = {
    "F32": (0, 1, [_f("value", "<f4")]),
    "F16": (1, 1, [_f("value", "<f2")]),
    "BF16": (30, 1, [_f("bits", "<u2")]),  # the upper half of a float32
    "Q4_0": (2, SMALL_BLOCK, [_D, _f("qs", "u1", 16)]),
    "Q4_1": (3, SMALL_BLOCK, [_D, _M, _f("qs", "u1", 16)]),
    "Q5_0": (6, SMALL_BLOCK, [_D, _f("qh", "u1", 4), _f("qs", "u1", 16)]),
    "Q5_1": (7, SMALL_BLOCK, [_D, _M, _f("qh", "u1", 4), _f("qs", "u1", 16)]),
    "Q8_0": (8, SMALL_BLOCK, [_D, _f("qs", "i1", 32)]),
    "Q2_K": (10, SUPER_BLOCK, [_f("scales", "u1", 16), _f("qs", "u1", 64), _D, _DMIN]),
    "Q3_K": (
        11,
        SUPER_BLOCK,
        [_f("hmask", "u1", 32), _f("qs", "u1", 64), _f("scales", "u1", 12), _D],
    ),
    "Q4_K": (12, SUPER_BLOCK, [_D, _DMIN, _f("scales", "u1", 12), _f("qs", "u1", 128)]),
    "Q5_K": (
        13,
        SUPER_BLOCK,
        [_D, _DMIN, _f("scales", "u1", 12), _f("qh", "u1", 32), _f("qs", "u1", 128)],
    ),
    "Q6_K": (
        14,
        SUPER_BLOCK,
        [_f("ql", "u1", 128), _f("qh", "u1", 64), _f("scales", "i1", 16), _D],
    ),
}

FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        name: BlockFormat(name, number, elements, np.dtype(fields))
        for name, (number, elements, fields) in _LAYOUTS.items()
    }
)
_BY_NUMBER = {block_format.ggml_type: block_format for block_format in FORMATS.values()}


def format_of_type(ggml_type: int, tensor_name: str) -> BlockFormat:
    """The format with ggml's number `ggml_type`; Unsupported, listing what is, for any other."""
    found = _BY_NUMBER.get(ggml_type)
    if found is not None:
        return found
    known = {member.value: member.name for member in GGMLQuantizationType}
    raise Unsupported(
        f"format_of_type: {tensor_name} has tensor type {known.get(ggml_type, 'unknown')} "
        f"({ggml_type}), expected one of {', '.join(FORMATS)}"
    )
