"""Norms, RoPE and activations on the device against float64, at edge shapes."""

from typing import cast

import numpy as np
import pytest

from backend_hip import ops
from backend_hip.device import Device
from reference import ops as exact
from reference.model.spec import Activation, LayerSpec, Pairing, RopeSpec
from suites.correctness.lab import Lab
from suites.harness import bounds
from suites.harness.compare import compare

NORM_BLOCK = 128


@pytest.mark.parametrize("width", [1, 31, 32, 64, NORM_BLOCK - 1, NORM_BLOCK, NORM_BLOCK + 1, 576])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(width: int, with_residual: bool, device: Device) -> None:
    generator = np.random.default_rng([width, with_residual])
    rows, epsilon = 3, 1e-5
    x, residual = (generator.standard_normal((rows, width)).astype(np.float32) for _ in range(2))
    x[1] *= 1e-4  # so small that epsilon matters
    residual[1] *= 1e-4
    weight = generator.uniform(0.5, 2, width).astype(np.float32)
    key = ("add_rms_norm" if with_residual else "rms_norm", "", "any")
    with Lab(device) as lab:
        flow = lab.flow([key], {}, tokens=range(rows))
        y = lab.output(rows, width)
        if with_residual:
            stream = lab.values(residual)
            ops.add_rms_norm(flow, stream, lab.values(x), lab.vector(weight), y, epsilon)
            total = stream.download(rows)
            assert np.array_equal(total, residual + x)  # one rounding, the same as NumPy's
        else:
            total = x
            ops.rms_norm(flow, lab.values(x), lab.vector(weight), y, epsilon)
        got = lab.read(y)
    want, limit = bounds.rms_norm(total, weight, epsilon)
    result = compare(got.astype(np.float64), want, limit)
    assert result.ok, result.reason()


def test_norm_of_a_row_does_not_depend_on_other_rows(device: Device) -> None:
    x = np.random.default_rng(5).standard_normal((41, 96)).astype(np.float32)
    weight = np.ones(96, dtype=np.float32)
    outputs = []
    with Lab(device) as lab:
        for rows in (x, x[40:]):
            flow = lab.flow([("rms_norm", "", "any")], {}, tokens=range(len(rows)))
            y = lab.output(len(rows), 96)
            ops.rms_norm(flow, lab.values(rows), lab.vector(weight), y, 1e-6)
            outputs.append(lab.read(y)[-1])
    assert outputs[0].tobytes() == outputs[1].tobytes()


def _layer(pairing: Pairing, head_size: int, heads: int) -> LayerSpec:
    rope = RopeSpec(pairing, head_size, 10000.0, 1.0)
    return LayerSpec(0, heads, heads, head_size, 64, None, rope)


@pytest.mark.parametrize("pairing", ["norm", "neox"])
@pytest.mark.parametrize("head_size", [2, 32, 64, 66, 128, 256])
@pytest.mark.parametrize("position", [0, 1, 4095, 131_069])
def test_rope(pairing: Pairing, head_size: int, position: int, device: Device) -> None:
    heads, tokens = 3, 2
    layer = _layer(pairing, head_size, heads)
    generator = np.random.default_rng([head_size, position])
    x = generator.standard_normal((tokens, heads, head_size)).astype(np.float32)
    positions = np.arange(position + tokens)
    cos, sin = exact.rope_tables(layer.rope.frequencies(), positions)
    with Lab(device) as lab:
        flow = lab.flow([("rope", pairing, "any")], {}, tokens=range(tokens), position=position)
        values = lab.values(x.reshape(tokens, heads * head_size))
        cosine, sine = (lab.buffer(table.astype(np.float32)) for table in (cos, sin))
        ops.rope(flow, values, cosine, sine, layer, pairing)
        got = values.download(tokens, heads, head_size)
    want, limit = bounds.rope(x, layer.rope.frequencies(), positions[position:], pairing)
    result = compare(got.astype(np.float64), want, limit)
    assert result.ok, result.reason()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_over_the_whole_range(activation: str, device: Device) -> None:
    kind = cast(Activation, activation)
    sweep = np.concatenate(
        [
            np.linspace(-120, 120, 20_001),
            np.geomspace(1e-38, 1e4, 2_000),
            -np.geomspace(1e-38, 1e4, 2_000),
            [0.0, -0.0],
        ]
    ).astype(np.float32)
    gate = np.ascontiguousarray(sweep[None])
    up = np.full_like(gate, 1.5)
    with Lab(device) as lab:
        flow = lab.flow([("gated", kind, "any")], {})
        out = lab.output(1, gate.shape[1])
        ops.gated(flow, lab.values(gate), lab.values(up), out, kind)
        got = lab.read(out)
    want, limit = bounds.gated(gate, up, kind)
    result = compare(got.astype(np.float64), want, limit)
    assert result.ok, result.reason()


@pytest.mark.parametrize("count", [1, 127, 128, 129])
def test_add_rounds_once(count: int, device: Device) -> None:
    a, b = np.random.default_rng(count).standard_normal((2, 1, count)).astype(np.float32)
    with Lab(device) as lab:
        flow = lab.flow([("add", "", "any")], {})
        stream = lab.values(a)
        ops.add(flow, stream, lab.values(b))
        got = stream.download(1)
    assert np.array_equal(got, a + b)
