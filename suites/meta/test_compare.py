"""The comparator rejects what must not pass, finds the one bad element and reports true figures."""

from dataclasses import dataclass

import numpy as np
import pytest

from suites.harness.compare import Array, compare, compare_logits, same_bits, top2_margin

LIMIT = 0.5
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Rejected:
    id: str
    got: Array
    want: Array
    reason: str
    limit: float = LIMIT


def _floats(*values: float) -> Array:
    return np.array(values, dtype=np.float32)


REJECTED = [
    Rejected("nan-got", _floats(NAN, 1), _floats(0, 1), "not finite"),
    Rejected("nan-want", _floats(0, 1), _floats(NAN, 1), "not finite"),
    Rejected("nan-both", _floats(NAN, 1), _floats(NAN, 1), "not finite"),
    Rejected("inf-same-sign", _floats(INF, 1), _floats(INF, 1), "not finite"),
    Rejected("inf-signs-differ", _floats(INF, 1), _floats(-INF, 1), "not finite"),
    Rejected("inf-got", _floats(INF, 1), _floats(1, 1), "not finite"),
    Rejected("shape", np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32), "shape"),
    Rejected("broadcast-row", np.zeros((1, 3), np.float32), np.zeros((2, 3), np.float32), "shape"),
    Rejected("broadcast-scalar", np.float32(0), np.zeros(4, np.float32), "shape"),  # type: ignore[arg-type]
    Rejected("rank", np.zeros((3, 1), np.float32), np.zeros(3, np.float32), "shape"),
    Rejected("dtype-kind", np.zeros(3, np.int32), np.zeros(3, np.float32), "dtype"),
    Rejected("dtype-wider-result", np.zeros(3), np.zeros(3, np.float32), "dtype"),
    Rejected("dtype-signedness", np.zeros(3, np.int32), np.zeros(3, np.uint32), "dtype"),
    Rejected("empty", np.zeros(0, np.float32), np.zeros(0, np.float32), "no elements"),
    Rejected("empty-rows", np.zeros((0, 8), np.float32), np.zeros((0, 8), np.float32), "no elem"),
    Rejected("above", _floats(0, 1), _floats(0, 1.75), "1 of 2 elements"),
    Rejected("limit-nan", _floats(0, 1), _floats(0, 1), "limits", NAN),
    Rejected("limit-inf", _floats(0, 1), _floats(0, 1), "limits", INF),
    Rejected("limit-negative", _floats(0, 1), _floats(0, 1), "limits", -1.0),
    Rejected("limit-zero", _floats(0, 1), _floats(0, np.nextafter(np.float32(1), 2)), "above", 0.0),
]


@pytest.mark.parametrize("case", REJECTED, ids=lambda case: case.id)
def test_rejects(case: Rejected) -> None:
    comparison = compare(case.got, case.want, case.limit)
    assert not comparison.ok
    assert case.reason in comparison.reason()


def test_accepts_what_is_within_the_limit() -> None:
    comparison = compare(_floats(0, 1, -2), _floats(0, 1.25, -2), LIMIT)
    assert comparison.ok
    assert comparison.elements == 3
    assert comparison.of_limit == 0.25 / LIMIT
    assert comparison.reason() == ""


def test_accepts_a_wider_reference() -> None:
    assert compare(_floats(1, 2), np.array([1.0, 2.0]), 0.0).ok


def test_finds_one_bad_element_among_a_million() -> None:
    want = np.random.default_rng(7).standard_normal((1000, 1000)).astype(np.float32)
    got = want.copy()
    got[123, 456] += 1
    comparison = compare(got, want, LIMIT)
    assert not comparison.ok
    assert comparison.above_limit == 1
    assert comparison.worst_difference is not None
    assert comparison.worst_difference.index == (123, 456)
    assert comparison.worst_difference.flat == 123_456
    assert comparison.worst_difference.got == float(got[123, 456])
    # The global figure is blind to it, which is why it never decides.
    assert comparison.nmse is not None
    assert comparison.nmse < 2 / want.size


def test_worst_by_backward_error_is_not_worst_by_difference() -> None:
    want = _floats(0, 0)
    comparison = compare(_floats(0.5, 0.25), want, np.array([1.0, 0.25]))
    assert comparison.ok
    assert comparison.worst_difference is not None
    assert comparison.worst_backward is not None
    assert comparison.worst_difference.flat == 0
    assert comparison.worst_backward.flat == 1
    assert comparison.of_limit == 1.0


def test_nan_is_the_worst_element() -> None:
    comparison = compare(_floats(9, 0, NAN), _floats(0, 0, 0), LIMIT)
    assert comparison.worst_difference is not None
    assert comparison.worst_difference.flat == 2
    assert comparison.of_limit == INF
    assert comparison.max_abs_diff is not None
    assert np.isnan(comparison.max_abs_diff)


def test_counts_nan_and_inf_per_side() -> None:
    comparison = compare(_floats(NAN, INF, 0, NAN), _floats(NAN, 0, -INF, 0), LIMIT)
    assert (comparison.nan_got, comparison.inf_got) == (2, 1)
    assert (comparison.nan_want, comparison.inf_want) == (1, 1)


def test_bits() -> None:
    assert same_bits(_floats(0.0, 1), _floats(0.0, 1))
    assert not same_bits(_floats(-0.0, 1), _floats(0.0, 1))
    assert compare(_floats(-0.0), _floats(0.0), 0.0).ok  # equal numbers, other bits
    assert not compare(_floats(-0.0), _floats(0.0), 0.0).bit_equal
    payloads = np.array([0x7FC00000, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    assert not same_bits(payloads[:1], payloads[1:])
    assert same_bits(payloads[1:], payloads[1:])
    assert not same_bits(_floats(1), _floats(1).astype(np.float64))
    columns = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert same_bits(columns.T, np.ascontiguousarray(columns.T))


def test_integers_compare_exactly() -> None:
    assert compare(np.array([1, 2]), np.array([1, 2]), 0).ok
    assert not compare(np.array([1, 2]), np.array([1, 3]), 0).ok


def test_a_limit_of_another_shape_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        compare(_floats(1, 2), _floats(1, 2), np.ones(3))


def test_logits_flip_is_allowed_only_within_twice_the_limit() -> None:
    want = _floats(1.0, 1.9, 2.0)
    flipped = _floats(1.0, 2.0, 1.9)
    near = compare_logits(flipped, want, 0.125)
    assert (near.top1_got, near.top1_want) == (1, 2)
    assert near.flip_allowed
    assert near.near_tie
    assert near.ok
    far = compare_logits(flipped, want, 0.04)
    assert not far.flip_allowed
    assert not far.ok


def test_logits_report_distribution_and_overlap() -> None:
    want = np.linspace(0, 3, 32, dtype=np.float32)
    same = compare_logits(want.copy(), want, 0.0)
    assert same.ok
    assert same.kl_divergence == 0.0
    assert same.top_k_overlap == same.top_k == 10
    other = compare_logits(want[::-1].copy(), want, 10.0)
    assert other.kl_divergence > 0.1
    assert other.top_k_overlap == 0
    assert not other.ok or other.flip_allowed


def test_logits_with_nan_say_nothing_and_fail() -> None:
    comparison = compare_logits(_floats(NAN, 1), _floats(0, 1), LIMIT)
    assert not comparison.ok
    assert np.isnan(comparison.kl_divergence)


def test_logits_of_several_rows_are_refused() -> None:
    rows = np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"\(vocab,\)"):
        compare_logits(rows, rows, LIMIT)


def test_top2_margin() -> None:
    assert top2_margin(_floats(3, 1, 3)) == 0.0
    assert top2_margin(_floats(1, 4, 2)) == 2.0
