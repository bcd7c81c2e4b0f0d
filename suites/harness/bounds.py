"""Each op in float64 with the largest error that a correct float32 engine may have, per element.

Every function takes the ENGINE's recorded inputs and returns (want, limit), both float64 and of the
result's shape. `want` comes from the reference's own functions; `limit` is the row of
tolerances.py times the op's magnitude. Symbols: reference/model/spec.py.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from backend_hip.attention_shape import SPLIT_KEYS
from reference import ops
from reference.attention import attention as exact_attention
from reference.dequant import dequantise, magnitudes
from reference.half import half_rows, half_weights
from reference.kv_cache import BLOCK_STORAGE
from reference.model.spec import Activation, Pairing
from reference.model.weights import Tensor
from suites.harness import sensitivity
from suites.harness.compare import Array
from suites.harness.promises import promise
from suites.harness.tolerances import (
    BYTE_UNIT,
    DIGIT_SHARE,
    SECOND_ORDER,
    SMALLEST_KEPT,
    SMALLEST_NORMAL,
    SPLIT_FLOOR,
    row,
    summation,
)

Bounded = tuple[Array, Array]
# How path matrix rounds weights: to halves, or not at all where few columns meet a K format.
Weights = Literal["halves", "exact", "either"]
EXACT_FORMATS = ("Q4_K", "Q5_K", "Q6_K")

# A float64 block of a weight matrix and its absolute value hold about this many elements each, so
# that a vocabulary of 262,144 rows needs tens of megabytes and not gigabytes.
BLOCK_ELEMENTS = 1 << 21
BLOCK = 32  # elements of a head that share a scale in BLOCK_STORAGE; activations, a unit on digits


def embed(table: Tensor, tokens: tuple[int, ...], scale: float) -> Bounded:
    """-> (T, E): the table's rows times the embedding scale."""
    rows = dequantise(table.format, table.raw[list(tokens)], np.float64)
    want = rows * scale
    relative = 0.0 if scale == 1.0 else row("embed").relative()
    return want, relative * np.abs(want)


def rms_norm(x: Array, weight: Array | None, epsilon: float) -> Bounded:
    """(..., n) -> (..., n); `weight` None is a weight of ones."""
    want = ops.rms_norm(wide(x), None if weight is None else wide(weight), epsilon)
    return want, row("rms_norm").relative(x.shape[-1]) * np.abs(want) + SMALLEST_NORMAL


def linear(
    x: Array,
    tensor: Tensor,
    path: str,
    *,
    bias: Array | None = None,
    error: Array | None = None,
    weights: Weights = "either",
) -> Bounded:
    """(T, K) x (N, K) -> (T, N), the matrix widened in blocks of rows; `bias` (N,) is added.

    `error` (T, K) is how far the engine's x may be from this one, where x was not recorded. Path
    matrix rounds both factors, which the value follows (reference/half.py): rounding an x that is
    not known exactly has no bound here. Weights of EXACT_FORMATS are rounded or exact by the number
    of columns of a flow, which is not recorded: with `weights` "either" the limit reaches from the
    one value to the other. Path digits rounds x to whole units where weights are of EXACT_FORMATS,
    and applies their factors and offsets to sums.
    """
    halves = path == "matrix"
    if halves and error is not None:
        raise ValueError("bounds: linear on path matrix needs the engine's own x")
    x = half_rows(x) if halves else wide(x)
    magnitude = np.abs(x)
    if tensor.format.name not in EXACT_FORMATS:
        weights = "halves"
    want = np.empty((len(x), tensor.shape[0]), dtype=np.float64)
    limit = np.empty_like(want)
    order = summation(path, tensor.format.block_elements)
    relative = row("linear", order).relative(x.shape[-1])
    if order == "digits":
        kept = np.maximum(_largest(x, BLOCK), SMALLEST_KEPT)
        magnitude = relative * magnitude + DIGIT_SHARE * kept
    for rows in _row_blocks(tensor):
        weight = dequantise(tensor.format, tensor.raw[rows], np.float64)
        if order == "digits":
            want[:, rows] = x @ weight.T
            limit[:, rows] = magnitude @ magnitudes(tensor.format, tensor.raw[rows]).T
            np.abs(weight, out=weight)
        elif not halves:
            want[:, rows] = x @ weight.T
            np.abs(weight, out=weight)
            limit[:, rows] = relative * (magnitude @ weight.T)
        else:
            want[:, rows], limit[:, rows] = _halves(x, tensor, rows, weight, relative, weights)
        if error is not None:
            limit[:, rows] = SECOND_ORDER * (limit[:, rows] + error @ weight.T)
    if bias is not None:
        want += wide(bias)
        limit += row("bias").relative() * (np.abs(want) + limit)
    return want, limit + SMALLEST_NORMAL


def _halves(
    x: Array, tensor: Tensor, rows: slice, weight: Array, relative: float, weights: Weights
) -> Bounded:
    """`rows` of a product on path matrix; x (T, K) is rounded already, `weight` (rows, K) not."""
    if weights == "halves":
        rounded = half_weights(weight)
        return x @ rounded.T, relative * (np.abs(x) @ np.abs(rounded).T)
    terms = magnitudes(tensor.format, tensor.raw[rows])
    # A sum of activations is split into two halves; what is lost below the smallest half of the
    # row's largest value is a share of that value.
    peak = np.max(np.abs(x), axis=1, keepdims=True, initial=0.0)
    limit = relative * ((np.abs(x) + SPLIT_FLOOR * peak) @ terms.T)
    want = x @ weight.T
    if weights == "exact":
        return want, limit
    apart = (x @ half_weights(weight).T - want) / 2
    return want + apart, limit + np.abs(apart)


def soft_cap(logits: Bounded, cap: float) -> Bounded:
    """cap * tanh(x / cap) of values that are themselves only known within a limit."""
    x, error = logits
    want = ops.soft_cap(x, cap)
    argument = x / cap
    off = error / cap + row("soft_cap_argument").relative() * (np.abs(argument) + error / cap)
    change = cap * sensitivity.soft_cap(argument, off)
    own = row("soft_cap").relative() * (np.abs(want) + change)
    return want, change + own + SMALLEST_NORMAL


def rope(
    x: Array, frequencies: Array, positions: Array, pairing: Pairing, magnitude: float = 1.0
) -> Bounded:
    """(T, heads, D) -> the same; elements past twice the frequencies are copied."""
    x = wide(x)
    cos, sin = ops.rope_tables(frequencies, positions, magnitude)
    want = ops.rope(x, cos, sin, pairing)
    # |a cos| + |b sin| for the first of a pair and |a sin| + |b cos| for the second is the rotation
    # itself with every term made positive: -|sin| turns the first one's difference into a sum.
    first = ops.rope(np.abs(x), np.abs(cos), -np.abs(sin), pairing)
    second = ops.rope(np.abs(x), np.abs(cos), np.abs(sin), pairing)
    limit = row("rope").relative() * np.maximum(np.abs(first), np.abs(second)) + SMALLEST_NORMAL
    limit[..., 2 * cos.shape[-1] :] = 0.0
    return want, limit


def attention(
    q: Array,
    keys: Array,
    values: Array,
    start: int,
    window: int | None,
    scale: float,
    kv_types: tuple[str, str],
) -> Bounded:
    """(T, H, D) over (n, KVH, D), what a cache of `kv_types` gives back -> (T, H*D).

    With P the exact weights, e the error of a score and out the result, a change d_j of weight j
    moves the result by P_j d_j (v_j - out); |d_j| is at most the score's error, one rounding of
    score - maximum, and exp's own error.
    """
    tokens, heads, size = q.shape
    count, kv_heads, _ = keys.shape
    query, key, value = wide(q), wide(keys), wide(values)
    want = exact_attention(query, key, value, start, window, scale)
    out = np.abs(want.reshape(tokens, heads, size))
    limit = np.empty((tokens, heads, size), dtype=np.float64)

    query_position = start + np.arange(tokens)[:, None]
    distance = query_position - np.arange(count)[None, :]
    visible = (distance >= 0) & (distance < (count if window is None else window))
    score_relative = row("score").relative(size)
    own, total = row("softmax").relative(), row("attention_sum").relative(count)
    rounded = row("exponent").relative()
    for head in range(heads):
        k, v = key[:, head // (heads // kv_heads)], value[:, head // (heads // kv_heads)]
        score = np.where(visible, scale * (query[:, head] @ k.T), -np.inf)
        below = score - score.max(axis=1, keepdims=True)
        weight = np.exp(below)
        weight /= weight.sum(axis=1, keepdims=True)
        terms = score_relative * np.abs(query[:, head])
        if kv_types[0] in BLOCK_STORAGE:
            terms += BYTE_UNIT * _largest(query[:, head], BLOCK)
        score_error = abs(scale) * (terms @ np.abs(k).T)
        # The maximum carries an error too, but a common factor cancels in the normalisation.
        exponent = np.where(visible, score_error + rounded * np.abs(below), 0.0)
        share = weight * (np.expm1(exponent) + own)
        share_sum = share.sum(axis=1, keepdims=True)
        weighted = weight @ np.abs(v)
        limit[:, head] = share @ np.abs(v) + share_sum * out[:, head]
        limit[:, head] += total * (weighted + out[:, head])
        if kv_types[1] in BLOCK_STORAGE:
            limit[:, head] += _cut_off_weights(weight, visible, v)
    return want, limit.reshape(tokens, heads * size) + SMALLEST_NORMAL


def _largest(x: Array, block: int) -> Array:
    """(n, D): of each element, the largest magnitude of its block."""
    blocks = np.abs(x).reshape(len(x), -1, block)
    largest: Array = np.repeat(blocks.max(axis=-1), block, axis=-1)
    return largest


def _cut_off_weights(weight: Array, visible: NDArray[np.bool_], v: Array) -> Array:
    """How far weights (T, n) that become whole units, split by split, move a result (T, D).

    A unit counts against the split's largest weight times the largest scale of a block among its
    keys; bytes are at most 127, and 127 scales are the largest magnitude of a block.
    """
    largest = _largest(v, BLOCK)
    moved = np.zeros((len(weight), v.shape[1]))
    for first in range(0, len(v), SPLIT_KEYS):
        keys = slice(first, first + SPLIT_KEYS)
        units = visible[:, keys].sum(axis=1) * weight[:, keys].max(axis=1)
        moved += BYTE_UNIT * units[:, None] * largest[keys].max(axis=0)
    return moved


def gated(gate: Array, up: Array, activation: Activation) -> Bounded:
    """(T, F), (T, F) -> (T, F): SwiGLU or GeGLU."""
    gate, up = wide(gate), wide(up)
    want = ops.gated(gate, up, activation)
    # What underflows in float32 is lost whole: one smallest normal number, times the other factor.
    lost = SMALLEST_NORMAL * (1 + np.abs(gate)) * (1 + np.abs(up))
    if activation == "silu":
        return want, row("silu").relative() * np.abs(want) + lost
    argument = np.sqrt(2 / np.pi) * gate * (1 + 0.044715 * np.square(gate))
    tanh = np.tanh(argument)
    slope = 1 - np.square(tanh)
    absolute = row("gelu_argument").relative() * np.abs(argument) * slope
    absolute += row("gelu_tanh").relative() * np.abs(tanh) + row("gelu_sum").relative()
    products = row("gelu_products").relative() * np.abs(want)
    return want, np.abs(0.5 * gate * up) * absolute + products + lost


def sigmoid_gated(x: Array, gate: Array) -> Bounded:
    """x * sigmoid(gate), elementwise."""
    x, gate = wide(x), wide(gate)
    want = x * ops.sigmoid(gate)
    limit = row("sigmoid_gated").relative() * np.abs(want) + SMALLEST_NORMAL * (1 + np.abs(x))
    return want, limit


def add(a: Array, b: Array) -> Bounded:
    """Elementwise sum of two arrays of one shape."""
    want = wide(a) + wide(b)
    return want, row("add").relative() * np.abs(want)


def add_scaled(a: Array, b: Array, scale: float) -> Bounded:
    """(a + b) * scale."""
    want = (wide(a) + wide(b)) * scale
    return want, row("scaled").relative() * np.abs(want) + SMALLEST_NORMAL


def copy(x: Array) -> Bounded:
    """The same values under a second name."""
    want = wide(x)
    return want, promise("copy") * np.abs(want)


def per_layer_inputs(
    x: Array,
    tokens: tuple[int, ...],
    projection: Tensor,
    norm: Array,
    table: Tensor,
    epsilon: float,
    path: str,
) -> Bounded:
    """(T, E) -> (T, layers, P): (norm(x . W^T / sqrt(E)) + table * sqrt(P)) / sqrt(2).

    One check over the product, its scale, the norm and the sum: nothing between is recorded.
    """
    rescale = row("rescale").relative()
    projected, error = linear(x, projection, path)
    root, size = np.sqrt(x.shape[-1]), len(norm)
    shape = (len(x), -1, size)
    projected, error = (projected / root).reshape(shape), (error / root).reshape(shape)
    error = error + rescale * (np.abs(projected) + error)
    normed, own = rms_norm(projected, norm, epsilon)
    normed_error = SECOND_ORDER * (own + sensitivity.rms_norm(projected, norm, epsilon, error))
    rows = dequantise(table.format, table.raw[list(tokens)], np.float64).reshape(shape)
    rows = rows * np.sqrt(size)
    want = (normed + rows) / np.sqrt(2)
    inherited = (normed_error + rescale * np.abs(rows)) / np.sqrt(2)
    own_relative = row("per_layer_input").relative()
    return want, inherited + own_relative * (np.abs(want) + inherited) + SMALLEST_NORMAL


def wide(x: Array) -> Array:
    return x.astype(np.float64)


def _row_blocks(tensor: Tensor) -> Iterator[slice]:
    step = max(1, BLOCK_ELEMENTS // tensor.shape[1])
    for start in range(0, tensor.shape[0], step):
        yield slice(start, min(start + step, tensor.shape[0]))
