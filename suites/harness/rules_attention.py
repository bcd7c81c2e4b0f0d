"""Rules of the attention block's trace points (see rules.py)."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from reference.kv_cache import stored
from suites.harness import bounds
from suites.harness.bounds import Bounded
from suites.harness.compare import Array
from suites.harness.rules import LayerOps, Op

QUERY, GATE = 0, 1  # of each head's two parts, where attention is gated


def attention_op(ops: LayerOps, stem: str) -> Op | None:
    """The op of a point that only attention layers have; None for another stem."""
    layer, normed = ops.layer, ops.at("attn_norm")
    after_norm = "_normed" if ops.spec.qk_norm else ""
    match stem:
        case "gate":
            return ops.project("attn_q", normed, _part_rows(ops, GATE))
        case "Qcur":
            rows = _part_rows(ops, QUERY) if ops.spec.gated_attention else None
            return ops.project("attn_q", normed, rows)
        case "Kcur":
            return ops.project("attn_k", normed)
        case "Vcur" if layer.value_source == "key":
            return ops.copy(ops.at("Kcur"))
        case "Vcur":
            return ops.project("attn_v", normed)
        case "Qcur_normed":
            return ops.head_norm("attn_q_norm", ops.at("Qcur"), layer.head_count)
        case "Kcur_normed":
            return ops.head_norm("attn_k_norm", ops.at("Kcur"), layer.head_count_kv)
        case "Vcur_normed":
            return ops.head_norm(None, ops.at("Vcur"), layer.head_count_kv)
        case "Qcur_pos":
            return _rotate(ops, ops.at(f"Qcur{after_norm}"), layer.head_count)
        case "Kcur_pos":
            return _rotate(ops, ops.at(f"Kcur{after_norm}"), layer.head_count_kv)
        case "kqv_out":
            read = ops.at(stored_value(ops.spec.value_norm), layer.kv_layer)
            inputs = (ops.at("Qcur_pos"), ops.at("Kcur_pos", layer.kv_layer), read)
            return Op("attention", inputs, partial(_attention, ops))
        case "attn_gated":
            return Op("sigmoid_gate", (ops.at("kqv_out"), ops.at("gate")), bounds.sigmoid_gated)
        case "attn_out":
            source = "attn_gated" if ops.spec.gated_attention else "kqv_out"
            return ops.project("attn_output", ops.at(source))
    return None


def stored_value(value_norm: bool) -> str:
    """The point that a layer's cache holds as V."""
    return "Vcur_normed" if value_norm else "Vcur"


def _part_rows(ops: LayerOps, part: int) -> NDArray[np.int64]:
    """Rows of attn_q that give every head's query, or every head's gate."""
    heads, size = ops.layer.head_count, ops.layer.head_size
    both = np.arange(heads * 2 * size, dtype=np.int64).reshape(heads, 2, size)
    rows: NDArray[np.int64] = both[:, part].reshape(-1)
    return rows


def _rotate(ops: LayerOps, source: str, heads: int) -> Op:
    layer, top = ops.layer, ops.model.weights.top
    # The file's factors are for layers that do not slide.
    has_factors = "rope_freqs" in top and layer.window is None
    factors = top["rope_freqs"].vector() if has_factors else None
    frequencies = layer.rope.frequencies(factors)

    def evaluate(x: Array) -> Bounded:
        return bounds.rope(
            x.reshape(len(x), heads, layer.head_size),
            frequencies,
            ops.positions,
            layer.rope.pairing,
            layer.rope.magnitude,
        )

    return Op("rope", (source,), evaluate)


def _attention(ops: LayerOps, q: Array, k: Array, v: Array) -> Bounded:
    """Reads the engine's own K and V, rounded to the storage type as the cache write does."""
    layer, rules = ops.layer, ops.rules
    kv_shape = (len(k), layer.head_count_kv, layer.head_size)
    return bounds.attention(
        q.reshape(len(q), layer.head_count, layer.head_size),
        stored(rules.kv_type_k, k.reshape(kv_shape)),
        stored(rules.kv_type_v, v.reshape(kv_shape)),
        0,
        layer.window,
        ops.spec.attention_scale,
        (rules.kv_type_k, rules.kv_type_v),
    )
