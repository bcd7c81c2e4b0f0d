"""The gated delta net on the device against float64, at users' sizes, in any chunking."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_hip import delta_net
from backend_hip.delta_net import RecurrentState
from backend_hip.device import Device
from backend_hip.engine import Engine
from backend_hip.requirements import requirements
from fixtures.registry import resolve_model
from reference.model import load_model
from reference.model.errors import Unsupported
from reference.model.spec import DeltaNetSpec
from suites.correctness.lab import Lab
from suites.harness import bounds_delta_net as bounds
from suites.harness.compare import compare
from suites.harness.tolerances import row

Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class NetCase:
    """`decay` is the typical logarithm of the decay: weak forgetting keeps errors longest."""

    state: int
    keys: int
    values: int
    tokens: int
    decay: float = 0.05

    @property
    def id(self) -> str:
        return f"{self.state}x{self.keys}/{self.values}-{self.tokens}-{self.decay}"

    @property
    def net(self) -> DeltaNetSpec:
        return DeltaNetSpec(self.state, self.keys, self.values, conv_kernel=4)


NET_CASES = [
    NetCase(32, 2, 4, 1),
    NetCase(32, 1, 1, 41),
    NetCase(64, 2, 4, 40, decay=1e-4),
    NetCase(128, 16, 32, 9),  # Qwen3.5's heads
    NetCase(128, 2, 4, 105),
    NetCase(256, 1, 2, 3),
]


def _inputs(case: NetCase) -> Arrays:
    generator = np.random.default_rng([case.state, case.keys, case.values, case.tokens])

    def unit(heads: int) -> NDArray[np.float32]:
        x = generator.standard_normal((case.tokens, heads, case.state))
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        return x.astype(np.float32)

    heads = (case.tokens, case.values)
    channels = np.full((case.tokens, case.net.channels), np.nan, dtype=np.float32)
    v = generator.standard_normal((case.tokens, case.net.value_length)).astype(np.float32)
    channels[:, 2 * case.net.key_length :] = v
    return {
        "q": unit(case.keys) / np.float32(np.sqrt(case.state)),
        "k": unit(case.keys),
        "v": v.reshape(*heads, case.state),
        "channels": channels,
        "decay": -generator.exponential(case.decay, heads).astype(np.float32),
        "beta": generator.uniform(0, 1, heads).astype(np.float32),
    }


def _rule(
    device: Device, case: NetCase, data: Arrays, cuts: tuple[int, ...] = ()
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Results and final state, the tokens fed in the pieces between `cuts`."""
    edges = (0, *cuts, case.tokens)
    results = []
    with Lab(device) as lab:
        state = RecurrentState(case.net, device, 0)
        for start, end in pairwise(edges):
            key = ("delta_rule", f"@{case.state}", "any")
            flow = lab.flow([key], {}, tokens=range(end - start), batched=True)
            q, k, channels, decay, beta = (
                lab.values(data[name][start:end].reshape(end - start, -1))
                for name in ("q", "k", "channels", "decay", "beta")
            )
            out = lab.output(end - start, case.net.value_length)
            delta_net.delta_rule(flow, case.net, q, k, channels, decay, beta, state, out)
            results.append(lab.read(out))
        memory = state.memory
        state.free()
    return np.concatenate(results).reshape(data["v"].shape), memory


@pytest.mark.parametrize("case", NET_CASES, ids=lambda case: case.id)
def test_recurrence_stays_within_its_bound(case: NetCase, device: Device) -> None:
    data = _inputs(case)
    out, memory = _rule(device, case, data)
    expected = bounds.delta_rule(
        data["q"], data["k"], data["v"], data["decay"], data["beta"], case.net
    )
    for got, (want, limit) in ((out, expected.out), (memory, expected.memory)):
        result = compare(got.astype(np.float64), want, limit)
        assert result.elements == got.size
        assert result.ok, result.reason()


@pytest.mark.parametrize("cuts", [(1,), (20,), (39,), (40,), (1, 2, 3), (13, 26, 39)])
def test_chunking_changes_no_bit(cuts: tuple[int, ...], device: Device) -> None:
    case = NetCase(64, 2, 4, 41)
    data = _inputs(case)
    whole, parts = _rule(device, case, data), _rule(device, case, data, cuts)
    assert whole[0].tobytes() == parts[0].tobytes()
    assert whole[1].tobytes() == parts[1].tobytes()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 41])
@pytest.mark.parametrize("taps", [2, 4])
def test_convolution_and_its_tail(tokens: int, taps: int, device: Device) -> None:
    net = DeltaNetSpec(32, 1, 3, taps)
    generator = np.random.default_rng([tokens, taps])
    x = generator.standard_normal((tokens, net.channels)).astype(np.float32)
    kernel = generator.standard_normal((net.channels, taps)).astype(np.float32)
    pieces = []
    for cut in sorted({0, 1, tokens // 2, tokens - 1}):
        with Lab(device) as lab:
            state = RecurrentState(net, device, 0)
            rows = []
            for part in (x[:cut], x[cut:]):
                if not len(part):
                    continue
                flow = lab.flow([("convolve", "", "any")], {}, tokens=range(len(part)))
                y = lab.output(len(part), net.channels)
                delta_net.convolve(flow, lab.values(part), lab.vector(kernel), state, y)
                rows.append(lab.read(y))
            pieces.append((np.concatenate(rows), state.tail))
            state.free()
    want, limit = bounds.convolve(x, kernel, net)
    result = compare(pieces[0][0].astype(np.float64), want, limit)
    assert result.ok, result.reason()
    history = np.concatenate([np.zeros((taps - 1, net.channels), dtype=np.float32), x])
    for rows_joined, tail in pieces:
        assert rows_joined.tobytes() == pieces[0][0].tobytes()
        assert np.array_equal(tail, history[-(taps - 1) :])


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_unit_heads(size: int, device: Device) -> None:
    heads, tokens, epsilon = 3, 2, 1e-6
    x = np.random.default_rng(size).standard_normal((tokens, heads * size + 5)).astype(np.float32)
    x[0, :size] *= 1e-5  # so short that epsilon matters
    for divisor in (1.0, float(np.sqrt(size))):
        with Lab(device) as lab:
            flow = lab.flow([("unit_heads", "", "any")], {}, tokens=range(tokens))
            y = lab.output(tokens, heads * size)
            delta_net.unit_heads(flow, lab.values(x), 0, y, size, epsilon, divisor)
            got = lab.read(y).reshape(tokens, heads, size)
        source = x[:, : heads * size].reshape(tokens, heads, size)
        want, limit = bounds.unit_heads(source, epsilon, divisor)
        result = compare(got.astype(np.float64), want, limit)
        assert result.ok, result.reason()


def test_gates_over_the_whole_range(device: Device) -> None:
    heads = 2_003
    alpha = np.linspace(-120, 120, heads, dtype=np.float32)[None]
    bias = np.random.default_rng(3).standard_normal(heads).astype(np.float32)
    a = -np.random.default_rng(4).uniform(1e-3, 8, heads).astype(np.float32)
    with Lab(device) as lab:
        flow = lab.flow([("delta_gates", "", "any")], {})
        beta, decay = lab.values(alpha), lab.output(1, heads)
        delta_net.gates(flow, lab.values(alpha), lab.vector(bias), lab.vector(a), beta, decay)
        got, sigmoid = lab.read(decay), beta.download(1)
    want, limit = bounds.log_decay(alpha, bias, a)
    result = compare(got.astype(np.float64), want, limit)
    assert result.ok, result.reason()
    wide = 1 / (1 + np.exp(-alpha.astype(np.float64)))
    assert compare(sigmoid.astype(np.float64), wide, row("sigmoid").relative() * wide + 1e-37).ok


def test_state_sizes_that_do_not_fit_are_refused_before_anything_runs() -> None:
    model = load_model(resolve_model("oracle-qwen35d64"))
    for size in (16, 48, 288):
        layers = tuple(
            replace(layer, delta_net=layer.delta_net and replace(layer.delta_net, state_size=size))
            for layer in model.spec.layers
        )
        spec = replace(model.spec, layers=layers)
        with pytest.raises(Unsupported, match=f"state size is {size}; supported: multiples of 32"):
            requirements(spec, model.weights, "kparallel", "f16", "f16")


def test_state_is_loaded_and_stored_once_per_chunk(engine_for: Callable[..., Engine]) -> None:
    engine = engine_for("oracle-qwen35d64")
    layers = sum(layer.delta_net is not None for layer in engine.model.spec.layers)
    engine.reset()
    result = engine.prefill_batched([1] * 105)
    assert result.chunks == 3
    # One launch walks a chunk with the state in registers; one block per head.
    assert result.routes["delta_rule @64 any"] == layers * result.chunks
