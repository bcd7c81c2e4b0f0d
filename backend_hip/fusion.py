"""Which decode steps of an engine run fused kernels, and why the others don't."""

from collections.abc import Sequence
from dataclasses import dataclass

from backend_hip.fused import fused_keys, why_not_fused
from backend_hip.fused_batch import fused_batch_keys, why_not_fused_batch
from backend_hip.registry import Key, Registry
from reference.model.spec import ModelSpec
from reference.model.weights import Weights


@dataclass(frozen=True)
class Fusion:
    """`one`: of one column; `batch`: of several on path matrix. "on", or why not.
    `keys`: the rows that those need."""

    one: str
    batch: str
    keys: Sequence[Key]


def choose_fusion(
    spec: ModelSpec,
    weights: Weights,
    registry: Registry,
    kv_types: str,
    path: str,
    *,
    fused: bool,
    batch: bool,
) -> Fusion:
    """`fused` False: none. `batch`: whether decode steps of path matrix run at all."""
    one = why_not_fused(spec, weights, path, kv_types, registry) or "on" if fused else "off"
    many = why_not_fused_batch(spec, weights, registry) or "on" if fused and batch else "off"
    keys: list[Key] = [*fused_keys(spec, weights, path, kv_types)] if one == "on" else []
    if many == "on":
        keys += fused_batch_keys(spec, weights, kv_types)
    return Fusion(one, many, keys)
