"""Launches of products and of the kernels that fuse a norm with them, in any format."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from backend_hip.device import Buffer
from backend_hip.half_columns import PACKED_NBYTES, SUPERBLOCK
from backend_hip.kv_types import KV_TYPES
from backend_hip.registry import Key
from suites.correctness.lab import Lab, normal

EPSILON = 1e-6


@dataclass(frozen=True)
class FusedLaunch:
    """One launch over arrays that a Lab owns; "step" among the arguments stands for the flow's.

    `result` is written, the first of several; it holds normal values before.
    """

    key: Key
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    result: Buffer


def _weight(lab: Lab, form: str, seed: int, rows: int, columns: int) -> Buffer:
    return lab.weight(form, normal(seed, rows, columns)).buffer


def product(lab: Lab, key: Key, rows: int, columns: int, count: int = 1) -> FusedLaunch:
    """matvec, matvec_add, or matvec_few with `count` columns."""
    op, variant, _ = key
    weights = _weight(lab, variant.partition("@")[0], 1, rows, columns)
    x, y = lab.buffer(normal(2, count, columns)), lab.buffer(normal(3, count, rows))
    more = (count,) if op == "matvec_few" else ()
    return FusedLaunch(key, (2, 1), (weights, x, y, rows, columns, *more), y)


def norm_qkv(lab: Lab, key: Key, rows: int, kv_rows: int, columns: int) -> FusedLaunch:
    form, v_form = key[1].split(",")
    x, norm = (lab.buffer(normal(seed, columns)) for seed in (1, 2))
    sizes = ((form, rows), (form, kv_rows), (v_form, kv_rows))
    weights = [_weight(lab, name, 3 + i, n, columns) for i, (name, n) in enumerate(sizes)]
    outputs = [lab.buffer(normal(6 + i, n)) for i, (_, n) in enumerate(sizes)]
    arguments = (x, norm, *weights, *outputs, rows, kv_rows, columns, EPSILON)
    return FusedLaunch(key, (2, 1), arguments, outputs[0])


def norm_gate_up(lab: Lab, key: Key, rows: int, columns: int) -> FusedLaunch:
    form = key[1].split(",")[1]
    x, norm = (lab.buffer(normal(seed, columns)) for seed in (1, 2))
    gate, up = (_weight(lab, form, seed, rows, columns) for seed in (3, 4))
    inner = lab.buffer(normal(5, rows))
    return FusedLaunch(key, (2, 1), (x, norm, gate, up, inner, rows, columns, EPSILON), inner)


def norm_pack(lab: Lab, width: int) -> FusedLaunch:
    """One row, to which nothing is added: so that it is the same in the next launch."""
    x, weight, parts = (lab.buffer(normal(seed, width)) for seed in (1, 2, 3))
    # The largest value last: a share of the row alone would be scaled otherwise.
    ramp = np.linspace(0.1, 9, width, dtype=np.float32)
    x.upload(ramp)
    packed = lab.buffer(normal(4, width // SUPERBLOCK * PACKED_NBYTES // 4))
    scales = lab.buffer(normal(5, 16))
    arguments = (x, parts, weight, packed, scales, width, 1, 0, EPSILON)
    return FusedLaunch(("norm_pack", "", "any"), (1, 1), arguments, packed)


def rope_store(lab: Lab, key: Key, heads: int, size: int) -> FusedLaunch:
    """One token's `heads` queries and one key and value from two parts; the keys are the result."""
    kinds = [KV_TYPES[kind] for kind in key[1].split(",")[-2:]]
    parts = lab.buffer(normal(1, 2, heads + 2, size))
    q, *norms = (lab.buffer(normal(2 + i, heads if i == 0 else 1, size)) for i in range(3))
    tables = [lab.buffer(normal(seed, 1, size // 2)) for seed in (5, 6)]
    room = [kind.row_nbytes(size) for kind in kinds]
    keys, values = (lab.buffer(np.full(nbytes, 7, dtype=np.uint8)) for nbytes in room)
    numbers = (heads, size, size // 2, 1, 1, 2, EPSILON)
    arguments = (parts, q, *norms, *tables, keys, values, "step", *numbers)
    return FusedLaunch(key, (heads + 2, 1), arguments, keys)


def gated_parts(lab: Lab, key: Key, inner: int) -> FusedLaunch:
    """One token's gate and up from two parts."""
    parts, y = lab.buffer(normal(1, 2, 2 * inner)), lab.buffer(normal(2, inner))
    return FusedLaunch(key, (-(-inner // 512), 1), (parts, y, inner, 2), y)
