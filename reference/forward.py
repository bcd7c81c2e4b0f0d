"""The reference forward pass: right by construction, read top to bottom.

`backend_hip/engine.py` does the same in the same order; put the two side by side. What differs
between architectures is data in ModelSpec. Operations are called through their modules
(`ops.rope`), so that a test can replace one and see it caught.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reference import attention as attention_module
from reference import delta_net, moe, ops
from reference.delta_net import RecurrentState
from reference.dense import DenseCache, DenseWeights, WeightsMode
from reference.dequant import dequantise
from reference.half import half_rows
from reference.kv_cache import KVCache
from reference.model import Model, check_tokens
from reference.model.architectures import ARCHITECTURES
from reference.model.spec import LayerSpec, RopeSpec
from reference.model.trace import LOGITS, Trace
from reference.model.weights import Tensor
from reference.moe import Routing
from reference.ops import Array

__all__ = ["DenseCache", "Reference"]


@dataclass(frozen=True)
class _Chunk:
    """What the blocks of one chunk share."""

    tokens: tuple[int, ...]
    positions: NDArray[np.int64]
    trace: Trace | None
    rope_tables: dict[tuple[RopeSpec, bool], tuple[Array, Array]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.tokens)

    def record(self, name: str, value: Array) -> Array:
        """Passes `value` on, kept in the trace where there is one, which may replace it."""
        if self.trace is None or not len(value):
            return value
        self.trace.record(name, value)
        replacement = self.trace.replacement(name, value)
        return value if replacement is None else replacement


class Reference:
    """Runs one sequence through a model in float32 or float64.

    Weights are dequantised on first use and kept in `dense`; pass one dictionary to several
    References of the same model to share the work. Where they would take more than
    `dense_budget_nbytes` (None: a share of the available memory) they are dequantised at each use
    instead; `weights_mode` says which it is. `half_products`: plain products round both factors as
    reference/half.py says, or with `exact_weights` only activations; both may be set between calls.
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
        dense_budget_nbytes: int | None = None,
        half_products: bool = False,
        exact_weights: bool = False,
    ) -> None:
        self.model = model
        self.half_products, self.exact_weights = half_products, exact_weights
        self.dtype = np.dtype(dtype)
        self._context_length = context_length or model.spec.context_length
        self._kv_types = (kv_type_k, kv_type_v)
        kept: DenseCache = {} if dense is None else dense
        self._weights = DenseWeights(model.weights, kept, dense_budget_nbytes)
        self.reset()

    @property
    def weights_mode(self) -> WeightsMode:
        """ "kept" or "streamed": dequantised once, or at each use."""
        return self._weights.mode

    @property
    def position(self) -> int:
        """Number of tokens in the cache."""
        return self._cache.position

    def reset(self) -> None:
        """Forgets the sequence."""
        spec = self.model.spec
        self._cache = KVCache(spec, *self._kv_types, self._context_length)
        self._states = {
            layer.index: RecurrentState.zero(layer.delta_net, self.dtype)
            for layer in spec.layers
            if layer.delta_net is not None
        }

    def kv_contents(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values held for one layer, each (position, KVH, D) in storage type."""
        return self._cache.contents(layer)

    def recurrent_state(self, layer: int) -> RecurrentState:
        """A snapshot of a delta net layer's state."""
        return self._states[layer].copy()

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

    # --- the forward pass ---------------------------------------------------------------------

    def _forward(self, tokens: tuple[int, ...], want_rows: int, trace: Trace | None) -> Array:
        """One chunk through the model; logits of its last `want_rows` tokens, (want_rows, V)."""
        spec, weights, cache = self.model.spec, self.model.weights, self._cache
        start = cache.position
        positions = np.arange(start, start + len(tokens), dtype=np.int64)
        chunk = _Chunk(tokens, positions, trace)
        record = chunk.record

        x = self._embed(weights.top["token_embd"], tokens) * self.dtype.type(spec.embedding_scale)
        x = record("inp_embd", x)
        per_layer = self._per_layer_inputs(chunk, x) if spec.per_layer_length else None

        for layer in spec.layers:
            i, w = layer.index, weights.layers[layer.index]
            normed = record(f"attn_norm-{i}", self._norm(x, w["attn_norm"]))
            if layer.delta_net is None:
                out = self._attention(chunk, layer, normed)
            else:
                out = self._delta_net(chunk, layer, normed)
            if spec.post_norms:
                out = record(f"attn_post_norm-{i}", self._norm(out, w["post_attention_norm"]))
            x = record(f"ffn_inp-{i}", x + out)

            out = self._feed_forward(chunk, layer, x)
            if spec.post_norms:
                out = record(f"ffn_post_norm-{i}", self._norm(out, w["post_ffw_norm"]))
            x = x + out
            if per_layer is not None:
                x = record(f"ffn_sum-{i}", x)
                x = x + self._per_layer_output(chunk, layer, x, per_layer[:, i])
            if layer.output_scale:
                x = x * self.dtype.type(w["layer_output_scale"].vector()[0])
            x = record(f"l_out-{i}", x)

        cache.position += len(tokens)
        last = x[len(x) - want_rows :]
        normed = record("result_norm", self._norm(last, weights.top["output_norm"]))
        logits = self._project(normed, weights.lm_head)
        if "output.bias" in weights.top:
            logits = logits + weights.top["output.bias"].vector().astype(self.dtype)
        if spec.logit_softcap is not None:
            logits = ops.soft_cap(logits, spec.logit_softcap)
        return record(LOGITS, logits)

    def _attention(self, chunk: _Chunk, layer: LayerSpec, normed: Array) -> Array:
        """Softmax attention of one block up to its output projection, (T, E)."""
        spec, cache, record = self.model.spec, self._cache, chunk.record
        i, w = layer.index, self.model.weights.layers[layer.index]
        heads = (chunk.count, layer.head_count, layer.head_size)
        kv_heads = (chunk.count, layer.head_count_kv, layer.head_size)
        cos, sin = self._rope_tables(chunk, layer)

        gate = None
        q = self._biased(self._project(normed, w["attn_q"]), w.get("attn_q.bias"))
        if spec.gated_attention:
            both = q.reshape(chunk.count, layer.head_count, 2, layer.head_size)
            q, gate = both[:, :, 0], record(f"gate-{i}", both[:, :, 1].reshape(chunk.count, -1))
        q = record(f"Qcur-{i}", q.reshape(heads))
        if layer.owns_kv:
            k = self._biased(self._project(normed, w["attn_k"]), w.get("attn_k.bias"))
            k = record(f"Kcur-{i}", k.reshape(kv_heads))
            if layer.value_source == "key":
                v = k
            else:
                v = self._biased(self._project(normed, w["attn_v"]), w.get("attn_v.bias"))
            v = record(f"Vcur-{i}", v.reshape(kv_heads))
        if spec.qk_norm:
            q = record(f"Qcur_normed-{i}", self._norm(q, w["attn_q_norm"]))
        q = record(f"Qcur_pos-{i}", ops.rope(q, cos, sin, layer.rope.pairing))
        if layer.owns_kv:
            if spec.qk_norm:
                k = record(f"Kcur_normed-{i}", self._norm(k, w["attn_k_norm"]))
            k = record(f"Kcur_pos-{i}", ops.rope(k, cos, sin, layer.rope.pairing))
            if spec.value_norm:
                v = record(f"Vcur_normed-{i}", ops.rms_norm(v, None, spec.rms_epsilon))
            cache.write(i, k, v)
        keys, values = cache.contents(layer.kv_layer, cache.position + chunk.count)
        mixed = attention_module.attention(
            q, keys, values, cache.position, layer.window, spec.attention_scale
        )
        mixed = record(f"kqv_out-{i}", mixed)
        if gate is not None:
            mixed = record(f"attn_gated-{i}", mixed * ops.sigmoid(gate))
        return record(f"attn_out-{i}", self._project(mixed, w["attn_output"]))

    def _delta_net(self, chunk: _Chunk, layer: LayerSpec, normed: Array) -> Array:
        """Gated delta net of one block up to its output projection, (T, E)."""
        net, state, record = layer.delta_net, self._states[layer.index], chunk.record
        assert net is not None
        i, w = layer.index, self.model.weights.layers[layer.index]
        epsilon, count, size = self.model.spec.rms_epsilon, chunk.count, net.state_size

        qkv = record(f"linear_attn_qkv-{i}", self._project(normed, w["attn_qkv"]))
        z = record(f"z-{i}", self._project(normed, w["attn_gate"]))
        beta = record(f"beta-{i}", ops.sigmoid(self._project(normed, w["ssm_beta"])))
        alpha = record(f"alpha-{i}", self._project(normed, w["ssm_alpha"]))
        decay = delta_net.log_decay(alpha, w["ssm_dt.bias"].vector(), w["ssm_a"].vector())
        decay = record(f"log_decay-{i}", decay)
        mixed = delta_net.convolve(qkv, w["ssm_conv1d"].vector(), state)
        mixed = record(f"conv_output_silu-{i}", mixed)
        q, k, v = np.split(mixed, (net.key_length, 2 * net.key_length), axis=-1)
        q = delta_net.unit_heads(q.reshape(count, net.key_heads, size), epsilon)
        k = delta_net.unit_heads(k.reshape(count, net.key_heads, size), epsilon)
        q = record(f"q_conv-{i}", q / np.sqrt(self.dtype.type(size)))
        k = record(f"k_conv-{i}", k)
        # Value head h reads key head h mod NK: the key heads are tiled, not grouped.
        tiled = np.arange(net.value_heads) % net.key_heads
        out = delta_net.step_form(
            q[:, tiled],
            k[:, tiled],
            v.reshape(count, net.value_heads, size),
            decay,
            beta,
            state,
        )
        out = record(f"delta_out-{i}", out)
        out = self._norm(out, w["ssm_norm"]) * ops.silu(z).reshape(out.shape)
        out = record(f"delta_gated-{i}", out.reshape(count, net.value_length))
        return record(f"attn_out-{i}", self._project(out, w["ssm_out"]))

    def _feed_forward(self, chunk: _Chunk, layer: LayerSpec, x: Array) -> Array:
        """The dense block, the routed experts, or both, (T, E); `x` is the residual stream."""
        i, w, record = layer.index, self.model.weights.layers[layer.index], chunk.record
        norm = w[ARCHITECTURES[self.model.spec.architecture].pre_ffn_norm]
        normed = record(f"ffn_norm-{i}", self._norm(x, norm))
        if layer.experts is None:
            return record(f"ffn_out-{i}", self._gated_block(chunk, layer, normed, ""))
        if layer.experts.router == "plain":
            out = self._experts(chunk, layer, normed, normed)
            if layer.experts.shared_length is not None:
                shared = self._gated_block(chunk, layer, normed, "_shexp")
                open_ = ops.sigmoid(self._project(normed, _as_row(w["ffn_gate_inp_shexp"])))
                out = out + record(f"ffn_shexp_gated-{i}", shared * open_)
            return record(f"ffn_out-{i}", out)
        # Gemma 4: the router reads the unweighted norm of the residual stream, scaled; the experts
        # read a norm of their own; dense and routed results get a norm each and are added.
        dense = record(f"ffn_mlp-{i}", self._gated_block(chunk, layer, normed, ""))
        dense = record(f"ffn_mlp_normed-{i}", self._norm(dense, w["post_ffw_norm_1"]))
        scale = w["ffn_gate_inp.scale"].vector().astype(x.dtype)
        root = np.sqrt(x.dtype.type(self.model.spec.embedding_length))
        router_input = ops.rms_norm(x, None, self.model.spec.rms_epsilon) / root * scale
        router_input = record(f"ffn_moe_router-{i}", router_input)
        expert_input = record(f"ffn_norm_2-{i}", self._norm(x, w["pre_ffw_norm_2"]))
        routed = self._experts(chunk, layer, router_input, expert_input)
        routed = record(f"ffn_moe_normed-{i}", self._norm(routed, w["post_ffw_norm_2"]))
        return record(f"ffn_out-{i}", dense + routed)

    def _experts(
        self, chunk: _Chunk, layer: LayerSpec, router_input: Array, expert_input: Array
    ) -> Array:
        i, w, record = layer.index, self.model.weights.layers[layer.index], chunk.record
        assert layer.experts is not None
        logits = record(f"ffn_moe_logits-{i}", self._project(router_input, w["ffn_gate_inp"]))
        routing = self._route(chunk.positions, layer, logits)
        chosen = record(f"ffn_moe_topk-{i}", routing.experts)
        weights = record(f"ffn_moe_weights-{i}", routing.weights)
        routing = replace(routing, experts=chosen, weights=weights)

        def expert(e: int) -> tuple[Array, Array, Array]:
            gate, up, down = (
                self._weights.expert(w[f"ffn_{part}_exps"], e) for part in ("gate", "up", "down")
            )
            return gate, up, down

        scales = w["ffn_down_exps.scale"].vector() if "ffn_down_exps.scale" in w else None
        activation = self.model.spec.activation
        out = moe.routed_sum(expert_input, routing, expert, activation, scales)
        return record(f"ffn_moe_out-{i}", out)

    def _route(self, positions: NDArray[np.int64], layer: LayerSpec, logits: Array) -> Routing:
        """Where the tokens at `positions` go. A subclass may follow a choice made elsewhere."""
        assert layer.experts is not None
        return moe.route(logits, layer.experts.used)

    def _gated_block(self, chunk: _Chunk, layer: LayerSpec, normed: Array, suffix: str) -> Array:
        """Gate, up, activation and down of a dense (suffix "") or shared ("_shexp") block."""
        i, w, record = layer.index, self.model.weights.layers[layer.index], chunk.record
        gate = record(f"ffn_gate{suffix}-{i}", self._project(normed, w[f"ffn_gate{suffix}"]))
        up = record(f"ffn_up{suffix}-{i}", self._project(normed, w[f"ffn_up{suffix}"]))
        inner = ops.gated(gate, up, self.model.spec.activation)
        inner = record(f"ffn_act{suffix}-{i}", inner)
        out = self._project(inner, w[f"ffn_down{suffix}"])
        return record(f"ffn_shexp-{i}", out) if suffix else out

    def _per_layer_inputs(self, chunk: _Chunk, x: Array) -> Array:
        """Gemma's per-layer inputs, (T, layers, P), from the embedding and a second table."""
        spec, top = self.model.spec, self.model.weights.top
        shape = (chunk.count, spec.layer_count, spec.per_layer_length)
        root = self.dtype.type(np.sqrt(spec.embedding_length))
        projected = self._project(x, top["per_layer_model_proj"]) / root
        projected = self._norm(projected.reshape(shape), top["per_layer_proj_norm"])
        scale = self.dtype.type(np.sqrt(spec.per_layer_length))
        table = self._embed(top["per_layer_token_embd"], chunk.tokens) * scale
        mixed = (projected + table.reshape(shape)) / np.sqrt(self.dtype.type(2))
        return chunk.record("inp_per_layer", mixed)

    def _per_layer_output(
        self, chunk: _Chunk, layer: LayerSpec, x: Array, per_layer: Array
    ) -> Array:
        i, w, record = layer.index, self.model.weights.layers[layer.index], chunk.record
        gate = record(f"per_layer_gate-{i}", self._project(x, w["inp_gate"]))
        mixed = record(f"per_layer_act-{i}", ops.gated(gate, per_layer, "gelu_tanh"))
        projected = record(f"per_layer_proj-{i}", self._project(mixed, w["proj"]))
        return record(f"per_layer_out-{i}", self._norm(projected, w["post_norm"]))

    # --- weights ------------------------------------------------------------------------------

    def _norm(self, x: Array, tensor: Tensor) -> Array:
        return ops.rms_norm(x, tensor.vector(), self.model.spec.rms_epsilon)

    def _project(self, x: Array, tensor: Tensor) -> Array:
        if self.half_products:
            x = half_rows(x).astype(self.dtype)
        return self._weights.linear(x, tensor, half=self.half_products and not self.exact_weights)

    def _biased(self, x: Array, bias: Tensor | None) -> Array:
        return x if bias is None else x + bias.vector().astype(self.dtype)

    def _embed(self, table: Tensor, tokens: tuple[int, ...]) -> Array:
        """Rows of an embedding table, (T, columns), in this reference's dtype."""
        return dequantise(table.format, table.raw[list(tokens)], np.float32).astype(self.dtype)

    def _rope_tables(self, chunk: _Chunk, layer: LayerSpec) -> tuple[Array, Array]:
        """cos and sin for the chunk's positions, made once for all layers that rotate alike."""
        rope, factors = layer.rope, self._rope_factors(layer)
        key = (rope, factors is not None)
        if key not in chunk.rope_tables:
            cos, sin = ops.rope_tables(rope.frequencies(factors), chunk.positions, rope.magnitude)
            chunk.rope_tables[key] = cos.astype(self.dtype), sin.astype(self.dtype)
        return chunk.rope_tables[key]

    def _rope_factors(self, layer: LayerSpec) -> NDArray[np.float32] | None:
        """`rope_freqs` applies to layers that do not slide."""
        factors = self.model.weights.top.get("rope_freqs")
        return None if factors is None or layer.window is not None else factors.vector()


def _as_row(vector: Tensor) -> Tensor:
    """A vector's tensor as a matrix of one row."""
    return replace(vector, shape=(1, *vector.shape), raw=vector.raw.reshape(1, -1))
