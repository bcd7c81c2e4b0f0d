"""Choosing the next token on the host: one module, so that both sides draw the same one.

Order as in llama.cpp's default chain: top-k, top-p, min-p, temperature. Temperature 0 is greedy.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference.model.errors import InputError


@dataclass(frozen=True)
class SamplingOptions:
    """`top_k` 0, `top_p` 1 and `min_p` 0 switch the filter off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), ">= 0"),
            ("top_k", self.top_k, self.top_k >= 0, ">= 0"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1"),
        )
        for name, value, good, expected in checks:
            if not good:
                raise InputError(f"sampling: {name} is {value}, expected {expected}")


def argmax(logits: NDArray[np.floating]) -> int:
    """Index of the largest of (V,) logits, the lowest one on ties. NaN is an InputError."""
    if logits.ndim != 1 or logits.size == 0:
        raise InputError(f"argmax: logits have shape {logits.shape}, expected (vocabulary,)")
    nan_count = int(np.isnan(logits).sum())
    if nan_count:
        first = int(np.flatnonzero(np.isnan(logits))[0])
        raise InputError(
            f"argmax: {nan_count} of {logits.size} logits are NaN (first at {first}), "
            "expected numbers because no token can be chosen"
        )
    return int(np.argmax(logits))


def sample(
    logits: NDArray[np.floating], options: SamplingOptions, generator: np.random.Generator
) -> int:
    """Draws one token id from (V,) logits.

    The same PCG64 state and logits give the same id; exactly one random number is used per draw.
    """
    best = argmax(logits)
    if options.temperature == 0:
        return best
    # A stable sort of the negated logits keeps the lowest index first among equals.
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    if options.top_k:
        order = order[: options.top_k]
    kept = logits.astype(np.float64)[order]
    probability = np.exp(kept - kept[0])
    probability /= probability.sum()
    # The token that crosses top_p stays in, so at least one always does.
    inside = np.cumsum(probability) - probability < options.top_p
    inside &= probability >= options.min_p * probability[0]
    order, kept = order[inside], kept[inside]
    weight = np.exp((kept - kept[0]) / options.temperature)
    threshold = generator.random() * weight.sum()
    return int(
        order[min(int(np.searchsorted(np.cumsum(weight), threshold, "right")), len(order) - 1)]
    )


def new_generator(seed: int) -> np.random.Generator:
    """PCG64 from one integer, spread by SeedSequence."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
