"""How far a function's value moves when its argument is off by at most `error`: rigorous bounds.

They are needed where one check spans several operations, because what lies between was not
recorded. Arrays are float64; `error` is absolute, of the argument's shape and not negative. Values
stay finite: each bound is capped by the function's whole range where it has one.
"""

import numpy as np

from reference import ops
from reference.model.spec import Activation
from suites.harness.compare import Array

# Largest |second derivative|, at 0 in both: silu'' = 2 * sigmoid'(0), gelu'' = 2 / sqrt(2 pi).
_CURVATURE = {"silu": 0.5, "gelu_tanh": 0.8}


def sigmoid(x: Array, error: Array) -> Array:
    """|sigmoid(x') - sigmoid(x)|: its slope s(1-s) grows by at most e^|x'-x| on the way."""
    open_ = ops.sigmoid(x)
    with np.errstate(over="ignore"):
        change: Array = np.minimum(open_ * ops.sigmoid(-x) * np.expm1(error), 1.0)
    return change


def softplus(x: Array, error: Array) -> Array:
    """|softplus(x') - softplus(x)|: the slope is the sigmoid, at most 1."""
    with np.errstate(over="ignore"):
        change: Array = np.minimum(ops.sigmoid(x) * np.expm1(error), error)
    return change


def soft_cap(x: Array, error: Array) -> Array:
    """|tanh(x') - tanh(x)|: the slope 1 - tanh^2 grows by at most e^(2|x'-x|) on the way."""
    slope = 1 - np.square(np.tanh(x))
    with np.errstate(over="ignore"):
        change: Array = np.minimum(slope * np.expm1(2 * error) / 2, error)
    return change


def activation(x: Array, error: Array, kind: Activation) -> Array:
    """|f(x') - f(x)| of SiLU or GELU: |f'| * error and the remainder of second order."""
    if kind == "silu":
        open_ = ops.sigmoid(x)
        slope = open_ * (1 + x * ops.sigmoid(-x))
    else:
        root, cubic = np.sqrt(2 / np.pi), 0.044715
        tanh = np.tanh(root * x * (1 + cubic * np.square(x)))
        inner = root * (1 + 3 * cubic * np.square(x))
        slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - np.square(tanh)) * inner
    change: Array = np.abs(slope) * error + _CURVATURE[kind] / 2 * np.square(error)
    return change


def gated(gate: Array, up: Array, gate_error: Array, up_error: Array, kind: Activation) -> Array:
    """|f(gate') up' - f(gate) up|."""
    value = ops.silu(gate) if kind == "silu" else ops.gelu_tanh(gate)
    change = activation(gate, gate_error, kind)
    moved: Array = change * (np.abs(up) + up_error) + np.abs(value) * up_error
    return moved


def rms_norm(x: Array, weight: Array, epsilon: float, error: Array) -> Array:
    """|norm(x') - norm(x)| over the last axis.

    With r the root of mean(x^2) + epsilon, |r' - r| is at most rho = rms(error) (r is a norm of the
    vector and sqrt(epsilon)), so x'/r' - x/r is at most (error + |x| rho / r) / (r - rho). No value
    of a norm exceeds sqrt(n) * weight, which caps it.
    """
    size = x.shape[-1]
    root = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + epsilon)
    rho = np.sqrt(np.mean(np.square(error), axis=-1, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        change = (error + np.abs(x) * rho / root) / (root - rho)
    whole = 2 * np.sqrt(size)
    moved: Array = np.abs(weight) * np.where(rho < root, np.minimum(change, whole), whole)
    return moved
