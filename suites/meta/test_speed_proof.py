"""The benchmark's own guard: what is not proved is not timed, and what failed leaves no figure."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backend_hip import Engine
from reference.model import Model
from suites.benchmark.cases import MAX_COLS, SpeedCase, cases
from suites.benchmark.clock import SampleClock
from suites.benchmark.plugin import UNVERIFIED, pytest_benchmark_update_json
from suites.benchmark.proof import prove, reference_of, require_route, require_same, run
from suites.options import Selection

CASE = SpeedCase("mode", "tiny-llama", "batched", "kparallel", 41, 40)


@pytest.fixture
def engine(engine_factory: Callable[..., Engine], load: Callable[[str], Model]) -> Engine:
    return engine_factory(load(CASE.model), max_cols=CASE.max_cols)


@pytest.mark.parametrize("prefill", ["per-token", "batched"])
def test_a_sound_engine_is_proved(engine: Engine, prefill: str) -> None:
    case = replace(CASE, prefill=prefill)
    proof = prove(engine, case, reference_of(engine.model, case))
    assert proof.result.mode == prefill
    assert proof.max_abs_diff <= proof.limit
    require_same(proof, run(engine, prefill, case.tokens(engine.model.spec.vocab_size)), case)


def test_without_a_reference_only_bit_equality_counts(engine: Engine) -> None:
    assert prove(engine, CASE, None).limit == 0
    assert prove(engine, replace(CASE, prefill="per-token"), None).max_abs_diff == 0
    with pytest.raises(AssertionError, match="needs the reference"):
        prove(engine, replace(CASE, path="serial"), None)


def test_batched_prefill_that_is_dead_code_is_not_timed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "prefill_batched", engine.prefill_per_token)
    with pytest.raises(AssertionError, match="invalid"):
        prove(engine, CASE, reference_of(engine.model, CASE))


def test_another_path_than_the_case_names_is_not_timed(engine: Engine) -> None:
    with pytest.raises(AssertionError, match="serial ran matvec_batched"):
        prove(engine, replace(CASE, path="serial"), reference_of(engine.model, CASE))


def test_wrong_logits_are_not_timed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = engine.prefill_batched

    def off_by_one_bit(tokens: Any) -> Any:
        result = sound(tokens)
        logits = result.logits.copy()
        logits.view(np.uint32)[0, 7] ^= 1
        return replace(result, logits=logits)

    monkeypatch.setattr(engine, "prefill_batched", off_by_one_bit)
    with pytest.raises(AssertionError, match="diverged"):
        prove(engine, CASE, reference_of(engine.model, CASE))


def test_wrong_reference_stops_per_token_too(engine: Engine) -> None:
    expected = reference_of(engine.model, CASE)
    moved = replace(expected, logits=expected.logits + 2 * expected.limits[-1])
    with pytest.raises(AssertionError, match="diverged"):
        prove(engine, replace(CASE, prefill="per-token"), moved)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "logits": lambda r: replace(r, logits=np.nextafter(r.logits, np.float32(np.inf))),
    "nan": lambda r: replace(r, logits=np.full_like(r.logits, np.nan)),
    "token": lambda r: replace(r, tail=replace(r.tail, staged_token=r.tail.staged_token + 1)),
    "stamp": lambda r: replace(r, tail=replace(r.tail, staged_stamp=r.tail.staged_stamp - 1)),
    "poison": lambda r: replace(r, logits_poisoned=1),
    "route": lambda r: replace(r, routes={**r.routes, "matvec Q4_K kparallel": 1}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_timed_round_must_give_what_was_proved(engine: Engine, name: str) -> None:
    proof = prove(engine, CASE, reference_of(engine.model, CASE))
    with pytest.raises(AssertionError, match="41"):
        require_same(proof, CHANGES[name](proof.result), CASE)


def test_route_needs_every_layer_of_every_flow(engine: Engine) -> None:
    result = run(engine, "batched", CASE.tokens(engine.model.spec.vocab_size))
    layers = engine.model.spec.layer_count
    require_route(result, "batched", "kparallel", layers)
    few = {"matvec_batched Q4_K kparallel": result.chunks * layers - 1}
    with pytest.raises(AssertionError, match="expected at least"):
        require_route(replace(result, routes=few), "batched", "kparallel", layers)
    with pytest.raises(AssertionError):
        require_route(replace(result, routes={}), "batched", "kparallel", layers)


def test_a_row_without_verdict_leaves_no_figure() -> None:
    rows = [
        {"fullname": "good", "param": "id", "extra_info": {"verdict": "ok"}},
        {"fullname": "failed after its timing", "param": "id", "extra_info": {}},
    ]
    output: dict[str, Any] = {"benchmarks": rows}
    config: Any = SimpleNamespace(stash=pytest.Stash())
    config.stash[UNVERIFIED] = []
    pytest_benchmark_update_json(config, [], output)
    assert [row["fullname"] for row in output["benchmarks"]] == ["good"]
    assert output["without_verdict"] == ["failed after its timing"]


def test_sweeps_hold_what_they_promise() -> None:
    mode = cases("mode", Selection(), "cpu")
    kinds = {(case.prefill, case.path) for case in mode}
    assert kinds == {("per-token", "kparallel"), ("batched", "serial"), ("batched", "kparallel")}
    assert {case.prompt_tokens for case in mode} >= {17, 105}
    columns = cases("max-cols", Selection(), "cpu")
    assert {case.max_cols for case in columns} == set(MAX_COLS)
    assert {case.prompt_tokens for case in columns} == {105, 120, 128}
    assert len({case.id for case in columns}) == len(columns)
    chosen = cases(
        "max-cols", Selection(max_cols=(9,), model=("x", "y"), kv_type_k=("f32",)), "cpu"
    )
    assert {(c.max_cols, c.kv_type_k) for c in chosen} == {(9, "f32")}
    assert {case.model for case in chosen} == {"x", "y"}
    per_token = Selection(prefill=("per-token",))
    assert not any(per_token.keeps({"case": case}) for case in columns), "deselected, not skipped"


def test_clock_advances_only_by_what_it_measured(device: Any) -> None:
    clock = SampleClock()
    assert clock.read() == 0
    assert [clock.measure(device, lambda: "result") for _ in range(2)] == ["result", "result"]
    assert clock.read() >= 0
    assert len(clock.rounds(2)) == 2
