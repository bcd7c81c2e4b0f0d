"""Path matrix: the fragment's layout, every block shape and format against float64, the rounding of
activations."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_hip import matrix, ops
from backend_hip.device import Device
from backend_hip.half_columns import STEP, padded
from backend_hip.registry import (
    HALVES_TILES,
    MATRIX_TILES,
    PACKED_FORMATS,
    REGISTRY,
    Key,
    tiles_of,
)
from reference.half import half_rows
from reference.model.quant import FORMATS
from reference.model.weights import Tensor
from reference.quantise import quantise
from suites.correctness.lab import Lab
from suites.harness.bounds import linear
from suites.harness.compare import compare

FORMS = [key.variant for key in REGISTRY if key.op == "matvec"]
SIDE = 16  # of a fragment


def _keys(form: str) -> list[Key]:
    products = [("matvec_batched", f"{form}/{tile}", "matrix") for tile in tiles_of(form)]
    return [("to_half", "", "any"), ("weights_to_half", form, "any"), *products]


def _columns(form: str) -> tuple[int, ...]:
    """Row lengths around one and two steps of K, and around what eight waves take in one."""
    block = FORMATS[form].block_elements
    if block == 256:
        return (256, 768)
    if block == 32:
        return (32, STEP, 96, 8 * STEP, 8 * STEP + 32)
    return (1, 15, 16, 17, STEP - 1, STEP, STEP + 1, 8 * STEP + 8)


def _tensor(form: str, weights: NDArray[np.float32]) -> Tensor:
    raw = quantise(FORMATS[form], weights)
    return Tensor("test weight", FORMATS[form], weights.shape, raw)


def _multiply(
    device: Device, tensor: Tensor, x: NDArray[np.float32], tile: int
) -> NDArray[np.float32]:
    (rows, columns), form = tensor.shape, tensor.format.name
    with Lab(device) as lab:
        flow = lab.flow(_keys(form), {}, tokens=range(len(x)), longest=columns)
        assert flow.halves is not None
        weight = lab.matrix(form, tensor.shape, tensor.raw)
        y = lab.output(len(x), rows)
        values = lab.values(x)
        matrix.multiply(flow.kernels, flow.halves, values.pointer, weight, y.pointer, len(x), tile)
        return lab.read(y)


def _check(device: Device, tensor: Tensor, x: NDArray[np.float32], tile: int) -> None:
    got = _multiply(device, tensor, x, tile)
    result = compare(got, *linear(x, tensor, "matrix", weights="halves"))
    assert result.elements == len(x) * tensor.shape[0]
    assert result.ok, result.reason()


def _draw(seed: list[int], rows: int, columns: int, count: int) -> tuple[NDArray[np.float32], ...]:
    generator = np.random.default_rng(seed)
    # A few channels far larger than the rest, as in real activations.
    x = generator.standard_normal((count, columns)).astype(np.float32)
    x[:, :: max(1, columns // 3)] *= 50
    return generator.standard_normal((rows, columns)).astype(np.float32), x


@dataclass(frozen=True)
class ShapeCase:
    """One block shape at the edges of its rows and columns."""

    tile: int
    rows: int
    count: int

    @property
    def id(self) -> str:
        return f"{self.tile}-{self.rows}x{self.count}"


def _shapes() -> list[ShapeCase]:
    cases = []
    for tile in MATRIX_TILES:
        height = matrix.HEIGHTS[tile]
        edges = [(height + d, tile + e) for d in (-1, 0, 1) for e in (-1, 0, 1)]
        cases += [ShapeCase(tile, *edge) for edge in [(1, 1), (height, 2 * tile + 1), *edges]]
    return cases


@pytest.mark.parametrize("case", _shapes(), ids=lambda case: case.id)
def test_every_edge_of_a_block(case: ShapeCase, device: Device) -> None:
    weights, x = _draw([case.tile, case.rows, case.count], case.rows, 2 * STEP, case.count)
    _check(device, _tensor("Q8_0", weights), x, case.tile)


@pytest.mark.parametrize(
    ("form", "tile"),
    [(form, tile) for form in FORMS for tile in (*MATRIX_TILES[:1], 64) if tile in tiles_of(form)],
)
def test_every_format_at_every_length(form: str, tile: int, device: Device) -> None:
    for columns in _columns(form):
        weights, x = _draw([FORMATS[form].ggml_type, columns], 37, columns, 5)
        _check(device, _tensor(form, weights), x, tile)


@pytest.mark.parametrize("tile", MATRIX_TILES)
def test_one_hot_matrices_land_where_they_belong(tile: int, device: Device) -> None:
    """A product of one-hot rows is exact: any lane, row or k in another's place shows."""
    rows, columns, count = 3 * SIDE, STEP, tile + 3
    for shift in range(0, STEP, SIDE - 1):
        weights = np.zeros((rows, columns), dtype=np.float32)
        weights[np.arange(rows), (np.arange(rows) + shift) % columns] = 1 + np.arange(rows)
        x = np.zeros((count, columns), dtype=np.float32)
        x[np.arange(count), (5 * np.arange(count) + shift) % columns] = 1 + np.arange(count) % 64
        got = _multiply(device, _tensor("F16", weights), x, tile)
        result = compare(got, x @ weights.T, 0.0)
        assert result.ok, f"shift {shift}: {result.reason()}"
        assert np.count_nonzero(got) > 0


def test_rows_of_activations_are_scaled_and_rounded(device: Device) -> None:
    """Values that float16 can't hold, tiny rows, zeros: as the reference declares it."""
    generator = np.random.default_rng(7)
    x = generator.standard_normal((7, STEP + 1)).astype(np.float32)
    x *= np.array([[1], [1e6], [1e30], [1e-30], [0], [2.0**-149], [1]], dtype=np.float32)
    x[6, 3] = 3e38
    stride = padded(x.shape[1])
    with Lab(device) as lab:
        flow = lab.flow([("to_half", "", "any")], {}, tokens=range(len(x)), longest=stride)
        held = flow.halves
        assert held is not None
        flow.kernels.launch(
            ("to_half", "", "any"),
            (len(x), 1),
            *(lab.values(x).pointer, held.halves, held.scales, x.shape[1], stride),
        )
        flow.kernels.device.stream.synchronise()
        halves = held.halves.download((len(x), stride), np.float16)
        scales = held.scales.download((len(x), 1), np.float32)
    assert np.isfinite(halves).all()
    assert not halves[:, x.shape[1] :].any()
    got = halves[:, : x.shape[1]].astype(np.float64) * scales
    assert np.array_equal(got, half_rows(x))
    assert np.count_nonzero(got) > x.size // 2


def test_more_rows_than_fit_as_halves_go_in_slices(device: Device) -> None:
    columns, count = 64 * STEP, 5
    fit = matrix.HEIGHTS[HALVES_TILES[0]]
    weights, x = _draw([10], 2 * fit + 3, columns, count)
    tensor = _tensor("Q8_0", weights)
    with Lab(device) as lab:
        flow = lab.flow(_keys("Q8_0"), {}, tokens=range(count), longest=columns)
        held = flow.halves
        assert held is not None
        held.weights.nbytes = 2 * columns * fit  # as if less had been there
        weight = lab.matrix("Q8_0", tensor.shape, tensor.raw)
        y, values = lab.output(count, len(weights)), lab.values(x)
        tile = HALVES_TILES[0]
        matrix.multiply(flow.kernels, held, values.pointer, weight, y.pointer, count, tile)
        assert flow.kernels.routes["weights_to_half", "Q8_0", "any"] == 3
        result = compare(lab.read(y), *linear(x, tensor, "matrix", weights="halves"))
    assert result.ok, result.reason()


def test_a_row_that_is_not_finite_stays_so(device: Device) -> None:
    weights, x = _draw([8], 3, STEP, 3)
    x[0, 5], x[2, 7] = np.nan, np.inf
    got = _multiply(device, _tensor("F16", weights), x, MATRIX_TILES[0])
    assert not np.isfinite(got[[0, 2]]).any()
    assert np.isfinite(got[1]).all()


def test_linear_chooses_the_block_by_size(device: Device) -> None:
    weights, x = _draw([9], 5, STEP, 17)
    with Lab(device) as lab:
        flow = lab.flow(
            _keys("Q8_0"), {}, tokens=range(17), batched=True, path="matrix", longest=STEP
        )
        y = lab.output(17, 5)
        ops.linear(flow, lab.values(x), lab.weight("Q8_0", weights), y)
        lab.read(y)
        assert flow.kernels.routes["matvec_batched", "Q8_0/32", "matrix"] == 1
    sizes = [(4096, count) for count in (1, 16, 17, 32, 33, 65, 658, 1024)]
    sizes += [(1024, 1024), (12288, 512), (12288, 658)]
    tiles = [matrix.choose_tile("Q8_0", *size) for size in sizes]
    assert tiles == [16, 16, 32, 32, 64, 64, 96, 128, 64, 128, 96]
    assert not {matrix.choose_tile(form, *size) for form in PACKED_FORMATS for size in sizes} - {
        *tiles_of("Q4_K")
    }
