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

// Reads columns from the chunk that begins at element `begin`; `stride` elements a column.
struct Columns {
    const float* x;
    int begin;
    int stride;
    template <class F>
    SIMT_DEVICE void read(int c, int k, float (&part)[4]) const {
        const simt::Quad bits = simt::load16(x + c * stride + place(k - begin));
        SIMT_UNROLL
        for (int i = 0; i < 4; ++i) part[i] = simt::from_bits(bits.word[i]);
    }
};

// Copies elements `begin` to `end` of `count` columns into shared memory; all threads of the block
// take part. `value(c, k)` gives an element. Elements past `columns` become zero, as
// far as a stripe reaches.
template <class Value>
SIMT_DEVICE void fill(float* shared, int stride, int begin, int end, int columns, int count,
                      const Value& value) {
    const int groups = (end - begin + formats::STRIPE - 1) / formats::STRIPE * (formats::STRIPE / 4);
    for (int i = simt::thread(); i < groups * count; i += SIMT_BLOCK) {
        const int c = i / groups;
        const int k = i % groups * 4;
        float* target = shared + c * stride + place(k);
        SIMT_UNROLL
        for (int j = 0; j < 4; ++j) {
            target[j] = begin + k + j < columns ? value(c, begin + k + j) : 0.0f;
        }
    }
}

}  // namespace staged
