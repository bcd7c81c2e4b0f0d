"""Routed experts: which experts a token goes to, and their weighted sum."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference import ops
from reference.model.spec import Activation
from reference.ops import Array


@dataclass(frozen=True)
class Routing:
    """`experts` (T, used) int64, most probable first; `weights` (T, used) sum to 1.

    `logits` and `probabilities` are (T, count).
    """

    logits: Array
    probabilities: Array
    experts: NDArray[np.int64]
    weights: Array


def route(logits: Array, used: int, experts: NDArray[np.int64] | None = None) -> Routing:
    """Softmax over all experts, the `used` most probable, renormalised to sum 1.

    Among equals the lowest index comes first. `experts` (T, used) is a choice made elsewhere, which
    is followed instead.
    """
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: Array = shifted / shifted.sum(axis=-1, keepdims=True)
    # Ordered by logit: softmax keeps the order, and rounding it could make ties of near-ties.
    if experts is None:
        experts = np.argsort(-logits, axis=-1, kind="stable")[:, :used]
    chosen = np.take_along_axis(probabilities, experts, axis=-1)
    weights: Array = chosen / chosen.sum(axis=-1, keepdims=True)
    return Routing(logits, probabilities, experts, weights)


def routed_sum(
    x: Array,
    routing: Routing,
    expert: Callable[[int], tuple[Array, Array, Array]],
    activation: Activation,
    scales: Array | None = None,
) -> Array:
    """(T, E) -> (T, E): each token's experts' gated blocks, weighted and added.

    `expert(e)` gives the gate (F, E), up (F, E) and down (E, F) matrices; `scales` (count,)
    multiplies each expert's output. An expert that no token chose is not asked for. A token's
    terms are added in the order of its routing.
    """
    used = routing.experts.shape[1]
    parts = np.zeros((used, *x.shape), dtype=x.dtype)
    for e in np.unique(routing.experts):
        token, place = np.nonzero(routing.experts == e)
        gate, up, down = expert(int(e))
        rows = x[token]
        inner = ops.gated(ops.linear(rows, gate), ops.linear(rows, up), activation)
        out = ops.linear(inner, down)
        if scales is not None:
            out = out * scales[e].astype(x.dtype)
        parts[place, token] = out * routing.weights[token, place, None]
    total: Array = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
