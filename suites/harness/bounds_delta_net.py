"""The gated delta net's ops in float64, each with its largest error (see bounds.py).

The recurrence is bounded through time in the 2-norm of a state column. Per value column c the state
is a vector s over the keys, and one token maps it to

    s -> (I - beta k k^T) e^g s + beta v_c k.

The matrix has norm max(1, |1 - beta k.k|), which is 1 for unit keys and beta in (0, 1): a past
error is carried with the decay and never grows, and only what each token rounds is added. Bounding
element by element instead would grow by up to 1 + beta a token and say nothing after twenty.
"""

from dataclasses import dataclass

import numpy as np

from reference import delta_net, ops
from reference.delta_net import RecurrentState
from reference.model.spec import DeltaNetSpec
from reference.model.weights import Tensor
from suites.harness import sensitivity
from suites.harness.bounds import Bounded, linear, rms_norm, wide
from suites.harness.compare import Array
from suites.harness.tolerances import SMALLEST_NORMAL, row


def beta(x: Array, tensor: Tensor, path: str) -> Bounded:
    """sigmoid(x . W^T), (T, NV): one check over the product and the sigmoid."""
    projected, error = linear(x, tensor, path)
    want = ops.sigmoid(projected)
    change = sensitivity.sigmoid(projected, error)
    return want, change + row("sigmoid").relative() * (want + change) + SMALLEST_NORMAL


def log_decay(alpha: Array, bias: Array, a: Array) -> Bounded:
    """softplus(alpha + bias) * a, (T, NV)."""
    alpha, bias, a = wide(alpha), wide(bias), wide(a)
    want = delta_net.log_decay(alpha, bias, a)
    raw = alpha + bias
    rounded = row("softplus_argument").relative() * np.abs(raw)
    change = np.abs(a) * sensitivity.softplus(raw, rounded)
    own = row("softplus").relative() * (np.abs(want) + change)
    return want, change + own + SMALLEST_NORMAL * (1 + np.abs(a))


def convolve(x: Array, kernel: Array, net: DeltaNetSpec) -> Bounded:
    """(T, channels) -> (T, channels): convolution from a zero tail, then SiLU."""
    x, kernel = wide(x), wide(kernel)
    taps = kernel.shape[1]
    want = delta_net.convolve(x, kernel, RecurrentState.zero(net, np.dtype(np.float64)))
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x], axis=0)
    mixed, magnitude = np.zeros_like(x), np.zeros_like(x)
    for tap in range(taps):
        term = padded[tap : tap + len(x)] * kernel[:, tap]
        mixed += term
        magnitude += np.abs(term)
    error = row("convolution").relative(taps) * magnitude + SMALLEST_NORMAL
    change = sensitivity.activation(mixed, error, "silu")
    own = row("silu").relative() * (np.abs(want) + change)
    return want, change + own + SMALLEST_NORMAL * (1 + np.abs(mixed))


def unit_heads(x: Array, epsilon: float, divisor: float) -> Bounded:
    """(T, heads, DS) -> the same: heads of length 1, divided by `divisor`."""
    want = delta_net.unit_heads(wide(x), epsilon) / divisor
    return want, row("unit_heads").relative(x.shape[-1]) * np.abs(want) + SMALLEST_NORMAL


@dataclass(frozen=True)
class DeltaRule:
    """`out` and `memory` (after the last token) in float64, each with its limit."""

    out: Bounded
    memory: Bounded


def delta_rule(
    q: Array, k: Array, v: Array, decay: Array, strength: Array, net: DeltaNetSpec
) -> DeltaRule:
    """q, k (T, NK, DS), v (T, NV, DS), log decay and beta (T, NV), from a zero state."""
    q, k, v, decay, strength = (wide(x) for x in (q, k, v, decay, strength))
    tiled = np.arange(net.value_heads) % net.key_heads
    q, k = q[:, tiled], k[:, tiled]
    state = RecurrentState.zero(net, np.dtype(np.float64))
    want = delta_net.step_form(q, k, v, decay, strength, state)

    read = row("delta_read").relative(net.state_size)
    rounded_decay = row("delta_decay").relative()
    rounded_delta, rounded_update = (
        row(f"delta_{part}").relative() for part in ("correction", "update")
    )
    limit = np.empty_like(want)
    memory = np.zeros((net.value_heads, net.state_size, net.state_size))
    error = np.zeros((net.value_heads, net.state_size))  # 2-norm per head and value column
    for t in range(len(v)):
        fade = np.exp(decay[t])[:, None]
        key, query = _length(k[t])[:, None], _length(q[t])[:, None]
        beta_ = strength[t][:, None]
        lost = SMALLEST_NORMAL * (1 + _length(memory, 1))  # exp or state below the normal numbers
        memory = memory * fade[:, :, None]
        faded_error = fade * error
        faded_error = faded_error + rounded_decay * (_length(memory, 1) + faded_error) + lost
        seen = np.einsum("hkv,hk->hv", memory, k[t])
        seen_magnitude = np.einsum("hkv,hk->hv", np.abs(memory), np.abs(k[t]))
        seen_error = read * (seen_magnitude + key * faded_error) + SMALLEST_NORMAL
        difference = v[t] - seen
        off = np.abs(difference) + seen_error + key * faded_error
        delta_error = beta_ * (seen_error + rounded_delta * off) + SMALLEST_NORMAL
        memory = memory + k[t][:, :, None] * (beta_ * difference)[:, None, :]
        norm = np.maximum(1.0, np.abs(1 - beta_ * np.square(key)))
        error = norm * faded_error + key * delta_error
        error = error + rounded_update * (_length(memory, 1) + error) + lost
        out_magnitude = np.einsum("hkv,hk->hv", np.abs(memory), np.abs(q[t]))
        limit[t] = query * error + read * (out_magnitude + query * error) + SMALLEST_NORMAL
    columns = np.broadcast_to(error[:, None, :], memory.shape)
    return DeltaRule((want, limit), (state.memory, columns))


def delta_gated(out: Array, z: Array, weight: Array, epsilon: float) -> Bounded:
    """RMS norm of (T, NV, DS) heads times silu(z), (T, NV * DS)."""
    normed, own = rms_norm(out, weight, epsilon)
    gate = ops.silu(wide(z)).reshape(normed.shape)
    want = normed * gate
    limit = own * np.abs(gate) + row("silu").relative() * (np.abs(want) + own * np.abs(gate))
    lost = SMALLEST_NORMAL * (1 + np.abs(normed)) * (1 + np.abs(wide(z).reshape(normed.shape)))
    return want, limit + lost


def _length(x: Array, axis: int = -1) -> Array:
    length: Array = np.sqrt(np.sum(np.square(x), axis=axis))
    return length
