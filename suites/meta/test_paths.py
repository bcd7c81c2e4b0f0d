"""The row of limits follows the kernel that ran, and a verdict proves which kernels those were."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from reference.model.errors import InputError
from reference.model.trace import Trace
from suites.harness.fake_engine import CLEAN, FakeEngine, FakePair, Fault, patched
from suites.harness.kernels import (
    kernels_check,
    path_of,
    product_rows,
    products_of,
    require_path,
)
from suites.harness.local import LocalRules, Proven, judge_trace
from suites.harness.pair import prefill_judge
from suites.harness.plants import flipped
from suites.harness.tolerances import row
from suites.harness.validate import Options, validate
from suites.harness.verdict import Check, State, Verdict
from suites.meta import broken
from suites.meta.models import LLAMA, oracle_model, prompt, tiny_model

KV = ("f16", "f16")


def _run(fault: Fault = CLEAN, name: str = LLAMA, **changes: Any) -> Verdict:
    model = tiny_model(name)
    options = replace(Options(n_decode=2), **changes)
    return validate(
        model, lambda: FakeEngine(model, fault, path=options.path), prompt(model), options
    )


def _between_the_rows(numerics_mode: str | None) -> Fault:
    """Every product wrong by more than kparallel's row allows and less than serial's."""

    def wrap(linear: Any) -> Any:
        def wrong(x: Any, weight: Any) -> Any:
            size = x.shape[-1]
            middle = np.sqrt(row("linear", "kparallel").relative(size)
                             * row("linear", "serial").relative(size))  # fmt: skip
            off = np.float32(2 * middle) * (np.abs(x) @ np.abs(weight).T)
            return linear(x, weight) + off.astype(np.float32)

        return wrong

    return Fault(lambda: patched("reference.ops.linear", wrap), numerics_mode=numerics_mode)


def test_a_wrong_matvec_is_not_excused_by_the_row_of_another_kernel() -> None:
    verdict = _run(_between_the_rows("per-token"), path="serial")
    assert verdict.summary() == "diverged: Qcur-0 (linear), per-token prefill"


def test_the_batched_kernels_have_the_row_of_their_path() -> None:
    fault = _between_the_rows("batched")
    local = {c.name: c for c in _run(fault, path="serial").checks}["local: linear"]
    assert local.state is State.OK
    assert _run(fault).summary() == "diverged: Qcur-0 (linear)"


def test_routed_experts_are_judged_by_the_row_of_their_own_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They run kernels of kparallel on every path."""
    from suites.harness import bounds_experts

    seen: set[str] = set()
    routed_sum = bounds_experts.routed_sum

    def watched(*arguments: Any) -> Any:
        seen.add(arguments[-1])
        return routed_sum(*arguments)

    monkeypatch.setattr(bounds_experts, "routed_sum", watched)
    model = oracle_model("qwen3moe")
    options = Options(n_decode=0, path="serial")
    verdict = validate(model, lambda: FakeEngine(model, path="serial"), prompt(model), options)
    assert verdict.summary() == "ok"
    assert seen == {"kparallel"}


@pytest.mark.parametrize("mode", ["per-token", "batched"])
def test_a_broken_mode_is_named_at_its_op(mode: str) -> None:
    """Decoding runs the kernels of per-token prefill, so theirs are looked into as well."""
    tail = "" if mode == "batched" else ", per-token prefill"
    fault = Fault(broken.lost_tail(32), numerics_mode=mode)
    verdict = _run(fault)
    assert verdict.summary() == f"diverged: Qcur-0 (linear){tail}"
    assert verdict.run["traced"] == {"batched": 21, "per-token": 21}


def test_a_long_prompt_is_traced_token_by_token_at_its_start() -> None:
    model = tiny_model(LLAMA)
    fault = Fault(broken.lost_tail(32), numerics_mode="per-token")
    options = Options(n_decode=0)
    for planted, summary in (
        (CLEAN, "ok"),
        (fault, "diverged: Qcur-0 (linear), per-token prefill"),
    ):
        engine = partial(FakeEngine, model, planted)
        verdict = validate(model, engine, prompt(model, 40), options)
        assert verdict.summary() == summary
        assert verdict.run["traced"] == {"batched": 40, "per-token": 32}
        assert "per-token: the first 32 of 40 tokens were traced" in verdict.notes


def test_equal_bits_are_judged_once_and_counted() -> None:
    (check,) = [
        c for c in _run().checks if c.name.startswith("local, per-token") and "sound ops" in c.name
    ]
    points = len(_run().run["trace_distance"])
    assert f"{points} points of {points} have the bits of the first trace" in check.detail


def test_a_path_that_no_mode_runs_is_refused() -> None:
    text = "path serial is a path of batched prefill; --prefill per-token does not run it"
    with pytest.raises(InputError, match=text):
        Options(modes=("per-token",), path="serial")
    with pytest.raises(InputError, match="path is quick, expected one of kparallel, serial"):
        require_path("quick", ("batched",))
    assert Options(modes=("per-token",)).path == "kparallel"


def test_modes_have_paths() -> None:
    assert [path_of(mode, "serial") for mode in ("per-token", "batched")] == ["kparallel", "serial"]
    (wanted,) = product_rows(tiny_model(LLAMA), "serial", "batched", KV)
    assert wanted
    assert all(row.startswith("matvec_batched ") and row.endswith(" serial") for row in wanted)


ROUTES = [
    ("clean", lambda ran: ran, True),
    ("nothing", lambda ran: {}, False),
    ("shared-only", lambda ran: {"argmax any": 1}, False),
    ("one-format-missing", lambda ran: dict(list(ran.items())[1:]), False),
    ("another-path", lambda ran: {k.replace("serial", "kparallel"): 1 for k in ran}, False),
    ("one-column-too", lambda ran: {**ran, "matvec Q6_K kparallel": 1}, False),
    ("other-path-too", lambda ran: {**ran, "matvec_batched Q6_K kparallel": 1}, False),
    ("counted-zero", lambda ran: dict.fromkeys(ran, 0), False),
]  # fmt: skip


@pytest.mark.parametrize(("change", "holds"), [c[1:] for c in ROUTES], ids=[c[0] for c in ROUTES])
def test_exactly_the_kernels_of_the_path_must_have_run(change: Any, holds: bool) -> None:
    model = tiny_model(LLAMA)
    result = FakeEngine(model, path="serial").prefill_batched(prompt(model))
    result = replace(result, routes=change(products_of(result.routes)))
    wanted = product_rows(model, "serial", "batched", KV)
    check = kernels_check("kernels", result, wanted)
    assert check.state is (State.OK if holds else State.INVALID)
    fault = Fault(
        prefilled=lambda r, before: (
            replace(r, routes=change(products_of(r.routes))) if r.mode == "batched" else r
        )
    )
    assert _run(fault, path="serial", modes=("batched",)).exit_code == (0 if holds else 3)


def test_the_switch_sees_another_path() -> None:
    model = tiny_model(LLAMA)
    engine = FakeEngine(model)
    per_token = engine.prefill_per_token(prompt(model))
    engine.reset()
    batched = engine.prefill_batched(prompt(model))
    assert prefill_judge(FakePair(per_token, batched)).summary() == "ok"
    other = {name.replace("kparallel", "serial"): n for name, n in batched.routes.items()}
    verdict = prefill_judge(FakePair(per_token, replace(batched, routes=other)))
    assert verdict.state is State.INVALID
    assert "kernels: batched prefill: ran matvec_batched" in verdict.summary()


def test_equal_bits_under_another_row_are_judged_again() -> None:
    """Both modes are off alike: within the row of serial's kernels, above that of kparallel's."""
    verdict = _run(_between_the_rows(None), path="serial")
    assert verdict.summary() == "diverged: Qcur-0 (linear), per-token prefill"


def test_what_is_taken_over_needs_equal_tokens_rules_results_and_inputs() -> None:
    model, rules, name = tiny_model(LLAMA), LocalRules(), "attn_norm-0"
    trace = Trace()
    FakeEngine(model).prefill_batched(prompt(model), trace=trace)
    points = {point.point.name: point for point in judge_trace(model, trace, rules)}
    proven = Proven(trace, rules, points, {})
    assert proven.covers(trace, rules, name, ["inp_embd"])
    assert not proven.covers(trace, replace(rules, path="serial"), name, ["inp_embd"])
    assert not proven.covers(trace, rules, "no-point", [])
    assert not proven.covers(trace, rules, name, ["no-point"])
    other = Trace(trace.tokens[::-1])
    other._parts = trace._parts
    assert not proven.covers(other, rules, name, ["inp_embd"])
    for changed in (name, "inp_embd"):
        other = Trace(trace.tokens)
        other._parts = {**trace._parts, changed: [flipped(trace[changed])]}
        assert not proven.covers(other, rules, name, ["inp_embd"])
    broken_point = replace(points[name], check=Check(name, State.DIVERGED, 1))
    assert not Proven(trace, rules, {name: broken_point}, {}).covers(trace, rules, name, [])
