"""Block formats: sizes and decoders against gguf-py, quantisers against their own resolution."""

import zlib

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from reference.dequant import CHUNK_ELEMENTS, dequantise, k_scales_and_mins
from reference.model.errors import InputError, Unsupported
from reference.model.quant import FORMATS, BlockFormat, format_of_type
from reference.quantise import QUANTISABLE, pack_k_scales_and_mins, quantise

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)
EVERY_QUANTISABLE = pytest.mark.parametrize("name", QUANTISABLE)


def _rng(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))


def _blocks(block_format: BlockFormat, shape: tuple[int, ...], seed: int) -> Bytes:
    """Random bytes, shape (..., blocks in a row): every field of a block, scales too, is random."""
    rng = _rng(block_format.name, seed)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * block_format.block_nbytes), np.uint8)


def _same_bits(got: npt.NDArray[np.floating], want: npt.NDArray[np.floating]) -> bool:
    """Equal bit for bit, and not empty. Random scales are NaN or Inf here and there."""
    return bool(
        got.size > 0
        and got.shape == want.shape
        and got.dtype == want.dtype
        and got.tobytes() == want.tobytes()
    )


def _widened(values: Floats) -> npt.NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # signalling NaN
        return values.astype(np.float64)


def _oracle(block_format: BlockFormat, raw: Bytes) -> Floats:
    with np.errstate(all="ignore"):
        values: Floats = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[block_format.name])
    return values


@EVERY_FORMAT
def test_numbers_and_sizes_are_ggmls(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block_format = FORMATS[name]
    assert block_format.ggml_type == kind
    sizes = (block_format.block_elements, block_format.block_nbytes)
    assert sizes == gguf.GGML_QUANT_SIZES[kind]
    assert format_of_type(kind, "blk.0.attn_q.weight") is block_format


def test_other_types_are_refused_by_name() -> None:
    for kind, name in ((gguf.GGMLQuantizationType.IQ4_XS, "IQ4_XS"), (4, "unknown"), (9999, "unk")):
        with pytest.raises(Unsupported, match=rf"output\.weight.*{name}.*Q4_K"):
            format_of_type(kind, "output.weight")


@EVERY_FORMAT
def test_row_bytes(name: str) -> None:
    block_format = FORMATS[name]
    blocks = 3
    columns = blocks * block_format.block_elements
    assert block_format.row_nbytes(columns, "t") == blocks * block_format.block_nbytes
    if block_format.block_elements > 1:
        for bad in (columns - 1, columns + 1, block_format.block_elements // 2):
            with pytest.raises(InputError, match=f"ffn_up has rows of {bad} .*{name}"):
                block_format.row_nbytes(bad, "ffn_up")


@EVERY_FORMAT
def test_decoder_equals_gguf_py(name: str) -> None:
    block_format = FORMATS[name]
    raw = _blocks(block_format, (64, 8), seed=1)
    assert _same_bits(dequantise(block_format, raw), _oracle(block_format, raw))


@EVERY_FORMAT
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_decoder_at_its_chunk_length(name: str, beyond: int) -> None:
    """Rows one block shorter than what is decoded at once, equal and one longer; both dtypes."""
    block_format = FORMATS[name]
    n_blocks = CHUNK_ELEMENTS // block_format.block_elements + beyond
    raw = _blocks(block_format, (n_blocks,), seed=2)
    want = _oracle(block_format, raw[None])[0]
    assert _same_bits(dequantise(block_format, raw), want)
    assert _same_bits(dequantise(block_format, raw, np.float64), _widened(want))


@EVERY_FORMAT
def test_decoder_takes_any_layout(name: str) -> None:
    """Three dimensions, and rows that are not contiguous in memory."""
    block_format = FORMATS[name]
    raw = _blocks(block_format, (4, 6, 2), seed=3)
    want = _oracle(block_format, raw)
    assert _same_bits(dequantise(block_format, raw), want)
    assert _same_bits(dequantise(block_format, raw[::2, 1::3]), want[::2, 1::3])
    raw.flags.writeable = False
    assert _same_bits(dequantise(block_format, raw[1]), want[1])
    assert dequantise(block_format, raw[:0]).shape == (0, *want.shape[1:])


@EVERY_FORMAT
def test_decoder_refuses_wrong_input(name: str) -> None:
    block_format = FORMATS[name]
    raw = _blocks(block_format, (2, 2), seed=4)
    with pytest.raises(InputError, match="uint8"):
        dequantise(block_format, raw[:, :-1])
    with pytest.raises(InputError, match="uint8"):
        dequantise(block_format, raw.view(np.int8))
    with pytest.raises(InputError, match="float16"):
        dequantise(block_format, raw, np.float16)


def test_q4_k_by_hand() -> None:
    """One block written out from the format's text: in group 5 the scale is 37, the min 50."""
    block = np.zeros(1, dtype=FORMATS["Q4_K"].dtype)
    block["d"], block["dmin"] = 0.5, 0.25
    block["scales"][0, 8 + 1] = (37 & 15) | (50 & 15) << 4
    block["scales"][0, 1] = (37 >> 4) << 6
    block["scales"][0, 5] = (50 >> 4) << 6
    block["qs"][0, 64 + 3] = 11 << 4  # group 5 is the high nibbles of the third 32 bytes
    values = dequantise(FORMATS["Q4_K"], block.view(np.uint8))
    group = values.reshape(8, 32)[5]
    assert group[3] == 0.5 * 37 * 11 - 0.25 * 50
    assert group[4] == -0.25 * 50
    assert np.count_nonzero(values) == 32


def test_k_scales_pack_and_unpack() -> None:
    rng = _rng("scales", 5)
    scale, minimum = rng.integers(0, 64, (2, 4096, 8), np.uint8)
    got = k_scales_and_mins(pack_k_scales_and_mins(scale, minimum))
    assert np.array_equal(got[0], scale)
    assert np.array_equal(got[1], minimum)


# (elements that share a scale, number of steps that span the range, range is symmetric about 0)
_RESOLUTION = {
    "Q4_0": (32, 16, True),
    "Q4_1": (32, 15, False),
    "Q5_0": (32, 32, True),
    "Q5_1": (32, 31, False),
    "Q8_0": (32, 254, True),
    "Q4_K": (32, 15, False),
    "Q5_K": (32, 31, False),
    "Q6_K": (16, 64, True),
}
_SIGNIFICAND_BITS = {"F32": 24, "F16": 11, "BF16": 8}
_SMALLEST = {"F32": 0.0, "F16": 2.0**-24, "BF16": 0.0}  # F16 is subnormal within what is tested


@EVERY_QUANTISABLE
def test_round_trip_error_is_that_of_the_bits(name: str) -> None:
    """RMS error below half a step of the group's range (a uniform error has 0.29 of a step).

    For the floating formats: no value off by more than half a unit in its last place.
    """
    values = _rng(name, 6).standard_normal((64, 1024)).astype(np.float32)
    raw = quantise(FORMATS[name], values)
    assert raw.shape == (64, FORMATS[name].row_nbytes(1024, "values"))
    error = dequantise(FORMATS[name], raw).astype(np.float64) - values
    if name in _SIGNIFICAND_BITS:
        half_unit = np.abs(values) * 2.0 ** -_SIGNIFICAND_BITS[name]
        assert np.all(np.abs(error) <= np.maximum(half_unit, _SMALLEST[name] / 2))
        return
    size, steps, symmetric = _RESOLUTION[name]
    groups = values.reshape(-1, size)
    high, low = groups.max(axis=1), groups.min(axis=1)
    span = 2 * np.maximum(high, -low) if symmetric else high - low
    step = np.sqrt(np.mean((span / steps) ** 2))
    assert np.sqrt(np.mean(error**2)) < step / 2


def _representable(name: str, n_blocks: int) -> Floats:
    """Values (n_blocks, elements) that a format holds exactly, by its formula and nothing else.

    Each group uses its extreme quants, each block its largest scale and min, and units are powers
    of two, so that a quantiser which looks at ranges finds the very same numbers again.
    """
    rng = _rng(name, 7)
    unit = 2.0 ** rng.integers(-8, 3, (n_blocks, 1, 1))
    if name in _SIGNIFICAND_BITS:
        bits = _SIGNIFICAND_BITS[name]
        whole = rng.integers(-(2**bits) + 1, 2**bits, (n_blocks, 1))
        return (whole * unit[:, 0]).astype(np.float32)
    size, steps, symmetric = _RESOLUTION[name]
    if name == "Q8_0":
        quants = rng.integers(-127, 128, (n_blocks, 1, size))
        quants[:, :, 0] = 127
    elif symmetric:
        half = steps // 2
        quants = rng.integers(-half + 1, half, (n_blocks, 256 // size, size))
        quants[:, :, 5] = -half
        quants = quants[:, :1] if name != "Q6_K" else quants
    else:
        quants = rng.integers(0, steps + 1, (n_blocks, 8, size))
        quants[:, :, 5], quants[:, :, 6] = 0, steps
        quants = quants[:, :1] if not name.endswith("_K") else quants
    groups = quants.shape[1]
    scale, offset = np.ones((2, n_blocks, groups, 1))
    if name == "Q6_K":
        scale = rng.integers(1, 128, (n_blocks, groups, 1)) * rng.choice([-1, 1], scale.shape)
        scale[:, 3] = -128
    elif name.endswith("_K"):
        scale, offset = rng.integers(1, 64, (2, n_blocks, groups, 1))
        scale[:, 3], offset[:, 3] = 63, 63
        # 0 must lie within every group's range, as the format's unsigned min assumes.
        offset = np.minimum(offset, scale * steps)
    lowest = 0.0 if symmetric else offset * unit
    return (unit * scale * quants - lowest).reshape(n_blocks, -1).astype(np.float32)


@EVERY_QUANTISABLE
def test_representable_values_survive(name: str) -> None:
    values = _representable(name, 256)
    assert values.shape == (256, FORMATS[name].block_elements)
    assert np.unique(values).size > 16
    got = dequantise(FORMATS[name], quantise(FORMATS[name], values))
    assert np.array_equal(got, values)


@EVERY_QUANTISABLE
def test_constant_and_zero_rows(name: str) -> None:
    """No division by an empty range: zeros stay zeros, a constant stays within half a step."""
    block_format = FORMATS[name]
    for value in (0.0, 3.0, -3.0):
        values = np.full((1, 2 * block_format.block_elements), value, dtype=np.float32)
        got = dequantise(block_format, quantise(block_format, values))
        steps = _RESOLUTION.get(name, (1, 2**8, True))[1]
        assert np.all(np.abs(got - values) <= abs(value) / steps)


@EVERY_QUANTISABLE
def test_quantiser_refuses_wrong_input(name: str) -> None:
    block_format = FORMATS[name]
    values = np.zeros((2, block_format.block_elements), dtype=np.float32)
    for bad in (np.nan, np.inf):
        values[1, -1] = bad
        with pytest.raises(InputError, match="not finite"):
            quantise(block_format, values)
    with pytest.raises(InputError, match="float64"):
        quantise(block_format, values.astype(np.float64))
    if block_format.block_elements > 1:
        with pytest.raises(InputError, match="multiple"):
            quantise(block_format, np.zeros((2, 33), dtype=np.float32))


def test_formats_without_a_quantiser_are_refused() -> None:
    missing = set(FORMATS) - set(QUANTISABLE)
    assert missing == {"Q2_K", "Q3_K"}
    for name in missing:
        with pytest.raises(Unsupported, match=f"{name}.*Q4_K"):
            quantise(FORMATS[name], np.zeros((1, 256), dtype=np.float32))
