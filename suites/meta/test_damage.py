"""The description of damage, on planted masks and planted values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.model.quant import format_of_type
from reference.model.weights import Tensor
from suites.harness.compare import Array
from suites.harness.damage import Damage, Layout, describe, features_text, runs, tokens_text
from suites.harness.damage_sums import wrong_part
from suites.harness.tolerances import UNIT_ROUNDOFF

ROWS, HEADS, SIZE = 21, 4, 64
CHUNKED = Layout(ROWS, chunk=8, columns=4)
IN_HEADS = Layout(ROWS, heads=HEADS)
Where = tuple[Any, ...]


def _want(heads: int = 1) -> Array:
    return np.random.default_rng(5).normal(size=(ROWS, heads, SIZE))


def _described(
    layout: Layout, where: Where, change: Callable[[Array], Array] = lambda x: x + 3.0
) -> Damage:
    """Float32 values with `change` at (rows, heads, elements) `where`."""
    want = _want(layout.heads)
    got = want.astype(np.float32)
    got[where] = change(want)[where]
    return describe(got, want, UNIT_ROUNDOFF * np.abs(want), layout)


EVERY = slice(None)


@pytest.mark.parametrize(
    ("layout", "rows", "text"),
    [
        (Layout(ROWS), EVERY, "at every token"),
        (Layout(ROWS), 20, "at token 20 only, the last"),
        (Layout(ROWS), 0, "at token 0 only, the first"),
        (Layout(ROWS), 7, "at token 7 only"),
        (CHUNKED, 16, "at token 16 only, the first of a chunk"),
        (CHUNKED, 7, "at token 7 only, the last of a chunk"),
        (CHUNKED, slice(16, 21), "at tokens 16 to 20, the last and partial chunk (5 of 8)"),
        (CHUNKED, slice(8, 21), "from token 8 on, where chunk 1 begins (chunks of 8)"),
        (CHUNKED, slice(3, 21, 4), "at column 3 of every product of up to 4 columns"),
        (CHUNKED, slice(4, 8), "at tokens 4 to 7, where a group of 4 columns begins"),
        (
            Layout(ROWS, chunk=10, columns=4),
            [8, 9, 18, 19],
            "at tokens 8, 9 and 18, 19, the last and partial group of columns of each whole chunk "
            "(2 of 4)",
        ),
        (CHUNKED, [7, 15, 20], "at the last token of every chunk (chunks of 8)"),
        (
            Layout(ROWS, chunk=8, columns=8),
            [i for i in range(ROWS) if (i + 1) % 8 and i != ROWS - 1],
            "at all but the last token of every chunk (chunks of 8)",
        ),
        (Layout(ROWS, chunk=40, columns=40), slice(1, 21), "at all tokens but the first"),
        (Layout(ROWS, chunk=40, columns=40), slice(0, 20), "at all tokens but the last"),
        (Layout(ROWS), slice(1, 21), "at all tokens but the first"),
        (CHUNKED, slice(1, 21), "at all tokens but the first"),
        (
            CHUNKED,
            [i for i in range(ROWS) if i % 8],
            "at all but the first token of every chunk (chunks of 8)",
        ),
        (Layout(ROWS, chunk=40, columns=1), slice(3, 9), "at tokens 3 to 8"),
        (CHUNKED, [0, 8, 16], "at the first token of every chunk (chunks of 8)"),
        (Layout(ROWS), slice(5, 21), "from token 5 to the last, 20"),
        (Layout(ROWS), slice(0, 21, 5), "at every 5th token from 0 to 20"),
        (Layout(ROWS), [2, 3, 4, 9, 11], "at tokens 2 to 4, 9 and 11"),
        (Layout(ROWS, first_token=40), EVERY, "at every token"),
    ],
)
def test_which_tokens(layout: Layout, rows: Any, text: str) -> None:
    assert _described(layout, (rows,)).tokens == text


def test_the_only_row_has_the_number_of_its_token() -> None:
    assert tokens_text(np.array([0]), 1, Layout(21, first_token=20)) == (
        "at token 20, the only one recorded"
    )


def test_which_heads() -> None:
    assert _described(IN_HEADS, (EVERY, [1, 3])).heads == "in heads 1 and 3 of 4"
    assert _described(IN_HEADS, (EVERY, 2)).heads == "in head 2 of 4"
    assert _described(IN_HEADS, (EVERY,)).heads == "in every head"
    assert _described(Layout(ROWS), (EVERY,)).heads == ""


@pytest.mark.parametrize(
    ("hit", "count", "text"),
    [
        (range(600), 600, "in every element of a row"),
        ([599], 600, "in element 599 (the last) of a row"),
        (range(300, 600), 600, "in the last 300 of 600 elements of a row, its second half"),
        (
            range(512, 600), 600,
            "in the last 88 of 600 elements of a row, what is left after whole blocks of 256",
        ),
        (
            range(576, 600), 600,
            "in the last 24 of 600 elements of a row, what is left after whole blocks of 32",
        ),
        (range(10), 600, "in the first 10 of 600 elements of a row"),
        (range(256, 512), 768, "in elements 256 to 511 of 768 of a row, one block of 256"),
        (range(32, 64), 768, "in elements 32 to 63 of 768 of a row, one block of 32"),
        (range(8, 16), 768, "in elements 8 to 15 of 768 of a row, one block of 8"),
        (range(1, 600, 2), 600, "in every odd element of a row"),
        (range(3, 600, 8), 600, "in every element whose index is 3 mod 8 of a row"),
        (range(7, 600, 32), 600, "in lane 7 of every wave (index mod 32) of a row"),
        (
            [i for i in range(1024) if i // 8 % 32 == 5], 1024,
            "in the 8-element stripes of lane 5 of a row",
        ),
        (
            [i for i in range(1024) if i % 256 in (40, 41)], 1024,
            "in elements 40, 41 of every block of 256 of a row",
        ),
        ([1, 5, 6, 300], 600, "in 4 of 600 elements of a row (1, 5, 6 and 300)"),
    ],
)  # fmt: skip
def test_which_elements(hit: Any, count: int, text: str) -> None:
    assert features_text(np.array(list(hit)), count, False) == text


@pytest.mark.parametrize(
    ("layout", "where", "change", "text"),
    [
        (Layout(ROWS), (3,), np.zeros_like, "they are 0"),
        (Layout(ROWS), (EVERY,), lambda x: x * 1.5, "got is want x 1.5"),
        (Layout(ROWS), (EVERY,), lambda x: -x, "got is want with its sign turned"),
        (Layout(ROWS), (EVERY,), lambda x: x + 0.25, "got is want + 0.25"),
        (Layout(ROWS), (EVERY,), lambda x: x - 0.25, "got is want - 0.25"),
        (Layout(ROWS), (EVERY,), lambda x: np.full_like(x, 7), "they are all 7"),
        (
            Layout(ROWS), (slice(1, ROWS),), lambda x: np.roll(x, 1, axis=0),
            "they are the values of the token before (column c - 1)",
        ),
        (
            Layout(ROWS), (slice(0, ROWS - 1),), lambda x: np.roll(x, -1, axis=0),
            "they are the values of the token after (column c + 1)",
        ),
        (
            CHUNKED, (slice(8, ROWS),), lambda x: np.roll(x, 8, axis=0),
            "they are the values of the same place of the chunk before (8 tokens back)",
        ),
        (
            CHUNKED, (slice(4, ROWS),), lambda x: np.roll(x, 4, axis=0),
            "they are the values of the same column of the product before (4 tokens back)",
        ),
        (
            CHUNKED, (slice(1, ROWS),), lambda x: x[np.arange(ROWS) // 8 * 8],
            "they are the values of the first token of their chunk",
        ),
        (
            Layout(ROWS), (slice(1, ROWS),), lambda x: np.broadcast_to(x[:1], x.shape),
            "they are the values of token 0",
        ),
        (
            IN_HEADS, (EVERY, [1, 2]), lambda x: x[:, [0, 2, 1, 3]],
            "head 1 holds head 2, head 2 holds head 1",
        ),
        (
            Layout(ROWS), ([9, 10],), lambda x: np.broadcast_to(x[8:9], x.shape),
            "token 9 holds token 8, token 10 holds token 8",
        ),
        (
            Layout(ROWS), (EVERY,),
            lambda x: x.reshape(ROWS, 1, SIZE // 2, 2)[..., ::-1].reshape(x.shape),
            "neighbours are swapped",
        ),
        (Layout(ROWS), (EVERY,), lambda x: np.roll(x, SIZE // 2, 2), "the two halves are swapped"),
        (Layout(ROWS), (EVERY,), lambda x: x[..., ::-1], "they are the values in reverse order"),
        (
            Layout(ROWS), (EVERY, EVERY, slice(1, SIZE)), lambda x: np.roll(x, 1, axis=2),
            "they are the values of the element before",
        ),
        (Layout(ROWS), (3, 0, [1, 2]), lambda x: x * np.nan, "they are NaN"),
    ],
)  # fmt: skip
def test_what_is_there_instead(
    layout: Layout, where: Where, change: Callable[[Array], Array], text: str
) -> None:
    assert _described(layout, where, change).values == text


def test_poison_is_told_from_another_nan() -> None:
    want = _want()
    got = want.astype(np.float32)
    got[4].view(np.uint32)[:] = 0xFFFFFFFF
    found = describe(got, want, np.abs(want), Layout(ROWS))
    assert found.values.startswith("they hold the poison of fresh memory")
    assert (found.bad, found.tokens) == (SIZE, "at token 4 only")


def test_counts_of_nan_and_poison_do_not_overlap_unsaid() -> None:
    want = _want()
    got = want.astype(np.float32)
    got[4] = np.nan
    got[5].view(np.uint32)[:] = 0xFFFFFFFF
    found = describe(got, want, np.abs(want), Layout(ROWS))
    assert found.values == f"they are NaN, {SIZE} of these the poison of fresh memory"
    got[6] = np.inf
    found = describe(got, want, np.abs(want), Layout(ROWS))
    assert found.values == (
        f"{2 * SIZE} of them are NaN, {SIZE} of these the poison of fresh memory, "
        f"{SIZE} of them are infinite"
    )


def test_bits_are_shown_to_the_last_digit() -> None:
    want = np.full((1, 1), np.float32(1.58492494))
    got = np.nextafter(want, np.float32(2))
    assert describe(got, want, np.zeros((1, 1)), Layout(1)).worst.endswith(
        "got 1.58492506, want 1.58492494, allowed 0"
    )


def test_what_is_finite_beside_nan_is_described_too() -> None:
    found = _described(Layout(ROWS), (EVERY,), lambda x: np.concatenate([x[:1] * np.nan, x[:-1]]))
    assert found.values == (
        f"{SIZE} of them are NaN; of the others: they are the values of the token before "
        "(column c - 1)"
    )


def test_an_input_that_was_passed_on_is_named() -> None:
    want = _want()
    source = np.random.default_rng(6).normal(size=want.shape)
    got = source.astype(np.float32)
    found = describe(got, want, UNIT_ROUNDOFF * np.abs(want), Layout(ROWS), {"ffn_inp-1": source})
    assert found.values == "they are the input ffn_inp-1, unchanged"


def test_factors_of_each_token() -> None:
    factors = np.linspace(1.1, 1.9, ROWS)[:, None, None]
    found = _described(Layout(ROWS), (EVERY,), lambda x: x * factors)
    assert found.values == "got is want times a factor of each token (1.1 to 1.9)"


def test_noise_is_no_relation() -> None:
    noise = np.random.default_rng(8).normal(size=(ROWS, 1, SIZE))
    assert _described(Layout(ROWS), (EVERY,), lambda x: x + noise).values == ""


def test_few_elements_fit_nothing() -> None:
    found = _described(Layout(ROWS), (3, 0, [5, 9]), lambda x: x * 1.5)
    assert (found.values, found.bad) == ("", 2)
    assert found.shares == "2 of 1,344 elements are above their limit"


def test_nothing_damaged_says_nothing() -> None:
    want = _want()
    found = describe(want, want, np.zeros_like(want), Layout(ROWS))
    assert (found.bad, found.tokens, found.values) == (0, "", "")


def test_one_sentence() -> None:
    found = _described(IN_HEADS, (20, 1, slice(32, 64)), lambda x: 0 * x)
    assert str(found).startswith(
        "32 of 5,376 elements are above their limit: at token 20 only, the last, in head 1 of 4, "
        "in the last 32 of 64 elements of each head, its second half; they are 0; worst at token 20"
    )


K, N = 1024, 40


def _product_damage(changed: Callable[[Array, Array], Array], columns: int = K) -> str:
    """Words on a product whose weights `changed(weights, k)` stand for what was summed."""
    rng = np.random.default_rng(9)
    weights = rng.normal(size=(N, columns)).astype(np.float32)
    x = rng.normal(size=(ROWS, columns)).astype(np.float32)
    tensor = Tensor("blk.0.w", format_of_type(0, "w"), (N, columns), weights.view(np.uint8))
    wide = weights.astype(np.float64)
    want = x.astype(np.float64) @ wide.T
    wrong = changed(wide.copy(), np.arange(columns))
    got = (x.astype(np.float64) @ wrong.T).astype(np.float32)
    return wrong_part(got, want, columns * UNIT_ROUNDOFF * np.abs(want), x, tensor)


def _times(weights: Array, columns: Array, factor: float) -> Array:
    weights[:, columns] *= factor
    return weights


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            lambda w, k: _times(w, k // 8 % 32 >= 16, 0.0),
            "part 4 to 7 of each block of 256 (parts of 32) (lane 16 to 31 (8-element stripes)): "
            "it is missing",
        ),
        (
            lambda w, k: _times(w, k // 8 % 32 == 5, 2.0),
            "belongs to lane 5 (8-element stripes): it is counted twice",
        ),
        (
            lambda w, k: _times(w, k % 256 // 32 == 3, 1.5),
            "part 3 of each block of 256 (parts of 32) (lane 12 to 15 (8-element stripes)): "
            "it is multiplied by 1.5",
        ),
        (
            lambda w, k: _times(w, k >= K - 256, 0.0),
            "block 3 of a row (blocks of 256): it is missing",
        ),
        (
            lambda w, k: _times(w, k % 8 == 7, 0.0),
            "place 7 of each 8-element stripe: it is missing",
        ),
    ],
    ids=["half-wave", "lane-twice", "scale-of-a-sub-block", "last-block", "end-of-stripes"],
)
def test_which_part_of_a_sum(changed: Callable[[Array, Array], Array], text: str) -> None:
    found = _product_damage(changed)
    assert found.startswith("the error is the part of the sum that belongs to ")
    assert found.endswith(text)


def test_the_tail_of_a_row_that_was_not_summed() -> None:
    found = _product_damage(lambda w, k: _times(w, k >= 512, 0.0), columns=600)
    assert found.endswith("belongs to what is left after whole blocks of 256: it is missing")


def test_a_sum_that_is_wrong_everywhere_has_no_part() -> None:
    assert _product_damage(lambda w, k: w * 1.5) == ""
    assert _product_damage(lambda w, k: w) == ""
    noise = np.random.default_rng(10).normal(size=(N, K))
    assert _product_damage(lambda w, k: w + noise) == ""


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, ROWS - 1), min_size=1), st.sets(st.integers(0, SIZE - 1), min_size=1))
def test_any_mask_is_counted_and_described(rows: set[int], elements: set[int]) -> None:
    where = np.ix_(sorted(rows), [0], sorted(elements))
    found = _described(CHUNKED, where)
    assert found.bad == len(rows) * len(elements)
    assert found.mask[where].all()
    assert int(found.mask.sum()) == found.bad
    assert found.tokens
    assert found.features
    assert found.worst


@given(st.sets(st.integers(0, 40), min_size=1))
def test_runs_name_what_they_cover(indices: set[int]) -> None:
    text = runs(sorted(indices))
    listed, more = text, 0
    if text.endswith(" more"):
        listed, _, number = text.removesuffix(" more").rpartition(" and ")
        more = int(number)
    covered: set[int] = set()
    for part in listed.replace(" and ", ", ").split(", "):
        first, _, last = part.partition(" to ")
        covered |= set(range(int(first), int(last or first) + 1))
    assert covered <= indices
    assert len(covered) + more == len(indices)


def test_at_most_three_runs_are_listed() -> None:
    assert runs([0, 1, 2, 5, 9]) == "0 to 2, 5 and 9"
    assert runs([0, 1, 2, 5, 9, 11, 12]) == "0 to 2, 5, 9 and 2 more"
