"""Causal attention over the cache, with grouped heads and an optional sliding window."""

import numpy as np
from numpy.typing import NDArray

from reference.ops import Array

# Queries are taken in blocks: a block's scores stay in the processor's cache, and keys that none of
# its queries sees are left out. The result does not depend on the size beyond rounding.
QUERY_BLOCK = 64


def attention(
    q: Array, keys: Array, values: Array, start: int, window: int | None, scale: float
) -> Array:
    """(T, H, D) queries at positions start.. over (n, KVH, D) keys and values -> (T, H*D).

    Query t sees key j when j <= start + t and, with a window, start + t - j < window. Computed in
    the dtype of q; keys and values come in their storage type.
    """
    tokens, heads, size = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    k = keys.astype(q.dtype, copy=False)
    v = values.astype(q.dtype, copy=False)
    # Query head h reads key head h // group: one key head's queries lie side by side.
    grouped = (q * q.dtype.type(scale)).reshape(tokens, kv_heads, group, size)
    mixed: Array = np.empty_like(grouped)
    for first in range(0, tokens, QUERY_BLOCK):
        block = slice(first, min(first + QUERY_BLOCK, tokens))
        seen = slice(_oldest(start + first, window), start + block.stop)
        hidden = _hidden(np.arange(start + first, start + block.stop), seen, window)
        for head in range(kv_heads):
            rows = grouped[block, head].reshape(-1, size)  # (block * group, D)
            weight = rows @ k[seen, head].T
            np.copyto(weight.reshape(len(hidden), group, -1), -np.inf, where=hidden[:, None])
            # Every query sees at least its own key, so the maximum is finite.
            weight -= weight.max(axis=-1, keepdims=True)
            np.exp(weight, out=weight)
            result = weight @ v[seen, head]
            result /= weight.sum(axis=-1, keepdims=True)
            mixed[block, head] = result.reshape(-1, group, size)
    return mixed.reshape(tokens, heads * size)


def _oldest(position: int, window: int | None) -> int:
    """The first key that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _hidden(positions: NDArray[np.int64], seen: slice, window: int | None) -> NDArray[np.bool_]:
    """(queries, keys): True where the key is in the query's future or outside its window."""
    distance = positions[:, None] - np.arange(seen.start, seen.stop)
    hidden: NDArray[np.bool_] = distance < 0
    if window is not None:
        hidden |= distance >= window
    return hidden
