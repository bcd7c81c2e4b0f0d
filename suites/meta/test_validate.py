"""Every step of validate with a fault planted in the engine: the right state and the right link."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from reference.forward import DenseCache
from reference.model.errors import InputError, Unsupported
from suites.harness import compare as compare_module
from suites.harness.compare import Comparison
from suites.harness.fake_engine import (
    CLEAN,
    FakeEngine,
    Fault,
    stale,
)
from suites.harness.protocol import ARGMAX_SAW_NAN, STAGING_POISON, JudgedEngine
from suites.harness.validate import Options, validate
from suites.harness.verdict import SCHEMA_PATH, State, Verdict
from suites.meta import broken
from suites.meta.models import GEMMA3, LLAMA, QWEN3, prompt, tiny_model
from suites.meta.test_verdict import violations

STEPS = 4
DENSE: dict[str, DenseCache] = {}


def _run(fault: Fault = CLEAN, name: str = LLAMA, **changes: Any) -> Verdict:
    model = tiny_model(name)
    options = replace(Options(n_decode=STEPS), **changes)

    def open_engine() -> FakeEngine:
        return FakeEngine(
            model,
            fault,
            path=options.path,
            kv_type_k=options.kv_type_k,
            kv_type_v=options.kv_type_v,
        )

    dense = DENSE.setdefault(name, {})
    return validate(model, open_engine, prompt(model), options, dense=dense)


@pytest.mark.parametrize("name", [LLAMA, QWEN3, GEMMA3])
@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_a_clean_engine_is_ok(name: str, kv_type: str) -> None:
    verdict = _run(name=name, kv_type_k=kv_type, kv_type_v=kv_type)
    assert verdict.summary() == "ok"
    assert verdict.exit_code == 0
    assert all(check.elements > 0 for check in verdict.checks)
    assert len(verdict.run["generated"]) == STEPS + 1
    schema = json.loads(SCHEMA_PATH.read_text())
    assert violations(json.loads(json.dumps(verdict.to_json(), allow_nan=False)), schema) == []


@pytest.mark.parametrize("modes", [("per-token",), ("batched",)])
def test_one_mode_alone_is_judged_without_the_pair(modes: tuple[str, ...]) -> None:
    verdict = _run(modes=modes)
    assert verdict.summary() == "ok"
    assert not any("pair" in check.name for check in verdict.checks)


def test_a_bounded_path_is_judged_within_its_limit() -> None:
    assert _run(path="serial").summary() == "ok"


# --- one fault each ------------------------------------------------------------------------------


def _other(mode: str) -> str:
    return {"per-token": "batched", "batched": "per-token"}.get(mode, mode)


def _shifted_when_untraced() -> Callable[[Any, int, str], Any]:
    """K of layer 1 as the second per-token prefill left it: the first one is traced."""
    reads = itertools.count()

    def kv(contents: Any, layer: int, mode: str) -> Any:
        if mode == "per-token" and layer == 1 and next(reads) == 1:
            return broken.shifted_kv(contents, layer, "batched")
        return contents

    return kv


@dataclass(frozen=True)
class Planted:
    id: str
    fault: Fault
    state: State
    link: str
    model: str = LLAMA


PLANTED = [
    Planted("rope", Fault(broken.ROPE_POSITION), State.DIVERGED, "Qcur_pos-0 (rope)"),
    Planted("head-map", Fault(broken.HEAD_MAP), State.DIVERGED, "kqv_out-0 (attention)"),
    Planted("window", Fault(broken.WINDOW), State.DIVERGED, "kqv_out-0 (attention)", GEMMA3),
    Planted("nan-lane", Fault(broken.NAN_LANE), State.DIVERGED, "ffn_act-0 (activation)"),
    Planted("all-nan", Fault(broken.EVERYTHING_NAN), State.DIVERGED, "attn_norm-0 (rms_norm)"),
    Planted(
        "only-batched-numerics",
        Fault(broken.ROPE_BASE, numerics_mode="batched"),
        State.DIVERGED,
        "Qcur_pos-0 (rope)",
    ),
    Planted(
        "only-per-token-numerics",
        Fault(broken.ROPE_BASE, numerics_mode="per-token"),
        State.DIVERGED,
        "Qcur_pos-0 (rope), per-token prefill",
    ),
    Planted(
        "only-decode-numerics",
        Fault(broken.HEAD_MAP, numerics_mode="decode"),
        State.DIVERGED,
        "decode step 0: logits against the reference",
        QWEN3,
    ),
    Planted(
        "only-decode-one-ulp",
        Fault(broken.ONE_ULP, numerics_mode="decode"),
        State.DIVERGED,
        "logits after 4 decode steps differ from a prefill of the same tokens",
    ),
    Planted(
        "traced-differs",
        Fault(broken.ONE_ULP, trace_only=True),
        State.DIVERGED,
        "untraced logits differ from the traced run's",
    ),
    Planted(
        "one-ulp", Fault(logits=broken.moved_logit), State.DIVERGED, "batched against per-token"
    ),
    Planted(
        "negative-zero", Fault(logits=broken.negative_zero), State.DIVERGED, "last-token logits"
    ),
    Planted("nan-logit", Fault(logits=broken.nan_logit), State.DIVERGED, "last-token logits"),
    Planted("kv-slot", Fault(kv=broken.shifted_kv), State.DIVERGED, "KV write: K of layer 1"),
    Planted(
        "kv-of-one-mode",
        Fault(kv=lambda contents, layer, mode: broken.shifted_kv(contents, layer, _other(mode))),
        State.DIVERGED,
        "KV write: K of layer 1, per-token prefill",
    ),
    Planted(
        "kv-of-one-untraced-mode",
        Fault(kv=_shifted_when_untraced()),
        State.DIVERGED,
        "batched against per-token KV cache: K of layer 1",
    ),
    Planted(
        "same-route",
        broken.on_batched(
            lambda result, before: replace(result, routes={"matvec F32 kparallel": 21})
        ),
        State.INVALID,
        "both sides took the same route: matvec F32 kparallel",
    ),
    Planted(
        "no-launches",
        broken.on_batched(lambda result, before: replace(result, routes={})),
        State.INVALID,
        "no launches were counted on one side",
    ),
    Planted(
        "same-buffer",
        broken.on_batched(
            lambda result, before: replace(
                result,
                logits=before.logits if before and before.mode == "per-token" else result.logits,
            )
        ),
        State.INVALID,
        "both sides returned the same logits buffer",
    ),
    Planted(
        "same-generation",
        broken.on_batched(
            lambda result, before: replace(
                result,
                tail=before.tail if before and before.mode == "per-token" else result.tail,
            )
        ),
        State.INVALID,
        "generation stamps",
    ),
    Planted(
        "poison-left",
        broken.on_batched(lambda result, before: replace(result, logits_poisoned=1)),
        State.INVALID,
        "logits never written: 0 per-token, 1 batched",
    ),
    Planted(
        "mode-is-a-lie",
        broken.on_batched(lambda result, before: replace(result, mode="per-token")),
        State.INVALID,
        "modes per-token and per-token",
    ),
    Planted(
        "position-twice",
        broken.on_batched(lambda result, before: replace(result, position=result.position + 1)),
        State.INVALID,
        "position 21 and 22",
    ),
    Planted(
        "no-argmax",
        broken.on_tail("batched", broken.no_argmax),
        State.DIVERGED,
        "device argmax: did not run",
    ),
    Planted(
        "stale-staging",
        broken.on_tail("batched", stale),
        State.DIVERGED,
        "stamped 11 and so stale",
    ),
    Planted(
        "copy-skipped",
        broken.on_tail("batched", lambda tail, before: replace(tail, staged_token=STAGING_POISON)),
        State.DIVERGED,
        "staging copy: staging still holds its poison -1",
    ),
    Planted(
        "old-stamp",
        broken.on_tail(
            "batched", lambda tail, before: replace(tail, staged_stamp=tail.staged_stamp - 1)
        ),
        State.DIVERGED,
        "generation stamp: staged stamp is",
    ),
    Planted(
        "argmax-off-by-one",
        broken.on_tail(
            "per-token", lambda tail, before: replace(tail, device_token=tail.device_token + 1)
        ),
        State.DIVERGED,
        "sampler tail: per-token prefill: device argmax: chose token",
    ),
    Planted(
        "argmax-cries-nan",
        broken.on_tail("batched", lambda tail, before: replace(tail, device_token=ARGMAX_SAW_NAN)),
        State.DIVERGED,
        "device argmax: reports NaN, but the logits are finite",
    ),
    Planted(
        "sampler-reads-another-row",
        broken.on_tail(
            "batched", lambda tail, before: replace(tail, logits=np.roll(tail.logits, 1))
        ),
        State.DIVERGED,
        "logits: the row returned is not the row",
    ),
    Planted(
        "stale-decode",
        broken.on_tail("decode", stale),
        State.DIVERGED,
        "sampler tail: decode: step 0: staging copy",
    ),
    Planted(
        "emits-another",
        broken.on_step(lambda step: replace(step, token=(step.token + 1) % 8)),
        State.DIVERGED,
        "sampler tail: decode: step 1: token emitted",
    ),
    Planted(
        "feeds-another",
        broken.on_step(lambda step: replace(step, fed_token=step.fed_token + 1)),
        State.DIVERGED,
        "sampler tail: decode: step 1: token fed back: the step read token",
    ),
    Planted(
        "decode-position",
        broken.on_step(lambda step: replace(step, position=step.position + 1)),
        State.DIVERGED,
        "step 1: token fed back: position went from",
    ),
    Planted(
        "illegal-token",
        broken.on_tail("batched", lambda tail, before: replace(tail, staged_token=10**6)),
        State.DIVERGED,
        "staging copy: staged token 1000000",
    ),
]


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.id)
def test_the_fault_is_named(case: Planted) -> None:
    verdict = _run(case.fault, case.model)
    assert (verdict.state, verdict.exit_code) == (case.state, case.state.exit_code)
    assert case.link in verdict.summary()
    json.dumps(verdict.to_json(), allow_nan=False)


def test_a_broken_tail_clears_the_forward_pass_in_words() -> None:
    vocab = tiny_model(LLAMA).spec.vocab_size
    summary = _run(broken.on_tail("batched", broken.no_argmax)).summary()
    assert summary.startswith(
        f"diverged: logits agree exactly (max_abs_diff=0.000000 over {vocab:,} entries); "
        "the fault is after the forward pass: sampler tail: batched prefill: device argmax"
    )


def test_unsupported_runs_nothing() -> None:
    def refuse() -> JudgedEngine:
        raise Unsupported("registry: no kernel for matvec with Q6_K on path kparallel")

    model = tiny_model(LLAMA)
    verdict = validate(model, refuse, prompt(model))
    assert (verdict.state, verdict.exit_code) == (State.UNSUPPORTED, 2)
    assert "Q6_K" in verdict.summary()
    assert [check.name for check in verdict.checks] == ["support"]


@pytest.mark.parametrize(
    "tokens", [(), (-1,), (10**9,), tuple([1] * 5000)], ids=["empty", "negative", "large", "long"]
)
def test_bad_tokens_are_refused_before_the_engine_opens(tokens: tuple[int, ...]) -> None:
    def never() -> JudgedEngine:
        raise AssertionError("the engine was opened")

    with pytest.raises(InputError):
        validate(tiny_model(LLAMA), never, tokens)


@pytest.mark.parametrize("modes", [(), ("batch",), ("batched", "batched")])
def test_unknown_modes_are_refused(modes: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="prefill is"):
        Options(modes=modes)


def test_a_comparator_that_passes_nan_makes_the_run_invalid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peers' form of the condition, `not error > limit`, which NaN passes."""
    strict = compare_module.compare

    def lenient(got: Any, want: Any, limit: Any) -> Comparison:
        found = strict(got, want, limit)
        with np.errstate(invalid="ignore"):
            above = np.abs(np.asarray(got, np.float64) - want) > limit
        return replace(found, ok=not above.any(), nan_got=0)

    monkeypatch.setattr(compare_module, "compare", lenient)
    verdict = _run()
    assert verdict.state is State.INVALID
    assert "the judge did not see a planted fault: a NaN" in verdict.summary()


@pytest.mark.parametrize("kind", ["other-number", "other-zero"])
def test_a_broken_promise_of_equal_bits_uses_more_than_its_limit(kind: str) -> None:
    """A limit of 0 has no share but more than all of it, also where numbers are equal."""
    fault = (
        Fault(kv=broken.shifted_kv)
        if kind == "other-number"
        else Fault(logits=broken.negative_zero)
    )
    checks = [check for check in _run(fault).checks if check.state is State.DIVERGED]
    assert checks
    assert all(check.of_limit == float("inf") for check in checks if check.limit == 0)
