"""Prefill speed by mode, path, prompt length and MAX_COLS; right before it is timed.

`pytest --benchmark suites/benchmark` times and prints the tables; without the flag every case is
verified and run once. Speed decides no test.
"""

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from backend_hip import Device, Engine
from backend_hip.results import PrefillResult
from fixtures.geometry_table import geometry_case
from reference.model import Model
from reports.records import SCHEMA_VERSION
from suites.benchmark.cases import SpeedCase, cases
from suites.benchmark.clock import CLOCK, host_name, read_clock
from suites.benchmark.proof import Proof, prove, require_same
from suites.harness.endtoend import Expected
from suites.options import DEVICE_KIND, SELECTION

SWEEPS = {"test_mode_and_path": "mode", "test_max_cols": "max-cols"}
WARMUP_ROUNDS = 1

pytestmark = pytest.mark.benchmark(timer=read_clock)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    stash = metafunc.config.stash
    sweep = SWEEPS[metafunc.function.__name__]
    chosen = cases(sweep, stash[SELECTION], stash[DEVICE_KIND])
    metafunc.parametrize("case", chosen, ids=[case.id for case in chosen])


@pytest.fixture
def timed(
    benchmark: Any,
    device: Device,
    load: Callable[[str], Model],
    expected_of: Callable[[Model, SpeedCase], Expected],
    engine_factory: Callable[..., Engine],
    request: pytest.FixtureRequest,
    commit: str,
) -> Callable[[SpeedCase], None]:
    """Proves a case, times it, proves the timed rounds, and only then writes its record."""

    def check_and_time(case: SpeedCase) -> None:
        model = load(case.model)
        small_enough = geometry_case(case.model) is None
        if not small_enough and case.path != "kparallel":
            pytest.skip("a bounded path needs the reference, for which the model is too large")
        engine = engine_factory(
            model,
            max_cols=case.max_cols,
            path=case.path,
            kv_type_k=case.kv_type_k,
            kv_type_v=case.kv_type_v,
        )
        proof = prove(engine, case, expected_of(model, case) if small_enough else None)
        tokens = case.tokens(model.spec.vocab_size)
        prefill = engine.prefill_batched if case.prefill == "batched" else engine.prefill_per_token
        results: list[PrefillResult] = []
        flush: Callable[[], None] | None = (
            request.getfixturevalue("flush") if benchmark.enabled else None
        )

        def prepare() -> None:
            engine.reset()
            if flush is not None:
                flush()

        benchmark.pedantic(
            lambda: results.append(CLOCK.measure(device, lambda: prefill(tokens))),
            setup=prepare,
            rounds=request.config.getoption("benchmark_min_rounds"),
            warmup_rounds=WARMUP_ROUNDS,
        )
        assert results, f"{case.id}: nothing ran"
        for result in results:
            require_same(proof, result, case)
        if benchmark.enabled:
            seconds = benchmark.stats.stats.data
            benchmark.extra_info.update(
                record(case, proof, device, commit, seconds, CLOCK.rounds(len(seconds)))
            )

    return check_and_time


def record(
    case: SpeedCase,
    proof: Proof,
    device: Device,
    commit: str,
    seconds: list[float],
    host_seconds: list[float],
) -> dict[str, Any]:
    """What reports.records reads; written only for a case that was proved."""
    return {
        "schema_version": SCHEMA_VERSION,
        "sweep": case.sweep,
        "model": case.model,
        "runtime": device.label,
        "device": device.name,
        "host": host_name(),
        "prefill": case.prefill,
        "path": case.path,
        "prompt_tokens": case.prompt_tokens,
        "max_cols": case.max_cols,
        "chunks": proof.result.chunks,
        "kv_type_k": case.kv_type_k,
        "kv_type_v": case.kv_type_v,
        "clock": CLOCK.label,
        "host_seconds": host_seconds,
        "tokens_per_second": case.prompt_tokens / statistics.median(seconds),
        "verdict": "ok",
        "max_abs_diff": proof.max_abs_diff,
        "limit": proof.limit,
        "seed": case.seed,
        "commit": commit,
        "compiler": device.runtime.compiler,
    }


def test_mode_and_path(case: SpeedCase, timed: Callable[[SpeedCase], None]) -> None:
    timed(case)


def test_max_cols(case: SpeedCase, timed: Callable[[SpeedCase], None]) -> None:
    timed(case)
