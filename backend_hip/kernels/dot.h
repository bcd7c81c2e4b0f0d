// The dot product of one weight row with several activation columns.
//
// This is THE arithmetic of the kparallel path: lane-to-k map, order of additions and reduction
// tree are fixed here, so that the number of columns never changes a bit of any of them.
#pragma once
#include "formats.h"

namespace dot {

// acc + w . x over one stripe, in ascending k, one rounding a step. Columns past the end of a plain
// row have w = 0 and are not read.
SIMT_DEVICE float stripe(const float (&w)[formats::STRIPE], const float* x, int k, int columns,
                         float acc) {
#ifdef FORMAT_IS_PLAIN
    if (k + formats::STRIPE > columns) {
        SIMT_UNROLL
        for (int i = 0; i < formats::STRIPE; ++i) {
            if (k + i < columns) acc = simt::fma(w[i], x[k + i], acc);
        }
        return acc;
    }
#else
    (void)columns;
#endif
    SIMT_UNROLL
    for (int i = 0; i < formats::STRIPE; ++i) acc = simt::fma(w[i], x[k + i], acc);
    return acc;
}

// Columns that lie one after another.
struct Consecutive {
    const float* x;
    int columns;
    SIMT_DEVICE const float* operator()(int c) const {
        return x + static_cast<int64_t>(c) * columns;
    }
};

// sums[c] = row . column(c) for c < count; every lane of the wave gets the result. Lane l takes
// stripes l, l + WAVE, ...; each stripe is decoded once for all columns.
template <int MAX, class Columns>
SIMT_DEVICE void wave_row(const formats::Block* row, const Columns& column, int columns, int count,
                          float (&sums)[MAX]) {
    SIMT_UNROLL
    for (int c = 0; c < MAX; ++c) sums[c] = 0.0f;
    for (int k = simt::lane() * formats::STRIPE; k < columns; k += SIMT_WAVE * formats::STRIPE) {
        float w[formats::STRIPE];
        formats::decode(row, k, columns, w);
        SIMT_UNROLL
        for (int c = 0; c < MAX; ++c) {
            if (c < count) sums[c] = stripe(w, column(c), k, columns, sums[c]);
        }
    }
    simt::wave_sum(sums, count);
}

}  // namespace dot
