"""Shapes of the engine's kernels, as its registry launches them: what the limits of sums count."""

import math

from backend_hip.attention_shape import SPLIT_KEYS
from backend_hip.registry import REGISTRY
from backend_hip.wave import WAVE

TREE_LEVELS = math.ceil(math.log2(WAVE))
# Attention (kernels/attention.h): a lane adds at most 16 products of a score by itself. Each wave
# takes its part of a split's keys, at worst one after another; split by split the running sums are
# rescaled once.
SCORE_LANE = 16
ATTENTION_WAVES = REGISTRY.find("attention", "f16,f16", "any").block // WAVE
ATTENTION_CHAIN = SPLIT_KEYS // ATTENTION_WAVES
# RMS norm: threads of the block that share a row's sum, and their waves.
NORM_BLOCK = REGISTRY.find("rms_norm", "", "any").block
NORM_WAVES = NORM_BLOCK // WAVE
# The kparallel dot product (one inline function for every number of columns): a lane takes a unit
# of elements a step, lanes stripe K, one butterfly over the wave ends it. kernels/formats.h: a unit
# is 8 neighbouring elements, or 32 of a super-block of 256.
LANE_ELEMENTS = 8
SUPER_BLOCK, SUPER_BLOCK_LANE_ELEMENTS = 256, 32
# One column as digits (kernels/digit_formats.h): a lane takes a part of a super-block a step, in up
# to so many groups of runs with a factor of their own.
DIGIT_PART, DIGIT_GROUPS = 64, 4
# The matrix unit: terms of one instruction's sums, and the waves that may share a row's K.
FRAGMENT_K = 16
MATRIX_WAVES = REGISTRY.find("matvec_batched", "F16/16", "matrix").block // WAVE
# kernels/numeric.h: exp is within 2 ulp; tanh's absolute error follows from it. In unit roundoffs.
EXP_ROUNDINGS = 4.0
TANH_ROUNDINGS = 6.0
# softplus there: log within 2 ulp, t / (u - 1), a product, and what u = 1 + t lost (Kahan).
LOG1P_ROUNDINGS = 7.0
