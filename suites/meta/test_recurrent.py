"""Recurrent states in validate: held against the trace, mode against mode, prompt after prompt."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from reference.delta_net import RecurrentState
from suites.harness import recurrent
from suites.harness.fake_engine import CLEAN, FakeEngine, Fault
from suites.harness.validate import Options, validate
from suites.harness.verdict import State, Verdict
from suites.meta import broken
from suites.meta.architecture_faults import FAKE
from suites.meta.models import oracle_model, prompt

MODEL = "qwen35d64"
MAX_COLS = 8
States = dict[int, RecurrentState]


def _validate(fault: Fault = CLEAN, name: str = MODEL, **changes: Any) -> Verdict:
    model = oracle_model(name)
    options = replace(Options(n_decode=3), **changes)

    def open_engine() -> FakeEngine:
        return FakeEngine(model, fault, path=options.path, max_cols=MAX_COLS)

    return validate(model, open_engine, prompt(model), options)


def _checks(verdict: Verdict) -> dict[str, int]:
    return {check.name: check.elements for check in verdict.checks if "recurrent" in check.name}


def test_a_clean_state_is_judged_three_times() -> None:
    verdict = _validate()
    assert verdict.summary() == "ok"
    net = oracle_model(MODEL).spec.layers[0].delta_net
    assert net is not None
    whole = net.value_heads * net.state_size**2 + (net.conv_kernel - 1) * net.channels
    assert _checks(verdict) == {
        "local: recurrent state": 2 * whole,
        "local, per-token: recurrent state": 2 * whole,
        "prefill pair: recurrent state": 2 * whole,
        "decode equals batched prefill of the same tokens: recurrent state": 2 * whole,
    }
    assert recurrent.NOTHING not in verdict.notes


@pytest.mark.parametrize("name", ["gemma4", "gemma4e", "gemma4moe", "qwen2", "qwen35moe"])
def test_every_kind_of_layer_passes_every_step(name: str) -> None:
    """Shared and normed KV, per-layer inputs, biases, states beside experts: all of validate."""
    verdict = _validate(name=name)
    assert verdict.summary() == "ok"
    assert all(check.elements > 0 for check in verdict.checks)


def test_a_prompt_shorter_than_the_tail_is_judged() -> None:
    model = oracle_model(MODEL)
    verdict = validate(model, lambda: FakeEngine(model), prompt(model, 1), Options(n_decode=2))
    assert verdict.summary() == "ok"


def test_a_model_without_states_says_so_and_counts_nothing() -> None:
    verdict = _validate(name="llama")
    assert verdict.summary() == "ok"
    assert _checks(verdict) == {}
    assert recurrent.NOTHING in verdict.notes


def _in(mode: str, change: Callable[[RecurrentState], RecurrentState], layer: int = 1) -> Fault:
    """What is read back of one layer after a prefill in `mode`."""

    def state(held: RecurrentState, at: int, of: str) -> RecurrentState:
        return change(held) if (at, of) == (layer, mode) else held

    return Fault(state=state)


def _one_ulp(state: RecurrentState) -> RecurrentState:
    memory = state.memory.copy()
    memory[1, 2, 3] = np.nextafter(memory[1, 2, 3], np.float32(np.inf))
    return RecurrentState(memory, state.tail)


def _transposed(state: RecurrentState) -> RecurrentState:
    return RecurrentState(state.memory.transpose(0, 2, 1), state.tail)


def _older_tail(state: RecurrentState) -> RecurrentState:
    return RecurrentState(state.memory, np.roll(state.tail, 1, axis=0))


def _nan(state: RecurrentState) -> RecurrentState:
    return RecurrentState(np.full_like(state.memory, np.nan), state.tail)


def _float64(state: RecurrentState) -> RecurrentState:
    return RecurrentState(state.memory.astype(np.float64), state.tail)


def _short(state: RecurrentState) -> RecurrentState:
    return RecurrentState(state.memory, state.tail[1:])


def _keep(states: States, before: States) -> None:
    states.update(before)


def _keep_memory(states: States, before: States) -> None:
    for layer, state in states.items():
        state.memory = before[layer].memory


@dataclass(frozen=True)
class Planted:
    id: str
    fault: Fault
    link: str


PLANTED = [
    Planted("not-reset", Fault(at_reset=_keep), "conv_output_silu-0 (convolution)"),
    Planted("memory-not-reset", Fault(at_reset=_keep_memory), "delta_out-0 (delta_rule)"),
    Planted("tail-shifted", FAKE["tail-shifted-at-chunk"], "conv_output_silu-0 (convolution)"),
    Planted(
        "one-ulp-in-one-mode",
        _in("per-token", _one_ulp),
        "batched against per-token recurrent state: memory of layer 1",
    ),
    Planted(
        "tail-of-one-mode",
        _in("per-token", _older_tail),
        "recurrent state: tail of layer 1, per-token prefill",
    ),
    Planted("transposed", _in("batched", _transposed), "recurrent state: memory of layer 1"),
    Planted("older-tail", _in("batched", _older_tail), "recurrent state: tail of layer 1"),
    Planted("nan", _in("batched", _nan, layer=0), "recurrent state: memory of layer 0"),
    Planted(
        "float64",
        _in("batched", _float64),
        "recurrent state: memory of layer 1 is float64 (4, 64, 64), expected float32 (4, 64, 64)",
    ),
    Planted(
        "short-tail",
        _in("batched", _short),
        "recurrent state: tail of layer 1 is float32 (2, 512), expected float32 (3, 512)",
    ),
    Planted(
        "decode-loses-it",
        _in("decode", _transposed),
        "recurrent state after decoding against a prefill: memory of layer 1",
    ),
    Planted(
        "only-per-token-decays-late",
        replace(FAKE["decay-after-update"], numerics_mode="per-token"),
        "delta_out-0 (delta_rule), per-token prefill",
    ),
]


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.id)
def test_the_fault_is_named(case: Planted) -> None:
    verdict = _validate(case.fault)
    assert verdict.summary() == f"diverged: {case.link}"


def test_a_broken_delta_net_does_not_hide_that_the_state_was_not_judged() -> None:
    """NaN before the recurrence: its state can't be known, and that is not called sound."""
    verdict = _validate(Fault(numerics=broken.EVERYTHING_NAN))
    assert verdict.summary() == "diverged: attn_norm-0 (rms_norm)"
    held = next(check for check in verdict.checks if check.name == "local: recurrent state")
    assert (held.state, held.elements) == (State.DIVERGED, 0)
    assert "broken since attn_norm-0" in held.detail


def test_a_recurrence_that_overflows_does_not_outrank_what_made_it() -> None:
    """Beta above 1 grows the state past every finite limit, which alone would be invalid."""
    verdict = _validate(FAKE["beta-without-sigmoid"], name="qwen35")
    assert verdict.summary() == "diverged: beta-0 (beta)"
    overflow = [check for check in verdict.checks if "limits are negative" in check.detail]
    assert overflow
    assert all("wrong since beta-0" in check.detail for check in overflow)
