"""Each reference op against an independent torch expression, both in float64."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reference import moe, ops
from reference.attention import QUERY_BLOCK, attention
from reference.model.sampling import SamplingOptions, sample
from reference.model.spec import Activation, Pairing, RopeSpec, YarnSpec
from suites.parity.oracle import require, widened
from suites.parity.tolerances import require_agreement

torch = require("torch")
functional = torch.nn.functional

Array = NDArray[np.float64]


def _normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def _tensor(values: NDArray[Any]) -> Any:
    return torch.from_numpy(np.ascontiguousarray(values))


@pytest.mark.parametrize("width", [1, 31, 64, 257])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(width: int, weighted: bool) -> None:
    x = _normal(width, 5, 3, width)
    x[1] *= 1e-4  # so small that epsilon matters
    weight = np.random.default_rng([width, 1]).uniform(0.5, 2, width) if weighted else None
    scale = None if weight is None else _tensor(weight)
    want = functional.rms_norm(_tensor(x), (width,), scale, 1e-6)
    require_agreement(ops.rms_norm(x, weight, 1e-6), want, "op")


def test_linear_widens_a_float32_weight() -> None:
    x, weight = _normal(1, 7, 33), _normal(2, 19, 33).astype(np.float32)
    want = functional.linear(_tensor(x), _tensor(weight).double())
    require_agreement(ops.linear(x, weight), want, "op")


# --- RoPE ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeCase:
    """`scaling` in transformers' words; `dimensions` of `head_size` are rotated."""

    pairing: Pairing
    head_size: int
    dimensions: int
    base: float
    scaling: str = "default"
    factor: float = 1.0
    original: int = 64
    start: int = 0

    @property
    def id(self) -> str:
        parts = (self.pairing, self.scaling, f"d{self.head_size}", f"n{self.dimensions}")
        return "-".join((*parts, f"p{self.start}"))

    def spec(self) -> RopeSpec:
        yarn = YarnSpec(self.factor, self.original) if self.scaling == "yarn" else None
        divisor = self.factor if self.scaling == "linear" else 1.0
        magnitude = 1.0 if yarn is None else yarn.magnitude
        return RopeSpec(self.pairing, self.dimensions, self.base, divisor, yarn, magnitude)

    def transformers(self) -> tuple[Any, float]:
        """Frequencies and magnitude by transformers' own function, in float64."""
        from_config = require("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
        config = require("transformers").LlamaConfig(
            head_dim=self.dimensions,
            hidden_size=self.dimensions,
            num_attention_heads=1,
            max_position_embeddings=int(self.original * self.factor),
            rope_parameters={
                "rope_type": self.scaling,
                "rope_theta": self.base,
                "factor": self.factor,
                "original_max_position_embeddings": self.original,
            },
        )
        with widened():
            frequencies, magnitude = from_config[self.scaling](config, "cpu")
        return frequencies.double(), float(magnitude)


ROPE_CASES = [
    RopeCase("norm", 2, 2, 10000.0),
    RopeCase("norm", 64, 64, 100000.0, start=131_000),
    RopeCase("neox", 66, 66, 10000.0, start=3),
    RopeCase("neox", 256, 64, 10_000_000.0, start=4_095),
    RopeCase("norm", 32, 8, 10000.0),
    RopeCase("neox", 64, 64, 1e6, "linear", 8.0),
    RopeCase("norm", 64, 64, 10000.0, "yarn", 4.0, 2_048, start=1_000),
    RopeCase("neox", 128, 128, 1e6, "yarn", 4.0, 32_768, start=7),
    RopeCase("neox", 32, 16, 10000.0, "yarn", 40.0, 256),
]


@pytest.mark.parametrize("case", ROPE_CASES, ids=lambda case: case.id)
def test_rope(case: RopeCase) -> None:
    """A pair is a complex number, rotation a product with e^(i angle)."""
    x = _normal(case.head_size, 5, 3, case.head_size)
    positions = np.arange(case.start, case.start + len(x))
    if case.scaling == "default":
        pair = torch.arange(0, case.dimensions, 2, dtype=torch.float64)
        frequencies, magnitude = torch.pow(case.base, -pair / case.dimensions), 1.0
    else:
        frequencies, magnitude = case.transformers()
    angle = torch.outer(_tensor(positions).double(), frequencies)[:, None]
    turned, rest = _tensor(x[..., : case.dimensions]), _tensor(x[..., case.dimensions :])
    if case.pairing == "norm":
        number = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous())
    else:
        number = torch.complex(*turned.chunk(2, dim=-1))
    number = number * torch.polar(torch.full_like(angle, magnitude), angle)
    if case.pairing == "norm":
        turned = torch.view_as_real(number).flatten(-2)
    else:
        turned = torch.cat([number.real, number.imag], dim=-1)
    spec = case.spec()
    cos, sin = ops.rope_tables(spec.frequencies(), positions, spec.magnitude)
    got = ops.rope(x, cos, sin, case.pairing)
    require_agreement(got, torch.cat([turned, rest], dim=-1), "rope")


# --- attention ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionCase:
    """`tokens` queries after `start` cached keys."""

    tokens: int
    start: int
    heads: int
    kv_heads: int
    size: int
    window: int | None = None
    scale: float = 0.25

    @property
    def id(self) -> str:
        return f"t{self.tokens}-s{self.start}-h{self.heads}-{self.kv_heads}-w{self.window}"


ATTENTION_CASES = [
    AttentionCase(1, 0, 1, 1, 8),
    AttentionCase(1, 40, 6, 2, 16),
    AttentionCase(1, 40, 6, 2, 16, window=16),
    AttentionCase(1, 15, 4, 1, 16, window=16),
    AttentionCase(1, 16, 4, 1, 16, window=16),
    AttentionCase(41, 0, 8, 8, 32),
    AttentionCase(41, 0, 6, 3, 32, window=16),
    AttentionCase(17, 24, 9, 3, 64, window=16),
    AttentionCase(17, 24, 4, 4, 64, window=1),
    AttentionCase(33, 7, 8, 2, 256, scale=1.0),
    AttentionCase(QUERY_BLOCK, 1, 4, 2, 16),
    AttentionCase(QUERY_BLOCK + 1, 0, 4, 2, 16, window=16),
    AttentionCase(2 * QUERY_BLOCK + 1, 37, 6, 2, 16),
    AttentionCase(2 * QUERY_BLOCK + 1, 37, 6, 2, 16, window=QUERY_BLOCK + 1),
]


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.id)
def test_attention(case: AttentionCase) -> None:
    count = case.start + case.tokens
    q = _normal(1, case.tokens, case.heads, case.size)
    k, v = (_normal(seed, count, case.kv_heads, case.size) for seed in (2, 3))
    # Row t of the last `tokens` rows of a square causal mask, its old keys cut off.
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    if case.window is not None:
        mask &= ~torch.ones(count, count, dtype=torch.bool).tril(-case.window)
    want = functional.scaled_dot_product_attention(
        *(_tensor(part).transpose(0, 1)[None] for part in (q, k, v)),
        attn_mask=mask[case.start :],
        scale=case.scale,
        enable_gqa=True,
    )
    got = attention(q, k, v, case.start, case.window, case.scale)
    require_agreement(got, want[0].transpose(0, 1).flatten(1), "op")


# --- activations --------------------------------------------------------------------------------

EXTREMES = np.array([-745.0, -88.7, -20.0, -1e-9, 0.0, 1e-9, 20.0, 88.7, 709.0])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("inputs", ["normal", "tiny", "extreme"])
def test_gated_blocks(activation: Activation, inputs: str) -> None:
    spread = {"normal": 2.0, "tiny": 1e-6}.get(inputs)
    gate = EXTREMES if spread is None else _normal(3, 500) * spread
    up = _normal(4, len(gate))
    known = _tensor(gate)
    want = (
        functional.silu(known)
        if activation == "silu"
        else functional.gelu(known, approximate="tanh")
    )
    require_agreement(ops.gated(gate, up, activation), want * _tensor(up), "op")


def test_sigmoid() -> None:
    x = np.concatenate([_normal(5, 100) * 6, EXTREMES])
    require_agreement(ops.sigmoid(x), torch.sigmoid(_tensor(x)), "op")


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_cap(cap: float) -> None:
    x = np.concatenate([_normal(6, 100) * 50, EXTREMES])
    require_agreement(ops.soft_cap(x, cap), cap * torch.tanh(_tensor(x) / cap), "op")


# --- routed experts -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertsCase:
    tokens: int
    count: int
    used: int
    activation: Activation = "silu"
    scaled: bool = False

    @property
    def id(self) -> str:
        return f"t{self.tokens}-{self.used}of{self.count}-{self.activation}"


EXPERTS_CASES = [
    ExpertsCase(1, 4, 1),
    ExpertsCase(9, 8, 2),
    ExpertsCase(5, 128, 8),
    ExpertsCase(3, 3, 3),
    ExpertsCase(11, 7, 3, "gelu_tanh", scaled=True),
]


@pytest.mark.parametrize("case", EXPERTS_CASES, ids=lambda case: case.id)
def test_router_and_experts(case: ExpertsCase) -> None:
    """Token by token, expert by expert: no grouping, no scatter."""
    width, inner = 24, 40
    x, logits = _normal(1, case.tokens, width), _normal(2, case.tokens, case.count) * 2
    gate, up = (_normal(seed, case.count, inner, width) / width for seed in (3, 4))
    down = _normal(5, case.count, width, inner) / inner
    scales = np.random.default_rng(6).uniform(0.5, 2, case.count) if case.scaled else None
    routing = moe.route(logits, case.used)
    got = moe.routed_sum(x, routing, lambda e: (gate[e], up[e], down[e]), case.activation, scales)

    rows, chosen, weights = [], [], []
    for token in range(case.tokens):
        p = torch.softmax(_tensor(logits[token]), dim=0)
        best = torch.topk(p, case.used)
        share = best.values / best.values.sum()
        total = torch.zeros(width, dtype=torch.float64)
        for e, weight in zip(best.indices.tolist(), share, strict=True):
            row = _tensor(x[token])
            act = torch.mv(_tensor(gate[e]), row)
            tanh = {"approximate": "tanh"}
            act = (
                functional.silu(act) if case.activation == "silu" else functional.gelu(act, **tanh)
            )
            out = torch.mv(_tensor(down[e]), act * torch.mv(_tensor(up[e]), row))
            total += weight * out * (1.0 if scales is None else scales[e])
        rows.append(total)
        chosen.append(best.indices)
        weights.append(share)
    require_agreement(routing.experts, torch.stack(chosen), "exact")
    require_agreement(routing.weights, torch.stack(weights), "op")
    require_agreement(routing.probabilities, torch.softmax(_tensor(logits), dim=1), "op")
    require_agreement(got, torch.stack(rows), "op")


def test_equal_router_logits_go_to_the_lowest_index() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    require_agreement(moe.route(logits, 2).experts, np.array([[1, 2], [0, 1]]), "exact")


# --- sampling -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingCase:
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def id(self) -> str:
        return f"t{self.temperature}-k{self.top_k}-p{self.top_p}-m{self.min_p}"


SAMPLING_CASES = [
    SamplingCase(1.0),
    SamplingCase(0.3),
    SamplingCase(2.0, top_k=5),
    SamplingCase(1.0, top_p=0.6),
    SamplingCase(1.5, top_p=1e-6),
    SamplingCase(1.0, min_p=0.2),
    SamplingCase(0.7, top_k=12, top_p=0.8, min_p=0.05),
]


class _Fixed:
    """A generator whose one number is known."""

    def __init__(self, number: float) -> None:
        self._number = number

    def random(self) -> float:
        return self._number


@pytest.mark.parametrize("case", SAMPLING_CASES, ids=lambda case: case.id)
def test_sampling_draws_from_the_distribution_of_transformers_filters(case: SamplingCase) -> None:
    """Each kept token's interval of the cumulative distribution, from just inside both ends."""
    filters = require("transformers.generation.logits_process")
    logits = _normal(8, 40) * 2
    scores = _tensor(logits)[None]
    if case.top_k:
        scores = filters.TopKLogitsWarper(case.top_k)(None, scores)
    if case.top_p < 1:
        scores = filters.TopPLogitsWarper(case.top_p)(None, scores)
    if case.min_p:
        scores = filters.MinPLogitsWarper(case.min_p)(None, scores)
    scores = filters.TemperatureLogitsWarper(case.temperature)(None, scores)
    p, order = torch.softmax(scores[0], dim=0).sort(descending=True, stable=True)
    order = order[p > 0].tolist()
    edges = np.concatenate([[0.0], np.cumsum(p[p > 0].numpy())])
    options = SamplingOptions(case.temperature, case.top_k, case.top_p, case.min_p)
    inside = 1e-3  # of the interval's width
    for place, token in enumerate(order):
        low, high = edges[place], edges[place + 1]
        for number in (low + inside * (high - low), high - inside * (high - low)):
            drawn = sample(logits, options, _Fixed(number))  # type: ignore[arg-type]
            assert drawn == token, f"{case.id}: {number} drew {drawn}, expected {token}"
    assert len(order) >= 1
    assert len(order) < len(logits) or case == SamplingCase(case.temperature)
