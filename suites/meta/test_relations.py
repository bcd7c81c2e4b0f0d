"""The relations of suites/correctness/test_relations.py, on an engine that breaks them.

Every planted fault must be found by drawn cases, shrink to the smallest case that shows it, and be
there again when that case's id is replayed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, settings

from backend_hip import compile as compiling
from backend_hip import kv_cache, ops, sampler, state
from backend_hip.device import Device, open_device
from backend_hip.engine import Engine
from backend_hip.forward import Forward
from reference.model import Model
from suites.correctness.relation_mates import MatesRunner
from suites.correctness.relation_runs import Walker
from suites.correctness.relation_strategies import Axes, mates, walks
from suites.correctness.relations import Mates, Piece, Relation, Walk, parse_relation
from suites.correctness.test_relations import assert_holds
from suites.meta.engine_faults import REAL, Plant, kernel, state_not_reset
from suites.meta.models import oracle_model, tiny_model
from suites.meta.test_options import USAGE_ERROR, run_pytest

LLAMA, GEMMA3, QWEN35 = "tiny-llama-q8_0", "tiny-gemma3", "oracle-qwen35d64"
RELATIONS = "suites/correctness/test_relations.py"
AXES = Axes(max_cols=(7,), kv_pairs=(("f16", "f16"),), longest=9)
FIND = settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with open_device("cpu") as opened:
        yield opened


@pytest.fixture(scope="module", autouse=True)
def _sources_are_read_once() -> Iterator[None]:
    """Thousands of small engines are built here, and each reads every kernel's source."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "flatten", cache(compiling.flatten))
        yield


def _load(name: str) -> Model:
    if name.startswith("oracle-"):
        return oracle_model(name.removeprefix("oracle-"))
    return tiny_model(name)


def _open(model: Model, *, device: Device, **options: Any) -> Engine:
    return Engine(model, device, **options)


def _walker(device: Device) -> Walker:
    return Walker(_load, partial(_open, device=device))


# --- faults -------------------------------------------------------------------------------------


def _partial_chunk_too_short(patch: pytest.MonkeyPatch) -> None:
    flow = Engine._flow

    def broken(self: Engine, tokens: int, *, batched: bool, **rest: Any) -> ops.Flow:
        short = batched and self.position and 1 < tokens < self.chunk
        return flow(self, tokens - 1 if short else tokens, batched=batched, **rest)

    patch.setattr(Engine, "_flow", broken)


def _write(change: Callable[[state.StepInput, int, int], int]) -> Plant:
    """The position that a flow is told becomes change(step, position, tokens)."""
    write = state.StepInput.write

    def broken(self: state.StepInput, stamp: int, rows: Sequence[state.FlowRow]) -> None:
        off = change(self, rows[0].position, len(rows)) - rows[0].position
        write(self, stamp, [replace(row, position=row.position + off) for row in rows])

    return lambda patch: patch.setattr(state.StepInput, "write", broken)


def _old_position(step: state.StepInput, position: int, tokens: int) -> int:
    """After a reset, the first replay of the graph runs where the last one did."""
    last = getattr(step, "last", 0)
    step.last = position  # type: ignore[attr-defined]
    return last if tokens == 1 and position == 0 else position


def _no_argmax_batched(patch: pytest.MonkeyPatch) -> None:
    queue = sampler.SamplerTail.queue

    def only_per_token(self: Any, flow: ops.Flow, *rest: Any) -> None:
        if not flow.batched:
            queue(self, flow, *rest)

    patch.setattr(sampler.SamplerTail, "queue", only_per_token)


def _traced_takes_the_other_kernels(patch: pytest.MonkeyPatch) -> None:
    run = Forward.run
    patch.setattr(
        Forward,
        "run",
        lambda self, flow, want, trace: run(
            self, replace(flow, batched=flow.batched or trace is not None), want, trace
        ),
    )


def _per_token_after_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "prefill_batched", Engine.prefill_per_token)


NEIGHBOUR = kernel(
    "matvec_batched.hip",
    ("const float* column = x + static_cast<int64_t>(c) * columns;",
     "const float* column = x + static_cast<int64_t>(c > 0 ? c - 1 : 0) * columns;"),
)  # fmt: skip
OTHER_ORDER = kernel(
    "matvec_batched.hip",
    ("sums[r][c] = simt::fma(w[r][i + j], values[j], sums[r][c]);",
     "const int from = MAX_COLS > 32 ? 3 - j : j;"
     "sums[r][c] = simt::fma(w[r][i + from], values[from], sums[r][c]);"),
)  # fmt: skip
WINDOW = kernel(
    "attention.hip",
    ("seen_by(step, first_row + row, window)",
     "seen_by(step, first_row + row, count > 1 ? window - 1 : window)"),
)  # fmt: skip


def k_as_v(patch: pytest.MonkeyPatch) -> None:
    """Wherever keys are written, also by the fused kernel of a decode step."""
    for file, value in (("kv_write.hip", "k[source]"), ("rope_store.hip", "turned[i]")):
        rounded = f"V_TYPE == 1 ? simt::half_to_float(simt::float_to_half({value})) : {value}"
        kernel(file, (f"write<K>(keys, {value},", f"write<K>(keys, {rounded},"))(patch)


@dataclass(frozen=True)
class Fault:
    """A plant, where to look for it, and what the smallest case that shows it is like."""

    plant: Plant
    says: str
    holds: Callable[[Walk], bool]
    length: int  # at most
    model: str = LLAMA
    axes: Axes = field(default=AXES)


def _ways(walk: Walk) -> str:
    return "".join(piece.way for piece in walk.pieces)


FAULTS = {
    "column-of-the-neighbour": Fault(NEIGHBOUR, "logits of", lambda w: _ways(w) == "b", 2),
    "partial-chunk-too-short": Fault(
        _partial_chunk_too_short, "logits of", lambda w: "b" in _ways(w), 8
    ),
    "position-off-after-a-split": Fault(
        _write(lambda step, position, tokens: position + (position > 0 and tokens > 1)),
        "K of layer 0", lambda w: "b" in _ways(w), 4,
    ),
    "tail-shifted-at-chunk": Fault(
        REAL["tail-shifted-at-chunk"], "tail of layer 0", lambda w: len(w.pieces) == 1, 2, QWEN35
    ),
    "other-order-above-32-columns": Fault(
        OTHER_ORDER, "logits of", lambda w: (w.max_cols, _ways(w)) == (33, "b"), 1,
        axes=replace(AXES, max_cols=(7, 32, 33, 40)),
    ),
    "window-edge-only-batched": Fault(
        WINDOW, "logits of", lambda w: _ways(w) == "b", 17, GEMMA3, replace(AXES, longest=17)
    ),
    "graph-replayed-at-an-old-position": Fault(
        _write(_old_position), "K of layer 0", lambda w: len(w.earlier) == 1, 1
    ),
    "graph-position-never-written": Fault(
        _write(lambda step, position, tokens: 0 if tokens == 1 else position),
        "canonical run at 1: K of layer 0 is not finite", lambda w: _ways(w) == "g", 2,
    ),
    "state-not-reset": Fault(
        state_not_reset, "memory of layer 0", lambda w: w.calls == 2 or len(w.earlier) == 1, 1,
        QWEN35,
    ),
    "cache-not-reset": Fault(
        lambda patch: patch.setattr(kv_cache.DeviceCache, "poison", lambda *where, **_: None),
        "bytes behind position 1 are not poison", lambda w: len(w.earlier) == 1, 1,
    ),
    "no-argmax-batched": Fault(
        _no_argmax_batched, "the staged token is -1", lambda w: _ways(w) == "b", 1
    ),
    "traced-takes-other-kernels": Fault(
        _traced_takes_the_other_kernels, "batched products ran", lambda w: _ways(w) in ("e", "E"), 1
    ),
    "batched-is-per-token": Fault(
        _per_token_after_all, "batched products never ran", lambda w: _ways(w) == "b", 1
    ),
    "k-rounded-as-v": Fault(
        k_as_v, "K of layer 0 is not ('f32', 'f32') rounded",
        lambda w: (w.kv_type_k, w.kv_type_v, _ways(w)) == ("f32", "f16", "g"), 1,
        axes=replace(AXES, kv_pairs=(("f16", "f16"), ("f16", "f32"), ("f32", "f16"))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_relation_is_found_shrinks_and_replays(
    name: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    cases = walks(fault.model, _load(fault.model).spec, fault.axes)
    with monkeypatch.context() as patch:
        fault.plant(patch)
        with _walker(device) as walker:
            smallest = find(cases, lambda walk: bool(walker.differences(walk)), settings=FIND)
            found = walker.differences(smallest)
        assert any(fault.says in line for line in found), (smallest.id, found)
        assert smallest.length <= fault.length, smallest.id
        assert fault.holds(smallest), smallest.id
        assert smallest.fill == "poison", smallest.id
        with _walker(device) as another:
            assert another.differences(_replayed(smallest)) == found
    with _walker(device) as clean:
        assert clean.differences(_replayed(smallest)) == ()


def _replayed(case: Relation) -> Any:
    return parse_relation(case.id)


NAN_LEAKS = kernel(
    "matvec_batched.hip",
    ("here.template read<F>(c, place, at, i, values);",
     "here.template read<F>(c, place, at, i, values);"
     "float leak[4]; x.template read<F>(0, place, at, i, leak);"
     "for (int j = 0; j < 4; ++j) values[j] += 0.0f * leak[j];"),
)  # fmt: skip
WRITES_BEHIND = kernel(
    "matvec_batched.hip",
    ("if (c < count) y[", "y["),
)  # fmt: skip
FEW_NEIGHBOUR = kernel(
    "matvec_batched.hip",
    ("const int64_t offset = static_cast<int64_t>(c) * columns;",
     "const int64_t offset = static_cast<int64_t>(c > 0 ? c - 1 : 0) * columns;"),
)  # fmt: skip
EXPERTS_NEIGHBOUR = kernel(
    "matvec_experts.hip", ("slots[c] / share", "slots[c > 0 ? c - 1 : 0] / share")
)
PRODUCTS: dict[str, tuple[Plant, str, int, str]] = {
    "column-of-the-neighbour": (NEIGHBOUR, "columns", 2, "column 1 of"),
    "nan-of-the-neighbour": (NAN_LEAKS, "columns", 2, "have other bits"),
    "written-behind-the-last-column": (WRITES_BEHIND, "columns", 1, "behind the last column"),
    "sequence-of-the-neighbour": (FEW_NEIGHBOUR, "few", 2, "column 1 of"),
    "expert-of-the-neighbour": (EXPERTS_NEIGHBOUR, "experts", 2, "have other bits"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_column_that_sees_its_neighbour_is_found(
    name: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, op, most, says = PRODUCTS[name]
    with monkeypatch.context() as patch:
        plant(patch)
        runner = MatesRunner(device)
        cases = mates(op, forms=("Q8_0",), max_cols=(8,))
        smallest: Mates = find(cases, lambda case: bool(runner.differences(case)), settings=FIND)
        found = runner.differences(smallest)
        assert any(says in line for line in found), (smallest.id, found)
        assert len(smallest.picks) <= most, smallest.id
        assert MatesRunner(device).differences(_replayed(smallest)) == found
    assert MatesRunner(device).differences(_replayed(smallest)) == ()


# --- what a failure prints ----------------------------------------------------------------------

WALK = Walk(LLAMA, "f16", "f16", 7, 7, 0, "poison", 1, (), (Piece("b", 8),))


def test_a_failure_prints_the_commands_that_replay_it(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    NEIGHBOUR(monkeypatch)
    with _walker(device) as walker, pytest.raises(AssertionError) as failure:
        assert_holds(WALK, walker, MatesRunner(device))
    text = str(failure.value)
    assert f"replay: pytest {RELATIONS} --relation {WALK.id}" in text
    assert f"also: assay validate {LLAMA} --tokens " in text
    assert "--max-cols 7 --chunk 7 --kv-type-k f16 --kv-type-v f16" in text


def test_only_a_single_prefill_has_a_validate_command() -> None:
    for change in (
        {"pieces": (Piece("b", 4), Piece("b", 4))},
        {"pieces": (Piece("d", 1),)},
        {"earlier": (Piece("g", 1),)},
        {"calls": 2},
    ):
        assert replace(WALK, **change).validate_command([1]) is None
    assert WALK.validate_command([1, 2]) is not None


def test_the_option_runs_that_case_alone() -> None:
    run = run_pytest("--device", "cpu", RELATIONS, "--relation", WALK.id)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed" in run.stdout
    assert "deselected" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((RELATIONS, "--relation", "tiny-llama:b8"), "expected one as a failing run prints it"),
        (("suites/meta/test_reports.py", "--relation", WALK.id), "no collected test takes"),
        ((RELATIONS, "--relation-walks", "0"), "expected a number from 1 on"),
    ],
)
def test_a_wrong_use_of_the_options_runs_nothing(arguments: tuple[str, ...], text: str) -> None:
    run = run_pytest("--device", "cpu", *arguments)
    assert run.returncode == USAGE_ERROR, run.stdout + run.stderr
    assert text in run.stdout + run.stderr
