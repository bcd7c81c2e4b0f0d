"""Decode steps of path matrix in few launches a layer, for dense models with weights in K formats.

The same bits as Forward.run on that path: products leave the parts of their results, and the kernel
that needs them adds them, norms or gates and packs what the next products read. Q, K and V share a
launch, and so do gate and up. What Forward.run records between these is not materialised.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from backend_hip import ops, packed
from backend_hip.forward import Forward
from backend_hip.fused import what_is_not_plain
from backend_hip.half_columns import HalfColumns
from backend_hip.kv_cache import DeviceCache
from backend_hip.ops import Flow, Values
from backend_hip.registry import PACKED_FORMATS, PACKED_MOST, REGISTRY, Key, Registry
from backend_hip.rope_store import rope_key, rope_store
from backend_hip.scratch import Scratch
from backend_hip.weights import DeviceTensor, DeviceWeights
from reference.model.architectures import ARCHITECTURES
from reference.model.errors import Unsupported
from reference.model.spec import ModelSpec
from reference.model.weights import Weights

LARGEST_WIDTH = 8192  # of the residual stream, kernels/norm_pack.hip
_PRODUCTS = (
    ("attn_q", "attn_k", "attn_v"),
    ("attn_output",),
    ("ffn_gate", "ffn_up"),
    ("ffn_down",),
)
_NORM_PACK: Key = ("norm_pack", "", "any")


def why_not_fused_batch(spec: ModelSpec, weights: Weights, registry: Registry = REGISTRY) -> str:
    """What of a model this pass does not know; empty where it does."""
    found = what_is_not_plain(spec)
    others = {
        tensor.format.name
        for layer in weights.layers
        for role, tensor in layer.items()
        if len(tensor.shape) == 2 and tensor.format.name not in PACKED_FORMATS
    }
    if others:
        found.append(f"weights in {', '.join(sorted(others))}")
    if spec.embedding_length > LARGEST_WIDTH:
        found.append(f"rows of more than {LARGEST_WIDTH} elements")
    if found:
        return f"the model has {', '.join(found)}"
    try:
        for key in fused_batch_keys(spec, weights, "f16,f16"):
            registry.find(*key)
    except Unsupported as error:
        return str(error)
    return ""


def fused_batch_keys(spec: ModelSpec, weights: Weights, kv_types: str) -> Iterator[Key]:
    """The rows that this pass needs beside those of Forward, of a model that it knows."""
    yield _NORM_PACK
    yield ("gated_parts", spec.activation, "any")
    yield from product_keys(weights)
    for layer in spec.layers:
        yield rope_key(spec, layer, kv_types)


def product_keys(weights: Weights) -> Iterator[Key]:
    """The rows that multiply, but for the LM head's."""
    for layer in weights.layers:
        for roles in _PRODUCTS:
            yield packed.product_key([layer[role].format.name for role in roles])


@dataclass(frozen=True)
class FusedBatch:
    """Binds a model's weights and an engine's memory to the fused operations."""

    spec: ModelSpec
    weights: DeviceWeights
    cache: DeviceCache
    scratch: Scratch
    forward: Forward
    kv_types: str

    def run(self, flow: Flow, *, with_tail: bool) -> None:
        """Queues one token of each sequence, with LM head and sampler tail where asked."""
        spec, top, s = self.spec, self.weights.top, self.scratch
        held = flow.halves
        if held is None or flow.tokens > PACKED_MOST:
            raise ValueError(
                f"fused batch: {flow.tokens} rows, expected at most {PACKED_MOST}, and halves"
            )
        ops.embed(flow, top["token_embd"], s.x, spec.embedding_scale)
        parts = 0  # of the product whose result is to be added to the residual stream
        for layer in spec.layers:
            i, w = layer.index, self.weights.layers[layer.index]
            qkv, out, gate_up, down = ([w[role] for role in roles] for roles in _PRODUCTS)
            self._norm_pack(flow, held, w["attn_norm"], parts)
            parts = packed.multiply(flow.kernels, held, qkv, flow.tokens)
            q, mixed = (v.of_width(layer.head_count * layer.head_size) for v in (s.q, s.mixed))
            known = (self.forward.tables[layer], held.parts, q, self.cache, self.kv_types)
            rope_store(flow, spec, layer, w, *known, parts=parts)
            keys, values = self.cache.keys[i], self.cache.values[i]
            scale = spec.attention_scale
            ops.attention(flow, q, keys, values, mixed, layer, scale, self.kv_types)
            packed.pack(flow.kernels, held, mixed.pointer, flow.tokens, mixed.width)
            parts = packed.multiply(flow.kernels, held, out, flow.tokens)
            norm = w[ARCHITECTURES[spec.architecture].pre_ffn_norm]
            self._norm_pack(flow, held, norm, parts)
            parts = packed.multiply(flow.kernels, held, gate_up, flow.tokens)
            inner = s.gate.of_width(layer.feed_forward_length)
            self._gated_parts(flow, held, inner, parts)
            packed.pack(flow.kernels, held, inner.pointer, flow.tokens, inner.width)
            parts = packed.multiply(flow.kernels, held, down, flow.tokens)
        # The residual stream takes the last product in even where no logits are wanted.
        self._norm_pack(flow, held, top["output_norm"], parts)
        if not with_tail:
            return
        head = self.weights.lm_head
        if head.format in PACKED_FORMATS:
            packed.multiply_one(flow.kernels, held, head, s.logits.pointer, flow.tokens)
            self.forward.finish(flow, s.logits, flow.tokens)
        else:
            self.forward.head(flow, flow.tokens)

    def _norm_pack(self, flow: Flow, held: HalfColumns, weight: DeviceTensor, parts: int) -> None:
        """Residual stream = residual stream + the last product; its norm is packed."""
        x = self.scratch.x
        flow.kernels.launch(
            _NORM_PACK,
            (flow.tokens, 1),
            *(x.pointer, held.parts, weight.buffer, held.packed, held.scales),
            *(x.width, flow.tokens, parts, self.spec.rms_epsilon),
        )
        held.holds = ("packed", flow.tokens, x.width)

    def _gated_parts(self, flow: Flow, held: HalfColumns, inner: Values, parts: int) -> None:
        """inner = the activation of gate times up."""
        key = ("gated_parts", self.spec.activation, "any")
        grid = (-(-inner.width // (4 * flow.kernels.block(key))), flow.tokens)
        flow.kernels.launch(key, grid, held.parts, inner.pointer, inner.width, parts)
