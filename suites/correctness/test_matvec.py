"""The dequantising products: every format against float64, every number of columns bit-equal."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_hip import ops
from backend_hip.device import Device
from backend_hip.registry import REGISTRY
from reference.dequant import dequantise
from reference.model.quant import FORMATS
from reference.quantise import quantise
from suites.correctness.lab import Lab
from suites.harness.compare import compare
from suites.harness.tolerances import row, summation

FORMS = [key.variant for key in REGISTRY if key.op == "matvec"]
ALL_MAX_COLS = (1, 8, 16, 32, 35, 40, 44, 48, 64)


def _columns(form: str) -> tuple[int, ...]:
    """Row lengths around what a wave takes in one step, 256 or 1,024 of a super-block's format, and
    around the 1,024 elements that shared memory holds of a column.
    """
    block = FORMATS[form].block_elements
    if block == 256:
        return (256, 768, 1024, 1280)
    if block == 32:
        return (32, 224, 256, 288, 576, 1056)
    return (1, 7, 8, 9, 255, 256, 257, 1025)


def _inputs(
    form: str, rows: int, columns: int, count: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    generator = np.random.default_rng([FORMATS[form].ggml_type, rows, columns, count])
    # A few channels far larger than the rest, as in real activations.
    x = generator.standard_normal((count, columns)).astype(np.float32)
    x[:, :: max(1, columns // 3)] *= 50
    return generator.standard_normal((rows, columns)).astype(np.float32), x


@dataclass(frozen=True)
class ProductCase:
    form: str
    columns: int
    path: str
    batched: bool

    @property
    def id(self) -> str:
        return f"{self.form}-{self.columns}-{self.path}-{'batched' if self.batched else 'single'}"


CASES = [
    ProductCase(form, columns, path, batched)
    for form in FORMS
    for columns in _columns(form)
    for path, batched in (("kparallel", False), ("kparallel", True), ("serial", True))
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_product_stays_within_its_backward_error_bound(case: ProductCase, device: Device) -> None:
    rows, count = 37, 5 if case.batched else 1  # 37: the last block of rows is not full
    weights, x = _inputs(case.form, rows, case.columns, count)
    op = "matvec_batched" if case.batched else "matvec"
    with Lab(device) as lab:
        flow = lab.flow(
            [(op, case.form, case.path)],
            {"MAX_COLS": 8},
            tokens=range(count),
            batched=case.batched,
            path=case.path,
            max_cols=8,
        )
        y = lab.output(count, rows)
        ops.linear(flow, lab.values(x), lab.weight(case.form, weights), y)
        got = lab.read(y)
    form = FORMATS[case.form]
    dense = dequantise(form, quantise(form, weights), np.float32).astype(np.float64)
    wide = x.astype(np.float64)
    order = summation(case.path, form.block_elements)
    limit = row("linear", order).relative(case.columns) * (np.abs(wide) @ np.abs(dense).T)
    result = compare(got.astype(np.float64), wide @ dense.T, limit)
    assert result.elements == rows * count
    assert result.ok, result.reason()


@pytest.mark.parametrize("max_cols", ALL_MAX_COLS)
@pytest.mark.parametrize("form", FORMS)
def test_number_of_columns_never_changes_a_bit(form: str, max_cols: int, device: Device) -> None:
    rows, columns = 9, 512
    counts = sorted({1, 2, max_cols - 1, max_cols, max_cols + 1, 2 * max_cols + 1} - {0})
    weights, x = _inputs(form, rows, columns, counts[-1])
    keys = [("matvec", form, "kparallel"), ("matvec_batched", form, "kparallel")]
    with Lab(device) as lab:
        matrix = lab.weight(form, weights)
        single = lab.flow(keys, {"MAX_COLS": max_cols})
        expected = []
        for column in x:
            y = lab.output(1, rows)
            ops.linear(single, lab.values(column[None]), matrix, y)
            expected.append(lab.read(y)[0])
        for count in counts:
            flow = lab.flow(
                keys, {"MAX_COLS": max_cols}, tokens=range(count), batched=True, max_cols=max_cols
            )
            y = lab.output(count, rows)
            ops.linear(flow, lab.values(x[:count]), matrix, y)
            result = compare(lab.read(y), np.stack(expected[:count]), 0.0)
            assert result.bit_equal, f"{count} columns: {result.reason()}"


@pytest.mark.parametrize("form", FORMS)
def test_embedding_rows_are_dequantised_exactly(form: str, device: Device) -> None:
    columns = max(_columns(form))
    table, _ = _inputs(form, 50, columns, 1)
    ids = (49, 0, 7, 7, 31)
    with Lab(device) as lab:
        flow = lab.flow([("embed", form, "any")], {}, tokens=ids)
        x = lab.output(len(ids), columns)
        ops.embed(flow, lab.weight(form, table), x, 1.0)
        got = lab.read(x)
    dense = dequantise(FORMATS[form], quantise(FORMATS[form], table), np.float32)
    assert np.array_equal(got.view(np.uint32), dense[list(ids)].view(np.uint32))
