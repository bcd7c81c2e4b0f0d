// Results of matvec_packed.hip, of which each part of K left one: their sum, in ascending order.
#pragma once
#include "simt.h"

constexpr int MOST_PARTS = 8;  // backend_hip/tuning.py

// Element `at` of `splits` arrays, 1 to MOST_PARTS, that lie `stride` apart. All are asked for before the
// first is added.
SIMT_DEVICE float partial_sum(const float* parts, int64_t at, int64_t stride, int splits) {
    float part[MOST_PARTS];
    SIMT_UNROLL
    for (int i = 0; i < MOST_PARTS; ++i) part[i] = i < splits ? parts[at + i * stride] : 0.0f;
    float sum = part[0];
    SIMT_UNROLL
    for (int i = 1; i < MOST_PARTS; ++i)
        if (i < splits) sum = sum + part[i];
    return sum;
}

// Four of them from a boundary of 16 bytes on.
SIMT_DEVICE void partial_sums(float* sums, const float* parts, int64_t at, int64_t stride, int splits) {
    simt::Quad part[MOST_PARTS];
    SIMT_UNROLL
    for (int i = 0; i < MOST_PARTS; ++i)
        if (i < splits) part[i] = simt::load16(parts + at + i * stride);
    SIMT_UNROLL
    for (int n = 0; n < 4; ++n) {
        float sum = simt::from_bits(part[0].word[n]);
        SIMT_UNROLL
        for (int i = 1; i < MOST_PARTS; ++i)
            if (i < splits) sum = sum + simt::from_bits(part[i].word[n]);
        sums[n] = sum;
    }
}
