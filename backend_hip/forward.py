"""The forward pass on the device: the same methods in the same order as reference/forward.py.

Everything here queues kernels; nothing waits, except for a trace, which reads each value back.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend_hip import delta_net, experts, ops
from backend_hip.delta_net import RecurrentState
from backend_hip.device import Buffer, Device
from backend_hip.kv_cache import DeviceCache
from backend_hip.ops import Flow, Values
from backend_hip.sampler import SamplerTail
from backend_hip.scratch import Scratch
from backend_hip.state import RopeTables
from backend_hip.weights import DeviceTensor, DeviceWeights
from reference.model import Model
from reference.model.architectures import ARCHITECTURES
from reference.model.spec import LayerSpec
from reference.model.trace import LOGITS, Trace

FUSED: Mapping[str, str] = {"ffn_norm": "ffn_inp", "ffn_moe_weights": "ffn_moe_topk"}
"""Points (stems) that one kernel makes together with one of their inputs: a trace's replacement of
that input comes too late for them."""


@dataclass(frozen=True)
class _Chunk:
    """One flow and where its values are recorded.

    What is recorded is what the next operation reads, and a trace may replace it there.
    """

    flow: Flow
    trace: Trace | None

    def record(self, name: str, values: Values, *shape: int, rows: int = 0) -> None:
        if self.trace is not None:
            value = values.download(rows or self.flow.tokens, *shape)
            self._exchange(self.trace, name, value, values.buffer, values.offset_nbytes)

    def record_integers(self, name: str, buffer: Buffer, width: int) -> None:
        if self.trace is not None:
            value = buffer.download((self.flow.tokens, width), np.int32)
            self._exchange(self.trace, name, value, buffer, 0)

    @staticmethod
    def _exchange(
        trace: Trace, name: str, value: NDArray[Any], buffer: Buffer, offset_nbytes: int
    ) -> None:
        trace.record(name, value)
        replacement = trace.replacement(name, value)
        if replacement is not None:
            buffer.upload(replacement, offset_nbytes)


class Forward:
    """Binds a model's weights and an engine's memory to the operations."""

    def __init__(
        self,
        model: Model,
        device: Device,
        weights: DeviceWeights,
        cache: DeviceCache,
        scratch: Scratch,
        tail: SamplerTail,
        kv_types: str,
        sequences: int = 1,
    ) -> None:
        self._spec = model.spec
        self._weights = weights
        self._cache = cache
        self._scratch = scratch
        self._tail = tail
        self._kv_types = kv_types
        spec = model.spec
        factors = model.weights.top.get("rope_freqs")
        self.tables = RopeTables(
            spec, device, None if factors is None else factors.vector(), cache.context_length
        )
        self.states = {
            layer.index: RecurrentState(layer.delta_net, device, layer.index, sequences)
            for layer in spec.layers
            if layer.delta_net is not None
        }
        # Weights of ones: V's norm has no weight, an expert without a scale keeps its output. Made
        # here, because nothing may be allocated while a graph is captured.
        lengths = {layer.head_size for layer in spec.layers if spec.value_norm}
        lengths |= {layer.experts.count for layer in spec.layers if layer.experts is not None}
        self._ones = {
            length: weights.vector(f"{length} ones", np.ones(length, dtype=np.float32))
            for length in lengths
        }
        self._router_scale: dict[int, DeviceTensor] = {}
        self._output_scale: dict[int, float] = {}
        for layer in spec.layers:
            tensors = model.weights.layers[layer.index]
            if layer.output_scale:
                value = tensors["layer_output_scale"].vector()[0]
                self._output_scale[layer.index] = float(value)
            if "ffn_gate_inp.scale" in tensors:
                scale = tensors["ffn_gate_inp.scale"].vector().astype(np.float64)
                self._router_scale[layer.index] = weights.vector(
                    "router scale", (scale / math.sqrt(spec.embedding_length)).astype(np.float32)
                )

    def free(self) -> None:
        self.tables.free()
        for state in self.states.values():
            state.free()

    # --- the forward pass ---------------------------------------------------------------------

    def run(self, flow: Flow, want_rows: int, trace: Trace | None) -> Values:
        """Queues one flow through the model; logits of its last `want_rows` tokens and the tail."""
        spec, weights, s = self._spec, self._weights, self._scratch
        chunk = _Chunk(flow, trace)
        record = chunk.record

        ops.embed(flow, weights.top["token_embd"], s.x, spec.embedding_scale)
        record("inp_embd", s.x)
        if spec.per_layer_length:
            self._per_layer_inputs(chunk)

        for layer in spec.layers:
            i, w = layer.index, weights.layers[layer.index]
            self._norm(flow, s.x, w["attn_norm"], s.normed)
            record(f"attn_norm-{i}", s.normed)
            if layer.delta_net is None:
                self._attention(chunk, layer)
            else:
                self._delta_net(chunk, layer)
            record(f"attn_out-{i}", s.out)
            if spec.post_norms:
                self._norm(flow, s.out, w["post_attention_norm"], s.out)
                record(f"attn_post_norm-{i}", s.out)

            norm = w[ARCHITECTURES[spec.architecture].pre_ffn_norm]
            ops.add_rms_norm(flow, s.x, s.out, norm, s.normed, spec.rms_epsilon)
            record(f"ffn_inp-{i}", s.x)
            record(f"ffn_norm-{i}", s.normed)
            self._feed_forward(chunk, layer)
            record(f"ffn_out-{i}", s.out)
            if spec.post_norms:
                self._norm(flow, s.out, w["post_ffw_norm"], s.out)
                record(f"ffn_post_norm-{i}", s.out)
            ops.add(flow, s.x, s.out)
            if spec.per_layer_length:
                record(f"ffn_sum-{i}", s.x)
                self._per_layer_output(chunk, layer)
                ops.add(flow, s.x, s.out)
            if layer.output_scale:
                ops.scale(flow, s.x, self._output_scale[i])
            record(f"l_out-{i}", s.x)

        return self.head(flow, want_rows, trace) if want_rows else s.logits

    def head(self, flow: Flow, want_rows: int, trace: Trace | None = None) -> Values:
        """Logits of the flow's last `want_rows` tokens from the residual stream, and the tail."""
        s, record = self._scratch, _Chunk(flow, trace).record
        last = replace(flow, tokens=want_rows)
        logits = s.logits if want_rows == flow.sequences else s.all_logits()
        output_norm = self._weights.top["output_norm"]
        self._norm(last, s.x.from_row(flow.tokens - want_rows), output_norm, s.normed)
        record("result_norm", s.normed, rows=want_rows)
        ops.linear(last, s.normed, self._weights.lm_head, logits)
        self.finish(flow, logits, want_rows)
        record(LOGITS, logits, rows=want_rows)
        return logits

    def finish(self, flow: Flow, logits: Values, want_rows: int) -> None:
        """What follows the LM head's product, in place, and the sampler tail."""
        spec, last = self._spec, replace(flow, tokens=want_rows)
        if "output.bias" in self._weights.top:
            ops.add_bias(last, logits, self._weights.top["output.bias"])
        if spec.logit_softcap is not None:
            ops.soft_cap(last, logits, spec.logit_softcap)
        self._tail.queue(flow, logits.row(want_rows - flow.sequences), spec.vocab_size)

    def _attention(self, chunk: _Chunk, layer: LayerSpec) -> None:
        """Softmax attention of one block: s.normed -> s.out."""
        spec, s, flow, record = self._spec, self._scratch, chunk.flow, chunk.record
        i, w = layer.index, self._weights.layers[layer.index]
        heads = (layer.head_count, layer.head_size)
        kv_heads = (layer.head_count_kv, layer.head_size)
        q, mixed = (v.of_width(math.prod(heads)) for v in (s.q, s.mixed))
        k, v = (values.of_width(math.prod(kv_heads)) for values in (s.k, s.v))
        cosine, sine = self.tables[layer]

        if spec.gated_attention:
            both = s.both.of_width(2 * q.width)
            gate = s.attention_gate.of_width(q.width)
            ops.linear(flow, s.normed, w["attn_q"], both)
            ops.split_gate(flow, both, q, gate, layer.head_size)
            record(f"gate-{i}", gate)
        else:
            self._project_biased(flow, s.normed, w, "attn_q", q)
        record(f"Qcur-{i}", q, *heads)
        if layer.owns_kv:
            self._project_biased(flow, s.normed, w, "attn_k", k, same_input=True)
            record(f"Kcur-{i}", k, *kv_heads)
            if layer.value_source == "projection":
                self._project_biased(flow, s.normed, w, "attn_v", v, same_input=True)
            raw_v = v if layer.value_source == "projection" else k
            record(f"Vcur-{i}", raw_v, *kv_heads)
            if spec.value_norm:
                # Here, before k is normed and rotated in place, because V may be the raw K.
                self._norm(flow, raw_v, self._ones[layer.head_size], v)
        if spec.qk_norm:
            self._norm(flow, q, w["attn_q_norm"], q)
            record(f"Qcur_normed-{i}", q, *heads)
        ops.rope(flow, q, cosine, sine, layer, layer.rope.pairing)
        record(f"Qcur_pos-{i}", q, *heads)
        if layer.owns_kv:
            if spec.qk_norm:
                self._norm(flow, k, w["attn_k_norm"], k)
                record(f"Kcur_normed-{i}", k, *kv_heads)
            ops.rope(flow, k, cosine, sine, layer, layer.rope.pairing)
            record(f"Kcur_pos-{i}", k, *kv_heads)
            if spec.value_norm:
                record(f"Vcur_normed-{i}", v, *kv_heads)
            keys, values = self._cache.keys[i], self._cache.values[i]
            ops.kv_write(flow, k, v, keys, values, layer, self._kv_types)
        keys, values = self._cache.keys[layer.kv_layer], self._cache.values[layer.kv_layer]
        scale = spec.attention_scale
        ops.attention(flow, q, keys, values, mixed, layer, scale, self._kv_types)
        record(f"kqv_out-{i}", mixed)
        if spec.gated_attention:
            ops.sigmoid_gated(flow, mixed, gate)
            record(f"attn_gated-{i}", mixed)
        ops.linear(flow, mixed, w["attn_output"], s.out)

    def _delta_net(self, chunk: _Chunk, layer: LayerSpec) -> None:
        """Gated delta net of one block: s.normed -> s.out."""
        net, state, s = layer.delta_net, self.states[layer.index], self._scratch
        assert net is not None
        i, w = layer.index, self._weights.layers[layer.index]
        flow, record = chunk.flow, chunk.record
        epsilon, size = self._spec.rms_epsilon, net.state_size
        keys, values = (net.key_heads, size), (net.value_heads, size)

        ops.linear(flow, s.normed, w["attn_qkv"], s.qkv)
        record(f"linear_attn_qkv-{i}", s.qkv)
        ops.linear(flow, s.normed, w["attn_gate"], s.z, same_input=True)
        record(f"z-{i}", s.z)
        ops.linear(flow, s.normed, w["ssm_beta"], s.beta, same_input=True)
        ops.linear(flow, s.normed, w["ssm_alpha"], s.alpha, same_input=True)
        record(f"alpha-{i}", s.alpha)
        delta_net.gates(flow, s.alpha, w["ssm_dt.bias"], w["ssm_a"], s.beta, s.decay)
        record(f"beta-{i}", s.beta)
        record(f"log_decay-{i}", s.decay)
        delta_net.convolve(flow, s.qkv, w["ssm_conv1d"], state, s.convolved)
        record(f"conv_output_silu-{i}", s.convolved)
        root = math.sqrt(size)
        delta_net.unit_heads(flow, s.convolved, 0, s.unit_q, size, epsilon, root)
        record(f"q_conv-{i}", s.unit_q, *keys)
        delta_net.unit_heads(flow, s.convolved, net.key_length, s.unit_k, size, epsilon, 1.0)
        record(f"k_conv-{i}", s.unit_k, *keys)
        delta_net.delta_rule(
            flow, net, s.unit_q, s.unit_k, s.convolved, s.decay, s.beta, state, s.delta
        )
        record(f"delta_out-{i}", s.delta, *values)
        self._norm(flow, s.delta, w["ssm_norm"], s.delta)
        ops.gated(flow, s.z, s.delta, s.delta, "silu")
        record(f"delta_gated-{i}", s.delta)
        ops.linear(flow, s.delta, w["ssm_out"], s.out)

    def _feed_forward(self, chunk: _Chunk, layer: LayerSpec) -> None:
        """The dense block, the routed experts, or both: s.normed (and s.x) -> s.out."""
        spec, s, flow, record = self._spec, self._scratch, chunk.flow, chunk.record
        i, w = layer.index, self._weights.layers[layer.index]
        if layer.experts is None:
            self._gated_block(chunk, layer, "", layer.feed_forward_length, s.out)
            return
        if layer.experts.router == "plain":
            self._experts(chunk, layer, s.normed, s.normed, s.out)
            if layer.experts.shared_length is not None:
                self._gated_block(chunk, layer, "_shexp", layer.experts.shared_length, s.routed)
                record(f"ffn_shexp-{i}", s.routed)
                ops.linear(flow, s.normed, w["ffn_gate_inp_shexp"].as_row(), s.shared_gate)
                ops.sigmoid_gated(flow, s.routed, s.shared_gate)
                record(f"ffn_shexp_gated-{i}", s.routed)
                ops.add(flow, s.out, s.routed)
            return
        # Gemma 4: the router reads the unweighted norm of the residual stream, scaled; the experts
        # read a norm of their own; dense and routed results get a norm each and are added.
        self._gated_block(chunk, layer, "", layer.feed_forward_length, s.out)
        record(f"ffn_mlp-{i}", s.out)
        self._norm(flow, s.out, w["post_ffw_norm_1"], s.out)
        record(f"ffn_mlp_normed-{i}", s.out)
        ops.rms_norm(flow, s.x, self._router_scale[i], s.router_input, spec.rms_epsilon)
        record(f"ffn_moe_router-{i}", s.router_input)
        self._norm(flow, s.x, w["pre_ffw_norm_2"], s.normed)
        record(f"ffn_norm_2-{i}", s.normed)
        self._experts(chunk, layer, s.router_input, s.normed, s.routed)
        self._norm(flow, s.routed, w["post_ffw_norm_2"], s.routed)
        record(f"ffn_moe_normed-{i}", s.routed)
        ops.add(flow, s.out, s.routed)

    def _experts(
        self,
        chunk: _Chunk,
        layer: LayerSpec,
        router_input: Values,
        expert_input: Values,
        out: Values,
    ) -> None:
        """Routes by one input, feeds the other to the chosen experts: their sum -> out."""
        s, flow, record, spec = self._scratch, chunk.flow, chunk.record, layer.experts
        assert spec is not None
        i, w = layer.index, self._weights.layers[layer.index]
        ops.linear(flow, router_input, w["ffn_gate_inp"], s.routing.logits)
        record(f"ffn_moe_logits-{i}", s.routing.logits)
        experts.route(flow, spec, s.routing)
        chunk.record_integers(f"ffn_moe_topk-{i}", s.routing.chosen, spec.used)
        record(f"ffn_moe_weights-{i}", s.routing.weights)
        experts.group_by_expert(flow, spec, s.routing)
        matrices = (w["ffn_gate_exps"], w["ffn_up_exps"], w["ffn_down_exps"])
        scales = w.get("ffn_down_exps.scale") or self._ones[spec.count]
        activation = self._spec.activation
        experts.routed_sum(
            flow, expert_input, spec, s.routing, matrices, scales, activation, s.experts, out
        )
        record(f"ffn_moe_out-{i}", out)

    def _gated_block(
        self, chunk: _Chunk, layer: LayerSpec, suffix: str, inner: int, out: Values
    ) -> None:
        """Gate, up, activation and down of a dense (suffix "") or shared ("_shexp") block."""
        s, flow, record = self._scratch, chunk.flow, chunk.record
        i, w = layer.index, self._weights.layers[layer.index]
        gate, up = s.gate.of_width(inner), s.up.of_width(inner)
        ops.linear(flow, s.normed, w[f"ffn_gate{suffix}"], gate)
        record(f"ffn_gate{suffix}-{i}", gate)
        ops.linear(flow, s.normed, w[f"ffn_up{suffix}"], up, same_input=True)
        record(f"ffn_up{suffix}-{i}", up)
        ops.gated(flow, gate, up, gate, self._spec.activation)
        record(f"ffn_act{suffix}-{i}", gate)
        ops.linear(flow, gate, w[f"ffn_down{suffix}"], out)

    def _per_layer_inputs(self, chunk: _Chunk) -> None:
        """Gemma's per-layer inputs, from the scaled embedding in s.x and a second table."""
        spec, top, s, flow = self._spec, self._weights.top, self._scratch, chunk.flow
        ops.linear(flow, s.x, top["per_layer_model_proj"], s.per_layer)
        ops.scale(flow, s.per_layer, 1 / math.sqrt(spec.embedding_length))
        self._norm(flow, s.per_layer, top["per_layer_proj_norm"], s.per_layer)
        scale = math.sqrt(spec.per_layer_length)
        ops.embed(flow, top["per_layer_token_embd"], s.per_layer_table, scale)
        ops.add_scaled(flow, s.per_layer, s.per_layer_table, math.sqrt(0.5))
        chunk.record("inp_per_layer", s.per_layer, spec.layer_count, spec.per_layer_length)

    def _per_layer_output(self, chunk: _Chunk, layer: LayerSpec) -> None:
        """What the layer's own input adds to the residual stream: s.x -> s.out."""
        s, flow, record = self._scratch, chunk.flow, chunk.record
        i, w = layer.index, self._weights.layers[layer.index]
        ops.linear(flow, s.x, w["inp_gate"], s.per_layer_gate)
        record(f"per_layer_gate-{i}", s.per_layer_gate)
        ops.gated_layer(flow, s.per_layer_gate, s.per_layer, i, "gelu_tanh")
        record(f"per_layer_act-{i}", s.per_layer_gate)
        ops.linear(flow, s.per_layer_gate, w["proj"], s.out)
        record(f"per_layer_proj-{i}", s.out)
        self._norm(flow, s.out, w["post_norm"], s.out)
        record(f"per_layer_out-{i}", s.out)

    # --- weights ------------------------------------------------------------------------------

    def _norm(self, flow: Flow, x: Values, weight: DeviceTensor, y: Values) -> None:
        ops.rms_norm(flow, x, weight, y, self._spec.rms_epsilon)

    def _project_biased(
        self,
        flow: Flow,
        x: Values,
        w: dict[str, DeviceTensor],
        role: str,
        y: Values,
        *,
        same_input: bool = False,
    ) -> None:
        ops.linear(flow, x, w[role], y, same_input=same_input)
        if f"{role}.bias" in w:
            ops.add_bias(flow, y, w[f"{role}.bias"])
