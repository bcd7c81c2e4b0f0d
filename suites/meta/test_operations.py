"""What the speed tables say beside speeds: matrix products, controls, kernels, operations."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from backend_hip import Device
from reference.model import Model
from reports import kernel_use, operations
from reports.kernel_use import BatchedKernel
from reports.operations import Operation
from reports.records import ReportError
from reports.stored import tables_of
from suites.benchmark.deadline import Deadline
from suites.benchmark.engine_runs import Runner
from suites.benchmark.kernel_use import batched_kernels, format_shares, static_figures
from suites.benchmark.kv_control import ExpandingRunner, open_runner
from suites.benchmark.matrix_work import executed_products, step_work
from suites.harness.tolerances import FLOAT64_SUMS

KERNEL = BatchedKernel(
    "m", "cuda sm_90", "card", 40, "Q4_K", 0.9, 168, 16, 0, 512, 2048, 99, 0, 12, ""
)
OPERATION = Operation(
    "m", "cuda sm_90", "card", "Products", "attn_q", "matrix", 8, None, 36,
    (2e-3, 1e-3, 4e-3), 4e9, 8e9, 1e-3, "bytes",
)  # fmt: skip


# --- products of the matrix unit ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-llama", "oracle-qwen35moe"])
def test_launches_follow_from_the_shapes(
    name: str, device: Device, load: Callable[[str], Model]
) -> None:
    runner = Runner(load(name), device, sequences=2, context_length=64, path="matrix")
    try:
        runner.assume(17)
        routes = runner.inspect([7, 8], [0, 1])[0].routes
        assert executed_products(runner.model, 2, routes) == step_work(runner.model, 2).products
        with pytest.raises(AssertionError, match="expected"):
            executed_products(runner.model, 2, {**routes, "matvec_batched F32/16 matrix": 1})
        runner.place(17)
        assert executed_products(runner.model, 1, runner.inspect([7], [0])[0].routes) is None
    finally:
        runner.close()


def test_products_count_padding(load: Callable[[str], Model]) -> None:
    """tiny-llama: 2 layers of 192, 64, 64, 256 x 3 and 256 rows, a head of 320; K 256 or 192."""
    model = load("tiny-llama")
    few, sixteen = (step_work(model, columns).products for columns in (2, 16))
    assert few == sixteen == step_work(model, 1).products
    # A packed superblock of 16 rows: 16 products and one for minima; Q6_K takes both twice.
    packed = {"Q4_K": 17, "Q6_K": 34}
    want = 0
    for tensor in model.weights.matrices():
        squares = tensor.shape[0] * tensor.shape[1] // 16**2
        want += squares // 16 * packed.get(tensor.format.name, 16)
    assert few == want
    assert step_work(model, 17).products == 2 * few


# --- the control --------------------------------------------------------------------------------


def test_the_control_decodes_from_what_q8_0_holds(
    device: Device, load: Callable[[str], Model]
) -> None:
    """Its f16 cache is the q8_0 engine's, but for the rounding of values to f16."""
    model = load("tiny-llama")
    options = {"sequences": 2, "context_length": 64, "kv_type_k": "q8_0", "kv_type_v": "q8_0"}
    control, quantised = (
        open_runner(model, device, expanded=expanded, **options) for expanded in (True, False)
    )
    assert isinstance(control, ExpandingRunner)
    for runner in (control, quantised):
        runner.assume(33)
    for layer in range(model.spec.layer_count):
        for sequence in (0, 1):
            pairs = zip(
                control.engine.kv_contents(layer, sequence),
                quantised.engine.kv_contents(layer, sequence),
                strict=True,
            )
            for expanded, held in pairs:
                assert len(expanded) == 33
                assert np.array_equal(expanded, held.astype(np.float16))
    control.engine._cache.tensors[0][0].buffer.poison()
    control.step([7, 8])  # NaN logits, if it did not write the cache anew
    control.engine._cache.tensors[0][0].buffer.poison()
    with pytest.raises(AssertionError, match="expanded values differ"):
        control.require_expanded(33)
    for runner in (control, quantised):
        runner.close()


# --- what kernels take --------------------------------------------------------------------------


def test_every_format_and_max_cols_has_a_row(
    device: Device, load: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("tiny-llama")
    shares = format_shares(model)
    assert sum(shares.values()) == pytest.approx(1, rel=FLOAT64_SUMS)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    runner = Runner(model, device, context_length=64, max_cols=16)
    monkeypatch.setenv("PATH", "")
    kernels = {16: runner.engine.kernels}
    found = batched_kernels("m", model, device, kernels)
    runner.close()
    assert [(one.max_cols, one.format) for one in found] == [(16, name) for name in shares]
    assert all(one.static_registers is None for one in found)
    assert all("no clang" in one.static_missing for one in found)
    emulated = device.runtime.kind == "cpu"
    assert all((one.registers is None) == emulated for one in found)
    assert static_figures(list(shares), [16]).figures == {}


def test_a_kernel_is_said_in_a_row_and_in_a_note() -> None:
    assert KERNEL.summary == (
        "Q4_K: 168 registers, 16 B spilled, 25 % occupied; gfx1201 99 VGPR, 0 spilled, 12 of 16 "
        "waves"
    )
    bare = replace(KERNEL, registers=None, static_registers=None, static_missing="no clang")
    assert bare.summary == ""
    (table,) = kernel_use.tables([KERNEL, bare])
    assert table.rows[0] == ("40", "Q4_K", "90 %", "168", "16", "0", "25 %", "99", "0", "12")
    assert "gfx1201: no clang." in table.notes


# --- operations ---------------------------------------------------------------------------------


def test_an_operation_stands_beside_its_limit() -> None:
    (table,) = operations.tables([OPERATION])
    row = dict(zip(table.headers, table.rows[0], strict=True))
    assert row["us [cuda sm_90]"] == "2,000.0 (1,000.0 to 4,000.0)"
    assert (row["GB/s"], row["TFLOP/s"]) == ("2,000.0", "4.00")
    assert (row["limit us"], row["limited by"], row["share of limit"]) == (
        "1,000.0",
        "bytes",
        "50.0 %",
    )
    assert "context" not in row
    with pytest.raises(ReportError, match="operations mix"):
        operations.tables([OPERATION, replace(OPERATION, runtime="emulated")])


def test_records_of_all_kinds_survive_json() -> None:
    stored = json.loads(json.dumps([OPERATION.stored(), KERNEL.stored()]))
    assert operations.read_rows(stored[:1]) == (OPERATION,)
    assert kernel_use.read_rows(stored[1:]) == (KERNEL,)
    assert len(tables_of(stored)) == 2
    with pytest.raises(ReportError, match="kind is sleep"):
        tables_of([{"kind": "sleep"}])
    with pytest.raises(ReportError, match="no samples above 0"):
        operations.read_rows([{**stored[0], "seconds": []}])
    for rows, read in ((stored[:1], operations.read_rows), (stored[1:], kernel_use.read_rows)):
        with pytest.raises(ReportError, match="lacks device"):
            read([{name: value for name, value in rows[0].items() if name != "device"}])


def test_a_deadline_notes_what_it_refuses() -> None:
    assert Deadline().allows("a")
    late = Deadline(minutes=-1)
    assert not late.allows("b")
    assert late.left_out == ["b"]
