"""Decode speed by batch, context, KV type and path, beside what bytes allow; proved, then timed.

`pytest --benchmark suites/benchmark/test_decode.py --model geometry-qwen3-8b` times and prints the
tables; without the flag every row is verified and run once. One sequence on the same engine is
timed in turn with each row. `assay bench` has all rows of a table in turn, and prefill too.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from backend_hip import Device
from reference.model import Model
from suites.benchmark.bench import Options, Subject, record, timed_row
from suites.benchmark.cases import MODELS
from suites.benchmark.clock import CLOCK, host_name, read_clock
from suites.benchmark.engine_runs import Runner
from suites.benchmark.interleave import Samples, in_turn
from suites.benchmark.kv_control import open_runner
from suites.benchmark.limits import MeasuredLimits, measure_limits
from suites.benchmark.plans import Section, SpeedRow, section
from suites.benchmark.row_proof import prove_decode
from suites.options import DEVICE_KIND, SELECTION

pytestmark = pytest.mark.benchmark(timer=read_clock)


def sweep(device_kind: str | None) -> Section:
    """Every batch and context with f16, and those of the KV section with each type."""
    rows = (*section("decode", device_kind).rows, *section("kv", device_kind).rows)
    return Section(
        "decode",
        "Decode by batch, context and KV type",
        tuple(dict.fromkeys(rows)),
        lambda row: replace(row, batch=1),
        "one sequence",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" not in metafunc.fixturenames:
        return
    stash = metafunc.config.stash
    kind, selection = stash[DEVICE_KIND], stash[SELECTION]
    size = "cpu" if kind in ("cpu", None) else "gpu"
    models, rows = selection.model or MODELS[size], sweep(kind).rows
    # Types that are asked for take the place of the ones that the sections have.
    types = [
        {"kv_type_k": kind_k, "kv_type_v": kind_v}
        for kind_k in selection.kv_type_k or ("f16",)
        for kind_v in selection.kv_type_v or ("f16",)
    ]
    if selection.kv_type_k or selection.kv_type_v:
        rows = tuple(_with_types(row, **kinds) for kinds in types for row in rows)
    chosen = [(model, row) for model in models for row in dict.fromkeys(rows)]
    metafunc.parametrize(("model", "row"), chosen, ids=[f"{name}-{row.id}" for name, row in chosen])


def _with_types(row: SpeedRow, kv_type_k: str, kv_type_v: str) -> SpeedRow:
    return replace(row, kv_type_k=kv_type_k, kv_type_v=kv_type_v)


@pytest.fixture(scope="module")
def limits(device: Device) -> MeasuredLimits:
    return measure_limits(device)


@pytest.fixture(scope="module")
def runner_of(
    device: Device, load: Callable[[str], Model], pytestconfig: pytest.Config
) -> Iterator[Callable[[str, SpeedRow], Runner]]:
    """An engine for all rows of a model that have its options, with full caches."""
    runners: dict[tuple[str, Options], Runner] = {}
    rows = sweep(pytestconfig.stash[DEVICE_KIND]).rows

    def find(model: str, row: SpeedRow) -> Runner:
        if (model, row.options) not in runners:
            runner = open_runner(
                load(model),
                device,
                sequences=max(other.batch for other in rows),
                context_length=max(other.context + other.steps for other in rows) + 1,
                **dict(row.options),
            )
            runner.assume(max(other.context for other in rows))
            runners[model, row.options] = runner
        return runners[model, row.options]

    yield find
    for runner in runners.values():
        runner.close()


def test_decode(
    model: str,
    row: SpeedRow,
    benchmark: Any,
    device: Device,
    load: Callable[[str], Model],
    limits: MeasuredLimits,
    runner_of: Callable[[str, SpeedRow], Runner],
    request: pytest.FixtureRequest,
    commit: str,
) -> None:
    plan = sweep(request.config.stash[DEVICE_KIND])
    subject = Subject(model, load(model), device, limits, host_name(), commit)
    runner = runner_of(model, row)
    tokens = subject.tokens(row.batch)
    proof = prove_decode(runner, row, tokens)
    base, base_seconds = plan.base(row), list[float]()
    timed, base_timed = (timed_row(subject, runner, each) for each in (row, base))

    def prepare() -> None:
        if benchmark.enabled:
            base_seconds.extend(in_turn(device, {base: base_timed}, 1, warm_up=0)[base].device)
        timed.prepare()

    benchmark.pedantic(
        lambda: CLOCK.measure(device, timed.run),
        setup=prepare,
        rounds=request.config.getoption("benchmark_min_rounds"),
        warmup_rounds=1,
    )
    assert prove_decode(runner, row, tokens) == proof, f"{row.id}: other tokens after its timing"
    if not benchmark.enabled:
        return
    seconds = list(benchmark.stats.stats.data)
    samples = {
        base: Samples(base_seconds[-len(seconds) :], []),
        row: Samples(seconds, CLOCK.rounds(len(seconds))),
    }
    made = record(subject, plan, row, proof, samples, {row.options: runner})
    benchmark.extra_info.update(made.stored())
