// How the splits of one query's keys become one result: in ascending order, with this formula and no other.
#pragma once
#include "numeric.h"

namespace attention {

// Splits merged so far. Nothing: maximum -inf, total 0, every value 0.
struct Merge {
    float maximum, total;
    float before, now;  // factors of what was there and of what the last split brought

    SIMT_DEVICE void clear() {
        maximum = simt::from_bits(0xff800000u);
        total = 0.0f;
    }
    // Takes a split with at least one visible key, so that its maximum is finite.
    SIMT_DEVICE void take(float split_maximum, float split_total) {
        const float next = simt::max(maximum, split_maximum);
        before = numeric::exp(maximum - next);  // 0 where nothing was there
        now = numeric::exp(split_maximum - next);
        total = value(total, split_total);
        maximum = next;
    }
    SIMT_DEVICE float value(float held, float split_value) const {
        return simt::fma(split_value, now, held * before);
    }
};

// A split's partial result in memory: MIXED values per block, then its heads' maxima and sums.
constexpr int PARTIAL_EXTRA = 2;  // floats beside a head's values

SIMT_DEVICE int64_t partial_at(int64_t row, int heads, int head, int splits, int split, int head_size) {
    return (((row * heads + head) * splits) + split) * (head_size + PARTIAL_EXTRA);
}

}  // namespace attention
