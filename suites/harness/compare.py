"""Compares two arrays and states facts; every condition is written as the condition for passing.

`ok` needs equal shapes, agreeing dtypes, at least one element, finite numbers on both sides and
|got - want| <= limit everywhere, so a NaN on either side, on both sides or in the limit fails by
itself. A global figure (NMSE, KL divergence) is reported beside the element rule, never instead of
it: one lost element among many moves no global figure.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Place:
    """One element of a comparison: where it is, both values, how far apart, how far allowed."""

    index: tuple[int, ...]
    flat: int
    got: float
    want: float
    error: float
    limit: float

    def __str__(self) -> str:
        index = ",".join(map(str, self.index))
        return f"[{index}] got {self.got:.9g} want {self.want:.9g}"


@dataclass(frozen=True)
class Comparison:
    """What was found; the figures over elements are None where shapes forbid an element rule.

    `of_limit` is max(error / limit), the share of the limit that is used: 1 is the limit itself,
    and 0/0 counts as 0. It is infinite where a limit of 0 is exceeded or a number is not finite.
    `nmse` is sum((got-want)^2) / sum(want^2).
    """

    elements: int
    shape_got: tuple[int, ...]
    shape_want: tuple[int, ...]
    dtype_got: str
    dtype_want: str
    max_abs_diff: float | None
    worst_difference: Place | None
    worst_backward: Place | None
    of_limit: float | None
    above_limit: int
    nan_got: int
    nan_want: int
    inf_got: int
    inf_want: int
    invalid_limits: int
    bit_equal: bool
    nmse: float | None
    ok: bool

    @property
    def same_shape(self) -> bool:
        return self.shape_got == self.shape_want

    @property
    def finite(self) -> bool:
        return not (self.nan_got or self.nan_want or self.inf_got or self.inf_want)

    def reason(self) -> str:
        """Why the comparison fails, in one line; empty where it passes."""
        if self.ok:
            return ""
        if not self.same_shape:
            return f"shape {self.shape_got} against {self.shape_want}"
        if not dtypes_agree(np.dtype(self.dtype_got), np.dtype(self.dtype_want)):
            return f"dtype {self.dtype_got} against {self.dtype_want}"
        if not self.elements:
            return "no elements"
        if not self.finite:
            return (
                f"not finite: got {self.nan_got} NaN {self.inf_got} Inf, "
                f"want {self.nan_want} NaN {self.inf_want} Inf"
            )
        if self.invalid_limits:
            return f"{self.invalid_limits} limits are negative or not finite"
        return f"{self.above_limit} of {self.elements} elements above their limit"


def dtypes_agree(got: np.dtype[Any], want: np.dtype[Any]) -> bool:
    """Equal dtypes agree, and so does a floating `got` with a wider floating `want` (a reference
    evaluated in more precision). A result wider than its reference is a wrong result dtype.
    """
    if got == want:
        return True
    return got.kind == want.kind == "f" and got.itemsize < want.itemsize


def same_bits(got: Array, want: Array) -> bool:
    """True where shapes, dtypes and every bit agree: -0.0 and 0.0 differ, as do NaN payloads."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    bits_got = np.ascontiguousarray(got).reshape(-1).view(np.uint8)
    bits_want = np.ascontiguousarray(want).reshape(-1).view(np.uint8)
    return bool(np.array_equal(bits_got, bits_want))


def compare(got: Array, want: Array, limit: ArrayLike) -> Comparison:
    """Compares `got` with `want` under an absolute `limit`, a scalar or an array of want's shape.

    Arrays are numeric of any shape and never broadcast against each other. Differences are taken
    in float64. A limit array that does not fit want's shape raises ValueError.
    """
    got, want = np.asarray(got), np.asarray(want)
    same_shape, dtypes = got.shape == want.shape, dtypes_agree(got.dtype, want.dtype)
    nan_got, inf_got = _not_finite(got)
    nan_want, inf_want = _not_finite(want)
    finite = not (nan_got or nan_want or inf_got or inf_want)
    elements = int(want.size) if same_shape else 0
    limits = np.broadcast_to(np.asarray(limit, dtype=np.float64), want.shape)
    invalid_limits = int(np.count_nonzero(~(np.isfinite(limits) & (limits >= 0))))

    max_abs_diff = of_limit = nmse = None
    worst_difference = worst_backward = None
    above = 0
    if elements:
        wide_want = want.astype(np.float64)
        with np.errstate(all="ignore"):
            error = np.abs(got.astype(np.float64) - wide_want)
            within = error <= limits
            share = np.where(error == 0, 0.0, error / limits)
        above = elements - int(np.count_nonzero(within))
        # NaN must win the search for the worst element.
        error_rank = np.where(np.isnan(error), np.inf, error)
        share_rank = np.where(np.isnan(share) | np.isnan(error), np.inf, share)
        worst_difference = _place(int(np.argmax(error_rank)), got, want, error, limits)
        worst_backward = _place(int(np.argmax(share_rank)), got, want, error, limits)
        max_abs_diff = float(np.max(error))  # NaN where any error is NaN
        of_limit = float(np.max(share_rank))
        with np.errstate(all="ignore"):
            energy = float(np.sum(np.square(wide_want)))
            noise = float(np.sum(np.square(error)))
        nmse = 0.0 if noise == 0 else (noise / energy if energy else float("inf"))
    # The conditions overlap on purpose: losing any one of the last four still lets no NaN pass.
    ok = (
        same_shape
        and dtypes
        and elements > 0
        and finite
        and invalid_limits == 0
        and above == 0
        and of_limit is not None
        and of_limit <= 1.0
    )
    return Comparison(
        elements=elements,
        shape_got=got.shape,
        shape_want=want.shape,
        dtype_got=got.dtype.str,
        dtype_want=want.dtype.str,
        max_abs_diff=max_abs_diff,
        worst_difference=worst_difference,
        worst_backward=worst_backward,
        of_limit=of_limit,
        above_limit=above,
        nan_got=nan_got,
        nan_want=nan_want,
        inf_got=inf_got,
        inf_want=inf_want,
        invalid_limits=invalid_limits,
        bit_equal=same_bits(got, want),
        nmse=nmse,
        ok=bool(ok),
    )


def _not_finite(values: Array) -> tuple[int, int]:
    if values.dtype.kind != "f":
        return 0, 0
    return int(np.count_nonzero(np.isnan(values))), int(np.count_nonzero(np.isinf(values)))


def _place(flat: int, got: Array, want: Array, error: Array, limits: Array) -> Place:
    index = tuple(int(i) for i in np.unravel_index(flat, want.shape))
    return Place(
        index,
        flat,
        float(got[index]),
        float(want[index]),
        float(error[index]),
        float(limits[index]),
    )


@dataclass(frozen=True)
class LogitComparison:
    """A comparison of two logit vectors over one vocabulary, with what sampling would notice.

    `kl_divergence` is KL(softmax(want) || softmax(got)) in nats. `margin` is want's largest logit
    minus its second largest. A flip of the top token is explained (`flip_allowed`) only where the
    reference holds the two tokens within twice the logit limit, because each may be off by one
    limit. `near_tie` says that the reference's own top two are that close.
    """

    comparison: Comparison
    kl_divergence: float
    top1_got: int
    top1_want: int
    top_k: int
    top_k_overlap: int
    margin: float
    near_tie: bool
    flip_allowed: bool

    @property
    def top1_equal(self) -> bool:
        return self.top1_got == self.top1_want

    @property
    def ok(self) -> bool:
        return self.comparison.ok and (self.top1_equal or self.flip_allowed)


def compare_logits(got: Array, want: Array, limit: float, *, top_k: int = 10) -> LogitComparison:
    """Compares one position's logits, each of shape (vocab,). Raises ValueError for other ranks."""
    if np.ndim(got) != 1 or np.ndim(want) != 1:
        raise ValueError(
            f"logits have shapes {np.shape(got)} and {np.shape(want)}, expected (vocab,)"
        )
    comparison = compare(got, want, limit)
    nothing = float("nan")
    if not comparison.elements or not comparison.finite:
        return LogitComparison(comparison, nothing, -1, -1, 0, 0, nothing, False, False)
    top_k = min(top_k, comparison.elements)
    wide_got, wide_want = got.astype(np.float64), want.astype(np.float64)
    top1_got, top1_want = int(np.argmax(wide_got)), int(np.argmax(wide_want))
    margin = top2_margin(wide_want)
    log_want, log_got = _log_softmax(wide_want), _log_softmax(wide_got)
    overlap = np.intersect1d(_top(wide_got, top_k), _top(wide_want, top_k)).size
    return LogitComparison(
        comparison=comparison,
        kl_divergence=max(0.0, float(np.sum(np.exp(log_want) * (log_want - log_got)))),
        top1_got=top1_got,
        top1_want=top1_want,
        top_k=top_k,
        top_k_overlap=int(overlap),
        margin=margin,
        near_tie=bool(margin <= 2 * limit),
        flip_allowed=flip_allowed(wide_want, top1_got, limit),
    )


def flip_allowed(want: Array, token: int, limit: float) -> bool:
    """True where `want`'s largest logit exceeds that of `token` by at most twice the limit."""
    return bool(float(np.max(want)) - float(want[token]) <= 2 * limit)


def top2_margin(logits: Array) -> float:
    """The largest logit minus the second largest; infinite for a vocabulary of one."""
    if logits.size < 2:
        return float("inf")
    second, first = np.partition(logits, logits.size - 2)[-2:]
    return float(first) - float(second)


def _top(values: Array, count: int) -> Array:
    return np.argpartition(-values, count - 1)[:count]


def _log_softmax(values: Array) -> Array:
    shifted: Array = values - np.max(values)
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted))))
