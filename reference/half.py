"""The roundings that matrix units declare: weights and activations as float16, sums as they may.

Scaling a row by a power of two is exact, so a row's rounding depends on its largest magnitude only
where values would otherwise overflow or become subnormal. Both functions return float64.
"""

import numpy as np
from numpy.typing import NDArray

from reference.ops import Array

_PEAK_EXPONENT = 15  # a row's largest magnitude becomes 2^14 to 2^15, below float16's 65,504
_LARGEST_SHIFT = 126  # float32 holds 2^126 and its inverse as normal numbers


def half_weights(weight: Array) -> NDArray[np.float64]:
    """The values rounded to float16, nearest even; above 65,504 infinite."""
    with np.errstate(over="ignore"):
        return weight.astype(np.float16).astype(np.float64)


def half_rows(x: Array) -> NDArray[np.float64]:
    """(..., K) rounded to float16 after each row was scaled by a power of two, and scaled back.

    A row that is not finite is rounded as it is.
    """
    wide = x.astype(np.float64)
    peak = np.max(np.abs(wide), axis=-1, keepdims=True, initial=0.0)
    shift = np.minimum(_PEAK_EXPONENT - np.frexp(peak)[1], _LARGEST_SHIFT)
    shift = np.where(np.isfinite(peak), shift, 0)
    return np.ldexp(half_weights(np.ldexp(wide, shift)), -shift)
