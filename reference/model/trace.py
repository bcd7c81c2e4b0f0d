"""Trace points: the named intermediate values that both forward passes record, in one order.

Names are llama.cpp's (`cb(cur, "attn_norm", il)` in src/models/*.cpp): `{point}-{layer}`, with
`Qcur_pos` for the query after RoPE. A trace file is an .npz with one array per point, `tokens`,
`logits` and `meta` (JSON text), so that two machines can be compared without either being there.
"""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.model.cache import atomic_write
from reference.model.errors import InputError
from reference.model.spec import LayerSpec, ModelSpec

LOGITS = "result_output"
_RESERVED = ("tokens", "logits", "meta")


@dataclass(frozen=True)
class TracePoint:
    """`shape` is that of one token's value; an array holds (rows, *shape), rows = tokens or 1."""

    name: str
    stem: str
    layer: int | None
    shape: tuple[int, ...]


def _layer_points(spec: ModelSpec, layer: LayerSpec) -> list[tuple[str, tuple[int, ...]]]:
    width = (spec.embedding_length,)
    queries = (layer.head_count, layer.head_size)
    keys = (layer.head_count_kv, layer.head_size)
    inner = (layer.feed_forward_length,)
    points = [("attn_norm", width), ("Qcur", queries), ("Kcur", keys), ("Vcur", keys)]
    if spec.qk_norm:
        points += [("Qcur_normed", queries), ("Kcur_normed", keys)]
    points += [("Qcur_pos", queries), ("Kcur_pos", keys)]
    points += [("kqv_out", (layer.head_count * layer.head_size,)), ("attn_out", width)]
    if spec.post_norms:
        points += [("attn_post_norm", width)]
    points += [("ffn_inp", width), ("ffn_norm", width)]
    points += [("ffn_gate", inner), ("ffn_up", inner), ("ffn_act", inner), ("ffn_out", width)]
    if spec.post_norms:
        points += [("ffn_post_norm", width)]
    return [*points, ("l_out", width)]


def trace_points(spec: ModelSpec) -> tuple[TracePoint, ...]:
    """Every point of a full trace, in the order in which the forward pass makes them."""
    width = (spec.embedding_length,)
    points = [TracePoint("inp_embd", "inp_embd", None, width)]
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
    """Values recorded by one forward pass; chunks of a prompt are joined along the token axis."""

    tokens: tuple[int, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    _parts: dict[str, list[NDArray[Any]]] = field(default_factory=dict)

    def record(self, name: str, value: NDArray[Any]) -> None:
        """Keeps a copy of `value` (rows, ...)."""
        self._parts.setdefault(name, []).append(np.array(value, copy=True))

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
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            missing = [name for name in _RESERVED if name not in arrays]
            if missing:
                raise InputError(f"trace: {path} has no array {missing[0]}, expected a trace file")
            meta = json.loads(str(arrays.pop("meta")))
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"trace: {path} can't be read as a trace file: {error}") from None
        tokens = arrays.pop("tokens")
        trace = Trace(tuple(int(token) for token in tokens), meta)
        trace._parts = {name: [value] for name, value in arrays.items() if name != "logits"}
        trace._parts[LOGITS] = [arrays["logits"]]
        return trace


def in_order(spec: ModelSpec, names: Sequence[str]) -> list[str]:
    """`names` sorted as the forward pass makes them; names that it does not make are dropped."""
    wanted = set(names)
    return [point.name for point in trace_points(spec) if point.name in wanted]
