"""The operations of a transformer block in NumPy: pure functions, one precision in, the same out.

Every function computes in the dtype of its activation argument (float32 or float64) and returns it.
Symbols: reference/model/spec.py.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.model.spec import Activation, Pairing

Array = NDArray[Any]

# float64 copies of a float32 weight are made in row blocks, so that a 262,144-row output projection
# needs tens of megabytes beside the weights and not gigabytes.
_WIDEN_ELEMENTS = 1 << 22


def rms_norm(x: Array, weight: Array | None, epsilon: float) -> Array:
    """(..., n) -> (..., n): x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019).

    `weight` None is a weight of ones.
    """
    mean_square = np.add.reduce(x * x, axis=-1, keepdims=True) / x.dtype.type(x.shape[-1])
    y: Array = x * (1 / np.sqrt(mean_square + x.dtype.type(epsilon)))
    if weight is not None:
        _require(x.shape[-1:] == weight.shape, "rms_norm", "weight", weight.shape, x.shape[-1:])
        y *= weight.astype(x.dtype, copy=False)
    return y


def linear(x: Array, weight: Array) -> Array:
    """(T, K) x (N, K) -> (T, N): x . W^T through BLAS; a float32 `weight` is widened if x is."""
    _require(x.shape[-1] == weight.shape[-1], "linear", "x", x.shape, weight.shape)
    if weight.dtype == x.dtype:
        return x @ weight.T
    y = np.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)
    step = max(1, _WIDEN_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        y[..., start : start + step] = x @ weight[start : start + step].astype(x.dtype).T
    return y


def rope_tables(
    frequencies: NDArray[np.float64], positions: Array, magnitude: float = 1.0
) -> tuple[Array, Array]:
    """cos and sin of position * frequency, times `magnitude`; float64, each (T, n/2)."""
    angle = positions.astype(np.float64)[:, None] * frequencies[None, :]
    return np.cos(angle) * magnitude, np.sin(angle) * magnitude


def rope(x: Array, cos: Array, sin: Array, pairing: Pairing) -> Array:
    """(T, heads, D) -> same: head pairs rotated by the position's angle (Su et al. 2021)."""
    _require(x.shape[0] == cos.shape[0], "rope", "x", x.shape, cos.shape)
    cos = cos.astype(x.dtype, copy=False)[:, None, :]
    sin = sin.astype(x.dtype, copy=False)[:, None, :]
    half = cos.shape[-1]
    y = np.array(x, copy=True)
    if pairing == "norm":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = x[..., first], x[..., second]
    y[..., first] = a * cos - b * sin
    y[..., second] = a * sin + b * cos
    return y


def gated(gate: Array, up: Array, activation: Activation) -> Array:
    """(T, F), (T, F) -> (T, F): SwiGLU or GeGLU (Shazeer 2020), GELU in its tanh form."""
    y = silu(gate) if activation == "silu" else gelu_tanh(gate)
    y *= up
    return y


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), written so that exp never overflows."""
    decayed = np.exp(-np.abs(x))
    y: Array = np.where(x >= 0, x.dtype.type(1), decayed)
    y /= 1 + decayed
    return y


def silu(x: Array) -> Array:
    """x * sigmoid(x).

    As x / (1 + e^-x), with few passes over the data. Below x = -88 (float32; -709 in float64) e^-x
    overflows and the result is -0 instead of a value smaller than 1e-36 (1e-305).
    """
    y: Array = np.negative(x)
    with np.errstate(over="ignore"):
        np.exp(y, out=y)
    y += 1
    return np.divide(x, y, out=y)


def soft_cap(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap): keeps values inside (-cap, cap)."""
    bound = x.dtype.type(cap)
    y: Array = bound * np.tanh(x / bound)
    return y


def gelu_tanh(x: Array) -> Array:
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
    root = x.dtype.type(np.sqrt(2 / np.pi))
    cubic = x.dtype.type(0.044715)
    half = x.dtype.type(0.5)
    y: Array = x * x
    y *= cubic
    y += 1
    y *= x
    y *= root
    np.tanh(y, out=y)
    y += 1
    y *= half * x
    return y


def _require(condition: bool, op: str, argument: str, got: object, expected: object) -> None:
    if not condition:
        raise ValueError(f"{op}: {argument} has shape {got}, expected one that fits {expected}")
