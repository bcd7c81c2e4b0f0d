"""KV contents: the cache against what was recorded, and one run's cache against another's."""

from typing import Any

import numpy as np

from reference.kv_cache import storage_type
from reference.model.trace import Trace
from suites.harness.compare import Array, Comparison, compare, same_bits
from suites.harness.protocol import JudgedEngine
from suites.harness.verdict import Check, State

KVSnapshot = list[tuple[Array, Array]]
"""Per layer, copies of K and V, each (tokens, KVH, D) in storage type."""


def snapshot(engine: JudgedEngine, layer_count: int) -> KVSnapshot:
    """Copies of everything that the cache holds."""
    contents = [engine.kv_contents(layer) for layer in range(layer_count)]
    return [(np.array(k, copy=True), np.array(v, copy=True)) for k, v in contents]


def written_check(trace: Trace, held: KVSnapshot, stored: tuple[str, str]) -> Check:
    """The cache holds the recorded K and V, rounded to the storage types, bit for bit."""
    name = "local: kv_write"
    elements = 0
    for layer, contents in enumerate(held):
        sides = zip("KV", ("Kcur_pos", "Vcur"), stored, contents, strict=True)
        for letter, stem, kind, got in sides:
            point, where = f"{stem}-{layer}", f"{letter} of layer {layer}"
            if point not in trace:
                return Check(name, State.INVALID, elements, detail=f"{point} was not recorded")
            recorded = trace[point]
            if recorded.size != got.size:
                detail = f"{where} holds {got.shape}, {point} is {recorded.shape}"
                return Check(name, State.DIVERGED, elements, detail=detail)
            with np.errstate(over="ignore"):
                want = recorded.reshape(got.shape).astype(storage_type("kv type", kind))
            elements += got.size
            if not same_bits(got, want):
                return _different(name, got, want, elements, where, f"KV write: {where}")
    return Check(name, State.OK, elements, measured=0.0, limit=0.0, headroom=0.0)


def pair_check(
    per_token: KVSnapshot,
    batched: KVSnapshot,
    n_tokens: int,
    *,
    name: str = "prefill pair: KV contents",
    link: str = "batched against per-token KV cache",
) -> Check:
    """KV contents of two runs of the same `n_tokens` tokens, all layers, bit for bit."""
    elements = 0
    if len(per_token) != len(batched):
        return Check(name, State.INVALID, 0, detail="layer counts differ")
    for layer, (one, other) in enumerate(zip(per_token, batched, strict=True)):
        for letter, want, got in zip("KV", one, other, strict=True):
            where = f"{letter} of layer {layer}"
            if len(want) != n_tokens or len(got) != n_tokens:
                detail = f"{where} holds {len(want)} and {len(got)} tokens, expected {n_tokens}"
                return Check(name, State.DIVERGED, elements, detail=detail)
            elements += want.size
            if not same_bits(got, want):
                return _different(name, got, want, elements, where, f"{link}: {where}")
    return Check(name, State.OK, elements, measured=0.0, limit=0.0, headroom=0.0)


def _different(name: str, got: Any, want: Any, elements: int, where: str, link: str) -> Check:
    comparison: Comparison = compare(got, want, 0.0)
    return Check(
        name,
        State.DIVERGED,
        elements,
        measured=comparison.max_abs_diff,
        limit=0.0,
        where=f"{where} {comparison.worst_difference or ''}".strip(),
        detail=comparison.reason() or "equal numbers, other bits",
        link=link,
    )
