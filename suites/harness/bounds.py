"""Each op in float64 with the largest error that a correct float32 engine may have, per element.

Every function takes the ENGINE's recorded inputs and returns (want, limit), both float64 and of the
result's shape. `want` comes from the reference's own functions; `limit` is the row of
tolerances.py times the op's magnitude. Symbols: reference/model/spec.py.
"""

from collections.abc import Iterator

import numpy as np

from reference import ops
from reference.attention import attention as exact_attention
from reference.dequant import dequantise
from reference.model.spec import Activation, Pairing
from reference.model.weights import Tensor
from suites.harness.compare import Array
from suites.harness.tolerances import SMALLEST_NORMAL, UNIT_ROUNDOFF, row

Bounded = tuple[Array, Array]

# A float64 block of a weight matrix and its absolute value hold about this many elements each, so
# that a vocabulary of 262,144 rows needs tens of megabytes and not gigabytes.
BLOCK_ELEMENTS = 1 << 21


def embed(table: Tensor, tokens: tuple[int, ...], scale: float) -> Bounded:
    """-> (T, E): the table's rows times the embedding scale."""
    rows = dequantise(table.format, table.raw[list(tokens)], np.float64)
    want = rows * scale
    relative = 0.0 if scale == 1.0 else row("embed").relative()
    return want, relative * np.abs(want)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Bounded:
    """(..., n) -> (..., n)."""
    want = ops.rms_norm(_wide(x), _wide(weight), epsilon)
    return want, row("rms_norm").relative(x.shape[-1]) * np.abs(want) + SMALLEST_NORMAL


def linear(x: Array, tensor: Tensor, path: str) -> Bounded:
    """(T, K) x (N, K) -> (T, N), the matrix widened in blocks of rows."""
    x = _wide(x)
    magnitude = np.abs(x)
    want = np.empty((len(x), tensor.shape[0]), dtype=np.float64)
    limit = np.empty_like(want)
    relative = row("linear", path).relative(x.shape[-1])
    for rows in _row_blocks(tensor):
        weight = dequantise(tensor.format, tensor.raw[rows], np.float64)
        want[:, rows] = x @ weight.T
        limit[:, rows] = relative * (magnitude @ np.abs(weight, out=weight).T)
    return want, limit + SMALLEST_NORMAL


def rope(x: Array, frequencies: Array, positions: Array, pairing: Pairing) -> Bounded:
    """(T, heads, D) -> the same."""
    x = _wide(x)
    cos, sin = ops.rope_tables(frequencies, positions)
    want = ops.rope(x, cos, sin, pairing)
    # |a cos| + |b sin| for the first of a pair and |a sin| + |b cos| for the second is the rotation
    # itself with every term made positive: -|sin| turns the first one's difference into a sum.
    first = ops.rope(np.abs(x), np.abs(cos), -np.abs(sin), pairing)
    second = ops.rope(np.abs(x), np.abs(cos), np.abs(sin), pairing)
    magnitude = np.maximum(np.abs(first), np.abs(second))
    return want, row("rope").relative() * magnitude + SMALLEST_NORMAL


def attention(
    q: Array, keys: Array, values: Array, start: int, window: int | None, scale: float
) -> Bounded:
    """(T, H, D) over (n, KVH, D) in storage type -> (T, H*D).

    With P the exact weights, e the error of a score and out the result, a change d_j of weight j
    moves the result by P_j d_j (v_j - out); |d_j| is at most the score's error, one rounding of
    score - maximum, and exp's own error.
    """
    tokens, heads, size = q.shape
    count, kv_heads, _ = keys.shape
    query, key, value = _wide(q), _wide(keys), _wide(values)
    want = exact_attention(query, key, value, start, window, scale)
    out = np.abs(want.reshape(tokens, heads, size))
    limit = np.empty((tokens, heads, size), dtype=np.float64)

    query_position = start + np.arange(tokens)[:, None]
    distance = query_position - np.arange(count)[None, :]
    visible = (distance >= 0) & (distance < (count if window is None else window))
    score_relative = row("score").relative(size)
    own, total = row("softmax").relative(), row("attention_sum").relative(count)
    for head in range(heads):
        k, v = key[:, head // (heads // kv_heads)], value[:, head // (heads // kv_heads)]
        score = np.where(visible, scale * (query[:, head] @ k.T), -np.inf)
        below = score - score.max(axis=1, keepdims=True)
        weight = np.exp(below)
        weight /= weight.sum(axis=1, keepdims=True)
        score_error = score_relative * abs(scale) * (np.abs(query[:, head]) @ np.abs(k).T)
        # The maximum carries an error too, but a common factor cancels in the normalisation.
        exponent = np.where(visible, score_error + UNIT_ROUNDOFF * np.abs(below), 0.0)
        share = weight * (np.expm1(exponent) + own)
        share_sum = share.sum(axis=1, keepdims=True)
        weighted = weight @ np.abs(v)
        limit[:, head] = share @ np.abs(v) + share_sum * out[:, head]
        limit[:, head] += total * (weighted + out[:, head])
    return want, limit.reshape(tokens, heads * size) + SMALLEST_NORMAL


def gated(gate: Array, up: Array, activation: Activation) -> Bounded:
    """(T, F), (T, F) -> (T, F): SwiGLU or GeGLU."""
    gate, up = _wide(gate), _wide(up)
    want = ops.gated(gate, up, activation)
    # What underflows in float32 is lost whole: one smallest normal number, times the other factor.
    lost = SMALLEST_NORMAL * (1 + np.abs(gate)) * (1 + np.abs(up))
    if activation == "silu":
        return want, row("silu").relative() * np.abs(want) + lost
    argument = np.sqrt(2 / np.pi) * gate * (1 + 0.044715 * np.square(gate))
    tanh = np.tanh(argument)
    slope = 1 - np.square(tanh)
    inside = 6 * UNIT_ROUNDOFF * np.abs(argument) * slope
    absolute = inside + row("gelu_tanh").relative() * np.abs(tanh) + UNIT_ROUNDOFF
    return want, np.abs(0.5 * gate * up) * absolute + 4 * UNIT_ROUNDOFF * np.abs(want) + lost


def add(a: Array, b: Array) -> Bounded:
    """Elementwise sum of two arrays of one shape."""
    want = _wide(a) + _wide(b)
    return want, row("add").relative() * np.abs(want)


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def _row_blocks(tensor: Tensor) -> Iterator[slice]:
    step = max(1, BLOCK_ELEMENTS // tensor.shape[1])
    for start in range(0, tensor.shape[0], step):
        yield slice(start, min(start + step, tensor.shape[0]))
