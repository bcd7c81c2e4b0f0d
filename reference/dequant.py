"""What the bytes of a quantised tensor mean as numbers: one function per block format.

The formulas are ggml's (ggml-quants.c, dequantize_row_*), evaluated in float32 in ggml's order, so
the results equal gguf-py's bit for bit. A file's numbers ARE these float32 values by ggml's
definition; for float64 they are therefore widened afterwards, not recomputed with more digits.

Every function fills `out` (n, block_elements), float32, from n blocks of its format. Shapes in the
comments: G groups of elements that share one scale.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.model.errors import InputError, Unsupported
from reference.model.quant import BlockFormat

Blocks = npt.NDArray[Any]  # (n,), structured
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Blocks are decoded in pieces of about this many values, so that temporaries stay in the L2 cache.
CHUNK_ELEMENTS = 1 << 16


def dequantise(
    block_format: BlockFormat, raw: Bytes, dtype: npt.DTypeLike = np.float32
) -> npt.NDArray[Any]:
    """Values of `raw` (..., row_nbytes) uint8 as (..., columns) of `dtype`, float32 or float64.

    Raises InputError where rows are not whole blocks or a dtype is another, and Unsupported for a
    format without a decoder.
    """
    decode = _DECODERS.get(block_format.name)
    if decode is None:
        raise Unsupported(
            f"dequantise: format is {block_format.name}, expected one of {', '.join(_DECODERS)}"
        )
    kind = np.dtype(dtype)
    if kind not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise InputError(f"dequantise: dtype is {kind}, expected float32 or float64")
    if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] % block_format.block_nbytes:
        raise InputError(
            f"dequantise: raw is {raw.dtype} of shape {raw.shape}, expected uint8 rows of a "
            f"multiple of {block_format.block_nbytes} bytes because the format is "
            f"{block_format.name}"
        )
    columns = raw.shape[-1] // block_format.block_nbytes * block_format.block_elements
    blocks = np.ascontiguousarray(raw).reshape(-1).view(block_format.dtype)
    out = np.empty((blocks.size, block_format.block_elements), dtype=kind)
    step = max(1, CHUNK_ELEMENTS // block_format.block_elements)
    # A scale may be Inf or NaN in a damaged file: the result then says so by itself.
    with np.errstate(invalid="ignore", over="ignore"):
        if kind == np.float32:
            for start in range(0, blocks.size, step):
                decode(blocks[start : start + step], out[start : start + step])
        else:
            piece = np.empty((min(step, blocks.size), block_format.block_elements), np.float32)
            for start in range(0, blocks.size, step):
                part = blocks[start : start + step]
                decode(part, piece[: part.size])
                out[start : start + step] = piece[: part.size]
    return out.reshape(*raw.shape[:-1], columns)


def magnitudes(block_format: BlockFormat, raw: Bytes) -> npt.NDArray[np.float64]:
    """|d * scale * quant| + |offset| of every value of `raw` (..., row_nbytes), as dequantise.

    What rounding is relative to where a sum takes both terms of a value apart: of Q4_K and Q5_K the
    offset is dmin * min, of Q6_K 32 * d * scale. Of other formats the value's own magnitude.
    """
    magnitude: npt.NDArray[np.float64]
    if block_format.name not in ("Q4_K", "Q5_K", "Q6_K"):
        magnitude = np.abs(dequantise(block_format, raw, np.float64))
        return magnitude
    blocks = np.array(raw).reshape(-1).view(block_format.dtype)
    blocks["d"] = np.abs(blocks["d"])
    if block_format.name == "Q6_K":
        quants = _q6_quants(blocks).reshape(-1, 16, 16).astype(np.float64) + 32
        scales = np.abs(blocks["scales"].astype(np.float64)) * blocks["d"][:, None]
        terms: npt.NDArray[np.float64] = quants * scales[:, :, None]
        return terms.reshape(*raw.shape[:-1], -1)
    blocks["dmin"] = -np.abs(blocks["dmin"])
    flipped = blocks.view(np.uint8).reshape(raw.shape)
    magnitude = dequantise(block_format, flipped, np.float64)
    return magnitude


def _column(field: npt.NDArray[Any]) -> Floats:
    """A scalar field of every block as (n, 1) float32."""
    return field.astype(np.float32)[:, None]


def _nibbles(qs: Bytes, span: int) -> Bytes:
    """4-bit fields as (n, groups, 2, span): `span` low nibbles, then the same bytes' high ones."""
    groups = qs.reshape(len(qs), -1, span)
    out = np.empty((*groups.shape[:2], 2, span), dtype=np.uint8)
    np.bitwise_and(groups, 0x0F, out=out[:, :, 0])
    np.right_shift(groups, 4, out=out[:, :, 1])
    return out


def _fields(packed: Bytes, span: int, bits: int) -> Bytes:
    """`bits`-wide fields, (n, groups, 8 / bits, span): field f of `span` bytes, lowest f first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    groups = packed.reshape(len(packed), -1, 1, span)
    return (groups >> shifts) & np.uint8((1 << bits) - 1)


def k_scales_and_mins(scales: Bytes) -> tuple[Bytes, Bytes]:
    """Unpacks the 12 bytes of Q4_K and Q5_K into 8 scales and 8 mins of 6 bits, each (n, 8).

    Bytes 0-3 hold scales 0-3 in their low 6 bits, bytes 4-7 mins 0-3. Bytes 8-11 hold the low
    4 bits of scales 4-7 (low nibble) and of mins 4-7 (high nibble), whose upper 2 bits are the top
    bits of bytes 0-3 and 4-7 (ggml: get_scale_min_k4).
    """
    first, second, third = scales[:, 0:4], scales[:, 4:8], scales[:, 8:12]
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minimum = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scale, minimum


def _f32(blocks: Blocks, out: Floats) -> None:
    out[:, 0] = blocks["value"]


def _f16(blocks: Blocks, out: Floats) -> None:
    out[:, 0] = blocks["value"]


def _bf16(blocks: Blocks, out: Floats) -> None:
    np.left_shift(blocks["bits"], 16, out=out[:, 0].view(np.uint32), dtype=np.uint32)


def _q4_0(blocks: Blocks, out: Floats) -> None:
    out[...] = _nibbles(blocks["qs"], 16).reshape(out.shape).view(np.int8) - np.int8(8)
    out *= _column(blocks["d"])


def _q4_1(blocks: Blocks, out: Floats) -> None:
    out[...] = _nibbles(blocks["qs"], 16).reshape(out.shape)
    out *= _column(blocks["d"])
    out += _column(blocks["m"])


def _q5_quants(blocks: Blocks) -> Bytes:
    """5-bit quants (n, 32); bit i of the 32-bit `qh` is the top bit of element i."""
    quants = _nibbles(blocks["qs"], 16).reshape(-1, 32)
    quants |= np.unpackbits(blocks["qh"], axis=-1, bitorder="little") << np.uint8(4)
    return quants


def _q5_0(blocks: Blocks, out: Floats) -> None:
    out[...] = _q5_quants(blocks).view(np.int8) - np.int8(16)
    out *= _column(blocks["d"])


def _q5_1(blocks: Blocks, out: Floats) -> None:
    out[...] = _q5_quants(blocks)
    out *= _column(blocks["d"])
    out += _column(blocks["m"])


def _q8_0(blocks: Blocks, out: Floats) -> None:
    out[...] = blocks["qs"]
    out *= _column(blocks["d"])


def _q2_k(blocks: Blocks, out: Floats) -> None:
    scale = _column(blocks["d"]) * (blocks["scales"] & 0x0F).astype(np.float32)
    minimum = _column(blocks["dmin"]) * (blocks["scales"] >> 4).astype(np.float32)
    groups = out.reshape(-1, 16, 16)  # (n, G, 16)
    groups[...] = _fields(blocks["qs"], 32, 2).reshape(groups.shape)
    groups *= scale[:, :, None]
    groups -= minimum[:, :, None]


def _q3_k(blocks: Blocks, out: Floats) -> None:
    # 16 scales of 6 bits, biased by 32: 8 bytes of low nibbles, then 4 bytes of 2-bit tops.
    low = _nibbles(blocks["scales"][:, :8], 8).reshape(-1, 16)
    top = _fields(blocks["scales"][:, 8:], 4, 2).reshape(-1, 16)
    scale = ((low | (top << np.uint8(4))).view(np.int8) - np.int8(32)).astype(np.float32)
    scale *= _column(blocks["d"])
    # The third bit is stored inverted: a cleared mask bit subtracts 4.
    quants = _fields(blocks["qs"], 32, 2).reshape(-1, 256).view(np.int8)
    clear = _fields(blocks["hmask"], 32, 1).reshape(-1, 256) ^ np.uint8(1)
    groups = out.reshape(-1, 16, 16)  # (n, G, 16)
    groups[...] = (quants - (clear << np.uint8(2)).view(np.int8)).reshape(groups.shape)
    groups *= scale[:, :, None]


def _scale_and_offset(blocks: Blocks, out: Floats) -> None:
    """Q4_K and Q5_K: d * scale * quant - dmin * min, one scale and min for 32 elements."""
    scale, minimum = k_scales_and_mins(blocks["scales"])
    groups = out.reshape(-1, 8, 32)  # (n, G, 32)
    groups *= (_column(blocks["d"]) * scale.astype(np.float32))[:, :, None]
    groups -= (_column(blocks["dmin"]) * minimum.astype(np.float32))[:, :, None]


def _q4_k(blocks: Blocks, out: Floats) -> None:
    out[...] = _nibbles(blocks["qs"], 32).reshape(out.shape)
    _scale_and_offset(blocks, out)


def _q5_k(blocks: Blocks, out: Floats) -> None:
    quants = _nibbles(blocks["qs"], 32).reshape(out.shape)
    quants |= _fields(blocks["qh"], 32, 1).reshape(out.shape) << np.uint8(4)
    out[...] = quants
    _scale_and_offset(blocks, out)


def _q6_quants(blocks: Blocks) -> Bytes:
    """6-bit quants (n, 256), 32 above their value."""
    quants = _nibbles(blocks["ql"], 64).reshape(-1, 256)
    quants |= _fields(blocks["qh"], 32, 2).reshape(-1, 256) << np.uint8(4)
    return quants


def _q6_k(blocks: Blocks, out: Floats) -> None:
    quants = _q6_quants(blocks)
    groups = out.reshape(-1, 16, 16)  # (n, G, 16)
    groups[...] = (quants.view(np.int8) - np.int8(32)).reshape(groups.shape)
    groups *= (_column(blocks["d"]) * blocks["scales"].astype(np.float32))[:, :, None]


_DECODERS: Mapping[str, Callable[[Blocks, Floats], None]] = MappingProxyType(
    {
        "F32": _f32,
        "F16": _f16,
        "BF16": _bf16,
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
