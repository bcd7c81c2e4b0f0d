"""Judges the two prefill modes of one prompt against each other, and that they are two at all.

A comparison of a buffer with itself, of one route with itself or of poison with poison proves
nothing, and says so.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from suites.harness.compare import Comparison, compare
from suites.harness.kernels import path_check
from suites.harness.promises import PROMISES, promise
from suites.harness.protocol import Pair, Prefilled
from suites.harness.selftest import planted_faults
from suites.harness.tail import broken_prefill, tail_check
from suites.harness.verdict import Check, State, Verdict, check_of, fact

POISON_BITS = 0xFFFFFFFF


@dataclass(frozen=True)
class PairOfRun:
    """Both prefills of a run. KV contents are compared array by array beside it."""

    per_token: Prefilled
    batched: Prefilled
    kv_bits_equal: bool = True


def is_exact(path: str) -> bool:
    """True where the path promises equal bits between the prefill modes."""
    return ("prefill_pair", path) in PROMISES


def pair_limit(path: str, end_to_end: float | None) -> float:
    """Absolute limit between the modes' logits: 0 for an exact path, else twice the logit limit,
    because each mode may be off by one. NaN (which nothing passes) where that is not known.
    """
    if is_exact(path):
        return promise("prefill_pair", path)
    return math.nan if end_to_end is None else 2 * end_to_end


def proofs(per_token: Prefilled, batched: Prefilled, broken_since: str = "") -> list[Check]:
    """What must hold before a comparison of the two can mean anything; failures are invalid.

    `broken_since`: what an earlier check already found. Poison is a NaN that arithmetic can carry
    into written logits, so behind a proven fault it is diverged.
    """
    modes = (per_token.mode, batched.mode)
    same_prompt = per_token.n_tokens == batched.n_tokens > 0
    same_place = per_token.position == batched.position
    return [
        _routes(per_token.routes, batched.routes),
        fact(
            "prefill pair: two modes of one prompt",
            modes == ("per-token", "batched") and same_prompt and same_place,
            f"modes {modes[0]} and {modes[1]}, {per_token.n_tokens} and {batched.n_tokens} tokens, "
            f"position {per_token.position} and {batched.position}",
            failed=State.INVALID,
        ),
        _buffers(per_token, batched),
        _poison(per_token, batched, broken_since),
    ]


def _routes(per_token: Mapping[str, int], batched: Mapping[str, int]) -> Check:
    """Registry rows say in their name that they are batched; one side must run some, the other
    none. Shared rows (norms, attention, a last-token output projection) say nothing.
    """
    sides = [
        {str(name) for name, count in side.items() if count > 0} for side in (per_token, batched)
    ]
    one, other = ({name for name in side if "batched" in name} for side in sides)
    differ = bool(sides[0]) and bool(other) and not one
    if differ:
        detail = f"batched side ran {_names(other)}; per-token side ran none"
    elif not sides[0] or not sides[1]:
        detail = "no launches were counted on one side"
    else:
        detail = f"both sides took the same route: {_names(one or sides[1])}"
    launches = sum(per_token.values()) + sum(batched.values())
    return fact(
        "prefill pair: routes differ",
        differ,
        detail,
        failed=State.INVALID,
        elements=launches,
        unit="launches",
    )


def _names(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _buffers(per_token: Prefilled, batched: Prefilled) -> Check:
    name = "prefill pair: separate results"
    stamps = (per_token.tail.expected_stamp, batched.tail.expected_stamp)
    if np.shares_memory(per_token.logits, batched.logits):
        return fact(name, False, "both sides returned the same logits buffer", failed=State.INVALID)
    return fact(
        name,
        stamps[0] != stamps[1],
        f"generation stamps {stamps[0]} and {stamps[1]}",
        failed=State.INVALID,
        elements=int(per_token.logits.size),
        unit="values",
    )


def _poison(per_token: Prefilled, batched: Prefilled, broken_since: str) -> Check:
    left = [_poisoned(result) for result in (per_token, batched)]
    spread = bool(broken_since) and left != [0, 0]
    return fact(
        "prefill pair: no poison left",
        left == [0, 0],
        f"logits never written: {left[0]} per-token, {left[1]} batched"
        + (f", or spread since {broken_since}" if spread else ""),
        failed=State.DIVERGED if spread else State.INVALID,
        elements=int(per_token.logits.size) + int(batched.logits.size),
        unit="values",
    )


def poison_check(result: Prefilled, broken_since: str) -> Check:
    """The same for a prefill that has no pair."""
    left = _poisoned(result)
    spread = bool(broken_since) and left != 0
    return fact(
        f"{result.mode} prefill: no poison left",
        left == 0,
        f"logits never written: {left}" + (f", or spread since {broken_since}" if spread else ""),
        failed=State.DIVERGED if spread else State.INVALID,
        elements=int(result.logits.size),
        unit="values",
    )


def _poisoned(result: Prefilled) -> int:
    """What the engine counted on the device, or what is seen here, whichever is more."""
    if result.logits.dtype != np.float32:
        return result.logits_poisoned
    bits = np.ascontiguousarray(result.logits).view(np.uint32)
    return max(result.logits_poisoned, int(np.count_nonzero(bits == POISON_BITS)))


def compare_last(per_token: Prefilled, batched: Prefilled, limit: float) -> Comparison:
    """Last-token logits, batched as got and per-token as want."""
    return compare(batched.logits[-1:], per_token.logits[-1:], limit)


def logits_check(
    per_token: Prefilled, batched: Prefilled, limit: float, *, broken_since: str = ""
) -> Check:
    """Last-token logits of the two modes. `broken_since`: what an earlier check already found."""
    comparison = compare_last(per_token, batched, limit)
    name = "prefill pair: last-token logits"
    check = check_of(name, comparison, link="batched against per-token prefill logits")
    if check.state is State.OK and is_exact(batched.path) and not comparison.bit_equal:
        detail = "equal numbers, other bits"
        return replace(check, state=State.DIVERGED, detail=detail, of_limit=math.inf)
    if check.state is State.INVALID and comparison.nan_got and broken_since:
        detail = f"not finite since {broken_since}"
        return Check(name, State.DIVERGED, comparison.elements, detail=detail)
    return check


def bits_check(name: str, got: Any, want: Any, link: str, broken_since: str = "") -> Check:
    """Equal bits. NaN on both sides counts as diverged behind what an earlier check found."""
    comparison = compare(got, want, 0.0)
    check = check_of(name, comparison, link=link)
    if check.state is State.OK and not comparison.bit_equal:
        detail = "equal numbers, other bits"
        return replace(check, state=State.DIVERGED, detail=detail, of_limit=math.inf)
    if check.state is State.INVALID and comparison.nan_got and broken_since:
        return replace(check, state=State.DIVERGED, detail=f"not finite since {broken_since}")
    return check


def exact_logits_text(comparison: Comparison) -> str:
    """The sentence that clears the forward pass; empty where the bits are not equal."""
    if not (comparison.ok and comparison.bit_equal and comparison.max_abs_diff is not None):
        return ""
    return (
        f"logits agree exactly (max_abs_diff={comparison.max_abs_diff:.6f} over "
        f"{comparison.elements:,} entries)"
    )


def prefill_judge(pair: Pair, end_to_end_limit: float | None = None) -> Verdict:
    """The judge of the engine's `validate` switch: both modes of one prompt, without a reference.

    `end_to_end_limit` is the logit limit of a path that is bounded and not exact.
    """
    per_token, batched = pair.per_token, pair.batched
    limit = pair_limit(batched.path, end_to_end_limit)
    comparison = compare_last(per_token, batched, limit)
    checks = proofs(per_token, batched)
    checks += [
        path_check(f"kernels: {result.mode} prefill", result) for result in (per_token, batched)
    ]
    checks.append(logits_check(per_token, batched, limit))
    if is_exact(batched.path):
        checks.append(_kv_bits(pair))
    exact = exact_logits_text(comparison)
    for result in (per_token, batched):
        name = f"sampler tail: {result.mode} prefill"
        checks.append(tail_check(name, [broken_prefill(result)], exact_logits=exact))
    checks.append(planted_faults(per_token, batched, limit, proofs))
    return Verdict(tuple(checks), run={"path": batched.path, "n_tokens": batched.n_tokens})


def _kv_bits(pair: Pair) -> Check:
    differ = "KV caches or recurrent states of the two prefill modes differ"
    detail = "equal bits" if pair.kv_bits_equal else differ
    tokens = pair.batched.n_tokens
    name = "prefill pair: KV contents"
    return fact(
        name, pair.kv_bits_equal, detail, failed=State.DIVERGED, elements=tokens, unit="tokens"
    )


def validate_line(pair: Pair, verdict: Verdict, end_to_end_limit: float | None = None) -> str:
    """The one line that the validate switch prints."""
    limit = pair_limit(pair.batched.path, end_to_end_limit)
    comparison = compare_last(pair.per_token, pair.batched, limit)
    place = comparison.worst_difference
    index, want, got = (-1, math.nan, math.nan)
    if place is not None:
        index, want, got = place.flat, place.want, place.got
    difference = math.nan if comparison.max_abs_diff is None else comparison.max_abs_diff
    line = (
        f"prefillBatched validate[{verdict.state.value}]: last-token logits "
        f"max_abs_diff={difference:.6f} at idx={index} (ref={want:.4f} batched={got:.4f}) "
        f"tol={limit:.6f} n_tokens={pair.batched.n_tokens}"
    )
    return line if verdict.state is State.OK else f"{line}; {verdict.summary()}"


def printing_judge(
    write: Callable[[str], None], end_to_end_limit: Callable[[], float] | None = None
) -> Callable[[Pair], Verdict]:
    """A judge for Engine(judge=...) that also writes the line; the limit is computed if needed."""

    def judge(pair: Pair) -> Verdict:
        needed = end_to_end_limit is not None and not is_exact(pair.batched.path)
        limit = end_to_end_limit() if needed and end_to_end_limit is not None else None
        verdict = prefill_judge(pair, limit)
        write(validate_line(pair, verdict, limit))
        return verdict

    return judge
