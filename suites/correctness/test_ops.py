"""Norms, RoPE, attention and activations on the device against float64, at edge shapes."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest

from backend_hip import ops
from backend_hip.device import Device
from backend_hip.wave import WAVE
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


def _layer(
    pairing: Pairing, head_size: int, heads: int, kv_heads: int, window: int | None
) -> LayerSpec:
    rope = RopeSpec(pairing, head_size, 10000.0, 1.0)
    return LayerSpec(0, heads, kv_heads, head_size, 64, window, rope)


@pytest.mark.parametrize("pairing", ["norm", "neox"])
@pytest.mark.parametrize("head_size", [2, 32, 64, 66, 128, 256])
@pytest.mark.parametrize("position", [0, 1, 4095, 131_069])
def test_rope(pairing: Pairing, head_size: int, position: int, device: Device) -> None:
    heads, tokens = 3, 2
    layer = _layer(pairing, head_size, heads, heads, None)
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


@dataclass(frozen=True)
class AttentionCase:
    """`length` keys in the cache, the last `tokens` of them queries."""

    length: int
    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    window: int | None
    types: str

    @property
    def id(self) -> str:
        return (
            f"n{self.length}-t{self.tokens}-h{self.heads}/{self.kv_heads}x{self.head_size}"
            f"-w{self.window}-{self.types}"
        )


_EDGES = (1, 2, WAVE - 1, WAVE, WAVE + 1, 2 * WAVE, 2 * WAVE + 1, 105)
ATTENTION_CASES = [
    *(AttentionCase(n, n, 4, 2, 32, None, "f32,f32") for n in _EDGES),
    *(AttentionCase(n, 1, 9, 3, 64, None, "f16,f16") for n in _EDGES),
    *(AttentionCase(n, n, 3, 1, 32, 16, "f16,f32") for n in (15, 16, 17, 47, 48, 49, 105)),
    *(AttentionCase(n, 3, 8, 1, 64, 33, "f32,f16") for n in (32, 33, 34, 65, 66, 97)),
    AttentionCase(105, 40, 28, 4, 32, 1, "f32,f32"),
    AttentionCase(70, 5, 4, 1, 256, 512, "f16,f16"),
    AttentionCase(40, 40, 2, 2, 48, None, "f32,f32"),
    AttentionCase(600, 2, 4, 2, 32, 512, "f16,f16"),
]
STORAGE = {"f32": np.float32, "f16": np.float16}


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.id)
def test_attention(case: AttentionCase, device: Device) -> None:
    generator = np.random.default_rng([case.length, case.tokens, case.heads, case.head_size])
    type_k, type_v = (STORAGE[name] for name in case.types.split(","))
    q = generator.standard_normal((case.tokens, case.heads, case.head_size)).astype(np.float32)
    shape = (case.length, case.kv_heads, case.head_size)
    k, v = (generator.standard_normal(shape).astype(np.float32) for _ in range(2))
    layer = _layer("neox", case.head_size, case.heads, case.kv_heads, case.window)
    scale, start = float(case.head_size**-0.5), case.length - case.tokens
    keys = [
        ("attention", f"{case.types}@{case.head_size}", "any"),
        ("kv_write", case.types, "any"),
    ]
    room = case.length + 7  # unwritten rows after the last key hold NaN and must not matter
    with Lab(device) as lab:
        parameters: dict[str, int] = {}
        width = case.kv_heads * case.head_size
        key_cache, value_cache = (
            lab.buffer(np.full((room, width), np.nan, dtype=dtype)) for dtype in (type_k, type_v)
        )
        write = lab.flow(keys, parameters, tokens=range(case.length))
        new_keys, new_values = (lab.values(array.reshape(case.length, width)) for array in (k, v))
        ops.kv_write(write, new_keys, new_values, key_cache, value_cache, case.types)
        flow = lab.flow(keys, parameters, tokens=range(case.tokens), position=start)
        out = lab.output(case.tokens, case.heads * case.head_size)
        queries = lab.values(q.reshape(case.tokens, -1))
        ops.attention(flow, queries, key_cache, value_cache, out, layer, scale, case.types)
        got = lab.read(out)
        stored_k, stored_v = key_cache.download(shape, type_k), value_cache.download(shape, type_v)
    assert np.array_equal(stored_k, k.astype(type_k))
    assert np.array_equal(stored_v, v.astype(type_v))
    want, limit = bounds.attention(q, stored_k, stored_v, start, case.window, scale)
    result = compare(got.astype(np.float64), want, limit)
    assert result.elements == case.tokens * case.heads * case.head_size
    assert result.ok, result.reason()


def test_each_query_head_reads_its_own_kv_head(device: Device) -> None:
    # Every KV head holds one constant, so a wrong head map shows as the wrong constant.
    for heads, kv_heads in ((28, 4), (9, 3), (8, 1), (1, 1)):
        length, size = 5, 32
        layer = _layer("neox", size, heads, kv_heads, None)
        constants = np.arange(1, kv_heads + 1, dtype=np.float32)
        values = np.broadcast_to(constants[:, None], (length, kv_heads, size)).copy()
        with Lab(device) as lab:
            flow = lab.flow([("attention", f"f32,f32@{size}", "any")], {}, position=length - 1)
            out = lab.output(1, heads * size)
            q = np.ones((1, heads * size), dtype=np.float32)
            zeros, constant = lab.buffer(np.zeros_like(values)), lab.buffer(values)
            ops.attention(flow, lab.values(q), zeros, constant, out, layer, 1.0, "f32,f32")
            got = lab.read(out).reshape(heads, size)
        expected = np.repeat(constants, heads // kv_heads)[:, None]
        assert np.array_equal(got, np.broadcast_to(expected, got.shape)), (heads, kv_heads)


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
