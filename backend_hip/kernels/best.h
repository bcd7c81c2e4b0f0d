// Largest value with its index: the lowest index among equals, NaN above everything.
//
// The order is total, so that a reduction gives every lane the same result whatever it meets.
#pragma once
#include "simt.h"

struct Best {
    float value;
    int32_t index;  // -1: none yet
};

SIMT_DEVICE bool above(float a, float b) { return a > b || (a != a && b == b); }

SIMT_DEVICE Best better(Best a, Best b) {
    if (b.index < 0) return a;
    if (a.index < 0) return b;
    const bool second = above(b.value, a.value) || (!above(a.value, b.value) && b.index < a.index);
    return second ? b : a;
}

// The wave's best, in every lane.
SIMT_DEVICE Best wave_best(Best best) {
    for (int offset = SIMT_WAVE / 2; offset > 0; offset /= 2) {
        best = better(best, Best{simt::shuffle_xor(best.value, offset),
                                 simt::shuffle_xor(best.index, offset)});
    }
    return best;
}
