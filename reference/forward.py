"""The reference forward pass: right by construction, read top to bottom.

`backend_hip/engine.py` does the same in the same order; put the two side by side. Operations are
called through their modules (`ops.rope`), so that a test can replace one and see it caught.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reference import attention as attention_module
from reference import ops
from reference.dequant import dequantise
from reference.kv_cache import KVCache
from reference.model import Model, check_tokens
from reference.model.trace import LOGITS, Trace
from reference.model.weights import Tensor
from reference.ops import Array

DenseCache = dict[str, NDArray[np.float32]]


class Reference:
    """Runs one sequence through a model in float32 or float64.

    Weights are dequantised on first use and kept in `dense`; pass one dictionary to several
    References of the same model to share the work.
    """

    def __init__(
        self,
        model: Model,
        *,
        dtype: type[np.floating[Any]] = np.float32,
        kv_type_k: str = "f16",
        kv_type_v: str = "f16",
        context_length: int | None = None,
        dense: DenseCache | None = None,
    ) -> None:
        self.model = model
        self.dtype = np.dtype(dtype)
        self._context_length = context_length or model.spec.context_length
        self._kv_types = (kv_type_k, kv_type_v)
        self._dense: DenseCache = {} if dense is None else dense
        self._cache = KVCache(model.spec, *self._kv_types, self._context_length)

    @property
    def position(self) -> int:
        """Number of tokens in the cache."""
        return self._cache.position

    def reset(self) -> None:
        """Forgets the sequence."""
        self._cache = KVCache(self.model.spec, *self._kv_types, self._context_length)

    def kv_contents(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values held for one layer, each (position, KVH, D) in storage type."""
        return self._cache.contents(layer)

    def prefill(
        self,
        tokens: Sequence[int],
        *,
        chunk: int | None = None,
        trace: Trace | None = None,
        logits: Literal["last", "all"] = "last",
    ) -> Array:
        """Feeds a prompt, `chunk` tokens at a time (None: all at once); (1 or T, V) logits."""
        tokens = tuple(int(token) for token in tokens)
        check_tokens(tokens, self.model.spec, self._context_length - self.position)
        size = chunk or len(tokens)
        if trace is not None:
            trace.tokens += tokens
        rows = []
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            last = start + len(part) == len(tokens)
            want = len(part) if logits == "all" else int(last)
            rows.append(self._forward(part, want, trace))
        return np.concatenate(rows, axis=0)

    def decode(self, token: int, *, trace: Trace | None = None) -> Array:
        """Feeds one token; (V,) logits of the next."""
        logits: Array = self.prefill([token], trace=trace)[0]
        return logits

    def _dense_weight(self, tensor: Tensor) -> NDArray[np.float32]:
        if tensor.name not in self._dense:
            self._dense[tensor.name] = dequantise(tensor.format, tensor.raw, np.float32)
        return self._dense[tensor.name]

    def _forward(self, tokens: tuple[int, ...], want_rows: int, trace: Trace | None) -> Array:
        """One chunk through the model; logits of its last `want_rows` tokens, (want_rows, V)."""
        spec, weights, cache = self.model.spec, self.model.weights, self._cache
        start, epsilon = cache.position, spec.rms_epsilon
        positions = np.arange(start, start + len(tokens), dtype=np.int64)
        factors = weights.top["rope_freqs"].vector() if "rope_freqs" in weights.top else None

        def record(name: str, value: Array) -> Array:
            if trace is not None and len(value):
                trace.record(name, value)
            return value

        def norm(x: Array, tensor: Tensor) -> Array:
            return ops.rms_norm(x, tensor.vector(), epsilon)

        def project(x: Array, tensor: Tensor) -> Array:
            return ops.linear(x, self._dense_weight(tensor))

        table = weights.top["token_embd"]
        rows = dequantise(table.format, table.raw[list(tokens)], np.float32)
        x = rows.astype(self.dtype) * self.dtype.type(spec.embedding_scale)
        record("inp_embd", x)

        for layer in spec.layers:
            i, w = layer.index, weights.layers[layer.index]
            heads = (len(tokens), layer.head_count, layer.head_size)
            kv_heads = (len(tokens), layer.head_count_kv, layer.head_size)

            normed = record(f"attn_norm-{i}", norm(x, w["attn_norm"]))
            q = record(f"Qcur-{i}", project(normed, w["attn_q"]).reshape(heads))
            k = record(f"Kcur-{i}", project(normed, w["attn_k"]).reshape(kv_heads))
            v = record(f"Vcur-{i}", project(normed, w["attn_v"]).reshape(kv_heads))
            if spec.qk_norm:
                q = record(f"Qcur_normed-{i}", norm(q, w["attn_q_norm"]))
                k = record(f"Kcur_normed-{i}", norm(k, w["attn_k_norm"]))
            cos, sin = ops.rope_tables(layer.rope.frequencies(factors), positions)
            q = record(f"Qcur_pos-{i}", ops.rope(q, cos, sin, layer.rope.pairing))
            k = record(f"Kcur_pos-{i}", ops.rope(k, cos, sin, layer.rope.pairing))
            cache.write(i, k, v)
            keys, values = cache.contents(i, start + len(tokens))
            mixed = attention_module.attention(
                q, keys, values, start, layer.window, spec.attention_scale
            )
            record(f"kqv_out-{i}", mixed)
            out = record(f"attn_out-{i}", project(mixed, w["attn_output"]))
            if spec.post_norms:
                out = record(f"attn_post_norm-{i}", norm(out, w["post_attention_norm"]))
            x = record(f"ffn_inp-{i}", x + out)

            normed = record(f"ffn_norm-{i}", norm(x, w["ffn_norm"]))
            gate = record(f"ffn_gate-{i}", project(normed, w["ffn_gate"]))
            up = record(f"ffn_up-{i}", project(normed, w["ffn_up"]))
            inner = record(f"ffn_act-{i}", ops.gated(gate, up, spec.activation))
            out = record(f"ffn_out-{i}", project(inner, w["ffn_down"]))
            if spec.post_norms:
                out = record(f"ffn_post_norm-{i}", norm(out, w["post_ffw_norm"]))
            x = record(f"l_out-{i}", x + out)

        cache.position += len(tokens)
        last = x[len(x) - want_rows :]
        normed = record("result_norm", norm(last, weights.top["output_norm"]))
        return record(LOGITS, project(normed, weights.lm_head))
