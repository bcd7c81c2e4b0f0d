"""The judge of the engine's validate switch: its verdict and the one line that it prints."""

from dataclasses import replace

from suites.harness.fake_engine import CLEAN, FakeEngine, FakePair, Fault
from suites.harness.pair import prefill_judge, printing_judge, validate_line
from suites.harness.verdict import State
from suites.meta import broken
from suites.meta.models import LLAMA, prompt, tiny_model


def _pair(fault: Fault = CLEAN) -> FakePair:
    model = tiny_model(LLAMA)
    engine = FakeEngine(model, fault)
    per_token = engine.prefill_per_token(prompt(model))
    engine.reset()
    return FakePair(per_token, engine.prefill_batched(prompt(model)))


def test_the_switch_prints_its_line() -> None:
    pair = _pair()
    lines: list[str] = []
    verdict = printing_judge(lines.append)(pair)
    value = f"{float(pair.batched.logits[0, 0]):.4f}"
    assert verdict.state is State.OK
    assert lines == [
        "prefillBatched validate[ok]: last-token logits max_abs_diff=0.000000 at idx=0 "
        f"(ref={value} batched={value}) tol=0.000000 n_tokens=21"
    ]


def test_the_switch_names_the_tail_when_logits_agree() -> None:
    pair = _pair(broken.on_tail("batched", broken.no_argmax))
    verdict = prefill_judge(pair)
    line = validate_line(pair, verdict)
    assert verdict.state is State.DIVERGED
    assert "validate[diverged]" in line
    assert "max_abs_diff=0.000000" in line
    assert "the fault is after the forward pass: sampler tail: batched prefill" in line
    assert "\n" not in line


def test_the_switch_finds_the_moved_logit() -> None:
    pair = _pair(Fault(logits=broken.moved_logit))
    line = validate_line(pair, prefill_judge(pair))
    assert "validate[diverged]" in line
    assert "at idx=7 " in line


def test_the_switch_sees_another_kv_cache() -> None:
    pair = replace(_pair(), kv_bits_equal=False)
    differ = "KV caches or recurrent states of the two prefill modes differ"
    assert prefill_judge(pair).summary() == f"diverged: {differ}"


def test_nan_on_both_sides_of_the_switch_is_invalid() -> None:
    pair = _pair(Fault(logits=broken.nan_logit))
    assert prefill_judge(pair).state is State.INVALID


def test_a_bounded_path_needs_a_limit() -> None:
    model = tiny_model(LLAMA)
    engine = FakeEngine(model, path="serial")
    per_token = engine.prefill_per_token(prompt(model))
    engine.reset()
    pair = FakePair(per_token, engine.prefill_batched(prompt(model)))
    assert prefill_judge(pair).state is State.INVALID
    assert prefill_judge(pair, end_to_end_limit=1e-3).state is State.OK
    lines: list[str] = []
    assert printing_judge(lines.append, lambda: 1e-3)(pair).state is State.OK
    assert "tol=0.002000" in lines[0]
