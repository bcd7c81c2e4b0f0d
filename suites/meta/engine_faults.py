"""The faults of architecture_faults.py, planted in the real engine's kernels or in their callers.

A patch of a kernel's source must match exactly once, or the plant itself is broken.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from backend_hip import compile as compiling
from backend_hip import delta_net, experts, ops
from backend_hip.forward import Forward

Plant = Callable[[pytest.MonkeyPatch], None]


def kernel(file: str, *changes: tuple[str, str]) -> Plant:
    """Every (old, new) of `changes` in the flattened source of one kernel file."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        flatten = compiling.flatten

        def broken(name: str, *rest: Any) -> str:
            text = flatten(name, *rest)
            if name != file:
                return text
            for old, new in changes:
                if text.count(old) != 1:
                    raise AssertionError(f"{file}: {old!r} is there {text.count(old)} times")
                text = text.replace(old, new)
            return text

        patch.setattr(compiling, "flatten", broken)

    return plant


def _left_out(owner: Any, name: str) -> Plant:
    return lambda patch: patch.setattr(owner, name, lambda *arguments: None)


def _v_norm_skipped(patch: pytest.MonkeyPatch) -> None:
    norm = Forward._norm

    def broken(self: Forward, flow: Any, x: Any, weight: Any, y: Any) -> None:
        if weight not in self._ones.values():
            norm(self, flow, x, weight, y)

    patch.setattr(Forward, "_norm", broken)


def _v_from(rotated: bool) -> Plant:
    """V's norm is queued late where V is the raw K: after K's norm, or after its rotation."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        norm, rope = Forward._norm, ops.rope
        late: list[tuple[Any, ...]] = []

        def broken_norm(self: Forward, flow: Any, x: Any, weight: Any, y: Any) -> None:
            if weight in self._ones.values() and x is not y:
                late.append((self, flow, x, weight, y))
                return
            norm(self, flow, x, weight, y)
            if late and late[0][2] is x and not rotated:
                norm(*late.pop())

        def watched_rope(flow: Any, x: Any, *rest: Any) -> None:
            rope(flow, x, *rest)
            if late and late[0][2] is x and rotated:
                norm(*late.pop())

        patch.setattr(Forward, "_norm", broken_norm)
        patch.setattr(ops, "rope", watched_rope)

    return plant


def _gate_up_swapped(patch: pytest.MonkeyPatch) -> None:
    routed_sum = experts.routed_sum

    def broken(flow: Any, x: Any, spec: Any, routing: Any, matrices: Any, *rest: Any) -> None:
        gate, up, down = matrices
        routed_sum(flow, x, spec, routing, (up, gate, down), *rest)

    patch.setattr(experts, "routed_sum", broken)


def _router_fed_experts_input(patch: pytest.MonkeyPatch) -> None:
    inner = Forward._experts
    patch.setattr(
        Forward,
        "_experts",
        lambda self, chunk, layer, router, own, out: inner(self, chunk, layer, own, own, out),
    )


def state_not_reset(patch: pytest.MonkeyPatch) -> None:
    """States are zero once, when they are made."""
    reset, seen = delta_net.RecurrentState.reset, set[int]()

    def broken(self: delta_net.RecurrentState) -> None:
        if id(self) not in seen:
            seen.add(id(self))
            reset(self)

    patch.setattr(delta_net.RecurrentState, "reset", broken)


REAL: Mapping[str, Plant] = {
    "v-norm-skipped": _v_norm_skipped,
    "v-from-normed-k": _v_from(rotated=False),
    "v-from-rotated-k": _v_from(rotated=True),
    "soft-cap-missing": _left_out(ops, "soft_cap"),
    "layer-scale-missing": _left_out(ops, "scale"),
    "query-bias-missing": _left_out(ops, "add_bias"),
    "router-fed-experts-input": _router_fed_experts_input,
    "experts-gate-up-swapped": _gate_up_swapped,
    "expert-scale-missing": kernel("combine_experts.hip", (" * scales[chosen[pair]]", "")),
    "expert-of-the-neighbour": kernel(
        "matvec_experts.hip",
        ("expert_row(weights, expert, row,", "expert_row(weights, expert ^ 1, row,"),
    ),
    "no-renormalisation": kernel("route.hip", ("/= chosen_total;", "/= 1.0f;")),
    "ties-to-the-highest": kernel("route.hip", ("b.index < a.index", "b.index > a.index")),
    "shared-gate-missing": kernel(
        "arithmetic.hip", (" * numeric::sigmoid(gate[i / width])", "")
    ),
    "attention-gate-missing": kernel("arithmetic.hip", (" * numeric::sigmoid(gate[i])", "")),
    "beta-without-sigmoid": kernel(
        "delta_inputs.hip", ("beta[i] = numeric::sigmoid(beta[i])", "beta[i] = beta[i]")
    ),
    "decay-without-softplus": kernel(
        "delta_inputs.hip",
        ("numeric::softplus(alpha[i] + bias[i % heads])",
         "simt::max(alpha[i] + bias[i % heads], 0.0f)"),
    ),
    "taps-reversed": kernel("delta_inputs.hip", ("* taps + tap]", "* taps + (taps - 1 - tap)]")),
    "tail-shifted-at-chunk": kernel(
        "delta_inputs.hip",
        ("at = count - history + i;", "at = count - history + i - 1;"),
    ),
    "heads-not-unit": kernel("delta_inputs.hip", (" / length / divisor", " / divisor")),
    "decay-after-update": kernel(
        "delta_net.hip",
        ("state[i] *= decay;", ""),
        ("simt::fma(key[i], delta, state[i]);", "simt::fma(key[i], delta, state[i]) * decay;"),
    ),
    "delta-without-correction": kernel("delta_net.hip", ("(value - seen)", "(value - 0 * seen)")),
    "key-heads-grouped": kernel(
        "delta_net.hip", ("+ head % key_heads)", "+ head / (heads / key_heads))")
    ),
    "state-lost-at-chunk": kernel(
        "delta_net.hip",
        ("state[i] = stored[static_cast<int64_t>(i) * STATE_SIZE];", "state[i] = 0.0f;"),
    ),
}  # fmt: skip
