"""The local judge finds the op that broke, by name, on an engine whose every later value is off."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from reference.dequant import dequantise
from reference.forward import DenseCache
from reference.model import Model
from reference.model.trace import LOGITS, Trace, trace_points
from suites.harness.fake_engine import CLEAN, FakeEngine, Fault
from suites.harness.local import (
    UNOBSERVED,
    LocalRules,
    PointCheck,
    first_broken,
    judge_trace,
    summarise,
)
from suites.harness.verdict import State, Verdict
from suites.meta import broken
from suites.meta.models import GEMMA3, LLAMA, QWEN3, prompt, tiny_model

RULES = LocalRules()


def _trace(model: Model, fault: Fault = CLEAN, dense: DenseCache | None = None) -> Trace:
    trace = Trace()
    FakeEngine(model, fault, dense=dense).prefill_batched(prompt(model), trace=trace)
    return trace


def _judge(model: Model, trace: Trace, rules: LocalRules = RULES) -> list[PointCheck]:
    return list(judge_trace(model, trace, rules))


@pytest.mark.parametrize("name", [LLAMA, QWEN3, GEMMA3, "tiny-llama3", "tiny-gemma3-q4_1"])
def test_a_clean_engine_is_within_every_limit(name: str) -> None:
    model = tiny_model(name)
    points = _judge(model, _trace(model))
    assert first_broken(points) is None
    assert [point.point for point in points] == list(trace_points(model.spec))
    assert all(point.check.state is State.OK and point.check.elements > 0 for point in points)
    assert Verdict(tuple(summarise(points))).state is State.OK


@dataclass(frozen=True)
class Broken:
    id: str
    model: str
    numerics: broken.Numerics
    point: str
    op: str


BROKEN = [
    Broken("rope-position", LLAMA, broken.ROPE_POSITION, "Qcur_pos-0", "rope"),
    Broken("rope-position-qwen3", QWEN3, broken.ROPE_POSITION, "Qcur_pos-0", "rope"),
    Broken("rope-base", LLAMA, broken.ROPE_BASE, "Qcur_pos-0", "rope"),
    Broken("rope-pairing", GEMMA3, broken.ROPE_PAIRING, "Qcur_pos-0", "rope"),
    Broken("head-map", LLAMA, broken.HEAD_MAP, "kqv_out-0", "attention"),
    Broken("head-map-qwen3", QWEN3, broken.HEAD_MAP, "kqv_out-0", "attention"),
    Broken("attention-scale", QWEN3, broken.ATTENTION_SCALE, "kqv_out-0", "attention"),
    Broken("window", GEMMA3, broken.WINDOW, "kqv_out-0", "attention"),
    Broken("missing-residual", LLAMA, broken.missing_residual((256, 192)), "ffn_inp-0", "add"),
    Broken("norm-epsilon", LLAMA, broken.NORM_EPSILON, "attn_norm-0", "rms_norm"),
    Broken("norm-plus-one", GEMMA3, broken.NORM_PLUS_ONE, "attn_norm-0", "rms_norm"),
    Broken("k-tail", LLAMA, broken.lost_tail(32), "Qcur-0", "linear"),
    Broken("k-tail-one", QWEN3, broken.lost_tail(1), "Qcur-0", "linear"),
    Broken("nan-lane", LLAMA, broken.NAN_LANE, "ffn_act-0", "activation"),
    Broken("gelu", GEMMA3, broken.EXACT_GELU, "ffn_act-0", "activation"),
]


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.id)
def test_the_first_broken_point_is_named(case: Broken) -> None:
    model = tiny_model(case.model)
    points = _judge(model, _trace(model, Fault(numerics=case.numerics)))
    found = first_broken(points)
    assert found is not None
    assert (found.point.name, found.op) == (case.point, case.op)
    verdict = Verdict(tuple(summarise(points)))
    assert verdict.summary() == f"diverged: {case.point} ({case.op})"


@pytest.mark.parametrize(("layer", "role", "point"), [(0, "attn_q", "Qcur-0"),
                                                      (1, "attn_q", "Qcur-1"),
                                                      (1, "ffn_down", "ffn_out-1")])  # fmt: skip
def test_one_scale_of_one_block_is_found(layer: int, role: str, point: str) -> None:
    model = tiny_model(LLAMA)
    tensor = model.weights.layers[layer][role]
    weight = dequantise(tensor.format, tensor.raw, np.float32)
    weight[5, 32:64] *= np.float32(1.05)
    points = _judge(model, _trace(model, dense={tensor.name: weight}))
    found = first_broken(points)
    assert found is not None
    assert found.point.name == point
    assert found.comparison is not None
    # Only that row is off, at every token where the block's inputs are not all tiny.
    assert found.comparison.worst_backward is not None
    place = np.unravel_index(
        found.comparison.worst_backward.flat, (len(prompt(model)), tensor.shape[0])
    )
    assert place[1] == 5


def test_nan_is_diverged_where_it_began_and_inherited_behind() -> None:
    model = tiny_model(LLAMA)
    points = _judge(model, _trace(model, Fault(numerics=broken.NAN_LANE)))
    after = {point.point.name: point.check for point in points}
    assert after["ffn_act-0"].state is State.DIVERGED
    assert after["ffn_out-0"].detail == "inputs are not finite since ffn_act-0"
    assert Verdict(tuple(point.check for point in points)).state is State.DIVERGED


def test_a_missing_point_is_invalid_and_named() -> None:
    model = tiny_model(LLAMA)
    trace = _trace(model)
    del trace._parts["kqv_out-1"]
    verdict = Verdict(tuple(summarise(_judge(model, trace))))
    assert verdict.summary() == "invalid: kqv_out-1 (attention)"


def test_an_unobserved_point_is_named_and_never_passed() -> None:
    model = tiny_model(LLAMA)
    trace = _trace(model)
    del trace._parts["ffn_act-1"]
    trace.meta[UNOBSERVED] = ["ffn_act-1"]
    points = {point.point.name: point for point in _judge(model, trace)}
    for name in ("ffn_act-1", "ffn_out-1"):  # the point, and the one that reads it
        assert points[name].check.state is State.UNSUPPORTED
        assert not points[name].observed
    summary = {check.name: check for check in summarise(list(points.values()))}
    assert "ffn_act-1" in summary["local: activation"].detail
    assert summary["local: activation"].state is State.OK


@pytest.mark.parametrize("change", ["float64", "transposed", "one-row-short"])
def test_wrong_dtype_or_shape_is_diverged(change: str) -> None:
    model = tiny_model(LLAMA)
    trace = _trace(model)
    value = trace["ffn_norm-0"]
    changed = {
        "float64": value.astype(np.float64),
        "transposed": value.T,
        "one-row-short": value[1:],
    }
    trace._parts["ffn_norm-0"] = [changed[change]]
    found = first_broken(_judge(model, trace))
    assert found is not None
    assert found.point.name == "ffn_norm-0"


def test_logits_of_another_row_are_found() -> None:
    model = tiny_model(LLAMA)
    trace = _trace(model)
    trace._parts[LOGITS] = [np.roll(trace[LOGITS], 1, axis=-1)]
    found = first_broken(_judge(model, trace))
    assert found is not None
    assert found.point.name == LOGITS


def test_the_declared_kv_type_is_followed() -> None:
    """A cache of another type than declared is a rounding that the limit does not cover."""
    model = tiny_model(LLAMA)
    trace = Trace()
    FakeEngine(model, kv_type_k="f32", kv_type_v="f32").prefill_batched(prompt(model), trace=trace)
    assert first_broken(_judge(model, trace, LocalRules("kparallel", "f32", "f32"))) is None
    found = first_broken(_judge(model, trace, RULES))
    assert found is not None
    assert found.point.name == "kqv_out-0"


def test_the_serial_path_has_a_wider_limit() -> None:
    model = tiny_model(LLAMA)
    trace = _trace(model)
    kparallel = _judge(model, trace)
    serial = _judge(model, trace, replace(RULES, path="serial"))
    for narrow, wide in zip(kparallel, serial, strict=True):
        if narrow.op == "linear":
            assert narrow.check.of_limit is not None
            assert wide.check.of_limit is not None
            assert wide.check.of_limit < narrow.check.of_limit
