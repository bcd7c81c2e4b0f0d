// Activation columns in block-shared memory, a chunk of K at a time.
//
// Lanes of a wave read runs of 16 elements that lie 64 to 256 bytes apart, which would meet in the
// same banks. Groups of four elements are therefore stored so that the eight lanes that share a
// super-block read eight neighbouring groups, whichever of the K formats it is.
#pragma once
#include "dot.h"

namespace staged {

constexpr int SUPER = 256;  // elements that are reordered among themselves

// Where four elements from k on lie, k a multiple of 4 below the chunk's length. Of the run's number
// in its super-block, Q4_K's lanes differ in bits 0, 2, 3 and Q6_K's in bits 0, 1, 3.
SIMT_DEVICE int place(int k) {
    const int run = k % SUPER / 16;
    const int order = (run & 1) | ((run >> 2 ^ run >> 1) & 1) << 1 | (run >> 3 & 1) << 2 |
                      (run >> 1 & 1) << 3;
    return k / SUPER * SUPER + (k % 16 / 4 * 16 + order) * 4;
}

// Reads columns of a chunk, groups counted from its beginning; `stride` elements a column.
struct Columns {
    const float* x;
    int stride;
    SIMT_DEVICE Columns again() const { return *this; }
    template <class F>
    SIMT_DEVICE int at(int part, int r) const {
        return F::UNITS * F::UNIT == SUPER ? place(F::run_start(static_cast<uint32_t>(part), r)) : 0;
    }
    template <class F>
    SIMT_DEVICE void read(int c, int group, int at, int i, float (&values)[4]) const {
        // The four groups of a run lie 64 elements apart.
        const int offset = F::UNITS * F::UNIT == SUPER ? group * SUPER + at + i * 16
                                                       : place(group * F::UNITS * F::UNIT + i);
        const simt::Quad bits = simt::load16(x + c * stride + offset);
        SIMT_UNROLL
        for (int j = 0; j < 4; ++j) values[j] = simt::from_bits(bits.word[j]);
    }
};

// Copies elements `begin` to `end` of `count` columns into shared memory; all threads of the block
// take part. `four(c, k, part)` gives elements from k on, zero past the columns' end.
template <class Four>
SIMT_DEVICE void fill(float* shared, int stride, int begin, int end, int count, const Four& four) {
    // As far as a stripe reaches: what lies past the end meets zero weights, but must be a number.
    const int groups = (end - begin + formats::STRIPE - 1) / formats::STRIPE * (formats::STRIPE / 4);
    for (int c = 0; c < count; ++c) {
        for (int i = simt::thread(); i < groups; i += SIMT_BLOCK) {
            float part[4];
            four(c, begin + 4 * i, part);
            simt::Quad bits;
            SIMT_UNROLL
            for (int j = 0; j < 4; ++j) bits.word[j] = simt::bits(part[j]);
            simt::store16(shared + c * stride + place(4 * i), bits);
        }
    }
}

}  // namespace staged
