"""Ways to break the fake engine.

Entries in capitals patch one function of the reference each, for `Fault.numerics`; `on_...` wrap a
change of a record into a Fault; the other functions change logits, records or KV contents.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from suites.harness.compare import Array
from suites.harness.fake_engine import FakePrefill, FakeStep, FakeTail, Fault, patched
from suites.harness.protocol import STAGING_POISON

Numerics = Callable[[], AbstractContextManager[Any]]


def _patch(target: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Numerics:
    return lambda: patched(target, wrap)


class _DropsAddend(np.ndarray[Any, Any]):
    """`x + this` is this: a residual addition that was forgotten."""

    def __radd__(self, other: Any) -> Any:
        return np.asarray(self)


def missing_residual(shape: tuple[int, int]) -> Numerics:
    """After the product with the weight of `shape` the residual is not added."""

    def wrap(linear: Callable[..., Array]) -> Callable[..., Array]:
        def broken(x: Array, weight: Array) -> Array:
            y = linear(x, weight)
            return y.view(_DropsAddend) if weight.shape == shape else y

        return broken

    return _patch("reference.ops.linear", wrap)


def lost_tail(columns: int) -> Numerics:
    """Every product leaves the last `columns` of K out."""
    return _patch(
        "reference.ops.linear",
        lambda linear: lambda x, w: linear(x[..., :-columns], w[..., :-columns]),
    )


ROPE_POSITION = _patch("reference.ops.rope_tables", lambda f: lambda fr, pos, m: f(fr, pos + 1, m))
ROPE_BASE = _patch("reference.ops.rope_tables", lambda f: lambda fr, pos, m: f(fr * 0.999, pos, m))
ROPE_PAIRING = _patch(
    "reference.ops.rope",
    lambda f: lambda x, c, s, pairing: f(x, c, s, "neox" if pairing == "norm" else "norm"),
)
NORM_EPSILON = _patch("reference.ops.rms_norm", lambda f: lambda x, w, e: f(x, w, 10 * e))
NORM_PLUS_ONE = _patch("reference.ops.rms_norm", lambda f: lambda x, w, e: f(x, 1 + w, e))


def _wrong_heads(attention: Callable[..., Array]) -> Callable[..., Array]:
    def broken(q: Array, k: Array, v: Array, *rest: Any) -> Array:
        # Query head h reads KV head h mod KVH instead of h // group.
        tokens, heads, size = q.shape
        order = np.argsort(np.arange(heads) % k.shape[1], kind="stable")
        out = attention(q[:, order], k, v, *rest).reshape(tokens, heads, size)
        result = np.empty_like(out)
        result[:, order] = out
        return result.reshape(tokens, heads * size)

    return broken


HEAD_MAP = _patch("reference.attention.attention", _wrong_heads)
ATTENTION_SCALE = _patch(
    "reference.attention.attention",
    lambda f: lambda q, k, v, start, window, scale: f(q, k, v, start, window, scale * 1.001),
)
WINDOW = _patch(
    "reference.attention.attention",
    lambda f: (
        lambda q, k, v, start, window, scale: f(
            q, k, v, start, None if window is None else window + 1, scale
        )
    ),
)


def _nan_lane(gated: Callable[..., Array]) -> Callable[..., Array]:
    def broken(*arguments: Any) -> Array:
        out = np.array(gated(*arguments), copy=True)
        out[0, 3] = np.nan
        return out

    return broken


NAN_LANE = _patch("reference.ops.gated", _nan_lane)
ONE_ULP = _patch(
    "reference.ops.gated", lambda f: lambda *a: np.nextafter(f(*a), np.float32(np.inf))
)
EXACT_GELU = _patch(
    "reference.ops.gelu_tanh",
    lambda f: lambda x: f(x) + np.float32(1e-5) * x,
)
EVERYTHING_NAN = _patch(
    "reference.ops.rms_norm", lambda f: lambda x, w, e: f(x, w, e) * np.float32(np.nan)
)


def on_tail(mode: str, change: Callable[[FakeTail, FakeTail | None], FakeTail]) -> Fault:
    return Fault(tail=lambda tail, before, at: change(tail, before) if at == mode else tail)


def on_batched(change: Callable[[FakePrefill, FakePrefill | None], FakePrefill]) -> Fault:
    return Fault(
        prefilled=lambda result, before: (
            change(result, before) if result.mode == "batched" else result
        )
    )


def no_argmax(tail: FakeTail, before: FakeTail | None) -> FakeTail:
    if before is None:
        poison = STAGING_POISON
        return replace(tail, device_token=poison, device_stamp=0, staged_token=poison)
    return replace(
        tail,
        device_token=before.device_token,
        device_stamp=before.device_stamp,
        staged_token=before.staged_token,
        staged_stamp=before.staged_stamp,
    )


def moved_logit(row: Any, mode: str) -> Any:
    if mode == "batched":
        row[7] = np.nextafter(row[7], np.float32(np.inf))
    return row


def negative_zero(row: Any, mode: str) -> Any:
    row[9] = np.float32(-0.0 if mode == "batched" else 0.0)
    return row


def nan_logit(row: Any, mode: str) -> Any:
    row[-1] = np.nan
    return row


def shifted_kv(contents: Any, layer: int, mode: str) -> Any:
    keys, values = contents
    if mode == "batched" and layer == 1:
        return np.roll(keys, 1, axis=0), values
    return keys, values


def on_step(change: Callable[[FakeStep], FakeStep]) -> Fault:
    return Fault(stepped=lambda step, before: change(step) if before is not None else step)
