"""KV contents: the cache against what was recorded, and one run's cache against another's."""

import math
from typing import Any

import numpy as np

from reference.kv_cache import stored
from reference.model.spec import ModelSpec
from reference.model.trace import Trace
from suites.harness.compare import Array, Comparison, compare, same_bits
from suites.harness.promises import promise
from suites.harness.protocol import JudgedEngine
from suites.harness.rules_attention import stored_value
from suites.harness.verdict import Check, State

KVSnapshot = dict[int, tuple[Array, Array]]
"""Per layer that owns a cache, copies of K and V, each (tokens, KVH, D) in storage type."""


def snapshot(engine: JudgedEngine, spec: ModelSpec, sequence: int = 0) -> KVSnapshot:
    """Copies of everything that the cache holds of a sequence."""
    return {
        layer.index: (np.array(k, copy=True), np.array(v, copy=True))
        for layer in spec.layers
        if layer.owns_kv
        for k, v in [engine.kv_contents(layer.index, sequence)]
    }


def written_check(
    trace: Trace, held: KVSnapshot, kinds: tuple[str, str], *, value_norm: bool = False
) -> Check:
    """The cache holds the recorded K and V, rounded to the storage types, bit for bit."""
    name = "local: kv_write"
    elements, allowed = 0, promise("kv_write")
    for layer, contents in held.items():
        stems = ("Kcur_pos", stored_value(value_norm))
        sides = zip("KV", stems, kinds, contents, strict=True)
        for letter, stem, kind, got in sides:
            point, where = f"{stem}-{layer}", f"{letter} of layer {layer}"
            if point not in trace:
                return Check(name, State.INVALID, elements, detail=f"{point} was not recorded")
            recorded = trace[point]
            if recorded.size != got.size:
                detail = f"{where} holds {got.shape}, {point} is {recorded.shape}"
                return Check(name, State.DIVERGED, elements, detail=detail)
            with np.errstate(over="ignore"):
                want = stored(kind, recorded.reshape(got.shape))
            elements += got.size
            if not same_bits(got, want):
                return different(name, got, want, elements, where, f"KV write: {where}")
    return Check(name, State.OK, elements, measured=0.0, limit=allowed, of_limit=0.0)


def is_written(
    trace: Trace, held: KVSnapshot, kinds: tuple[str, str], layer: int, *, value_norm: bool = False
) -> bool:
    """True where one layer's cache holds what was recorded for it."""
    one = {layer: held[layer]} if layer in held else {}
    return written_check(trace, one, kinds, value_norm=value_norm).state is State.OK


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
    if per_token.keys() != batched.keys():
        return Check(name, State.INVALID, 0, detail="not the same layers on both sides")
    for layer, one in per_token.items():
        for letter, want, got in zip("KV", one, batched[layer], strict=True):
            where = f"{letter} of layer {layer}"
            if len(want) != n_tokens or len(got) != n_tokens:
                detail = f"{where} holds {len(want)} and {len(got)} tokens, expected {n_tokens}"
                return Check(name, State.DIVERGED, elements, detail=detail)
            elements += want.size
            if not same_bits(got, want):
                return different(name, got, want, elements, where, f"{link}: {where}")
    return Check(name, State.OK, elements, measured=0.0, limit=0.0, of_limit=0.0)


def different(name: str, got: Any, want: Any, elements: int, where: str, link: str) -> Check:
    """The check of two arrays that must have equal bits and don't: nothing is allowed."""
    comparison: Comparison = compare(got, want, 0.0)
    return Check(
        name,
        State.DIVERGED,
        elements,
        measured=comparison.max_abs_diff,
        limit=0.0,
        of_limit=math.inf,
        where=f"{where} {comparison.worst_difference or ''}".strip(),
        detail=comparison.reason() or "equal numbers, other bits",
        link=link,
    )
