"""The one table of this suite: how far two float64 (or float32) programs may be apart, and why.

A limit is `share` of the largest magnitude (ops) or of the range (logits) of what is expected.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suites.harness.compare import Comparison, compare


@dataclass(frozen=True)
class Row:
    """`share` of the expected values' largest magnitude or range."""

    name: str
    share: float
    reason: str


_ROWS = (
    Row(
        "op",
        1e-13,
        "Two float64 evaluations of one op in another order: a few hundred roundings of 1.1e-16, "
        "sums of up to 256 terms included.",
    ),
    Row(
        "rope",
        1e-10,
        "An angle is position * frequency: at position 131,000 a rounding of the frequency by "
        "1.1e-16 of itself turns a pair by 1.5e-11.",
    ),
    Row(
        "exact",
        0.0,
        "Indices, and values that are only moved.",
    ),
    Row(
        "recurrence",
        1e-12,
        "Another form of the delta rule (chunks, a triangular solve) over up to 200 tokens.",
    ),
    Row(
        "model_float64",
        1e-12,
        "A whole model twice in float64: 9 layers amplify roundings of 1.1e-16 to 4e-14 at most. "
        "A formula that differs anywhere shows at 1e-3 and more.",
    ),
    Row(
        "model_stored_factors",
        1e-5,
        "rope_freqs are float32 in a file: each angle is off by up to 6e-8 of itself, and angles "
        "reach 100 radians.",
    ),
    Row(
        "model_float32",
        1e-3,
        "transformers as it is, in float32, against the float32 reference: both round, and delta "
        "nets amplify; the share is the one that the goldens use.",
    ),
)
TABLE: Mapping[str, Row] = {row.name: row for row in _ROWS}


def against(got: Any, want: Any, name: str, *, share_of: str = "magnitude") -> Comparison:
    """Compares with the row's limit; both sides as arrays or torch tensors."""
    wanted: NDArray[Any] = np.asarray(want)
    scale = float(np.ptp(wanted) if share_of == "range" else np.abs(wanted).max())
    return compare(np.asarray(got), wanted, TABLE[name].share * scale)


def require_agreement(got: Any, want: Any, name: str, *, share_of: str = "magnitude") -> None:
    """AssertionError unless `got` is within the row's limit of `want`, everywhere."""
    found = against(got, want, name, share_of=share_of)
    assert found.ok, f"{name}: {found.reason()}; {found.worst_difference}"
    assert found.elements == np.asarray(want).size > 0
