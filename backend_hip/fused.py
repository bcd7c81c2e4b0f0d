"""One token through a dense model in few launches a layer: the decode graph's forward pass.

The same bits as Forward.run, because fusion moves no rounding: the norm of a projection's input is
in its prologue, residual sum and activation are in its epilogue, Q, K and V share a launch, and so
do the norms and rotations of their heads. What Forward.run records between these is not
materialised here, so a trace takes that one; that both agree bit for bit is a check of every
verdict (untraced against traced).
"""

from collections.abc import Iterator

from backend_hip import ops
from backend_hip.forward import Forward
from backend_hip.kv_cache import DeviceCache
from backend_hip.ops import Flow, Values
from backend_hip.registry import REGISTRY, Key, Registry
from backend_hip.scratch import Scratch
from backend_hip.weights import DeviceTensor, DeviceWeights
from reference.model.architectures import ARCHITECTURES
from reference.model.errors import Unsupported
from reference.model.spec import LayerSpec, ModelSpec
from reference.model.weights import Weights

LARGEST_HEAD = 512  # kernels/norm_rope.hip
ROWS_PER_WAVE = 2  # a wave's rows belong to one matrix


def what_is_not_plain(spec: ModelSpec) -> list[str]:
    """What a model has that no fused pass knows."""
    there = {
        "post norms": spec.post_norms,
        "gated attention": spec.gated_attention,
        "value norms": spec.value_norm,
        "per-layer inputs": bool(spec.per_layer_length),
        "biases of Q, K and V": spec.qkv_bias,
        "recurrent layers": any(layer.delta_net is not None for layer in spec.layers),
        "routed experts": any(layer.experts is not None for layer in spec.layers),
        "scaled layer outputs": any(layer.output_scale for layer in spec.layers),
        "shared KV caches": not all(layer.owns_kv for layer in spec.layers),
        "values made of keys": any(layer.value_source != "projection" for layer in spec.layers),
        "heads of an odd size": any(
            layer.head_size % ROWS_PER_WAVE or layer.head_size > LARGEST_HEAD
            for layer in spec.layers
        ),
    }
    return [name for name, found in there.items() if found]


def why_not_fused(spec: ModelSpec, weights: Weights, registry: Registry = REGISTRY) -> str:
    """What of a model the fused pass does not know; empty where it does."""
    found = what_is_not_plain(spec)
    if found:
        return f"the model has {', '.join(found)}"
    try:
        for key in fused_keys(spec, weights):
            registry.find(*key)
    except Unsupported as error:
        return str(error)
    return ""


def fused_keys(spec: ModelSpec, weights: Weights) -> Iterator[Key]:
    """The rows that the fused pass needs beside those of Forward, of a model that it knows."""
    for layer in spec.layers:
        w = {role: tensor.format.name for role, tensor in weights.layers[layer.index].items()}
        yield _qkv_key(w)
        yield _rope_key(spec, layer)
        yield ("matvec_add", w["attn_output"], "kparallel")
        yield _gate_up_key(spec, w)
        yield ("matvec_add", w["ffn_down"], "kparallel")


def _qkv_key(formats: dict[str, str]) -> Key:
    q, k, v = (formats[role] for role in ("attn_q", "attn_k", "attn_v"))
    return ("norm_qkv", f"{q},{v}" if q == k else f"{q},{k},{v}", "kparallel")


def _gate_up_key(spec: ModelSpec, formats: dict[str, str]) -> Key:
    gate, up = formats["ffn_gate"], formats["ffn_up"]
    form = gate if gate == up else f"{gate},{up}"
    return ("norm_gate_up", f"{spec.activation},{form}", "kparallel")


def _rope_key(spec: ModelSpec, layer: LayerSpec) -> Key:
    normed = ",normed" if spec.qk_norm else ""
    return ("norm_rope", f"{layer.rope.pairing}{normed}", "any")


class FusedForward:
    """Binds a model's weights and an engine's memory to the fused operations."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DeviceWeights,
        cache: DeviceCache,
        scratch: Scratch,
        forward: Forward,
        kv_types: str,
    ) -> None:
        self._spec, self._weights, self._cache = spec, weights, cache
        self._scratch, self._forward, self._tables = scratch, forward, forward.tables
        self._kv_types = kv_types

    def run(self, flow: Flow, *, with_tail: bool) -> None:
        """Queues one token through the model, with LM head and sampler tail where asked."""
        spec, top, s = self._spec, self._weights.top, self._scratch
        ops.embed(flow, top["token_embd"], s.x, spec.embedding_scale)
        for layer in spec.layers:
            i, w = layer.index, self._weights.layers[layer.index]
            q, k, v = (
                values.of_width(heads * layer.head_size)
                for values, heads in (
                    (s.q, layer.head_count),
                    (s.k, layer.head_count_kv),
                    (s.v, layer.head_count_kv),
                )
            )
            mixed, inner = s.mixed.of_width(q.width), s.gate.of_width(layer.feed_forward_length)
            self._norm_qkv(flow, w, q, k, v)
            self._norm_rope(flow, layer, w, q, k)
            keys, values = self._cache.keys[i], self._cache.values[i]
            ops.kv_write(flow, k, v, keys, values, layer, self._kv_types)
            scale = spec.attention_scale
            ops.attention(flow, q, keys, values, mixed, layer, scale, self._kv_types)
            self._linear_add(flow, mixed, w["attn_output"])
            self._norm_gate_up(flow, w, inner)
            self._linear_add(flow, inner, w["ffn_down"])
        if with_tail:
            self._forward.head(flow, 1)

    def _norm_qkv(
        self, flow: Flow, w: dict[str, DeviceTensor], q: Values, k: Values, v: Values
    ) -> None:
        key = _qkv_key({role: tensor.format for role, tensor in w.items()})
        flow.kernels.launch(
            key,
            (flow.kernels.resident_blocks(key, q.width + k.width + v.width), 1),
            *(self._scratch.x.pointer, w["attn_norm"].buffer),
            *(w[role].buffer for role in ("attn_q", "attn_k", "attn_v")),
            *(q.pointer, k.pointer, v.pointer),
            *(q.width, k.width, self._scratch.x.width, self._spec.rms_epsilon),
        )

    def _norm_rope(
        self, flow: Flow, layer: LayerSpec, w: dict[str, DeviceTensor], q: Values, k: Values
    ) -> None:
        cosine, sine = self._tables[layer]
        # Without norms the kernel reads no weights; it still has the two arguments.
        norms = [w.get(role, w["attn_norm"]).buffer for role in ("attn_q_norm", "attn_k_norm")]
        flow.kernels.launch(
            _rope_key(self._spec, layer),
            (layer.head_count + layer.head_count_kv, flow.tokens),
            *(q.pointer, k.pointer, *norms, cosine, sine, flow.step),
            *(layer.head_count, layer.head_size, layer.rope.dimensions // 2),
            self._spec.rms_epsilon,
        )

    def _linear_add(self, flow: Flow, x: Values, weight: DeviceTensor) -> None:
        """Residual stream = residual stream + W x."""
        rows, columns = weight.shape
        key = ("matvec_add", weight.format, "kparallel")
        grid = (flow.kernels.resident_blocks(key, rows), 1)
        target = self._scratch.x.pointer
        flow.kernels.launch(key, grid, weight.buffer, x.pointer, target, rows, columns)

    def _norm_gate_up(self, flow: Flow, w: dict[str, DeviceTensor], inner: Values) -> None:
        key = _gate_up_key(self._spec, {role: tensor.format for role, tensor in w.items()})
        norm = w[ARCHITECTURES[self._spec.architecture].pre_ffn_norm]
        flow.kernels.launch(
            key,
            (flow.kernels.resident_blocks(key, 2 * inner.width), 1),
            *(self._scratch.x.pointer, norm.buffer, w["ffn_gate"].buffer, w["ffn_up"].buffer),
            *(inner.pointer, inner.width, self._scratch.x.width, self._spec.rms_epsilon),
        )
