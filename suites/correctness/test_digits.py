"""One column as signed digits (kernels/digit_column.h): K formats against float64, and corners."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_hip import ops, tuning
from backend_hip.device import Device
from backend_hip.registry import DIGIT_FORMATS
from reference.dequant import dequantise
from reference.model.quant import FORMATS
from reference.model.weights import Tensor
from reference.quantise import quantise
from suites.correctness.lab import Lab, normal
from suites.harness.bounds import linear
from suites.harness.compare import compare

ROWS = 37  # the last block of rows is not full
# Around the 2,048 elements that a wave of 32 takes in a step, and a chunk of shared memory holds on
# the CPU; with lanes that have none, and in two and three chunks.
COLUMNS = (256, 1792, 2048, 2304, 4352)
SHAPES: tuple[dict[str, int], ...] = (
    {"ROWS_PER_WAVE": 2},
    {"AHEAD": 2, "STAGE": 4096},
    {"ROWS_PER_WAVE": 4, "STAGE": 4096, "BLOCKS_PER_UNIT": 1},
)


def _column(columns: int) -> NDArray[np.float32]:
    """A few channels far larger than the rest, as in real activations."""
    x = normal(columns, 1, columns)
    x[:, :: columns // 3] *= 500
    return x


def _tensor(form: str, columns: int) -> Tensor:
    raw = quantise(FORMATS[form], normal(1, ROWS, columns))
    return Tensor("test weight", FORMATS[form], (ROWS, columns), raw)


def _product(device: Device, tensor: Tensor, x: NDArray[np.float32]) -> NDArray[np.float32]:
    form = tensor.format.name
    with Lab(device) as lab:
        flow = lab.flow([("matvec", form, "digits")], {}, path="digits")
        y = lab.output(1, ROWS)
        ops.linear(flow, lab.values(x), lab.matrix(form, tensor.shape, tensor.raw), y)
        return lab.read(y)


def _require_within(device: Device, tensor: Tensor, x: NDArray[np.float32]) -> NDArray[Any]:
    """The limit (1, ROWS) that the product stayed within."""
    want, limit = linear(x, tensor, "digits")
    result = compare(_product(device, tensor, x).astype(np.float64), want, limit)
    assert result.elements == ROWS
    assert result.ok, result.reason()
    return limit


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("form", DIGIT_FORMATS)
def test_a_product_stays_within_its_limit(form: str, columns: int, device: Device) -> None:
    tensor, x = _tensor(form, columns), _column(columns)
    _require_within(device, tensor, x)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
@pytest.mark.parametrize("form", DIGIT_FORMATS)
def test_no_shape_changes_a_bit(
    form: str, shape: dict[str, int], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, x = _tensor(form, COLUMNS[-1]), _column(COLUMNS[-1])
    expected = _product(device, tensor, x)
    chosen = tuning.shape_of

    def other(architecture: str, op: str, path: str = "") -> Any:
        return {**chosen(architecture, op, path), **shape}

    monkeypatch.setattr("backend_hip.dispatch.shape_of", other)
    result = compare(_product(device, tensor, x), expected, 0.0)
    assert result.elements == ROWS
    assert result.bit_equal, result.reason()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("form", DIGIT_FORMATS)
def test_what_is_no_number_reaches_every_row(form: str, value: float, device: Device) -> None:
    x = _column(512)
    x[0, 300] = value
    assert np.isnan(_product(device, _tensor(form, 512), x)).all()


@pytest.mark.parametrize("form", DIGIT_FORMATS)
def test_nothing_times_anything_is_nothing(form: str, device: Device) -> None:
    assert not _product(device, _tensor(form, 512), np.zeros((1, 512), dtype=np.float32)).any()


@pytest.mark.parametrize("exponent", [-149, -127, -105, -104, 100], ids=str)
@pytest.mark.parametrize("form", DIGIT_FORMATS)
def test_activations_of_any_size(form: str, exponent: int, device: Device) -> None:
    """The unit is at its smallest for the first three, and a power above it for the fourth."""
    tensor = _tensor(form, 512)
    x = (np.sign(normal(3, 1, 512)) * 2.0**exponent).astype(np.float32)
    assert np.abs(x).max() > 0
    _require_within(device, tensor, x)


@pytest.mark.parametrize("form", DIGIT_FORMATS)
def test_whole_numbers_lose_nothing(
    form: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations that are whole numbers of their unit: what is left is the rounding of sums."""
    tensor = _tensor(form, 512)
    x = np.random.default_rng(5).integers(-(2**21), 2**21, (1, 512)).astype(np.float32)
    x[:, ::32] = 2.0**21
    monkeypatch.setattr("suites.harness.bounds.DIGIT_SHARE", 0.0)
    _require_within(device, tensor, x)


@pytest.mark.parametrize("form", DIGIT_FORMATS)
def test_a_unit_is_as_small_as_it_can_be(
    form: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unit beside a large activation counts: with weights of one sign nothing cancels."""
    tensor = _positive(form)
    x = np.full((1, 512), 2.0**-21, dtype=np.float32)
    x[0, 0] = 1.0
    x[0, 32::32] = 0.0  # blocks whose units are small: what they add is exact as well
    monkeypatch.setattr("suites.harness.bounds.DIGIT_SHARE", 0.0)
    limit = _require_within(device, tensor, x)
    # A unit twice as large would take the ones for nothing.
    lost = dequantise(tensor.format, tensor.raw, np.float64)[:, 1:32] @ x[0, 1:32]
    assert (lost > limit[0]).all()


@pytest.mark.parametrize("form", ["Q4_K", "Q5_K"])  # a sum of Q6_K's is judged beside its offset
def test_activations_become_the_nearest_number(form: str, device: Device) -> None:
    """Three quarters of a unit are one; cut off, they would all be missing."""
    tensor = _positive(form)
    x = np.full((1, 512), 0.75 * 2.0**-21, dtype=np.float32)
    x[:, ::32] = 1.0
    _require_within(device, tensor, x)
    want, limit = linear(x, tensor, "digits")
    missing = dequantise(tensor.format, tensor.raw, np.float64).sum(axis=1) * 0.75 * 2.0**-21
    assert not compare(want - missing, want, limit).ok


def _positive(form: str) -> Tensor:
    raw = quantise(FORMATS[form], np.abs(normal(1, ROWS, 512)) + 1)
    return Tensor("test weight", FORMATS[form], (ROWS, 512), raw)
