"""Launches of products and of the kernels that fuse a norm with them, in any format."""

from dataclasses import dataclass
from typing import Any

from backend_hip.device import Buffer
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


def norm_rope(lab: Lab, key: Key, heads: int, size: int) -> FusedLaunch:
    """Q and K with `heads` heads each, at the step's position."""
    q, k = (lab.buffer(normal(seed, heads, size)) for seed in (1, 2))
    norms = [lab.buffer(normal(seed, size)) for seed in (3, 4)]
    tables = [lab.buffer(normal(seed, 1, size // 2)) for seed in (5, 6)]
    arguments = (q, k, *norms, *tables, "step", heads, size, size // 2, EPSILON)
    return FusedLaunch(key, (2 * heads, 1), arguments, q)
