"""Recurrent states: what a delta net layer holds against what was recorded, and run against run."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from reference.model.spec import ModelSpec
from reference.model.trace import Trace
from suites.harness.bounds_delta_net import DeltaRule
from suites.harness.compare import Array, Comparison, compare, same_bits
from suites.harness.kv import different
from suites.harness.protocol import JudgedEngine
from suites.harness.verdict import Check, State, behind, check_of

StateSnapshot = dict[int, tuple[Array, Array]]
"""Per delta net layer, copies of memory (NV, DS, DS) and tail (taps - 1, channels), float32."""

NOTHING = "no layer keeps a recurrent state: there was none to compare"


def recurrent_layers(spec: ModelSpec) -> list[int]:
    return [layer.index for layer in spec.layers if layer.delta_net is not None]


def snapshot(engine: JudgedEngine, spec: ModelSpec, sequence: int = 0) -> StateSnapshot:
    """Copies of every layer's state of a sequence; empty for a model without."""
    held = {}
    for layer in recurrent_layers(spec):
        state = engine.recurrent_state(layer, sequence)
        held[layer] = np.array(state.memory, copy=True), np.array(state.tail, copy=True)
    return held


def held_check(
    trace: Trace,
    spec: ModelSpec,
    expected: Mapping[int, DeltaRule],
    held: StateSnapshot,
    broken_since: str = "",
) -> Check:
    """What the layers hold after a traced prompt from position 0.

    The tail is the last recorded inputs of the convolution, bit for bit, behind zeros where the
    prompt is shorter. The memory is the recurrence over the recorded q, k, v, decay and beta,
    within its limit. A layer that could not be judged, and a limit that is not finite, make the
    check invalid, or diverged where `broken_since` names the point that was found broken before.
    """
    name, elements = "local: recurrent state", 0
    worst: tuple[str, Comparison] | None = None
    for layer, (memory, tail) in held.items():
        problem = _shape_problem(spec, layer, memory, tail)
        if problem:
            return Check(name, State.DIVERGED, elements, link=f"recurrent state: {problem}")
        source = f"linear_attn_qkv-{layer}"
        if source not in trace or layer not in expected:
            missing = source if source not in trace else f"delta_out-{layer}"
            detail = f"{missing} was not judged"
            if broken_since:
                detail += f", broken since {broken_since}"
            state = State.DIVERGED if broken_since else State.INVALID
            return Check(name, state, elements, detail=detail)
        recorded = trace[source].reshape(len(trace[source]), -1)
        blank = np.zeros((len(tail), recorded.shape[1]), dtype=recorded.dtype)
        padded = np.concatenate([blank, recorded], axis=0)
        want_tail = padded[len(padded) - len(tail) :]
        elements += tail.size
        if not same_bits(tail, want_tail):
            where = f"tail of layer {layer}"
            return different(name, tail, want_tail, elements, where, f"recurrent state: {where}")
        want, limit = expected[layer].memory
        comparison = compare(memory, want, np.broadcast_to(limit, want.shape))
        elements += comparison.elements
        where = f"memory of layer {layer}"
        if not comparison.ok:
            check = check_of(name, comparison, link=f"recurrent state: {where}")
            return _named(behind(check, broken_since), where)
        if worst is None or (comparison.of_limit or 0) > (worst[1].of_limit or 0):
            worst = where, comparison
    if worst is None:
        return Check(name, State.INVALID, 0, detail=NOTHING)
    found = _named(check_of(name, worst[1]), worst[0])
    return replace(found, elements=elements)


def _shape_problem(spec: ModelSpec, layer: int, memory: Array, tail: Array) -> str:
    """What is wrong with the arrays as such; empty where nothing is."""
    net = spec.layers[layer].delta_net
    assert net is not None
    wanted = {
        "memory": (memory, (net.value_heads, net.state_size, net.state_size)),
        "tail": (tail, (net.conv_kernel - 1, net.channels)),
    }
    for part, (got, shape) in wanted.items():
        if got.shape != shape or got.dtype != np.float32:
            return f"{part} of layer {layer} is {got.dtype} {got.shape}, expected float32 {shape}"
    return ""


def pair_check(
    per_token: StateSnapshot,
    batched: StateSnapshot,
    *,
    name: str = "prefill pair: recurrent state",
    link: str = "batched against per-token recurrent state",
) -> Check:
    """States that two runs of the same tokens left, all layers, bit for bit."""
    elements = 0
    if per_token.keys() != batched.keys():
        return Check(name, State.INVALID, 0, detail="not the same layers on both sides")
    for layer, one in per_token.items():
        for part, want, got in zip(("memory", "tail"), one, batched[layer], strict=True):
            where = f"{part} of layer {layer}"
            elements += want.size
            if not same_bits(got, want):
                return different(name, got, want, elements, where, f"{link}: {where}")
    return Check(name, State.OK, elements, measured=0.0, limit=0.0, of_limit=0.0)


def _named(check: Check, where: str) -> Check:
    return replace(check, where=f"{where} {check.where}".strip())
