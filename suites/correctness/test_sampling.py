"""Host sampling: ties, filters, seeds."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from reference.model.errors import InputError
from reference.model.sampling import SamplingOptions, argmax, new_generator, sample
from suites.harness.tolerances import FLOAT64_SUMS, LIKELY

LOGITS = np.array([0.0, 3.0, 1.0, 3.0, 2.0, -np.inf], dtype=np.float32)


def test_argmax_takes_the_lowest_index_on_ties() -> None:
    assert argmax(LOGITS) == 1
    assert argmax(np.array([0.0, -0.0], dtype=np.float32)) == 0
    assert argmax(np.array([-0.0, 0.0], dtype=np.float32)) == 0
    assert argmax(np.full(5, -np.inf, dtype=np.float32)) == 0


def test_argmax_refuses_nan_and_wrong_shapes() -> None:
    with pytest.raises(InputError, match=r"1 of 3 logits are NaN \(first at 2\)"):
        argmax(np.array([0.0, 1.0, np.nan]))
    for wrong in (np.zeros((0,)), np.zeros((1, 3))):
        with pytest.raises(InputError, match="logits have shape"):
            argmax(wrong)


@given(
    hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(-30, 30, width=32)),
    st.integers(0, 2**32 - 1),
)
def test_filters_that_leave_one_token_are_greedy(logits: np.ndarray, seed: int) -> None:
    best = argmax(logits)
    for options in (
        SamplingOptions(),
        SamplingOptions(temperature=1.0, top_k=1),
        SamplingOptions(temperature=1.0, top_p=1e-9),
    ):
        assert sample(logits, options, new_generator(seed)) == best


@given(
    hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(-30, 30, width=32)),
    st.integers(0, 50),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.1, 5.0),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=200)
def test_draws_stay_inside_every_filter_and_repeat(
    logits: np.ndarray, top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    options = SamplingOptions(temperature, top_k, top_p, min_p)
    token = sample(logits, options, new_generator(seed))
    assert token == sample(logits, options, new_generator(seed))
    wide = logits.astype(np.float64)
    probability = np.exp(wide - wide.max())
    larger = int((logits > logits[token]).sum())
    if top_k:
        assert larger < top_k
    assert probability[token] >= min_p * (1 - FLOAT64_SUMS)


def test_temperature_one_draws_the_softmax() -> None:
    wide = LOGITS.astype(np.float64)
    expected = np.exp(wide) / np.exp(wide).sum()
    generator = new_generator(20260101)
    draws = 20_000
    seen = Counter(
        sample(LOGITS, SamplingOptions(temperature=1.0), generator) for _ in range(draws)
    )
    possible = np.flatnonzero(expected)
    assert set(seen) <= set(possible.tolist())
    counts = [seen[token] for token in possible.tolist()]
    # A fixed seed, so this is one deterministic draw and not a gamble.
    assert stats.chisquare(counts, expected[possible] * draws).pvalue > LIKELY


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1),
     ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", float("nan"))],
)  # fmt: skip
def test_bad_options_are_refused(field: str, value: float) -> None:
    with pytest.raises(InputError, match=f"sampling: {field} is"):
        SamplingOptions(**{field: value})  # type: ignore[arg-type]
