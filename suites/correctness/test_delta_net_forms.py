"""The gated delta net: its two forms agree, and its state is carried, reset and copied whole."""

from dataclasses import dataclass

import numpy as np
import pytest

from reference import delta_net
from reference.delta_net import RecurrentState
from reference.forward import Reference
from reference.model import load_model
from reference.model.spec import DeltaNetSpec
from reference.ops import Array
from suites.correctness.oracles import golden_name, golden_of
from suites.harness.compare import compare
from suites.harness.tolerances import float64_forms_limit, oracle_limit

CHUNKS = (1, 2, 7, 16, 63, 64, 65)
HYBRIDS = ("oracle-qwen35", "oracle-qwen35d64", "oracle-qwen35moe")
NET = DeltaNetSpec(state_size=16, key_heads=2, value_heads=6, conv_kernel=4)


@dataclass(frozen=True)
class FormCase:
    """`length` tokens, `chunk` at a time; `decay` scales the log decay (0: nothing fades)."""

    chunk: int
    length: int
    decay: float

    @property
    def id(self) -> str:
        return f"chunk{self.chunk}-length{self.length}-decay{self.decay}"


FORM_CASES = [
    FormCase(chunk, length, decay)
    for chunk in CHUNKS
    for length in sorted({1, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1})
    if length > 0
    for decay in (0.0, 1.0, 30.0)
]


Inputs = tuple[Array, Array, Array, Array, Array]


def _inputs(case: FormCase) -> tuple[Inputs, RecurrentState]:
    """q, k, v, g, beta as a layer makes them, and a state that is not zero."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([3, case.length])))
    heads, size = NET.value_heads, NET.state_size
    q, k, v = rng.standard_normal((3, case.length, heads, size))
    q = delta_net.unit_heads(q, 1e-6) / np.sqrt(size)
    k = delta_net.unit_heads(k, 1e-6)
    g = -case.decay * rng.exponential(size=(case.length, heads))
    beta = rng.uniform(0, 1, (case.length, heads))
    state = RecurrentState.zero(NET, np.dtype(np.float64))
    state.memory = rng.standard_normal(state.memory.shape)
    return (q, k, v, g, beta), state


@pytest.mark.parametrize("case", FORM_CASES, ids=lambda case: case.id)
def test_step_form_equals_chunk_form(case: FormCase) -> None:
    inputs, state = _inputs(case)
    steps, chunks = state.copy(), state.copy()
    want = delta_net.step_form(*inputs, steps)
    got = delta_net.chunk_form(*inputs, chunks, chunk=case.chunk)
    assert want.dtype == np.float64
    assert not np.array_equal(steps.memory, state.memory)
    for pair in ((got, want), (chunks.memory, steps.memory)):
        result = compare(*pair, float64_forms_limit(pair[1]))
        assert result.elements == pair[1].size > 0
        assert result.ok, result.reason()


def test_a_heads_update_by_hand() -> None:
    """One head of size 2 walked on paper: decay, then the delta rule, then the read-out."""
    state = RecurrentState(np.array([[[2.0, 0.0], [0.0, 4.0]]]), np.zeros((3, 1)))
    q, k, v = (np.array([[row]]) for row in ([1.0, 1.0], [1.0, 0.0], [5.0, 3.0]))
    out = delta_net.step_form(q, k, v, np.log([[0.5]]), np.array([[0.25]]), state)
    # Decayed [[1, 0], [0, 2]]; seen (1, 0); delta (5 - 1, 3 - 0) / 4; S = [[2, 0.75], [0, 2]].
    np.testing.assert_array_equal(state.memory, [[[2.0, 0.75], [0.0, 2.0]]])
    np.testing.assert_array_equal(out, [[[2.0, 2.75]]])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9])
def test_the_convolution_is_causal_and_carries_its_tail(length: int) -> None:
    """Against NumPy's own convolution, whole and cut at every place."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(7)))
    x = rng.standard_normal((length, NET.channels))
    kernel = rng.standard_normal((NET.channels, NET.conv_kernel))
    full = np.stack(
        [np.convolve(x[:, c], kernel[c, ::-1])[:length] for c in range(NET.channels)], axis=1
    )
    want = full / (1 + np.exp(-full))
    for cut in range(length + 1):
        state = RecurrentState.zero(NET, np.dtype(np.float64))
        parts = [
            delta_net.convolve(part, kernel, state) for part in (x[:cut], x[cut:]) if len(part)
        ]
        got = np.concatenate(parts)
        result = compare(got, want, float64_forms_limit(want))
        assert result.ok, f"cut at {cut}: {result.reason()}"
        padded = np.concatenate([np.zeros((NET.conv_kernel - 1, NET.channels)), x])
        assert np.array_equal(state.tail, padded[-(NET.conv_kernel - 1) :])


@pytest.mark.parametrize("model", HYBRIDS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunked_prefill_leaves_the_same_state(model: str, chunk: int) -> None:
    loaded = load_model(golden_of(model).path)
    tokens = golden_of(model).prompts[79].tokens.tolist()
    whole, parts = (Reference(loaded, dtype=np.float64) for _ in range(2))
    whole.prefill(tokens)
    parts.prefill(tokens, chunk=chunk)
    recurrent = [layer.index for layer in loaded.spec.layers if layer.delta_net is not None]
    assert 0 < len(recurrent) < loaded.spec.layer_count
    for layer in recurrent:
        one, two = whole.recurrent_state(layer), parts.recurrent_state(layer)
        for got, want in ((two.memory, one.memory), (two.tail, one.tail)):
            result = compare(got, want, oracle_limit(golden_name(model), want))
            assert result.ok, f"layer {layer}: {result.reason()}"
            assert np.any(want != 0)


@pytest.mark.parametrize("model", HYBRIDS)
def test_reset_clears_and_a_snapshot_stands_still(model: str) -> None:
    loaded = load_model(golden_of(model).path)
    tokens = golden_of(model).prompts[17].tokens.tolist()
    reference = Reference(loaded)
    first = reference.prefill(tokens)
    snapshot = reference.recurrent_state(0)
    kept = snapshot.copy()
    reference.decode(1)
    assert not np.array_equal(reference.recurrent_state(0).memory, kept.memory)
    assert not np.array_equal(reference.recurrent_state(0).tail, kept.tail)
    for array, before in ((snapshot.memory, kept.memory), (snapshot.tail, kept.tail)):
        assert np.array_equal(array, before)
        array.fill(np.nan)
    assert np.all(np.isfinite(reference.decode(2)))
    reference.reset()
    state = reference.recurrent_state(0)
    assert not np.any(state.memory)
    assert not np.any(state.tail)
    assert np.array_equal(reference.prefill(tokens), first)
