"""Every tolerance, with its reason: local limits, logits end to end, recorded logits, trace files.

The rows of single ops are in local_tolerances.py and are offered here too.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suites.harness.chains import summation
from suites.harness.local_tolerances import (
    SECOND_ORDER,
    SMALLEST_NORMAL,
    TABLE,
    UNIT_ROUNDOFF,
    Row,
    RowKey,
    consulted_rows,
    gamma,
    row,
)

__all__ = [
    "BYTE_UNIT",
    "DIGIT_SHARE",
    "END_TO_END",
    "FEW_ROUNDINGS",
    "FLOAT64_BOUND_SHARE",
    "FLOAT64_NOISE",
    "FLOAT64_SUMS",
    "LIKELY",
    "ORACLE_TIE_MARGIN",
    "RELATION",
    "SECOND_ORDER",
    "SENSITIVITY",
    "SMALLEST_KEPT",
    "SMALLEST_NORMAL",
    "SMALLEST_SHARE",
    "SPLIT_FLOOR",
    "TABLE",
    "TIED_LOGITS",
    "TRACE_FILES",
    "UNIT_ROUNDOFF",
    "USEFUL_BOUND",
    "EndToEnd",
    "Relation",
    "Row",
    "RowKey",
    "TraceFiles",
    "consulted_rows",
    "float64_forms_limit",
    "gamma",
    "oracle_limit",
    "recorded_margin_limit",
    "row",
    "summation",
]

# Sums of 32 activations are divided by 64 and split into halves hi and lo. lo is a multiple of
# 2^-24, so a sum may be off by 64 * 2^-25: 2^-33 of a row's largest magnitude, 2^14 and more. This
# share of the largest beside each of the 32 counts as much, because relative(K) is above 2^-15.
SPLIT_FLOOR = 2.0**-22

# kernels/attention_bytes.h: a number is cut off to units of at most this share of the largest that
# it is kept beside: of 32 elements of a query, or, as weight times scale, of a split's keys.
BYTE_UNIT = 2.0**-29

# kernels/digits.h: an activation is off by at most this share of the largest of the 32 that it is
# kept beside, or of SMALLEST_KEPT.
DIGIT_SHARE = 2.0**-22
SMALLEST_KEPT = 2.0**-105


@dataclass(frozen=True)
class EndToEnd:
    """The row of the logits.

    limit = distance_factor * max|ref32 - ref64| + kv_factor * max|ref64(kv) - ref64(kv f32)|
            + product_factor * max|ref64(products of halves) - ref64|

    The first term measures how this model and prompt amplify float32 rounding, whatever its order:
    the largest of several samples, because one alone is small by luck for one token in a hundred of
    a recurrent model. The factor covers an order of summation other than the reference's and the
    maximum over other elements. The second is the declared rounding of the KV cache: a last-bit
    difference before the
    rounding flips a code of the storage type, which moves by one unit in the last place, twice the
    largest rounding error. Few codes flip, but in a short prompt one alone can move the logits by
    as much as rounding all of them does.

    The third is the declared rounding of path matrix, in the prompt's products and what follows
    from them: once for itself, and once more because the same last-bit differences flip codes of
    halves. It is the largest of several samples for the reason of the first: of 300 clean runs of
    25 tiny models one sample alone was below half of the error in one.

    What path digits rounds has no term: 2^-22 of a block's largest activation is of the size of
    what float32 sums lose. Of this limit with an f32 cache its logits use 0.12 to 0.15, those of
    kparallel 0.06 to 0.08 (6 tiny models, 5 seeds).

    Measured on clean runs of the CPU runtime (10 tiny models, 12 seeds, 4,640 positions for each KV
    type): the largest error is 1.7 float32 distances with an f32 cache and 1.2 KV distances with an
    f16 one, so both constants leave more than 1.7 times that.
    """

    distance_factor: float
    kv_factor: float
    product_factor: float
    reason: str

    def limit(
        self, float32_distance: float, kv_distance: float, product_distance: float = 0.0
    ) -> float:
        return (
            self.distance_factor * float32_distance
            + self.kv_factor * kv_distance
            + self.product_factor * product_distance
        )


END_TO_END = EndToEnd(
    distance_factor=8.0,
    kv_factor=2.0,
    product_factor=2.0,
    reason="float32 to float64 distance of the reference on this prompt, KV codes that flip, and "
    "what a path's products round by declaration",
)


# Agreement with llama.cpp's recorded logits, as a share of their range. Every deliberate error
# tried on these models (wrong RoPE pairing, window one wider, ...) moves logits by 0.6 or more of a
# range of 12 to 18, rounding by less than 8e-5, so this separates right from wrong with room on
# both sides. The published Gemma was recorded with llama.cpp's half-precision GELU table.
_ORACLE_SHARE = 1e-3
_ORACLE_SHARE_GELU_TABLE = 1e-2

# Greedy continuations are compared until the oracle's top-2 margin falls below this: under it the
# choice rests on rounding (its own configurations part at margins of 0.01).
ORACLE_TIE_MARGIN = 0.05


def oracle_limit(model: str, logits: NDArray[np.floating[Any]]) -> float:
    """Absolute limit for logits recorded from llama.cpp on a golden model."""
    share = _ORACLE_SHARE_GELU_TABLE if model == "gemma3-270m" else _ORACLE_SHARE
    return share * float(np.ptp(logits))


def recorded_margin_limit(logits: NDArray[np.float32]) -> float:
    """Absolute limit of a recorded top-2 margin against the recorded logits themselves: both sides
    are float32, and each of two values may be rounded twice in units of the largest logit.
    """
    return 4 * float(np.spacing(np.abs(logits).max()))


# Two float64 programs for one recurrence (the delta net's step and chunk forms, a convolution)
# agree up to rounding: 2^-53 times some hundred compounded operations, well conditioned because
# keys are unit vectors and decays at most 1. Measured 8e-14 of the largest value; a misplaced
# decay, token or head moves results by 1e-2 of it or more.
_FLOAT64_FORMS_SHARE = 1e-11


def float64_forms_limit(values: NDArray[np.floating[Any]]) -> float:
    """Absolute limit between two float64 evaluations of the same function."""
    return _FLOAT64_FORMS_SHARE * float(np.abs(values).max())


# What a tiny model's logits must move by when one tensor or rule is taken away, so that a fault in
# it shows: ten times the oracle's limit on their range of about 20, thousands of times rounding.
SENSITIVITY = 0.1


@dataclass(frozen=True)
class TraceFiles:
    """The row of `assay compare`: a share of the largest magnitude at a point."""

    share: float
    reason: str


TRACE_FILES = TraceFiles(
    share=2.0**-7,
    reason="Without the model nothing can be evaluated again, and errors are inherited through all "
    "layers: float16 KV codes that flip (2^-10 each) grow to 2^-8 of a row's largest magnitude in "
    "attention results of the published models, where values cancel. Twice the most that was seen.",
)


@dataclass(frozen=True)
class Relation:
    """When a description of damage (twice the value, the token before) is said to explain it.

    `share`: what the description leaves, as a share of the damage. `elements`: with fewer damaged
    elements than this nothing that is fitted to them is named. This judges nothing.
    """

    share: float
    elements: int
    reason: str


RELATION = Relation(
    share=0.05,
    elements=8,
    reason="The smallest factor that a local limit shows is some 1e-6 of a value that rounding "
    "knows to 1e-7, so a true factor leaves percents; another token's or head's values are as far "
    "from it as from the right ones. Eight elements do not fit one number by chance.",
)


# --- what tests of the reference and of the judge allow -------------------------------------------

# A formula of up to nine float64 operations (RoPE frequencies, YaRN's magnitude), 1.1e-16 each: a
# share of the value.
FEW_ROUNDINGS = 1e-15

# Probabilities of up to a few hundred float64 terms, summed in two orders: a share of the value.
FLOAT64_SUMS = 1e-13

# What rounding in float64 does to functions of the size of the judge's tests (values to 1e3): an
# absolute error, and the share that a bound of the same function is itself off by.
FLOAT64_NOISE = 1e-13
FLOAT64_BOUND_SHARE = 1e-9

# The p-value below which draws are not of the distribution that they should be of. The seeds are
# fixed, so that this is no chance; a wrong distribution has one below 1e-10.
LIKELY = 1e-3

# Share of an op's limit that its worst element uses in fourteen clean runs: an op that stays below
# has a limit that hides faults. The least that was measured is 0.01 (experts).
SMALLEST_SHARE = 0.005

# Share of the largest value that the limit of a recurrence may reach after 400 tokens. What faults
# change is of the size of the values.
USEFUL_BOUND = 1e-2

# The span of float32 router logits that are equal but for rounding, where equal rows of the router
# make them; logits of rows that differ span 0.1 or more.
TIED_LOGITS = 1e-4

# Root mean square of what two paths' logits differ by, as a share of the logits' own standard
# deviation, up to which a benchmark of a model that is too large for the reference takes them for
# one network's. Halves round by 2^-11 at each product: 0.008 at most on the tiny models; more
# layers and routers that flip between near-ties add to it. Logits of two networks have 1.4, an
# eighth of them wrong leaves 0.5: this guards a table against gross faults, and judges nothing.
RELATED_LOGITS = 0.5
