"""The longest chain of roundings of a product's or an attention's sum, by the kernels' shapes."""

import math

from backend_hip.attention_shape import SPLIT_KEYS
from backend_hip.wave import WAVE
from suites.harness.kernel_shapes import (
    ATTENTION_CHAIN,
    ATTENTION_WAVES,
    DIGIT_GROUPS,
    DIGIT_PART,
    EXP_ROUNDINGS,
    FRAGMENT_K,
    LANE_ELEMENTS,
    MATRIX_WAVES,
    SUPER_BLOCK,
    TREE_LEVELS,
)


def striped(n: int, unit: int = LANE_ELEMENTS) -> float:
    steps = math.ceil(n / (unit * WAVE))
    return unit * steps + TREE_LEVELS + 1


def summation(path: str, block_elements: int) -> str:
    """Which row of "linear" bounds products with weights in blocks of so many elements."""
    if path == "digits":
        return path if block_elements == SUPER_BLOCK else "kparallel"
    super_blocks = path == "kparallel" and block_elements == SUPER_BLOCK
    return "kparallel K" if super_blocks else path


def matrix_unit(n: int) -> float:
    return 2 * (FRAGMENT_K + 1) * math.ceil(n / FRAGMENT_K) + MATRIX_WAVES


def digits(n: int) -> float:
    steps = math.ceil(n / (DIGIT_PART * WAVE))
    return 3 + 2 * DIGIT_GROUPS * steps + TREE_LEVELS


def attention_sum(n: int) -> float:
    inside = min(n, ATTENTION_CHAIN) + 1 + TREE_LEVELS + ATTENTION_WAVES - 1
    return inside + (EXP_ROUNDINGS + 2) * math.ceil(n / SPLIT_KEYS) + 1
