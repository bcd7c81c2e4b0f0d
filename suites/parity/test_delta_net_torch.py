"""The gated delta net against torch: a loop of our own, and transformers' two forms."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reference import delta_net
from reference.delta_net import RecurrentState
from suites.parity.oracle import require, widened
from suites.parity.tolerances import require_agreement

torch = require("torch")
functional = torch.nn.functional

Array = NDArray[np.float64]
HF_CHUNK = 64  # torch_chunk_gated_delta_rule's default
MODULES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


@dataclass(frozen=True)
class DeltaCase:
    """`started`: the state is not zero at the start. `decay` scales the log decay."""

    tokens: int
    heads: int
    size: int
    started: bool = False
    decay: float = 1.0

    @property
    def id(self) -> str:
        start = "-started" if self.started else ""
        return f"t{self.tokens}-h{self.heads}-s{self.size}-g{self.decay}{start}"

    def inputs(self) -> tuple[Array, Array, Array, Array, Array, RecurrentState]:
        """q and k of unit length, v, log decay, beta, and the state."""
        rng = np.random.default_rng([self.tokens, self.heads, self.size])
        shape = (self.tokens, self.heads, self.size)
        q, k, v = (rng.standard_normal(shape) for _ in range(3))
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        g = -self.decay * rng.gamma(1.0, 1.0, shape[:2])
        beta = rng.uniform(0, 1, shape[:2])
        memory = rng.standard_normal((self.heads, self.size, self.size)) * self.started
        return q, k, v, g, beta, RecurrentState(memory, np.zeros((0, 0)))


CASES = [
    DeltaCase(1, 1, 4),
    DeltaCase(1, 3, 16, started=True),
    DeltaCase(HF_CHUNK - 1, 2, 16, started=True),
    DeltaCase(HF_CHUNK, 2, 16),
    DeltaCase(HF_CHUNK + 1, 2, 16, started=True, decay=0.01),
    DeltaCase(2 * HF_CHUNK + 3, 2, 32, started=True, decay=0.1),
    DeltaCase(40, 2, 128, started=True),
    DeltaCase(70, 2, 8, started=True, decay=40.0),  # e^-40 a token: the old state vanishes
]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def _tensor(values: NDArray[Any]) -> Any:
    return torch.from_numpy(np.ascontiguousarray(values))


def _loop(case: DeltaCase) -> tuple[Any, Any]:
    """One head, one token at a time; S is (key, value)."""
    *inputs, state = case.inputs()
    q, k, v, g, beta, memory = (_tensor(x) for x in (*inputs, state.memory))
    out = torch.zeros_like(v)
    for head in range(case.heads):
        s = memory[head]
        for t in range(case.tokens):
            s = s * torch.exp(g[t, head])
            error = v[t, head] - k[t, head] @ s
            s = s + torch.outer(k[t, head], error * beta[t, head])
            out[t, head] = q[t, head] @ s
        memory[head] = s
    return out, memory


@by_case
def test_step_form_against_a_loop(case: DeltaCase) -> None:
    q, k, v, g, beta, state = case.inputs()
    got = delta_net.step_form(q, k, v, g, beta, state)
    want, memory = _loop(case)
    require_agreement(got, want, "recurrence")
    require_agreement(state.memory, memory, "recurrence")


@by_case
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunk_form_against_a_loop(case: DeltaCase, chunk: int) -> None:
    q, k, v, g, beta, state = case.inputs()
    got = delta_net.chunk_form(q, k, v, g, beta, state, chunk)
    want, memory = _loop(case)
    require_agreement(got, want, "recurrence")
    require_agreement(state.memory, memory, "recurrence")


@by_case
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_step_form_against_transformers(case: DeltaCase, module: str, form: str) -> None:
    """Their functions divide q by sqrt(size) themselves."""
    modelling = require(f"transformers.models.{module}.modeling_{module}")
    rule = getattr(modelling, f"torch_{form}_gated_delta_rule")
    rule = getattr(rule, "__wrapped__", rule)
    q, k, v, g, beta, state = case.inputs()
    with widened():
        want, memory = rule(
            *(_tensor(x)[None] for x in (q, k, v)),
            g=_tensor(g)[None],
            beta=_tensor(beta)[None],
            initial_state=_tensor(state.memory)[None],
            output_final_state=True,
        )
    assert want.dtype == torch.float64
    got = delta_net.step_form(q / np.sqrt(case.size), k, v, g, beta, state)
    require_agreement(got, want[0], "recurrence")
    require_agreement(state.memory, memory[0], "recurrence")


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 40])
def test_causal_convolution(taps: int, tokens: int) -> None:
    channels = 6
    rng = np.random.default_rng([taps, tokens])
    x, kernel = rng.standard_normal((tokens, channels)), rng.standard_normal((channels, taps))
    tail = rng.standard_normal((taps - 1, channels))
    state = RecurrentState(np.zeros((0, 0, 0)), tail.copy())
    got = delta_net.convolve(x, kernel, state)
    history = torch.cat([_tensor(tail), _tensor(x)])
    mixed = functional.conv1d(history.T[None], _tensor(kernel)[:, None], groups=channels)
    require_agreement(got, functional.silu(mixed[0].T), "op")
    require_agreement(state.tail, history[len(history) - (taps - 1) :], "exact")


@pytest.mark.parametrize("size", [1, 16, 128])
def test_unit_heads(size: int) -> None:
    x = np.random.default_rng(size).standard_normal((5, 3, size))
    x[0] *= 1e-3  # so small that epsilon matters
    norm = torch.linalg.vector_norm(_tensor(x), dim=-1, keepdim=True)
    require_agreement(
        delta_net.unit_heads(x, 1e-6),
        _tensor(x) / torch.hypot(norm, torch.full_like(norm, 1e-3)),
        "op",
    )
    theirs = require("transformers.models.qwen3_5.modeling_qwen3_5").l2norm(_tensor(x))
    require_agreement(delta_net.unit_heads(x, 1e-6), theirs, "op")


def test_log_decay() -> None:
    alpha = np.concatenate([np.linspace(-800, 800, 33), np.linspace(-3, 3, 31)])[:, None]
    bias, a = np.array([0.25]), np.array([-1.5])
    # Above its threshold torch's softplus is the identity; up to 40 that is exact in float64.
    want = functional.softplus(_tensor(alpha + bias), threshold=40) * -1.5
    require_agreement(delta_net.log_decay(alpha, bias, a), want, "op")
