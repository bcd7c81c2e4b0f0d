"""Router honesty: near-ties are reported, followed end to end, and hide no wrong choice."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reference.model import Model
from reference.model.trace import Trace
from suites.harness.bounds_experts import near_ties
from suites.harness.endtoend import References
from suites.harness.fake_engine import CLEAN, FakeEngine, Fault, patched
from suites.harness.fault_models import with_tied_router
from suites.harness.routing import RoutingJudge, Turn, choices_of
from suites.harness.tolerances import TIED_LOGITS
from suites.harness.validate import Options, validate
from suites.harness.verdict import State, Verdict
from suites.meta.models import oracle_model, prompt

LAYER = 1
EXPERTS = 8  # of oracle-qwen3moe: only the router's matrix has that many rows
FAVOURITE = 5  # not among the experts that a tie gives to


def _validate(model: Model, fault: Fault = CLEAN, **changes: Any) -> Verdict:
    options = replace(Options(n_decode=3), **changes)
    return validate(
        model, lambda: FakeEngine(model, fault, path=options.path), prompt(model), options
    )


def _favours(amount: Callable[[Any], Any]) -> Fault:
    """Router logits of the engine with `amount` more for one expert where all tie."""

    def wrap(linear: Callable[..., Any]) -> Callable[..., Any]:
        def broken(x: Any, weight: Any) -> Any:
            logits = linear(x, weight)
            if len(weight) == EXPERTS and np.ptp(logits) < TIED_LOGITS:
                logits = logits.copy()
                logits[:, FAVOURITE] = amount(logits.max(axis=-1))
            return logits

        return broken

    return Fault(numerics=lambda: patched("reference.ops.linear", wrap))


ONE_ULP = _favours(lambda largest: np.nextafter(largest, np.float32(np.inf)))


def test_a_clean_run_counts_what_it_compared_and_has_no_near_tie() -> None:
    model = oracle_model("qwen3moe")
    verdict = _validate(model)
    assert verdict.summary() == "ok"
    check = next(c for c in verdict.checks if c.name == "routing: engine against reference")
    # The last token that was generated is fed to nobody.
    assert check.elements == (len(prompt(model)) + 3) * model.spec.layer_count * 2
    assert not [note for note in verdict.notes if "near-tie" in note]


def test_an_exact_tie_is_reported_and_passes() -> None:
    verdict = _validate(with_tied_router(oracle_model("qwen3moe"), LAYER))
    assert verdict.summary() == "ok"
    (note,) = [note for note in verdict.notes if note.startswith(f"ffn_moe_topk-{LAYER}: ")]
    assert note.startswith(f"ffn_moe_topk-{LAYER}: 21 near-ties in routing: token 0: gap 0 within")


def test_a_near_tie_taken_otherwise_is_reported_and_passes() -> None:
    """One unit in the last place sends every token elsewhere, prompt and decoded ones."""
    model = with_tied_router(oracle_model("qwen3moe"), LAYER, zero=False)
    verdict = _validate(model, ONE_ULP)
    assert verdict.summary() == "ok"
    turns = [note for note in verdict.notes if note.startswith("near-tie in routing: ")]
    assert len(turns) == len(prompt(model)) + 3
    assert f"layer {LAYER} position 0: engine chose experts [{FAVOURITE}, " in turns[0]
    check = next(c for c in verdict.checks if c.name == "routing: engine against reference")
    assert (check.state, check.detail) == (State.OK, f"{len(turns)} near-ties taken otherwise")


def test_without_following_the_same_run_would_be_a_false_alarm() -> None:
    model = with_tied_router(oracle_model("qwen3moe"), LAYER, zero=False)
    trace = Trace()
    got = FakeEngine(model, ONE_ULP).prefill_batched(prompt(model), trace=trace).logits[-1]
    followed, alone = (References(model, "f16", "f16") for _ in range(2))
    followed.choices.update(choices_of(trace, model.spec))
    for references, inside in ((followed, True), (alone, False)):
        expected = references.feed(prompt(model))
        error = float(np.max(np.abs(got - expected.logits[-1])))
        assert bool(error <= expected.limits[-1]) is inside


def test_more_than_rounding_is_no_near_tie() -> None:
    model = with_tied_router(oracle_model("qwen3moe"), LAYER, zero=False)
    verdict = _validate(model, _favours(lambda largest: largest + np.float32(0.05)))
    assert verdict.summary() == f"diverged: ffn_moe_logits-{LAYER} (linear)"


@pytest.mark.parametrize(("gap", "state"), [(0.5, State.OK), (1.5, State.DIVERGED)])
def test_a_choice_is_held_against_how_well_logits_are_known(gap: float, state: State) -> None:
    """float32 is off by 1/16 here, so each logit is known within 8/16 and a pair within 1."""
    model = oracle_model("qwen3moe")
    logits = np.zeros((1, 8))
    logits[0, :3] = [4.0, 1.0 + gap / 2, 1.0 - gap / 2]
    judge = RoutingJudge(model.spec)
    choice = {2: np.array([[0, 2]], dtype=np.int64)}
    judge.feed(0, choice, {2: logits}, {2: logits + 1 / 16}, {})
    check = judge.check()
    assert (check.state, check.elements) == (state, 2)
    assert judge.turns == [Turn(2, 0, (0, 2), (0, 1), gap, 1.0)]
    if state is State.DIVERGED:
        assert check.link == "routing of layer 2 against the reference"
        assert check.where == "ffn_moe_topk-2 position 0"


def test_routing_that_was_not_recorded_is_not_called_sound() -> None:
    judge = RoutingJudge(oracle_model("qwen3moe").spec)
    judge.feed(0, {}, {0: np.zeros((1, 8))}, {0: np.zeros((1, 8))}, {})
    assert judge.check().state is State.INVALID


def test_the_same_experts_in_another_order_are_no_turn() -> None:
    judge = RoutingJudge(oracle_model("qwen3moe").spec)
    logits = np.arange(8.0)[None]
    judge.feed(0, {0: np.array([[6, 7]])}, {0: logits}, {0: logits}, {})
    assert judge.turns == []
    assert judge.check().state is State.OK


def test_near_ties_need_a_gap_within_both_limits() -> None:
    logits = np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.9], [2.0, 2.0, 2.0]])
    limit = np.full((3, 3), 0.06)
    found = near_ties(logits, limit, 2)
    assert [token for token, _, _ in found] == [1, 2]
    assert near_ties(logits, limit, 3) == []


@pytest.mark.parametrize(
    "ids",
    [[[0, 8]], [[-1, 0]], [[0]], [[3, 3]]],
    ids=["outside", "negative", "few", "twice"],
)
def test_a_choice_that_is_none_is_not_followed(ids: list[list[int]]) -> None:
    model = oracle_model("qwen3moe")
    trace = Trace()
    trace.record("ffn_moe_topk-0", np.array(ids, dtype=np.int32))
    assert choices_of(trace, model.spec) == {}


def test_a_bounded_path_says_that_decoded_tokens_were_not_followed() -> None:
    verdict = _validate(oracle_model("qwen3moe"), path="serial")
    assert verdict.summary() == "ok"
    assert any("where decoded tokens were routed was not recorded" in n for n in verdict.notes)
