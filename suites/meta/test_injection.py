"""Replacing recorded values: one's own change no bit, others change exactly what is downstream."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pytest

from backend_hip.device import Device, open_device
from backend_hip.engine import Engine
from backend_hip.forward import FUSED
from fixtures.golden import TINY_GATES
from reference.forward import Reference
from reference.model import Model
from reference.model.errors import InputError
from reference.model.trace import Trace, trace_points
from suites.harness.compare import Array, same_bits
from suites.harness.local import LocalRules, judge_point
from suites.harness.verdict import State
from suites.meta.models import oracle_model, prompt

CONTEXT = 64
MODES = ("per-token", "batched")
WIDE = ("llama", "qwen3moe", "qwen35moe", "gemma4e", "gemma4moe")
"""Together they have every point."""


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with open_device("cpu") as opened:
        yield opened


def _engine_trace(engine: Engine, mode: str, replacements: Mapping[str, Array]) -> Trace:
    trace = Trace(replacements=replacements)
    engine.reset()
    feed = engine.prefill_batched if mode == "batched" else engine.prefill_per_token
    feed(prompt(engine.model), trace=trace)
    return trace


def _kv(engine: Engine) -> list[bytes]:
    layers = [layer.index for layer in engine.model.spec.layers if layer.owns_kv]
    return [array.tobytes() for layer in layers for array in engine.kv_contents(layer)]


def _reference_trace(model: Model, replacements: Mapping[str, Array]) -> Trace:
    trace = Trace(replacements=replacements)
    Reference(model, dtype=np.float64).prefill(prompt(model), trace=trace)
    return trace


def _names(model: Model) -> list[str]:
    return [point.name for point in trace_points(model.spec)]


def _moved(value: Array) -> Array:
    noise = np.random.default_rng(3).uniform(-1, 1, value.shape)
    return (value + noise).astype(value.dtype)


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("mode", MODES)
def test_own_values_change_no_bit_and_others_exactly_what_follows(
    device: Device, name: str, mode: str
) -> None:
    """Of others, from layer 1 on everything is another value; up to it nothing is."""
    model = oracle_model(name)
    names = _names(model)
    with Engine(model, device, max_cols=8, context_length=CONTEXT) as engine:
        plain = _engine_trace(engine, mode, {})
        kept = _kv(engine)
        again = _engine_trace(engine, mode, plain.arrays)
        assert _kv(engine) == kept
        moved = _engine_trace(engine, mode, {"l_out-0": _moved(plain["l_out-0"])})
    assert set(plain.arrays) == set(_names(model))
    assert all(same_bits(again[point], plain[point]) for point in _names(model))
    upstream = names[: names.index("l_out-0") + 1]
    assert all(same_bits(moved[point], plain[point]) for point in upstream)
    same = [
        point
        for point in names[len(upstream) :]
        if same_bits(moved[point], plain[point]) and not point.startswith("ffn_moe_topk")
    ]
    assert same == []


@pytest.mark.parametrize("name", WIDE)
def test_each_point_of_the_engine_reaches_what_reads_it(device: Device, name: str) -> None:
    """One point at a time: the logits move, unless the same kernel had made what comes after."""
    model = oracle_model(name)
    final = model.spec.layer_count - 1
    with Engine(model, device, max_cols=8, context_length=CONTEXT) as engine:
        plain = _engine_trace(engine, "batched", {})
        for point in trace_points(model.spec):
            if point.layer not in (None, 0, final) or point.stem == "ffn_moe_topk":
                continue
            given = {point.name: _moved(plain[point.name])}
            moved = _engine_trace(engine, "batched", given)
            assert same_bits(moved[point.name], plain[point.name]), point.name
            last = given[point.name] if point.stem == "result_output" else moved["result_output"]
            assert not same_bits(last, plain["result_output"]), point.name


@pytest.mark.parametrize("name", WIDE)
def test_the_reference_takes_replacements_at_every_point(name: str) -> None:
    model = oracle_model(name)
    plain = _reference_trace(model, {})
    again = _reference_trace(model, plain.arrays)
    assert all(same_bits(again[point], plain[point]) for point in _names(model))
    final = model.spec.layer_count - 1
    for point in trace_points(model.spec):
        if point.layer not in (None, 0, final) or point.stem == "ffn_moe_topk":
            continue
        if point.stem == "result_output":
            continue
        moved = _reference_trace(model, {point.name: _moved(plain[point.name])})
        assert same_bits(moved[point.name], plain[point.name]), point.name
        assert not same_bits(moved["result_output"], plain["result_output"]), point.name


def test_another_choice_of_experts_is_followed(device: Device) -> None:
    model = oracle_model("qwen3moe")
    points = {point.name: point for point in trace_points(model.spec)}
    count = next(layer.experts.count for layer in model.spec.layers if layer.experts is not None)
    with Engine(model, device, max_cols=8, context_length=CONTEXT) as engine:
        for mode in MODES:
            plain = _engine_trace(engine, mode, {})
            turned = (plain["ffn_moe_topk-0"] + 1) % count
            given = {
                "ffn_moe_topk-0": turned,
                "ffn_norm-0": plain["ffn_norm-0"],
                "ffn_moe_weights-0": plain["ffn_moe_weights-0"],
            }
            moved = _engine_trace(engine, mode, given)
            judged = Trace(moved.tokens)
            for point, value in {**given, "ffn_moe_out-0": moved["ffn_moe_out-0"]}.items():
                judged.record(point, value)
            found = judge_point(model, judged, LocalRules(), points["ffn_moe_out-0"])
            assert found.check.state is State.OK, found.check
            assert not same_bits(moved["ffn_moe_out-0"], plain["ffn_moe_out-0"])


def test_a_replacement_of_another_size_is_refused() -> None:
    model = oracle_model("llama")
    with pytest.raises(InputError, match="replacement of l_out-0 is"):
        _reference_trace(model, {"l_out-0": np.zeros((3, 5))})


def test_fused_points_exist() -> None:
    stems = {point.stem for name in TINY_GATES for point in trace_points(oracle_model(name).spec)}
    assert stems >= {*FUSED, *FUSED.values()}


def test_the_wide_models_have_every_point() -> None:
    def stems(names: Iterable[str]) -> set[str]:
        return {point.stem for name in names for point in trace_points(oracle_model(name).spec)}

    assert stems(WIDE) == stems(TINY_GATES)
