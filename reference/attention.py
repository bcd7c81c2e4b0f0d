"""Causal attention over the cache, with grouped heads and an optional sliding window."""

import numpy as np

from reference.ops import Array


def attention(
    q: Array, keys: Array, values: Array, start: int, window: int | None, scale: float
) -> Array:
    """(T, H, D) queries at positions start.. over (n, KVH, D) keys and values -> (T, H*D).

    Query t sees key j when j <= start + t and, with a window, start + t - j < window. Computed in
    the dtype of q; keys and values come in their storage type.
    """
    tokens, heads, size = q.shape
    count, kv_heads, _ = keys.shape
    group = heads // kv_heads
    k = keys.astype(q.dtype, copy=False).transpose(1, 2, 0)  # (KVH, D, n)
    v = values.astype(q.dtype, copy=False).transpose(1, 0, 2)  # (KVH, n, D)
    grouped = q.reshape(tokens, kv_heads, group, size).transpose(1, 2, 0, 3)  # (KVH, group, T, D)
    scores = (grouped @ k[:, None]) * q.dtype.type(scale)

    query_position = start + np.arange(tokens, dtype=np.int64)[:, None]
    key_position = np.arange(count, dtype=np.int64)[None, :]
    visible = key_position <= query_position
    if window is not None:
        visible &= query_position - key_position < window
    scores = np.where(visible, scores, q.dtype.type(-np.inf))

    # Every query sees at least its own key, so the maximum is finite.
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    mixed: Array = weight @ v[:, None]  # (KVH, group, T, D)
    return mixed.transpose(2, 0, 1, 3).reshape(tokens, heads * size)
