"""Trace points: the named intermediate values that both forward passes record, in one order.

Names are llama.cpp's (`cb(cur, "attn_norm", il)` in src/models/*.cpp): `{point}-{layer}`, with
`Qcur_pos` for the query after RoPE. A trace file is an .npz with one array per point, `tokens`,
`logits` and `meta` (JSON text), so that two machines can be compared without either being there.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.model.cache import atomic_write
from reference.model.errors import InputError
from reference.model.npz import read_npz
from reference.model.spec import DeltaNetSpec, LayerSpec, ModelSpec

LOGITS = "result_output"


@dataclass(frozen=True)
class TracePoint:
    """`shape` is that of one token's value; an array holds (rows, *shape), rows = tokens or 1."""

    name: str
    stem: str
    layer: int | None
    shape: tuple[int, ...]


Shapes = list[tuple[str, tuple[int, ...]]]


def _attention_points(spec: ModelSpec, layer: LayerSpec) -> Shapes:
    queries = (layer.head_count, layer.head_size)
    keys = (layer.head_count_kv, layer.head_size)
    mixed = (layer.head_count * layer.head_size,)
    points: Shapes = [("gate", mixed)] if spec.gated_attention else []
    points += [("Qcur", queries)]
    points += [("Kcur", keys), ("Vcur", keys)] if layer.owns_kv else []
    points += [("Qcur_normed", queries)] if spec.qk_norm else []
    points += [("Qcur_pos", queries)]
    if layer.owns_kv:
        points += [("Kcur_normed", keys)] if spec.qk_norm else []
        points += [("Kcur_pos", keys)]
        points += [("Vcur_normed", keys)] if spec.value_norm else []
    points += [("kqv_out", mixed)]
    return points + ([("attn_gated", mixed)] if spec.gated_attention else [])


def _delta_net_points(net: DeltaNetSpec) -> Shapes:
    heads, value = (net.value_heads,), (net.value_length,)
    keys = (net.key_heads, net.state_size)
    return [
        *(("linear_attn_qkv", (net.channels,)), ("z", value), ("beta", heads), ("alpha", heads)),
        *(("log_decay", heads), ("conv_output_silu", (net.channels,))),
        *(("q_conv", keys), ("k_conv", keys)),
        *(("delta_out", (net.value_heads, net.state_size)), ("delta_gated", value)),
    ]


def _feed_forward_points(spec: ModelSpec, layer: LayerSpec) -> Shapes:
    width, inner = (spec.embedding_length,), (layer.feed_forward_length,)
    points: Shapes = [("ffn_norm", width)]
    if layer.feed_forward_length:
        points += [("ffn_gate", inner), ("ffn_up", inner), ("ffn_act", inner)]
    experts = layer.experts
    if experts is None:
        return [*points, ("ffn_out", width)]
    if experts.router == "scaled":
        points += [("ffn_mlp", width), ("ffn_mlp_normed", width)]
        points += [("ffn_moe_router", width), ("ffn_norm_2", width)]
    used = (experts.used,)
    points += [("ffn_moe_logits", (experts.count,))]
    points += [("ffn_moe_topk", used), ("ffn_moe_weights", used), ("ffn_moe_out", width)]
    if experts.router == "scaled":
        points += [("ffn_moe_normed", width)]
    if experts.shared_length is not None:
        inner = (experts.shared_length,)
        points += [("ffn_gate_shexp", inner), ("ffn_up_shexp", inner), ("ffn_act_shexp", inner)]
        points += [("ffn_shexp", width), ("ffn_shexp_gated", width)]
    return [*points, ("ffn_out", width)]


def _layer_points(spec: ModelSpec, layer: LayerSpec) -> Shapes:
    width, per_layer = (spec.embedding_length,), (spec.per_layer_length,)
    points: Shapes = [("attn_norm", width)]
    if layer.delta_net is None:
        points += _attention_points(spec, layer)
    else:
        points += _delta_net_points(layer.delta_net)
    points += [("attn_out", width)]
    points += [("attn_post_norm", width)] if spec.post_norms else []
    points += [("ffn_inp", width), *_feed_forward_points(spec, layer)]
    points += [("ffn_post_norm", width)] if spec.post_norms else []
    if spec.per_layer_length:
        points += [("ffn_sum", width), ("per_layer_gate", per_layer)]
        points += [("per_layer_act", per_layer), ("per_layer_proj", width)]
        points += [("per_layer_out", width)]
    return [*points, ("l_out", width)]


def trace_points(spec: ModelSpec) -> tuple[TracePoint, ...]:
    """Every point of a full trace, in the order in which the forward pass makes them."""
    width = (spec.embedding_length,)
    points = [TracePoint("inp_embd", "inp_embd", None, width)]
    if spec.per_layer_length:
        shape = (spec.layer_count, spec.per_layer_length)
        points.append(TracePoint("inp_per_layer", "inp_per_layer", None, shape))
    for layer in spec.layers:
        points += [
            TracePoint(f"{stem}-{layer.index}", stem, layer.index, shape)
            for stem, shape in _layer_points(spec, layer)
        ]
    points.append(TracePoint("result_norm", "result_norm", None, width))
    points.append(TracePoint(LOGITS, LOGITS, None, (spec.vocab_size,)))
    return tuple(points)


@dataclass
class Trace:
    """Values recorded by one forward pass; chunks of a prompt are joined along the token axis.

    `replacements` holds arrays (rows, ...) by point: once the pass has recorded its own value of
    such a point, it goes on with these rows instead, so that one side can be run on another's
    values. Kcur and Vcur of a layer whose V is its raw K are one value in an engine, and so are
    ffn_moe_out and ffn_out where nothing is added to them: replace both or neither.
    """

    tokens: tuple[int, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    replacements: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    _parts: dict[str, list[NDArray[Any]]] = field(default_factory=dict)

    def record(self, name: str, value: NDArray[Any]) -> None:
        """Keeps a copy of `value` (rows, ...)."""
        self._parts.setdefault(name, []).append(np.array(value, copy=True))

    def replacement(self, name: str, value: NDArray[Any]) -> NDArray[Any] | None:
        """What to go on with instead of `value`, which was recorded last; None: with itself.

        Shape and dtype are value's. InputError where the replacement lacks rows or has others.
        """
        if name not in self.replacements:
            return None
        given, done = self.replacements[name], sum(len(part) for part in self._parts[name])
        rows = given[done - len(value) : done]
        if rows.size != value.size:
            raise InputError(
                f"trace: replacement of {name} is {given.shape}, expected rows up to {done} of "
                f"{value.shape[1:]}"
            )
        return np.ascontiguousarray(rows.reshape(value.shape), dtype=value.dtype)

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        return {name: np.concatenate(parts, axis=0) for name, parts in self._parts.items()}

    def __getitem__(self, name: str) -> NDArray[Any]:
        return np.concatenate(self._parts[name], axis=0)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def save(self, path: Path) -> None:
        """Writes the trace whole or not at all. Needs the logits to have been recorded."""
        buffer = io.BytesIO()
        content = {name: value for name, value in self.arrays.items() if name != LOGITS}
        np.savez(
            buffer,
            tokens=np.asarray(self.tokens, dtype=np.int32),
            logits=self[LOGITS].astype(np.float32),
            meta=np.array(json.dumps(self.meta)),
            **content,  # type: ignore[arg-type]  # numpy types every keyword as allow_pickle
        )
        atomic_write(path, buffer.getvalue())

    @staticmethod
    def load(path: Path) -> "Trace":
        """Reads what `save` wrote; InputError when it is not such a file."""
        arrays, meta = read_npz(path, "trace", "trace file", "assay trace", _no_number)
        return Trace._from_arrays(path, arrays, meta)

    @staticmethod
    def _from_arrays(path: Path, arrays: dict[str, NDArray[Any]], meta: Any) -> "Trace":
        if not isinstance(meta, dict):
            raise InputError(f"trace: meta of {path} is no JSON object")
        for name in ("tokens", "logits"):
            if name not in arrays:
                raise InputError(f"trace: {path} has no array {name}, expected a trace file")
        tokens = arrays.pop("tokens")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InputError(
                f"trace: tokens of {path} are {tokens.dtype} {tokens.shape}, expected whole numbers"
            )
        for name, array in arrays.items():
            if array.ndim < 1 or array.dtype.kind not in "fiu":
                raise InputError(
                    f"trace: array {name} of {path} is {array.dtype} {array.shape}, "
                    "expected rows of real numbers"
                )
        trace = Trace(tuple(int(token) for token in tokens), meta)
        trace._parts = {name: [value] for name, value in arrays.items() if name != "logits"}
        trace._parts[LOGITS] = [arrays["logits"]]
        return trace


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
