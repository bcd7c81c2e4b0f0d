"""Which part of a product's sum is wrong: a lane's, a block's, a place's in the block.

got - want is explained by the parts of the sum x . w that each class of a partition of the columns
k holds: one factor a class, by least squares. A factor of -1 says that the part is missing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference.dequant import dequantise
from reference.model.weights import Tensor
from suites.harness.compare import Array
from suites.harness.damage import BLOCKS, LANES, STRIPE, runs
from suites.harness.tolerances import RELATION

ROWS, OUTPUTS = 6, 192
"""At most so many damaged tokens and outputs are looked at; a relation shows in all of them."""
CLASSES = 64


@dataclass(frozen=True)
class Partition:
    """`key` (K,) gives each column of the matrix its class; `words` has a place for the classes."""

    words: str
    key: NDArray[np.int64]


def partitions(columns: int) -> Iterator[Partition]:
    k = np.arange(columns, dtype=np.int64)
    for block in BLOCKS:
        part = columns % block
        if part and columns > block:
            tail = (k >= columns - part).astype(np.int64)
            yield Partition(f"what is left after whole blocks of {block}", tail)
    yield Partition(f"lane {{}} ({STRIPE}-element stripes)", k // STRIPE % LANES)
    yield Partition(f"place {{}} of each {STRIPE}-element stripe", k % STRIPE)
    yield Partition("part {} of each block of 256 (parts of 32)", k % 256 // 32)
    yield Partition("part {} of each block of 256 (parts of 16)", k % 256 // 16)
    yield Partition("half {} of each block of 32", k % 32 // 16)
    for block in BLOCKS:
        yield Partition(f"block {{}} of a row (blocks of {block})", k // block)


def wrong_part(got: Array, want: Array, limit: Array, x: Array, matrix: Tensor) -> str:
    """Words for the part of the sum that is wrong; empty where no partition explains the damage.

    got, want, limit (T, N), x (T, K), matrix (N, K).
    """
    count, columns = matrix.shape[0], matrix.shape[1]
    got, want, limit = (array.reshape(-1, count) for array in (got, want, limit))
    x = x.reshape(len(x), -1)[len(x) - len(got) :].astype(np.float64)
    mask = ~(np.abs(got - want) <= limit)
    rows = np.flatnonzero(mask.any(axis=1) & np.isfinite(got).all(axis=1))[:ROWS]
    if not len(rows):
        return ""
    outputs = np.flatnonzero(mask[rows].any(axis=0))[:OUTPUTS]
    damage = (got.astype(np.float64) - want)[np.ix_(rows, outputs)].ravel()
    weights = dequantise(matrix.format, matrix.raw[outputs], np.float64)
    found: list[_Explained] = []
    for partition in partitions(columns):
        classes = np.unique(partition.key)
        if not 2 <= len(classes) <= CLASSES or damage.size < 2 * len(classes):
            continue
        parts = [
            (x[rows][:, partition.key == c] @ weights[:, partition.key == c].T).ravel()
            for c in classes
        ]
        explained = _explained(partition, classes, np.stack(parts, axis=1), damage)
        found += [] if explained is None else [explained]
    return _text(found)


@dataclass(frozen=True)
class _Explained:
    partition: Partition
    classes: NDArray[np.int64]
    factors: Array

    def __str__(self) -> str:
        return self.partition.words.format(runs(self.classes))


def _explained(
    partition: Partition, classes: NDArray[np.int64], parts: Array, damage: Array
) -> _Explained | None:
    factors = np.linalg.lstsq(parts, damage, rcond=None)[0]
    wrong = np.abs(factors) > RELATION.share
    if not wrong.any() or 2 * np.count_nonzero(wrong) > len(classes):
        return None
    if "{}" not in partition.words and classes[wrong].tolist() != [1]:
        return None  # the words speak of class 1
    # Again with the wrong classes alone, so that the others can't soak up what is left.
    factors = np.linalg.lstsq(parts[:, wrong], damage, rcond=None)[0]
    left = np.linalg.norm(damage - parts[:, wrong] @ factors)
    if not left <= RELATION.share * np.linalg.norm(damage):
        return None
    return _Explained(partition, classes[wrong], factors)


def _text(found: list[_Explained]) -> str:
    """The partition with the fewest wrong classes; the lanes beside it, which may be the cause."""
    if not found:
        return ""
    best = min(found, key=lambda explained: len(explained.classes))
    lanes = [e for e in found if e is not best and e.partition.words.startswith("lane")]
    also = f" ({lanes[0]})" if lanes else ""
    return f"the error is the part of the sum that belongs to {best}{also}: {_said(best.factors)}"


def _said(factors: Array) -> str:
    low, high = float(factors.min()), float(factors.max())
    if high - low > RELATION.share:
        return f"it is multiplied by {1 + low:.4g} to {1 + high:.4g}"
    mean = float(factors.mean())
    if abs(mean + 1) <= RELATION.share:
        return "it is missing"
    if abs(mean - 1) <= RELATION.share:
        return "it is counted twice"
    return f"it is multiplied by {1 + mean:.4g}"
