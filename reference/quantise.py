"""Makes the bytes of a quantised tensor from float32 values, for fixtures and tests.

F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are gguf-py's quantisers. Q4_K, Q5_K and Q6_K, which
gguf-py cannot write, follow the plain form of ggml's reference (ggml-quants.c, quantize_row_*_ref):
scales come from each group's range, without ggml's search for a smaller error. Any reader of the
format reads the result; its bytes are not those that llama.cpp would choose.
"""

import gguf
import numpy as np
import numpy.typing as npt

from reference.model.errors import InputError, Unsupported
from reference.model.quant import BlockFormat

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_BY_GGUF = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
_K_MAXIMUM = {"Q4_K": 15, "Q5_K": 31}  # largest quant
QUANTISABLE = (*_BY_GGUF, *_K_MAXIMUM, "Q6_K")


def quantise(block_format: BlockFormat, values: Floats) -> Bytes:
    """Quantises `values` (..., columns) float32 to (..., row_nbytes) uint8.

    Raises Unsupported for a format without a quantiser, and InputError where rows are not whole
    blocks, a value is not finite or a dtype is another.
    """
    name = block_format.name
    if name not in QUANTISABLE:
        raise Unsupported(f"quantise: format is {name}, expected one of {', '.join(QUANTISABLE)}")
    if values.dtype != np.float32 or values.ndim == 0:
        raise InputError(
            f"quantise: values are {values.dtype} of shape {values.shape}, expected float32 rows"
        )
    if not np.isfinite(values).all():
        raise InputError("quantise: a value is not finite, expected finite values to scale")
    row_nbytes = block_format.row_nbytes(values.shape[-1], "values")
    if name in _BY_GGUF:
        kind = gguf.GGMLQuantizationType[name]
        rows = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
        packed = np.ascontiguousarray(gguf.quants.quantize(rows, kind)).view(np.uint8)
    else:
        groups = np.ascontiguousarray(values).reshape(-1, block_format.block_elements)
        blocks = np.zeros(len(groups), dtype=block_format.dtype)
        if name == "Q6_K":
            _fill_q6_k(blocks, groups)
        else:
            _fill_scale_and_offset(blocks, groups, _K_MAXIMUM[name])
        packed = blocks.view(np.uint8)
    return packed.reshape(*values.shape[:-1], row_nbytes)


def _over(values: Floats, divisor: Floats) -> Floats:
    """values / divisor, and 0 where the divisor is 0: an empty range has no quants."""
    return np.divide(values, divisor, out=np.zeros_like(values), where=divisor != 0)


def _fill_scale_and_offset(blocks: npt.NDArray[np.void], values: Floats, maximum: int) -> None:
    """Q4_K and Q5_K: value = d * scale * quant - dmin * min, 8 groups of 32 in a block.

    A group's offset is at least 0 (`min` is unsigned), so a positive group starts at 0. Scales and
    mins are rounded to 6 bits, then the quants are chosen for the rounded ones.
    """
    groups = values.reshape(-1, 8, 32)
    offset = -np.minimum(groups.min(axis=2), np.float32(0))  # (n, 8), >= 0
    step = (np.maximum(groups.max(axis=2), np.float32(0)) + offset) / np.float32(maximum)
    scale, blocks["d"] = _six_bits(step)
    minimum, blocks["dmin"] = _six_bits(offset)
    blocks["scales"] = pack_k_scales_and_mins(scale, minimum)

    step = blocks["d"].astype(np.float32)[:, None] * scale
    offset = blocks["dmin"].astype(np.float32)[:, None] * minimum
    shifted = groups + offset[:, :, None]
    quants = np.rint(_over(shifted, np.broadcast_to(step[:, :, None], shifted.shape)))
    quants = quants.clip(0, maximum).astype(np.uint8)  # (n, 8, 32)
    low = quants & 15
    blocks["qs"] = (low[:, 0::2] | (low[:, 1::2] << 4)).reshape(-1, 128)
    if maximum > 15:  # bit g of qh[l] is the top bit of element l of group g
        blocks["qh"] = np.packbits(quants >> 4, axis=1, bitorder="little")[:, 0]


def _six_bits(wanted: Floats) -> tuple[Bytes, npt.NDArray[np.float16]]:
    """Factors 0 to 63 (n, 8) and the f16 unit (n,) whose products come near `wanted` >= 0."""
    unit = (wanted.max(axis=1) / np.float32(63)).astype(np.float16)
    factors = np.rint(
        _over(wanted, np.broadcast_to(unit.astype(np.float32)[:, None], wanted.shape))
    )
    return factors.clip(0, 63).astype(np.uint8), unit


def pack_k_scales_and_mins(scale: Bytes, minimum: Bytes) -> Bytes:
    """The inverse of dequant.k_scales_and_mins: two (n, 8) of 6 bits into (n, 12)."""
    first = (scale[:, :4] & 63) | (scale[:, 4:] >> 4 << 6)
    second = (minimum[:, :4] & 63) | (minimum[:, 4:] >> 4 << 6)
    third = (scale[:, 4:] & 15) | (minimum[:, 4:] << 4)
    return np.concatenate([first, second, third], axis=1)


def _fill_q6_k(blocks: npt.NDArray[np.void], values: Floats) -> None:
    """Q6_K: value = d * scale * (quant - 32), 16 groups of 16 in a block, signed 8-bit scales.

    As in ggml, a group's largest magnitude becomes -32 (the longer side), so its scale carries the
    opposite sign.
    """
    groups = values.reshape(-1, 16, 16)
    largest = np.abs(groups).argmax(axis=2, keepdims=True)
    step = np.take_along_axis(groups, largest, axis=2)[:, :, 0] / np.float32(-32)  # (n, 16)
    strongest = np.abs(step).argmax(axis=1, keepdims=True)
    unit = (np.take_along_axis(step, strongest, axis=1)[:, 0] / np.float32(-128)).astype(np.float16)
    wide = np.broadcast_to(unit.astype(np.float32)[:, None], step.shape)
    scale = np.rint(_over(step, wide)).clip(-128, 127)
    blocks["d"], blocks["scales"] = unit, scale.astype(np.int8)

    wide = np.broadcast_to((wide * scale)[:, :, None], groups.shape)
    quants = (np.rint(_over(groups, wide)).clip(-32, 31) + 32).astype(np.uint8)
    halves = quants.reshape(-1, 2, 4, 32)  # 128 elements: quarters of 32
    low, high = halves & 15, halves >> 4
    blocks["ql"] = (low[:, :, :2] | (low[:, :, 2:] << 4)).reshape(-1, 128)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    blocks["qh"] = np.bitwise_or.reduce(high << shifts, axis=2).reshape(-1, 64)
