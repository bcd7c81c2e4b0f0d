"""Routing and routed experts in float64, each with its largest error (see bounds.py).

Which experts a token goes to is a comparison of the engine's own recorded logits and exact; every
later point takes the engine's recorded routing as given. Whether another engine, as right as this
one, could have routed otherwise is a separate question: `near_ties` answers it.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from reference import moe, ops
from reference.model.spec import Activation
from reference.model.weights import Tensor
from suites.harness import sensitivity
from suites.harness.bounds import Bounded, gated, linear, wide
from suites.harness.compare import Array
from suites.harness.promises import promise
from suites.harness.tolerances import SECOND_ORDER, SMALLEST_NORMAL, row


def router_input(x: Array, scale: Array, epsilon: float) -> Bounded:
    """(T, E) -> (T, E): RMS norm without weight, over sqrt(E), times the router's scale."""
    root = np.sqrt(x.shape[-1])
    want = ops.rms_norm(wide(x), None, epsilon) / root * wide(scale)
    return want, row("router").relative(x.shape[-1]) * np.abs(want) + SMALLEST_NORMAL


def chosen_experts(logits: Array, used: int) -> Bounded:
    """(T, count) -> (T, used): ids by falling logit, the lowest id first among equals; exact."""
    want = moe.route(wide(logits), used).experts.astype(np.float64)
    return want, promise("routing") * want


def routing_weights(logits: Array, experts: Array) -> Bounded:
    """(T, count), (T, used) -> (T, used): softmax shares of the chosen, which sum to 1."""
    logits = wide(logits)
    used = experts.shape[-1]
    below = np.take_along_axis(logits, experts, axis=-1) - logits.max(axis=-1, keepdims=True)
    weight = np.exp(below - below.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    # An error of exp's argument is a relative error of its value, above and below the line.
    rounding = row("exponent").relative() * np.abs(below)
    argument = rounding + np.sum(weight * rounding, axis=-1, keepdims=True)
    relative = row("routing_weights").relative(used) + argument
    # Probabilities that underflow are lost whole; the largest is at least 1 / count.
    lost = SMALLEST_NORMAL * (1 + used) * logits.shape[-1]
    return weight, SECOND_ORDER * relative * weight + lost


Matrices = Callable[[int], tuple[Tensor, Tensor, Tensor]]
"""Gate (F, E), up (F, E) and down (E, F) of one expert."""


def routed_sum(
    x: Array,
    experts: Array,
    weights: Array,
    matrices: Matrices,
    activation: Activation,
    scales: Array | None,
    path: str,
) -> Bounded:
    """(T, E) -> (T, E): one check over gate, up, activation, down, scale, weight and sum.

    What lies between is not recorded, so each step's limit is carried into the next.
    """
    x, weights = wide(x), wide(weights)
    want, limit, magnitude = (np.zeros_like(x) for _ in range(3))
    for e in np.unique(experts):
        token, place = np.nonzero(experts == e)
        gate_matrix, up_matrix, down_matrix = matrices(int(e))
        gate, gate_error = linear(x[token], gate_matrix, path)
        up, up_error = linear(x[token], up_matrix, path)
        inner, own = gated(gate, up, activation)
        change = sensitivity.gated(gate, up, gate_error, up_error, activation)
        out, out_error = linear(inner, down_matrix, path, error=SECOND_ORDER * (own + change))
        factor = weights[token, place, None]
        if scales is not None:
            factor = factor * float(scales[e])
        # A token names an expert once, so no row is added to twice.
        want[token] += out * factor
        limit[token] += out_error * np.abs(factor)
        magnitude[token] += np.abs(out * factor)
    own_relative = row("combine_experts").relative(experts.shape[-1])
    return want, SECOND_ORDER * (limit + own_relative * magnitude) + SMALLEST_NORMAL


def shared_gated(shared: Array, x: Array, gate: Tensor, path: str) -> Bounded:
    """(T, E): the shared expert's output times sigmoid(x . gate), one gate a token."""
    shared = wide(shared)
    matrix = replace(gate, shape=(1, *gate.shape), raw=gate.raw.reshape(1, -1))
    projected, error = (part[:, 0] for part in linear(x, matrix, path))
    open_ = ops.sigmoid(projected)
    change = sensitivity.sigmoid(projected, error)
    want = shared * open_[:, None]
    relative = row("sigmoid_gated").relative()
    limit = np.abs(shared) * (change + relative * (open_ + change))[:, None]
    return want, limit + SMALLEST_NORMAL * (1 + np.abs(shared))


def near_ties(logits: Array, limit: Array, used: int) -> list[tuple[int, float, float]]:
    """Tokens whose last chosen and first refused expert are nearer than their logits are known.

    -> (token, gap, sum of the two limits), by token; (T, count) `limit` is that of the logits.
    """
    if used >= logits.shape[-1]:
        return []
    logits = wide(logits)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, used - 1 : used + 1]
    pair = np.take_along_axis(logits, order, axis=-1)
    known = np.take_along_axis(limit, order, axis=-1).sum(axis=-1)
    gap = pair[:, 0] - pair[:, 1]
    return [(int(t), float(gap[t]), float(known[t])) for t in np.flatnonzero(gap <= known)]
