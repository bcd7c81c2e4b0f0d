"""Path matrix with few columns: weights of K formats as integers, activations with their sums."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_hip import half_columns, matrix, packed, tuning
from backend_hip.device import Device
from backend_hip.engine import Engine
from backend_hip.registry import PACKED_FORMATS, PACKED_MOST, PACKED_TILE, REGISTRY, Key
from backend_hip.requirements import requirements
from fixtures.registry import resolve_model
from reference.dequant import dequantise, magnitudes
from reference.half import half_rows
from reference.model import load_model
from reference.model.quant import FORMATS
from reference.model.weights import Tensor
from reference.quantise import quantise
from suites.correctness.lab import Lab
from suites.harness.bounds import linear
from suites.harness.compare import compare

BLOCK = half_columns.SUPERBLOCK
SIDE = 16  # rows of a wave
ROWS = packed.ROWS
PARTS = tuning.shape_of("cpu", "matvec_batched_packed")["PARTS"]


def _random_blocks(form: str, rows: int, columns: int, seed: int) -> Tensor:
    """Every bit pattern of scales and quants, with finite d and dmin."""
    generator = np.random.default_rng([seed, rows, columns])
    block_format = FORMATS[form]
    count = rows * columns // block_format.block_elements
    raw = generator.integers(0, 256, count * block_format.block_nbytes, dtype=np.uint8)
    blocks = raw.view(block_format.dtype)
    for name in ("d", "dmin"):
        if name in (block_format.dtype.names or ()):
            blocks[name] = generator.standard_normal(count).astype(np.float16)
    return Tensor("test weight", block_format, (rows, columns), raw.reshape(rows, -1))


def _activations(count: int, columns: int, seed: int = 5) -> NDArray[np.float32]:
    """Rows with a few channels far larger than the rest, and sub-blocks far from mean zero."""
    generator = np.random.default_rng([seed, count, columns])
    x = generator.standard_normal((count, columns)).astype(np.float32)
    x[:, :: columns // 3] *= 50
    x[:, : columns // 4] += 3
    return x


def _keys(*forms: str) -> list[Key]:
    return [("to_packed", "", "any"), ("sum_parts", "", "any"), packed.product_key(forms)]


def _multiply(device: Device, tensor: Tensor, x: NDArray[np.float32]) -> NDArray[np.float32]:
    (rows, columns), form = tensor.shape, tensor.format.name
    with Lab(device) as lab:
        flow = lab.flow(_keys(form), {}, tokens=range(len(x)), longest=columns)
        assert flow.halves is not None
        weight = lab.matrix(form, tensor.shape, tensor.raw)
        y = lab.output(len(x), rows)
        values = lab.values(x)
        matrix.multiply(flow.kernels, flow.halves, values.pointer, weight, y.pointer, len(x))
        return lab.read(y)


def _check(device: Device, tensor: Tensor, x: NDArray[np.float32]) -> None:
    result = compare(_multiply(device, tensor, x), *linear(x, tensor, "matrix", weights="exact"))
    assert result.elements == len(x) * tensor.shape[0]
    assert result.ok, result.reason()


COUNTS = (*range(1, PACKED_TILE + 2), PACKED_MOST - 1, PACKED_MOST)


@pytest.mark.parametrize("form", PACKED_FORMATS)
@pytest.mark.parametrize("count", COUNTS)
def test_every_number_of_columns(form: str, count: int, device: Device) -> None:
    _check(device, _random_blocks(form, SIDE + 1, 2 * BLOCK, 1), _activations(count, 2 * BLOCK))


@pytest.mark.parametrize("form", PACKED_FORMATS)
@pytest.mark.parametrize("rows", [1, SIDE - 1, SIDE, SIDE + 1, ROWS - 1, ROWS, ROWS + 1])
def test_every_edge_of_rows(form: str, rows: int, device: Device) -> None:
    _check(device, _random_blocks(form, rows, BLOCK, 2), _activations(5, BLOCK))


@pytest.mark.parametrize("form", PACKED_FORMATS)
@pytest.mark.parametrize("superblocks", [1, 2, 3, PARTS - 1, PARTS, PARTS + 1, 2 * PARTS + 1, 17])
def test_parts_share_every_length(form: str, superblocks: int, device: Device) -> None:
    columns = superblocks * BLOCK
    _check(device, _random_blocks(form, SIDE, columns, 3), _activations(3, columns))


@dataclass(frozen=True)
class SharedCase:
    """Matrices that share a launch: their formats, and their rows."""

    formats: tuple[str, ...]
    rows: tuple[int, ...]
    superblocks: int = 3

    @property
    def id(self) -> str:
        return "-".join(
            f"{form}x{rows}" for form, rows in zip(self.formats, self.rows, strict=True)
        )


MIXES = [key.variant.split(",") for key in REGISTRY if key.op == "matvec_batched_packed"]
SHARED = (
    *(SharedCase((a, a, b), (SIDE + 1, ROWS + 1, 5)) for a, b in MIXES),
    *(SharedCase((a, b), (ROWS, 2 * ROWS - 1)) for a, b in MIXES),
    SharedCase(("Q4_K", "Q4_K", "Q6_K"), (ROWS, ROWS, ROWS), 1),
    SharedCase(("Q4_K", "Q4_K", "Q6_K"), (7 * ROWS, 1, 1)),
)


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.id)
def test_matrices_that_share_a_launch_are_multiplied_as_if_alone(
    case: SharedCase, device: Device
) -> None:
    columns, count = case.superblocks * BLOCK, 5
    tensors = [
        _random_blocks(form, rows, columns, 20 + i)
        for i, (form, rows) in enumerate(zip(case.formats, case.rows, strict=True))
    ]
    x = _activations(count, columns)
    with Lab(device) as lab:
        keys, widest = _keys(*case.formats), sum(case.rows)
        flow = lab.flow(keys, {}, tokens=range(count), longest=columns, widest=widest)
        held, kernels = flow.halves, flow.kernels
        assert held is not None
        weights = [lab.matrix(t.format.name, t.shape, t.raw) for t in tensors]
        packed.pack(kernels, held, lab.values(x).pointer, count, columns)
        parts = packed.multiply(kernels, held, weights, count)
        assert parts == packed.parts_of_k(device.architecture, case.rows, columns)
        found = held.parts.download((parts, count, sum(case.rows)), np.float32)
    got = found[0]
    for part in found[1:]:
        got = got + part
    first = 0
    for tensor in tensors:
        last = first + tensor.shape[0]
        result = compare(got[:, first:last], *linear(x, tensor, "matrix", weights="exact"))
        assert result.ok, f"{tensor.format.name}: {result.reason()}"
        assert result.elements == count * tensor.shape[0]
        first = last


@pytest.mark.parametrize("form", PACKED_FORMATS)
def test_every_weight_lands_where_it_belongs(form: str, device: Device) -> None:
    """One-hot activations give single weights: any byte, nibble or scale of another shows."""
    tensor = _random_blocks(form, SIDE, BLOCK, 4)
    for first in range(0, BLOCK, PACKED_TILE):
        x = np.zeros((PACKED_TILE, BLOCK), dtype=np.float32)
        x[np.arange(PACKED_TILE), first + np.arange(PACKED_TILE)] = 1
        _check(device, tensor, x)


@pytest.mark.parametrize("form", PACKED_FORMATS)
@pytest.mark.parametrize("fill", [0x00, 0x80, 0xFF, 0x7F])
def test_extreme_scales_and_quants(form: str, fill: int, device: Device) -> None:
    """All bytes alike: the largest scales, minimums and quants of either sign are exact."""
    tensor = _random_blocks(form, SIDE, BLOCK, 5)
    blocks = tensor.raw.reshape(-1).view(tensor.format.dtype)
    for name in tensor.format.dtype.names or ():
        if name not in ("d", "dmin"):
            blocks[name].view(np.uint8)[...] = fill
    _check(device, tensor, _activations(PACKED_TILE, BLOCK))


def test_large_minimums_and_outliers(device: Device) -> None:
    """An offset far above its quants, met by activations that hardly cancel it."""
    tensor = _random_blocks("Q4_K", SIDE, 2 * BLOCK, 6)
    tensor.raw.reshape(-1).view(tensor.format.dtype)["dmin"] = 1000
    x = _activations(PACKED_TILE, 2 * BLOCK)
    x[:, 7] = 1e6
    x[1] *= np.float32(1e-30)
    x[2] = 0
    _check(device, tensor, x)


@pytest.mark.parametrize("form", PACKED_FORMATS)
def test_a_row_that_is_not_finite_stays_so(form: str, device: Device) -> None:
    x = _activations(4, BLOCK)
    x[0, 5], x[2, 7], x[3, 9] = np.nan, np.inf, -np.inf
    got = _multiply(device, _random_blocks(form, SIDE, BLOCK, 7), x)
    assert not np.isfinite(got[[0, 2, 3]]).any()
    assert np.isfinite(got[1]).all()


def test_what_is_not_packed_is_refused(device: Device) -> None:
    """More columns than fit, and rows of another number or length than were packed last."""
    tensor = _random_blocks("Q4_K", SIDE, BLOCK, 8)
    with Lab(device) as lab:
        count = PACKED_MOST + 1
        flow = lab.flow(_keys("Q4_K"), {}, tokens=range(count), longest=BLOCK)
        weight = lab.matrix("Q4_K", tensor.shape, tensor.raw)
        held, x = flow.halves, lab.values(_activations(count, BLOCK)).pointer
        assert held is not None
        with pytest.raises(ValueError, match="are None, expected 3 packed rows of 256"):
            packed.multiply(flow.kernels, held, [weight], 3)
        packed.pack(flow.kernels, held, x, 2, BLOCK)
        with pytest.raises(ValueError, match="expected 3 packed rows of 256"):
            packed.multiply(flow.kernels, held, [weight], 3)
        with pytest.raises(ValueError, match="count is 33, expected at most 32"):
            packed.pack(flow.kernels, held, x, count, BLOCK)


@pytest.mark.parametrize("form", PACKED_FORMATS)
def test_magnitudes_are_the_terms_of_each_value(form: str) -> None:
    """No value exceeds its terms, which reach beyond it by the offset."""
    weights = np.random.default_rng(9).standard_normal((3, 2 * BLOCK)).astype(np.float32)
    raw = quantise(FORMATS[form], weights)
    values, terms = dequantise(FORMATS[form], raw, np.float64), magnitudes(FORMATS[form], raw)
    assert terms.shape == values.shape
    assert (terms >= np.abs(values)).all()
    assert (terms > np.abs(values)).any()


def test_either_rounding_of_weights_is_accepted_and_no_other() -> None:
    tensor = _random_blocks("Q6_K", SIDE, BLOCK, 10)
    x = half_rows(_activations(3, BLOCK))
    both = linear(x, tensor, "matrix")
    for weights in ("exact", "halves"):
        want, _ = linear(x, tensor, "matrix", weights=weights)
        assert compare(want, *both).ok
        beyond = want + 2 * (want - both[0]) + np.sign(want - both[0]) * both[1]
        assert not compare(beyond, *both).ok


def test_decode_steps_of_few_sequences_follow_the_table(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of several below the threshold ask for kparallel's kernels, and no others do."""
    model = load_model(resolve_model("tiny-llama-q4_k"))
    threshold = 4
    monkeypatch.setattr(tuning, "_MATRIX_FROM", dict.fromkeys(tuning._MATRIX_FROM, threshold))
    paths = [tuning.decode_path("matrix", count, device.architecture) for count in (1, 3, 4, 8)]
    assert paths == ["digits", "kparallel", "matrix", "matrix"]
    assert tuning.decode_path("serial", 2, device.architecture) == "serial"
    keys = requirements(model.spec, model.weights, "matrix", "f16", "f16", 8, device.architecture)
    assert {key[1].partition("@")[2] for key in keys if key[0] == "matvec_few"} == {"4"}
    with Engine(model, device, path="matrix", sequences=4, context_length=8) as engine:
        for count, op in ((3, "matvec_few"), (4, "matvec_batched_packed")):
            routes = engine.decode_batch([1] * count, range(count))[0].routes
            ops = {route.split()[0] for route in routes}
            assert ops & {"matvec_few", "matvec_batched_packed"} == {op}
