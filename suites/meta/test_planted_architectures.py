"""The bugs that users of these architectures have met, planted in the real engine's kernels.

Each must be found at the layer and point where it is: the same places that the fake engine's faults
are found at (architecture_faults.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from backend_hip.device import Device, open_device
from backend_hip.engine import Engine
from fixtures.golden import TINY_GATES
from reference.model import Model
from reference.model.trace import Trace
from suites.harness.fault_models import with_tied_router
from suites.harness.local import LocalRules, judge_trace
from suites.harness.validate import Options, validate
from suites.harness.verdict import State, Verdict
from suites.meta.architecture_faults import PLACES, Place
from suites.meta.engine_faults import REAL, Plant, kernel, state_not_reset
from suites.meta.models import oracle_model, prompt

MAX_COLS = 8
CONTEXT = 64
PLANTED = [place for place in PLACES if place.id in REAL]


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with open_device("cpu") as opened:
        yield opened


def _open(model: Model, device: Device) -> Engine:
    return Engine(model, device, max_cols=MAX_COLS, context_length=CONTEXT)


@pytest.mark.parametrize("name", list(TINY_GATES))
def test_the_engine_as_it_is_is_ok(
    device: Device, name: str, record_verdict: Callable[[Verdict], Verdict]
) -> None:
    model = oracle_model(name)
    verdict = validate(
        model,
        lambda: _open(model, device),
        prompt(model),
        Options(n_decode=2),
        context_length=CONTEXT,
    )
    record_verdict(replace(verdict, run={**verdict.run, "model": f"oracle-{name}"}))
    assert verdict.summary() == "ok"
    assert all(check.elements > 0 for check in verdict.checks)


def test_every_plant_has_a_place() -> None:
    assert {place.id for place in PLANTED} == set(REAL)


@pytest.mark.parametrize("place", PLANTED, ids=lambda place: place.id)
def test_the_fault_is_found_where_it_was_planted(
    device: Device, monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    model = oracle_model(place.model)
    if place.id == "ties-to-the-highest":
        model = with_tied_router(model, 1)
    REAL[place.id](monkeypatch)
    trace = Trace()
    with _open(model, device) as engine:
        engine.prefill_batched(prompt(model), trace=trace)
    points = judge_trace(model, trace, LocalRules())
    found = next((point for point in points if point.check.state is not State.OK), None)
    assert found is not None
    assert (found.point.name, found.op, found.check.state) == (
        place.point,
        place.op,
        State.DIVERGED,
    )


# Stores a state that is not the one it computed with: the outputs of one flow stay right.
STATE_STORED_LATE = kernel(
    "delta_net.hip",
    (
        "stored[static_cast<int64_t>(i) * STATE_SIZE] = state[i];",
        "stored[static_cast<int64_t>(i) * STATE_SIZE] = count > 4 ? state[i] : 0.5f * state[i];",
    ),
)


@pytest.mark.parametrize(
    ("plant", "length", "summary"),
    [
        (state_not_reset, 21, "diverged: conv_output_silu-0 (convolution)"),
        (
            STATE_STORED_LATE,
            5,
            "diverged: delta_out-0 (delta_rule), per-token prefill",
        ),
        (
            STATE_STORED_LATE,
            3,
            "diverged: recurrent state: memory of layer 0",
        ),
    ],
    ids=["not-reset", "one-token-flows-store-half", "short-flows-store-half"],
)
def test_a_broken_state_is_named(
    device: Device, monkeypatch: pytest.MonkeyPatch, plant: Plant, length: int, summary: str
) -> None:
    model = oracle_model("qwen35d64")
    plant(monkeypatch)
    verdict = validate(
        model,
        lambda: _open(model, device),
        prompt(model, length),
        Options(n_decode=2),
        context_length=CONTEXT,
    )
    assert verdict.summary() == summary
