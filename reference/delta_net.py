"""The gated delta net: linear attention whose state is corrected by a delta rule at every token.

Yang et al. 2024 (Gated Delta Networks); layout and scales as in llama.cpp's qwen35. Two forms give
the same result: `step_form` walks token by token and is the definition; `chunk_form` solves a
chunk of tokens at once, as fast implementations do.
"""

from dataclasses import dataclass

import numpy as np

from reference.model.spec import DeltaNetSpec
from reference.ops import Array, silu


@dataclass
class RecurrentState:
    """What a layer carries from token to token.

    `memory` (NV, DS, DS), rows along the key, columns along the value; `tail`
    (conv_kernel - 1, channels): the convolution's last inputs, oldest first. Zero at the start.
    """

    memory: Array
    tail: Array

    @staticmethod
    def zero(net: DeltaNetSpec, dtype: np.dtype[np.floating]) -> "RecurrentState":
        size = net.state_size
        return RecurrentState(
            np.zeros((net.value_heads, size, size), dtype=dtype),
            np.zeros((net.conv_kernel - 1, net.channels), dtype=dtype),
        )

    def copy(self) -> "RecurrentState":
        """A snapshot."""
        return RecurrentState(self.memory.copy(), self.tail.copy())


def convolve(x: Array, kernel: Array, state: RecurrentState) -> Array:
    """(T, channels) -> (T, channels): causal depthwise convolution, then SiLU; advances the tail.

    `kernel` (channels, taps): the last tap multiplies the newest input.
    """
    taps = kernel.shape[1]
    padded = np.concatenate([state.tail, x], axis=0)
    kernel = kernel.astype(x.dtype, copy=False)
    mixed = np.zeros_like(x)
    for tap in range(taps):
        mixed += padded[tap : tap + len(x)] * kernel[:, tap]
    state.tail = padded[len(padded) - (taps - 1) :].copy()
    return silu(mixed)


def unit_heads(x: Array, epsilon: float) -> Array:
    """(T, heads, DS) -> the same, every head divided by sqrt(sum(x^2) + epsilon)."""
    square = np.sum(np.square(x), axis=-1, keepdims=True, dtype=x.dtype)
    y: Array = x / np.sqrt(square + x.dtype.type(epsilon))
    return y


def log_decay(alpha: Array, bias: Array, a: Array) -> Array:
    """(T, NV): softplus(alpha + bias) * a, the logarithm of the decay; `a` is already negative."""
    raw = alpha + bias.astype(alpha.dtype, copy=False)
    # softplus without overflow: log(1 + e^x) = max(x, 0) + log1p(e^-|x|).
    softplus = np.maximum(raw, 0) + np.log1p(np.exp(-np.abs(raw)))
    y: Array = softplus * a.astype(alpha.dtype, copy=False)
    return y


def step_form(q: Array, k: Array, v: Array, g: Array, beta: Array, state: RecurrentState) -> Array:
    """q, k (T, NV, DS), v (T, NV, DS), log decay g and beta (T, NV) -> (T, NV, DS).

    Per head: S = e^g S; d = (v - S^T k) beta; S = S + k d^T; o = S^T q. Advances the state.
    """
    out = np.empty_like(v)
    memory = state.memory
    for t in range(len(v)):
        memory = memory * np.exp(g[t])[:, None, None]
        seen = np.einsum("hkv,hk->hv", memory, k[t])
        delta = (v[t] - seen) * beta[t][:, None]
        memory = memory + k[t][:, :, None] * delta[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", memory, q[t])
    state.memory = memory
    return out


def chunk_form(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: RecurrentState, chunk: int = 64
) -> Array:
    """The same as step_form, `chunk` tokens at a time through matrix products.

    Inside a chunk with cumulative log decay G, the deltas d solve a unit lower triangular system
    (I + diag(beta) strictly_lower(K K^T * e^(G_t - G_s))) d = beta (v - e^G S0^T k).
    """
    out = np.empty_like(v)
    for start in range(0, len(v), chunk):
        part = slice(start, start + chunk)
        qc, kc, vc = (x[part].transpose(1, 0, 2) for x in (q, k, v))  # (NV, C, DS)
        cumulative = np.cumsum(g[part].T, axis=1)  # (NV, C)
        weight = beta[part].T[:, :, None]
        count = qc.shape[1]
        lower = np.tril(np.ones((count, count), dtype=bool))
        # Only differences of cumulative decay with t >= s are used: they never overflow.
        difference = np.where(lower, cumulative[:, :, None] - cumulative[:, None, :], -np.inf)
        decay = np.exp(difference)
        grown = np.exp(cumulative)[:, :, None]
        memory = state.memory
        system = np.eye(count, dtype=v.dtype) + weight * np.tril(
            (kc @ kc.transpose(0, 2, 1)) * decay, -1
        )
        delta = np.linalg.solve(system, weight * (vc - grown * (kc @ memory)))
        mixed = grown * (qc @ memory) + ((qc @ kc.transpose(0, 2, 1)) * decay) @ delta
        out[part] = mixed.transpose(1, 0, 2)
        to_end = np.exp(cumulative[:, -1:] - cumulative)[:, :, None]
        state.memory = memory * grown[:, -1:, :] + (kc * to_end).transpose(0, 2, 1) @ delta
    return out
