"""A judge that lost its sight at one place makes the run invalid: a plant there goes unseen."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from reference.model import Model
from suites.harness import kv, local, pair, recurrent, steps
from suites.harness.compare import compare, compare_logits
from suites.harness.fake_engine import CLEAN, FakeEngine, Fault
from suites.harness.plants import beyond, flipped
from suites.harness.validate import Options, validate
from suites.harness.verdict import State, Verdict
from suites.meta import broken
from suites.meta.models import LLAMA, oracle_model, prompt, tiny_model


def _run(model: Model, fault: Fault = CLEAN) -> Verdict:
    return validate(model, lambda: FakeEngine(model, fault), prompt(model), Options(n_decode=2))


def _passes(got: Any, want: Any, limit: Any) -> Any:
    """A comparison of `want` with itself, whatever was got."""
    return compare(np.asarray(want), want, limit)


def _passes_logits(got: Any, want: Any, limit: float) -> Any:
    return compare_logits(want, want, limit)


def _equal(got: Any, want: Any) -> bool:
    return True


@dataclass(frozen=True)
class Blind:
    id: str
    module: Any
    name: str
    judge: Callable[..., Any]
    missed: str
    model: str = LLAMA


BLIND = [
    Blind("local", local, "compare", _passes, "one element of inp_embd (embed) (local)"),
    Blind("kv", kv, "same_bits", _equal, "one bit of the K cache of layer 1, against the trace"),
    Blind(
        "state",
        recurrent,
        "compare",
        _passes,
        "one element of the memory of layer 6, against the trace",
        "qwen35",
    ),
    Blind(
        "state-run-to-run",
        recurrent,
        "same_bits",
        _equal,
        "one element of the memory of layer 6, run to run",
        "qwen35",
    ),
    Blind("decode", steps, "compare_logits", _passes_logits, "one logit of the last step (decode)"),
    Blind("bits", pair, "compare", _passes, "one bit of the logits: decode equals batched prefill"),
]


@pytest.mark.parametrize("case", BLIND, ids=lambda case: case.id)
def test_a_blind_judge_makes_the_run_invalid(case: Blind, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(LLAMA) if case.model == LLAMA else oracle_model(case.model)
    assert _run(model).summary() == "ok"
    monkeypatch.setattr(case.module, case.name, case.judge)
    verdict = _run(model)
    assert verdict.state is State.INVALID
    assert verdict.summary().startswith("invalid: the judge did not see a planted fault: ")
    (check,) = [c for c in verdict.checks if c.name == "planted faults are caught"]
    assert case.missed in check.detail


def test_every_op_of_a_run_gets_a_plant_and_the_table_says_where() -> None:
    model = oracle_model("qwen35moe")
    verdict = _run(model)
    planted = verdict.run["planted"]
    ops = {c.name.removeprefix("local: ") for c in verdict.checks if c.name.startswith("local: ")}
    # What the sequence left behind is no op of a trace point and has plants of its own.
    for op in ops - {"kv_write", "recurrent state"}:
        assert any(f"({op}) (local)" in plant for plant in planted), op
    assert sum("recurrent state" in plant for plant in planted) == 4
    assert sum("(KV)" in plant for plant in planted) == 4
    (check,) = [c for c in verdict.checks if c.name == "planted faults are caught"]
    assert (check.state, check.unit) == (State.OK, "faults")
    assert "KV 4, recurrent state 4, decode 2" in check.detail


def test_nothing_is_planted_in_what_is_broken() -> None:
    verdict = _run(tiny_model(LLAMA), Fault(kv=broken.shifted_kv))
    assert verdict.state is State.DIVERGED
    assert not [plant for plant in verdict.run["planted"] if "cache" in plant]


@pytest.mark.parametrize("limit", [1e-3, 1e-9])
def test_plants_are_the_least_that_must_be_seen(limit: float) -> None:
    assert abs(float(beyond(2.0, limit)) - 2.0) > limit
    assert beyond(2.0, 0.0) != np.float32(2.0)
    for dtype in (np.float16, np.float32):
        values = np.arange(6, dtype=dtype).reshape(2, 3)
        changed = flipped(values)
        assert changed.dtype == values.dtype
        assert np.count_nonzero(changed != values) == 1
        assert np.allclose(changed, values, rtol=np.finfo(dtype).eps, atol=0.0)
        assert not np.shares_memory(changed, values)


def test_the_units_of_a_verdict_are_not_added_up() -> None:
    verdict = _run(tiny_model(LLAMA))
    units = {check.unit for check in verdict.checks}
    assert units == {"values", "launches", "statements", "links", "probes", "faults", "results"}
    values = sum(check.elements for check in verdict.checks if check.unit == "values")
    assert verdict.elements == values
    moved = replace(verdict, checks=tuple(replace(c, unit="links") for c in verdict.checks))
    assert moved.elements == 0
