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
from backend_hip.registry import REGISTRY, Key, Registry, one_column_path
from backend_hip.rope_store import rope_key, rope_store
from backend_hip.scratch import Scratch
from backend_hip.weights import DeviceTensor, DeviceWeights
from reference.model.architectures import ARCHITECTURES
from reference.model.errors import Unsupported
from reference.model.spec import LayerSpec, ModelSpec
from reference.model.weights import Weights

LARGEST_HEAD = 512  # kernels/rope_head.h
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


def why_not_fused(
    spec: ModelSpec, weights: Weights, path: str, kv_types: str, registry: Registry = REGISTRY
) -> str:
    """What of a model the fused pass of an engine of `path` does not know; empty where it does."""
    found = what_is_not_plain(spec)
    if found:
        return f"the model has {', '.join(found)}"
    try:
        for key in fused_keys(spec, weights, path, kv_types):
            registry.find(*key)
    except Unsupported as error:
        return str(error)
    return ""


def fused_keys(spec: ModelSpec, weights: Weights, path: str, kv_types: str) -> Iterator[Key]:
    """The rows that the fused pass of an engine of `path` needs beside those of Forward, of a model
    that it knows."""
    for layer in spec.layers:
        w = {role: tensor.format.name for role, tensor in weights.layers[layer.index].items()}
        yield _qkv_key(w, path)
        yield rope_key(spec, layer, kv_types)
        yield _add_key(w["attn_output"], path)
        yield _gate_up_key(spec, w, path)
        yield _add_key(w["ffn_down"], path)


# A fused product runs its first matrix's path, which has no variant with a matrix that alone would
# run another: such a model is not fused.
def _qkv_key(formats: dict[str, str], path: str) -> Key:
    q, k, v = (formats[role] for role in ("attn_q", "attn_k", "attn_v"))
    return ("norm_qkv", f"{q},{v}" if q == k else f"{q},{k},{v}", one_column_path(path, q))


def _gate_up_key(spec: ModelSpec, formats: dict[str, str], path: str) -> Key:
    gate, up = formats["ffn_gate"], formats["ffn_up"]
    form = gate if gate == up else f"{gate},{up}"
    return ("norm_gate_up", f"{spec.activation},{form}", one_column_path(path, gate))


def _add_key(form: str, path: str) -> Key:
    return ("matvec_add", form, one_column_path(path, form))


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
            q = s.q.of_width(layer.head_count * layer.head_size)
            mixed, inner = s.mixed.of_width(q.width), s.gate.of_width(layer.feed_forward_length)
            self._norm_qkv(flow, layer, w)
            known = (self._tables[layer], s.heads.buffer, q, self._cache, self._kv_types)
            rope_store(flow, spec, layer, w, *known)
            keys, values = self._cache.keys[i], self._cache.values[i]
            scale = spec.attention_scale
            ops.attention(flow, q, keys, values, mixed, layer, scale, self._kv_types)
            self._linear_add(flow, mixed, w["attn_output"])
            self._norm_gate_up(flow, w, inner)
            self._linear_add(flow, inner, w["ffn_down"])
        if with_tail:
            self._forward.head(flow, 1)

    def _norm_qkv(self, flow: Flow, layer: LayerSpec, w: dict[str, DeviceTensor]) -> None:
        """Queries, keys and values of the normed residual stream, one behind the other."""
        key = _qkv_key({role: tensor.format for role, tensor in w.items()}, flow.path)
        q_rows, kv_rows = (
            heads * layer.head_size for heads in (layer.head_count, layer.head_count_kv)
        )
        to = self._scratch.heads.buffer
        flow.kernels.launch(
            key,
            (flow.kernels.resident_blocks(key, q_rows + 2 * kv_rows), 1),
            *(self._scratch.x.pointer, w["attn_norm"].buffer),
            *(w[role].buffer for role in ("attn_q", "attn_k", "attn_v")),
            *(to.at(4 * first) for first in (0, q_rows, q_rows + kv_rows)),
            *(q_rows, kv_rows, self._scratch.x.width, self._spec.rms_epsilon),
        )

    def _linear_add(self, flow: Flow, x: Values, weight: DeviceTensor) -> None:
        """Residual stream = residual stream + W x."""
        rows, columns = weight.shape
        key = _add_key(weight.format, flow.path)
        grid = (flow.kernels.resident_blocks(key, rows), 1)
        target = self._scratch.x.pointer
        flow.kernels.launch(key, grid, weight.buffer, x.pointer, target, rows, columns)

    def _norm_gate_up(self, flow: Flow, w: dict[str, DeviceTensor], inner: Values) -> None:
        formats = {role: tensor.format for role, tensor in w.items()}
        key = _gate_up_key(self._spec, formats, flow.path)
        norm = w[ARCHITECTURES[self._spec.architecture].pre_ffn_norm]
        flow.kernels.launch(
            key,
            (flow.kernels.resident_blocks(key, 2 * inner.width), 1),
            *(self._scratch.x.pointer, norm.buffer, w["ffn_gate"].buffer, w["ffn_up"].buffer),
            *(inner.pointer, inner.width, self._scratch.x.width, self._spec.rms_epsilon),
        )
