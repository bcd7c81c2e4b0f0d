"""The one table of local tolerances: a row for each (op, rounding), with its reason.

Limits are derived, not tuned. A local limit is

    roundings(n) * u * magnitude        u = 2^-24, the unit roundoff of float32

with `n` the length of the op's sum and `magnitude` the op's sum of absolute terms, taken from the
ENGINE's recorded inputs (bounds.py). It bounds one op alone and is never chained through layers.
Worst-case constants follow Higham, Accuracy and Stability of Numerical Algorithms, chapter 3: a sum
whose longest chain of additions is d steps is off by at most gamma(d) = d*u / (1 - d*u) times the
sum of its absolute terms.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

from reference.model.errors import Unsupported
from suites.harness.chains import attention_sum, digits, matrix_unit, striped
from suites.harness.kernel_shapes import (
    EXP_ROUNDINGS,
    LOG1P_ROUNDINGS,
    NORM_BLOCK,
    NORM_WAVES,
    SCORE_LANE,
    SUPER_BLOCK_LANE_ELEMENTS,
    TANH_ROUNDINGS,
    TREE_LEVELS,
)

RowKey = tuple[str, str]
"""Op and rounding: the path whose order of summation is meant, or "any"."""

UNIT_ROUNDOFF = 2.0**-24
SMALLEST_NORMAL = 2.0**-126

# Where one check spans several operations, the rounding of a value that is already off is taken at
# the exact value. The neglected part is that rounding's share of an error: below 2^-10 of it.
SECOND_ORDER = 1 + 2.0**-10


@dataclass(frozen=True)
class Row:
    """`roundings(n)` unit roundoffs are allowed on the op's magnitude for a sum of n terms.

    `rounding` is the path whose order of summation the row describes, or "any"; on a path where
    the order depends on the weights' format, what `summation` says.
    """

    op: str
    rounding: str
    roundings: Callable[[int], float]
    magnitude: str
    reason: str

    def relative(self, n: int = 1) -> float:
        """The relative limit for a sum of n terms."""
        return gamma(self.roundings(n))


def gamma(roundings: float) -> float:
    """d*u / (1 - d*u), the standard bound on d compounded roundings."""
    amount = roundings * UNIT_ROUNDOFF
    if not amount < 1:
        raise ValueError(f"tolerances: {roundings} roundings are more than float32 can bound")
    return amount / (1 - amount)


_ROWS = (
    Row(
        "embed",
        "any",
        lambda n: 2,
        "|scale * embedding|",
        "The table's value is exact; a scale rounds once itself and once in the product.",
    ),
    Row(
        "rms_norm",
        "any",
        lambda n: 0.5 * (math.ceil(n / NORM_BLOCK) + TREE_LEVELS + NORM_WAVES + 3) + 5,
        "|y|",
        "The sum of squares has positive terms, so its relative error is its depth; the root "
        "halves it; then mean, epsilon, root, division and two products round once each.",
    ),
    Row(
        "linear",
        "kparallel",
        striped,
        "sum |w||x|",
        "A lane adds 8 products a step over ceil(K / (8 * 32)) steps, five butterfly levels "
        "follow, and a product may round by itself. Weights are the file's float32 values exactly.",
    ),
    Row(
        "linear",
        "kparallel K",
        partial(striped, unit=SUPER_BLOCK_LANE_ELEMENTS),
        "sum |w||x|",
        "The same with units of 32: ceil(K / (32 * 32)) steps. Of a short row few lanes have one.",
    ),
    Row(
        "linear",
        "digits",
        digits,
        "sum (|factor q| + |offset|) |x|",
        "Activations are three digits (bytes) each, whose products with a K format's integers are "
        "exact. Their sums become a float with two roundings, a sum of activations with three; two "
        "multiply-adds join each of up to four groups that a lane takes a step, over "
        "ceil(n / (64 * 32)) steps, and five butterfly levels follow. An activation is rounded to "
        "2^-22 of the largest of its 32 by declaration: as much is added for each.",
    ),
    Row(
        "linear",
        "serial",
        lambda n: n + 1,
        "sum |w||x|",
        "One thread walks all of K: every product joins one chain of K additions.",
    ),
    Row(
        "linear",
        "matrix",
        matrix_unit,
        "sum |w||x| of the halves; K formats: sum (|d sc q| + |offset|) |x|",
        "Products of halves are exact. A unit adds 16 of them and the running sum in an order and "
        "with a rounding of its own: aligned to the largest and cut off, each of the 17 may lose "
        "two unit roundoffs of the sum of absolute terms. Up to 8 waves' sums follow. The rounding "
        "of both factors to halves is declared, and the value follows it; weights of a K format "
        "may be exact instead: d is applied to sums of at most 256 terms, which rounds less often "
        "than sums of all K would, and offsets are summed apart, so that both terms count.",
    ),
    Row(
        "rope",
        "any",
        lambda n: 4,
        "|a cos| + |b sin|",
        "cos and sin (with YaRN's magnitude in them) are float64 values rounded once; two products "
        "and one sum round once each. Elements that are not rotated are copies.",
    ),
    Row(
        "score",
        "any",
        lambda n: min(n, SCORE_LANE) + 1 + TREE_LEVELS + 1,
        "scale * sum |q||k|",
        "A lane's products, a butterfly over the lanes of a key, and the scale of the scores. Of "
        "q8_0 less: sums of bytes are exact, a block's sums round once and join a chain of blocks.",
    ),
    Row(
        "softmax",
        "any",
        lambda n: EXP_ROUNDINGS + 2,
        "p * (|v| + |out|)",
        "A relative error of exp is the absolute error of its argument (the score's, and one "
        "rounding of score - maximum) plus exp's own.",
    ),
    Row(
        "attention_sum",
        "any",
        attention_sum,
        "sum p|v| + |out|",
        "Weighted sum and normaliser: a lane's chain over a split's keys (of q8_0 only each weight "
        "times its scale), a butterfly and the block's waves; each split rescales both by "
        "one exp, a product and a sum; the division rounds once.",
    ),
    Row(
        "exponent",
        "any",
        lambda n: 1,
        "|score - maximum|",
        "The difference that exp gets, rounded once: what is absolute there is relative behind.",
    ),
    Row(
        "silu",
        "any",
        lambda n: EXP_ROUNDINGS + 4,
        "|y|",
        "exp of an exact argument, 1 + exp, division and product by up; all terms positive.",
    ),
    Row(
        "gelu_tanh",
        "any",
        lambda n: TANH_ROUNDINGS,
        "|up * gate / 2| * |tanh|",
        "tanh's own error, absolute in 1 + tanh, which cancels for negative gates.",
    ),
    Row(
        "gelu_argument",
        "any",
        lambda n: 6,
        "|up * gate / 2| * |argument| * (1 - tanh^2)",
        "sqrt(2/pi) g (1 + 0.044715 g^2): constant, product, sum, product round once each; three "
        "roundings of the cubic term count by its share, above 2/3 only where 1 - tanh^2 is 0.",
    ),
    Row(
        "gelu_sum",
        "any",
        lambda n: 1,
        "|up * gate / 2| * 1",
        "1 + tanh rounds once, in units of 1 because it is at most 2: absolute.",
    ),
    Row(
        "gelu_products",
        "any",
        lambda n: 3,
        "|y|",
        "A half, the gate, 1 + tanh and up: three products in any order.",
    ),
    Row("add", "any", lambda n: 1, "|a + b|", "One addition, rounded once."),
    Row(
        "bias",
        "any",
        lambda n: 1,
        "|x . w + bias|",
        "One addition after a projection, rounded once.",
    ),
    Row(
        "scaled",
        "any",
        lambda n: 2,
        "|(a + b) * scale|",
        "A sum and a product round once each; the scale is the file's float32 value.",
    ),
    Row(
        "soft_cap",
        "any",
        lambda n: TANH_ROUNDINGS + 2,
        "|cap * tanh|",
        "tanh's own error, the cap (a float64 in the file, float32 in the engine) and the product; "
        "the argument's error passes through 1 - tanh^2 beside this.",
    ),
    Row(
        "soft_cap_argument",
        "any",
        lambda n: 2,
        "|x / cap|",
        "The quotient and the cap round once each.",
    ),
    Row(
        "sigmoid",
        "any",
        lambda n: EXP_ROUNDINGS + 2,
        "|y|",
        "exp of an exact argument, 1 + exp and a division; all terms positive.",
    ),
    Row(
        "sigmoid_gated",
        "any",
        lambda n: EXP_ROUNDINGS + 3,
        "|x * sigmoid(gate)|",
        "The sigmoid and one product.",
    ),
    Row(
        "softplus",
        "any",
        lambda n: EXP_ROUNDINGS + LOG1P_ROUNDINGS + 2,
        "|softplus(x) * a|",
        "log1p damps the relative error of exp; log1p itself, the sum with x (both positive) and "
        "the product with a round after it. The error of alpha + bias passes through the slope.",
    ),
    Row(
        "softplus_argument",
        "any",
        lambda n: 1,
        "|alpha + bias|",
        "One addition, rounded once.",
    ),
    Row(
        "convolution",
        "any",
        lambda n: n,
        "sum |x||tap|",
        "One product per tap and a chain over all of them, in any order.",
    ),
    Row(
        "unit_heads",
        "any",
        lambda n: 0.5 * (n + 1) + 4,
        "|y|",
        "The sum of squares over the head in any order and epsilon, halved by the root; then root, "
        "division by the length, sqrt(head size) as a float32 and division by it round once each.",
    ),
    Row(
        "delta_decay",
        "any",
        lambda n: EXP_ROUNDINGS + 1,
        "|e^g S|",
        "exp of the recorded log decay and one product per state element.",
    ),
    Row(
        "delta_read",
        "any",
        lambda n: n,
        "sum |S||k| or sum |S||q|",
        "One chain of fused multiply-adds over the key index.",
    ),
    Row(
        "delta_correction",
        "any",
        lambda n: 2,
        "|(v - S^T k) * beta|",
        "A difference and a product round once each.",
    ),
    Row(
        "delta_update",
        "any",
        lambda n: 1,
        "|S|",
        "One fused multiply-add per state element.",
    ),
    Row(
        "router",
        "any",
        lambda n: row("rms_norm").roundings(n) + 3,
        "|y|",
        "RMS norm without weight, then 1 / sqrt(E) (rounded itself) and the scale.",
    ),
    Row(
        "routing_weights",
        "any",
        lambda n: 2 * EXP_ROUNDINGS + n + 3,
        "w",
        "exp above and below the line, the sum over n chosen experts, and two divisions; the sum "
        "over all experts cancels. The rounding of logit - maximum is exp's argument's, beside.",
    ),
    Row(
        "combine_experts",
        "any",
        lambda n: n + 1,
        "sum over the chosen |w * scale * y|",
        "Two products per expert and a chain over n of them.",
    ),
    Row(
        "per_layer_input",
        "any",
        lambda n: 3,
        "|projected + table| / sqrt(2)",
        "A sum and a product with a rounded constant.",
    ),
    Row(
        "rescale",
        "any",
        lambda n: 2,
        "|x * constant|",
        "A product with a constant that was rounded to float32 itself.",
    ),
)

TABLE: Mapping[RowKey, Row] = {(row.op, row.rounding): row for row in _ROWS}


_consulted: ContextVar[set[RowKey] | None] = ContextVar("consulted", default=None)


@contextmanager
def consulted_rows() -> Iterator[set[RowKey]]:
    """A set that receives the (op, rounding) of each row and promise looked up in the block."""
    rows: set[RowKey] = set()
    token = _consulted.set(rows)
    try:
        yield rows
    finally:
        _consulted.reset(token)


def consult(key: RowKey) -> None:
    """Notes that a limit is made of this row."""
    rows = _consulted.get()
    if rows is not None:
        rows.add(key)


def row(op: str, rounding: str = "any") -> Row:
    """The row of an op for a path, or the one for any path; Unsupported names what exists."""
    found = TABLE.get((op, rounding), TABLE.get((op, "any")))
    if found is None:
        known = sorted(path for name, path in TABLE if name == op)
        raise Unsupported(
            f"tolerances: {op} has no row for path {rounding}; rows exist for: {', '.join(known)}"
        )
    consult((found.op, found.rounding))
    return found
