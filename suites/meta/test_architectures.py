"""The local judge on every golden model: clean ones pass everywhere, broken ones fail by name.

The planted faults are those that users of these architectures have met, and each must be named at
the layer and point where it was planted.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from fixtures.golden import TINY_GATES
from reference.delta_net import RecurrentState
from reference.model import Model
from reference.model.trace import Trace, trace_points
from suites.harness.fake_engine import CLEAN, FakeEngine, Fault
from suites.harness.fault_models import with_tied_router
from suites.harness.local import LocalRules, PointCheck, first_broken, judge_trace, summarise
from suites.harness.verdict import State, Verdict
from suites.meta.architecture_faults import (
    FAKE,
    OTHER_CACHE,
    PLACES,
    Place,
    as_seen_by_engine,
    fault_of,
)
from suites.meta.models import oracle_model, prompt

MAX_COLS = 8
LENGTH = 21  # longer than the sliding window of 16, and three chunks of MAX_COLS


def _trace(model: Model, fault: Fault = CLEAN, kv_type: str = "f16") -> Trace:
    trace = Trace()
    engine = FakeEngine(model, fault, kv_type_k=kv_type, kv_type_v=kv_type, max_cols=MAX_COLS)
    engine.prefill_batched(prompt(model, LENGTH), trace=trace)
    return trace


def _judge(model: Model, trace: Trace, kv_type: str = "f16") -> Iterator[PointCheck]:
    return judge_trace(model, trace, LocalRules("kparallel", kv_type, kv_type))


@pytest.mark.parametrize("name", list(TINY_GATES))
@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_a_clean_engine_is_within_every_limit(name: str, kv_type: str) -> None:
    model = oracle_model(name)
    points = list(_judge(model, _trace(model, kv_type=kv_type), kv_type))
    assert first_broken(points) is None
    assert [point.point for point in points] == list(trace_points(model.spec))
    assert all(point.check.state is State.OK and point.check.elements > 0 for point in points)
    assert all(point.check.of_limit is not None for point in points)
    assert Verdict(tuple(summarise(points))).state is State.OK


def test_every_planted_fault_has_a_place() -> None:
    planted = {*FAKE, OTHER_CACHE}
    assert planted == {place.id for place in PLACES}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.id)
def test_the_fault_is_found_where_it_was_planted(place: Place) -> None:
    model = oracle_model(place.model)
    if place.id == "ties-to-the-highest":
        model = with_tied_router(model, 1)
    trace = _trace(as_seen_by_engine(place, model), fault_of(place))
    found = next((p for p in _judge(model, trace) if p.check.state is not State.OK), None)
    assert found is not None
    assert (found.point.name, found.op, found.check.state) == (
        place.point,
        place.op,
        State.DIVERGED,
    )


def test_v_recorded_from_another_stage_of_k_is_found_at_v() -> None:
    """The same two Gemma bugs, in an engine that records what it took for V."""
    model = oracle_model("gemma4")
    for source in ("Kcur_normed-2", "Kcur_pos-2"):
        trace = _trace(model)
        trace._parts["Vcur-2"] = [trace[source]]
        found = first_broken(list(_judge(model, trace)))
        assert found is not None
        assert (found.point.name, found.op) == ("Vcur-2", "copy")


def test_another_state_than_zero_at_the_start_is_found() -> None:
    """A prompt behind another whose state was not reset: the tail shows first, then the memory."""
    model = oracle_model("qwen35")
    for parts, point in ((("tail", "memory"), "conv_output_silu-0"), (("memory",), "delta_out-0")):
        engine = FakeEngine(model, Fault(at_reset=_keeps(parts)))
        engine.prefill_batched(prompt(model, 5, seed=3))
        engine.reset()
        trace = Trace()
        engine.prefill_batched(prompt(model, LENGTH), trace=trace)
        found = first_broken(list(_judge(model, trace)))
        assert found is not None
        assert found.point.name == point


States = dict[int, RecurrentState]


def _keeps(parts: tuple[str, ...]) -> Callable[[States, States], None]:
    def at_reset(states: States, before: States) -> None:
        for layer, state in states.items():
            for part in parts:
                setattr(state, part, getattr(before[layer], part))

    return at_reset


@pytest.mark.parametrize("change", ["outside", "negative", "twice", "float32"])
def test_ids_that_are_no_experts_are_diverged_and_judge_nothing_else(change: str) -> None:
    model = oracle_model("qwen3moe")
    trace = _trace(model)
    ids = trace["ffn_moe_topk-1"].copy()
    ids[4] = {"outside": [0, 8], "negative": [-1, 0], "twice": [3, 3], "float32": ids[4]}[change]
    trace._parts["ffn_moe_topk-1"] = [ids.astype(np.float32) if change == "float32" else ids]
    points = {point.point.name: point for point in _judge(model, trace)}
    assert points["ffn_moe_topk-1"].check.state is State.DIVERGED
    assert points["ffn_moe_out-1"].check.state is State.DIVERGED
    assert "ffn_moe_topk-1 has a wrong" in points["ffn_moe_out-1"].check.detail
