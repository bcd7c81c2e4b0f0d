"""Routed experts on the device: routing, grouping, products per expert, the weighted sum."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_hip import experts
from backend_hip.device import Device
from backend_hip.engine import Engine
from backend_hip.experts import ExpertScratch, Routing
from backend_hip.ops import Flow
from backend_hip.weights import DeviceTensor
from reference.model.quant import FORMATS
from reference.model.spec import ExpertsSpec
from reference.moe import route
from reference.quantise import quantise
from suites.correctness.lab import Lab
from suites.harness import bounds_experts as bounds
from suites.harness.compare import compare


@dataclass(frozen=True)
class RouteCase:
    tokens: int
    count: int
    used: int

    @property
    def id(self) -> str:
        return f"{self.tokens}-tokens-{self.used}-of-{self.count}"


# Fewer and more experts than lanes, a lane count that is not full, the largest that users run.
ROUTE_CASES = [
    RouteCase(tokens, count, used)
    for tokens in (1, 5, 40)
    for count, used in ((1, 1), (4, 2), (6, 6), (31, 3), (32, 8), (33, 8), (128, 8), (256, 8))
]


class _Bench:
    """One routing on the device, fed with given logits."""

    def __init__(self, lab: Lab, spec: ExpertsSpec, logits: NDArray[np.float32], batched: bool):
        tokens, used = len(logits), spec.used
        size = f"@{spec.count}"
        keys = [(op, size, "any") for op in ("route", "group_by_expert")]
        self.spec, self.tokens = spec, tokens
        self.flow = lab.flow(keys, {}, tokens=range(tokens), batched=batched)
        pairs = np.full(tokens * used, -1, dtype=np.int32)
        self.routing = Routing(
            lab.values(logits),
            lab.buffer(pairs),
            lab.values(np.full((tokens, used), np.nan, dtype=np.float32)),
            lab.buffer(np.full(spec.count + 1, -1, dtype=np.int32)),
            lab.buffer(pairs),
        )
        experts.route(self.flow, spec, self.routing)
        experts.group_by_expert(self.flow, spec, self.routing)

    def chosen(self) -> NDArray[np.int32]:
        return self.routing.chosen.download((self.tokens, self.spec.used), np.int32)


def _logits(case: RouteCase) -> NDArray[np.float32]:
    generator = np.random.default_rng([case.tokens, case.count, case.used])
    logits = generator.standard_normal((case.tokens, case.count)).astype(np.float32) * 3
    logits[0, :: max(1, case.count // 3)] = logits[0].max() + 1  # exact ties among the best
    return logits


@pytest.mark.parametrize("case", ROUTE_CASES, ids=lambda case: case.id)
def test_routing_equals_the_reference(case: RouteCase, device: Device) -> None:
    logits = _logits(case)
    with Lab(device) as lab:
        bench = _Bench(lab, ExpertsSpec(case.count, case.used, 32), logits, batched=True)
        chosen = bench.chosen()
        weights = bench.routing.weights.download(case.tokens)
        offsets = bench.routing.offsets.download((case.count + 1,), np.int32)
        slots = bench.routing.slots.download((case.tokens * case.used,), np.int32)
    assert np.array_equal(chosen, route(logits.astype(np.float64), case.used).experts)
    want, limit = bounds.routing_weights(logits, chosen.astype(np.int64))
    result = compare(weights.astype(np.float64), want, limit)
    assert result.elements == chosen.size
    assert result.ok, result.reason()
    # Every pair stands once, under its expert, in ascending order.
    assert sorted(slots.tolist()) == list(range(chosen.size))
    for expert in range(case.count):
        mine = slots[offsets[expert] : offsets[expert + 1]]
        assert np.array_equal(mine, np.flatnonzero(chosen.ravel() == expert))


def test_all_equal_logits_choose_the_lowest_ids(device: Device) -> None:
    with Lab(device) as lab:
        logits = np.zeros((3, 40), dtype=np.float32)
        bench = _Bench(lab, ExpertsSpec(40, 8, 32), logits, batched=False)
        assert np.array_equal(bench.chosen(), np.tile(np.arange(8), (3, 1)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_odd_logits_never_name_an_expert_that_is_not_there(value: float, device: Device) -> None:
    for place in (0, 20, 39):
        logits = np.ones((2, 40), dtype=np.float32)
        logits[0, place] = value
        logits[1] = value
        with Lab(device) as lab:
            bench = _Bench(lab, ExpertsSpec(40, 8, 32), logits, batched=True)
            chosen = bench.chosen()
        assert ((chosen >= 0) & (chosen < 40)).all()
        assert all(len(set(row)) == 8 for row in chosen.tolist())


FORMS = ("F32", "F16", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q5_0")


def _stack(lab: Lab, form: str, values: NDArray[np.float32]) -> DeviceTensor:
    raw = quantise(FORMATS[form], values.reshape(-1, values.shape[-1]))
    return lab.matrix(form, values.shape, raw)


def _routed(
    device: Device, form: str, tokens: int, *, batched: bool, used_experts: int | None = None
) -> NDArray[np.float32]:
    """The routed sum of one seeded case; `used_experts` restricts routing to the first few."""
    width, inner, spec = 256, 256, ExpertsSpec(12, 3, 256)
    generator = np.random.default_rng([FORMATS[form].ggml_type, tokens])
    x = generator.standard_normal((tokens, width)).astype(np.float32)
    logits = generator.standard_normal((tokens, spec.count)).astype(np.float32)
    if used_experts is not None:
        logits[:, used_experts:] -= 100
    gate, up = (
        generator.standard_normal((spec.count, inner, width)).astype(np.float32) for _ in range(2)
    )
    down = generator.standard_normal((spec.count, width, inner)).astype(np.float32)
    with Lab(device) as lab:
        bench = _Bench(lab, spec, logits, batched)
        keys = [(op, form, "kparallel") for op in ("matvec_expert", "matvec_experts")]
        keys += [("gated", "silu", "any"), ("combine_experts", "", "any")]
        flow: Flow = lab.flow(
            keys, {"MAX_COLS": 8}, tokens=range(tokens), batched=batched, max_cols=8
        )
        out = lab.output(tokens, width)
        pairs = tokens * spec.used
        scratch = ExpertScratch(
            lab.output(pairs, inner), lab.output(pairs, inner), lab.output(pairs, width)
        )
        scales = lab.vector(np.linspace(0.5, 2, spec.count, dtype=np.float32))
        experts.routed_sum(
            flow,
            lab.values(x),
            spec,
            bench.routing,
            tuple(_stack(lab, form, values) for values in (gate, up, down)),  # type: ignore[arg-type]
            scales,
            "silu",
            scratch,
            out,
        )
        return lab.read(out)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 17])
def test_grouping_changes_no_bit(form: str, tokens: int, device: Device) -> None:
    # 8 columns a group and 12 experts: groups that are empty, partial, full and overfull.
    single = _routed(device, form, tokens, batched=False)
    grouped = _routed(device, form, tokens, batched=True)
    assert single.tobytes() == grouped.tobytes()


def test_one_expert_may_get_every_token(device: Device) -> None:
    single = _routed(device, "Q8_0", 19, batched=False, used_experts=3)
    grouped = _routed(device, "Q8_0", 19, batched=True, used_experts=3)
    assert single.tobytes() == grouped.tobytes()


@pytest.mark.parametrize("model", ["oracle-qwen3moe", "oracle-gemma4moe", "oracle-qwen35moe"])
def test_launches_do_not_grow_with_tokens(model: str, engine_for: Callable[..., Engine]) -> None:
    """Three expert products per layer and chunk: each weight row is decoded once per chunk.

    A token names an expert at most once, so an expert's pairs never exceed the chunk, which fits
    in one group of columns.
    """
    engine: Any = engine_for(model)
    layers = sum(layer.experts is not None for layer in engine.model.spec.layers)
    counts = []
    for length in (2, 39, 40, 105):
        engine.reset()
        result = engine.prefill_batched([1] * length)
        launches = sum(n for route_, n in result.routes.items() if "matvec_experts" in route_)
        assert launches == 3 * layers * result.chunks
        counts.append((sum(result.routes.values()), result.chunks))
    assert counts[0][0] == counts[1][0] == counts[2][0]
    assert counts[3][1] == 3
    assert replace(engine.model.spec.layers[-1].experts).used <= engine.max_cols
