// Results of matvec_packed.hip, of which each part of K left one: their sum, in ascending order.
#pragma once
#include "simt.h"

// Element `at` of `splits` arrays that lie `stride` apart.
SIMT_DEVICE float partial_sum(const float* parts, int64_t at, int64_t stride, int splits) {
    float sum = parts[at];
    for (int split = 1; split < splits; ++split) sum = sum + parts[at + split * stride];
    return sum;
}
