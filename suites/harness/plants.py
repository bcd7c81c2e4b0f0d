"""Faults planted in copies of a run's trace, of what it left behind, and of its decode steps.

Only where the run itself is sound: what is broken already shows without a plant. Every plant is
judged by the very function that judged the run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from reference.model import Model
from reference.model.spec import ModelSpec
from reference.model.trace import Trace
from suites.harness import pair, steps
from suites.harness.bounds_delta_net import DeltaRule
from suites.harness.compare import Array
from suites.harness.endtoend import Expected
from suites.harness.left_behind import LeftBehind
from suites.harness.local import LocalRules, PointCheck, judge_point
from suites.harness.selftest import Plant
from suites.harness.verdict import Check, State

LIMITS = 4
"""How many limits a planted value is off by, at the element that is nearest to its limit."""


def beyond(want: float, limit: float) -> np.float32:
    """A float32 that is surely out of `limit` of `want`, by the least that float32 can show."""
    return np.float32(want + max(LIMITS * limit, 2 * float(np.spacing(np.float32(abs(want))))))


def local_plants(
    model: Model, trace: Trace, rules: LocalRules, points: Sequence[PointCheck]
) -> list[Plant]:
    """For each op one element of one of its points, moved: found there and nowhere else."""
    plants = []
    sound = [p for p in points if p.check.state is State.OK and p.comparison is not None]
    for op in dict.fromkeys(point.op for point in sound):
        # The smallest point of the op: its weights are the cheapest to dequantise again.
        mine = (point for point in sound if point.op == op)
        point = min(mine, key=lambda found: int(np.prod(found.point.shape)))
        values = _moved(model, trace, point)
        if values is None:
            continue
        copy = Trace(trace.tokens, trace.meta)
        copy._parts = {**trace._parts, point.point.name: [values]}
        found = judge_point(model, copy, rules, point.point)
        place, before = found.comparison, point.comparison
        seen = found.check.state is State.DIVERGED and place is not None
        if seen and place is not None and before is not None and values.dtype.kind == "f":
            there, meant = place.worst_backward, before.worst_backward
            seen = there is not None and meant is not None and there.flat == meant.flat
        plants.append(Plant("local", f"one element of {point.point.name} ({op})", seen))
    return plants


def _moved(model: Model, trace: Trace, point: PointCheck) -> Array | None:
    """The point's values with one changed; None where no other legal value exists."""
    values = trace[point.point.name].copy()
    assert point.comparison is not None
    place = point.comparison.worst_backward
    assert place is not None
    if values.dtype.kind != "i":
        values.reshape(-1)[place.flat] = beyond(place.want, place.limit)
        return values
    layer = point.point.layer
    experts = None if layer is None else model.spec.layers[layer].experts
    token = values.reshape(len(values), -1)[0]
    others = [] if experts is None else [e for e in range(experts.count) if e not in token]
    if not others:
        return None
    token[0] = others[0]
    return values


def left_behind_plants(
    held: LeftBehind,
    trace: Trace,
    stored: tuple[str, str],
    states: Mapping[int, DeltaRule],
    spec: ModelSpec,
    checks: Sequence[Check],
) -> list[Plant]:
    """One bit of K, of V and of a tail, one element of a memory: against the trace and run to run.

    `checks` are those of `held` as it is.
    """
    if any(check.state is not State.OK for check in checks):
        return []
    plants = []
    for what, copy in _changed(held, states):
        kind = "KV" if "cache" in what else "recurrent state"
        judged = copy.checks_of(trace, stored, states, spec, "")
        seen = any(check.state is State.DIVERGED for check in judged)
        plants.append(Plant(kind, f"{what}, against the trace", seen))
        run = copy.checks_against(held, len(trace.tokens), "planted", "{}")
        seen = any(check.state is State.DIVERGED for check in run)
        plants.append(Plant(kind, f"{what}, run to run", seen))
    return plants


def _changed(held: LeftBehind, states: Mapping[int, DeltaRule]) -> Iterator[tuple[str, LeftBehind]]:
    for layer, (k, v) in list(held.kv.items())[-1:]:
        yield f"one bit of the K cache of layer {layer}", _with_kv(held, layer, flipped(k), v)
        yield f"one bit of the V cache of layer {layer}", _with_kv(held, layer, k, flipped(v))
    for layer, (memory, tail) in list(held.states.items())[-1:]:
        want, limit = states[layer].memory
        moved, place = memory.copy(), (0,) * memory.ndim
        moved[place] = beyond(float(want[place]), float(np.broadcast_to(limit, want.shape)[place]))
        named = f"of layer {layer}"
        yield f"one element of the memory {named}", _with_state(held, layer, moved, tail)
        yield f"one bit of the tail {named}", _with_state(held, layer, memory, flipped(tail))


def _with_kv(held: LeftBehind, layer: int, k: Array, v: Array) -> LeftBehind:
    return replace(held, kv={**held.kv, layer: (k, v)})


def _with_state(held: LeftBehind, layer: int, memory: Array, tail: Array) -> LeftBehind:
    return replace(held, states={**held.states, layer: (memory, tail)})


def flipped(values: Array) -> Array:
    """A copy whose last element has another last bit."""
    copy = np.ascontiguousarray(values).copy()
    copy.reshape(-1).view(f"u{copy.itemsize}")[-1] ^= 1
    return copy


def decode_plants(decoded: steps.Decoded, expected: Expected, check: Check) -> list[Plant]:
    """One logit of the last step, moved out of its limit. `check` is that of the steps as is."""
    if check.state is not State.OK:
        return []
    index = len(decoded.steps) - 1
    step: Any = decoded.steps[index]
    logits = np.array(step.tail.logits)
    logits[-1] = beyond(float(expected.logits[index][-1]), float(expected.limits[index]))
    changed = replace(step, tail=replace(step.tail, logits=logits))
    copy = replace(decoded, steps=(*decoded.steps[:index], changed))
    found, _ = steps.continuation(copy, expected)
    seen = found.state is State.DIVERGED and found.where.startswith(f"step {index} ")
    return [Plant("decode", "one logit of the last step", seen)]


def bits_plants(what: str, got: Array, check: Check) -> list[Plant]:
    """One bit of logits that must be equal bit for bit. `check` is that of the logits as is."""
    if check.state is not State.OK:
        return []
    found = pair.bits_check(what, flipped(got), got, what)
    return [Plant("decode", f"one bit of the logits: {what}", found.state is State.DIVERGED)]
