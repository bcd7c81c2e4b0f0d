"""Queries, keys and values of a fused step: normed, turned and stored in one launch."""

from backend_hip import ops
from backend_hip.device import Buffer
from backend_hip.kv_cache import DeviceCache
from backend_hip.ops import Flow, Values
from backend_hip.registry import Key
from backend_hip.weights import DeviceTensor
from reference.model.spec import LayerSpec, ModelSpec


def rope_key(spec: ModelSpec, layer: LayerSpec, kv_types: str) -> Key:
    """The row that a layer needs."""
    normed = ",normed" if spec.qk_norm else ""
    return ("rope_store", f"{layer.rope.pairing}{normed},{kv_types}", "any")


def rope_store(
    flow: Flow,
    spec: ModelSpec,
    layer: LayerSpec,
    w: dict[str, DeviceTensor],
    tables: tuple[Buffer, Buffer],
    heads: Buffer,
    q: Values,
    cache: DeviceCache,
    kv_types: str,
    *,
    parts: int = 1,
) -> None:
    """`heads` (parts, tokens, queries and keys and values), of which parts are added up: queries,
    turned, -> q; keys, turned, and values -> the cache. `tables`: cosines and sines."""
    keys, values = cache.keys[layer.index], cache.values[layer.index]
    width = layer.head_count_kv * layer.head_size
    # Without norms the kernel reads no weights; it still has the two arguments.
    norms = [w.get(role, w["attn_norm"]).buffer for role in ("attn_q_norm", "attn_k_norm")]
    flow.kernels.launch(
        rope_key(spec, layer, kv_types),
        (layer.head_count + 2 * layer.head_count_kv, flow.tokens),
        *(heads, q.pointer, *norms, *tables, keys, values, flow.step),
        *(layer.head_count, layer.head_size, layer.rope.dimensions // 2),
        *(ops.cache_rows(keys, width, kv_types), flow.tokens, parts),
        spec.rms_epsilon,
    )
