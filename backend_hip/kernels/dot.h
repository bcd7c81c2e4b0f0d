// The dot product of weight rows with activation columns.
//
// This is THE arithmetic of the kparallel path: lane-to-k map, order of additions and reduction
// tree are fixed here, so that neither the number of columns, nor the rows of a wave, nor where the
// activations are read from changes a bit of any result.
#pragma once
#include "formats.h"

namespace dot {

// Four activations of a column from k on. Past the end of a plain row nothing is read: its weights
// are zero there.
template <class F>
SIMT_DEVICE void four(const float* x, int k, int columns, float (&part)[4]) {
    if constexpr (F::ELEMENTS == 1) {
        SIMT_UNROLL
        for (int i = 0; i < 4; ++i) part[i] = k + i < columns ? x[k + i] : 0.0f;
    } else {
        const simt::Quad bits = simt::load16(x + k);
        SIMT_UNROLL
        for (int i = 0; i < 4; ++i) part[i] = simt::from_bits(bits.word[i]);
    }
}

// Columns that lie one after another in device memory.
struct Consecutive {
    const float* x;
    int columns;
    template <class F>
    SIMT_DEVICE void read(int c, int k, float (&part)[4]) const {
        four<F>(x + static_cast<int64_t>(c) * columns, k, columns, part);
    }
};

// sums[row][c] += the unit's part of row . column c for the `count` columns from `first` on, in
// ascending k, one rounding a step.
template <class F, int ROWS, int MAX, class Columns>
SIMT_DEVICE void add_unit(const typename F::Unit (&data)[ROWS], int unit, const Columns& x,
                          int columns, int first, int last, float (&sums)[ROWS][MAX]) {
    SIMT_UNROLL
    for (int r = 0; r < F::RUNS; ++r) {
        const int k = F::run_start(unit, r);
        float w[ROWS][F::RUN];
        SIMT_UNROLL
        for (int row = 0; row < ROWS; ++row) F::run(data[row], unit, r, columns, w[row]);
        SIMT_UNROLL
        for (int c = 0; c < MAX; ++c) {
            if (c < first || c >= last) continue;
            SIMT_UNROLL
            for (int i = 0; i < F::RUN; i += 4) {
                float part[4];
                x.template read<F>(c, k + i, part);
                SIMT_UNROLL
                for (int row = 0; row < ROWS; ++row) {
                    SIMT_UNROLL
                    for (int j = 0; j < 4; ++j) {
                        sums[row][c] = simt::fma(w[row][i + j], part[j], sums[row][c]);
                    }
                }
            }
        }
    }
}

// sums[row][c] += rows[row] . column c over the elements from `begin` to `end`, which is the row's
// end or a multiple of what a wave takes at a time. Lane l takes units l, l + WAVE, ...; a unit's
// bytes are asked for while the one before is multiplied.
template <class F, int ROWS, int MAX, class Columns>
SIMT_DEVICE void add_rows(const typename F::Block* const (&rows)[ROWS], const Columns& x,
                          int columns, int begin, int end, int count, float (&sums)[ROWS][MAX]) {
    constexpr int UNIT = F::UNIT;
    typename F::Unit data[ROWS];
    int unit = begin / UNIT + simt::lane();
    if (unit * UNIT < end) {
        SIMT_UNROLL
        for (int row = 0; row < ROWS; ++row) data[row] = F::load(rows[row], unit);
    }
    while (unit * UNIT < end) {
        const int next = unit + SIMT_WAVE;
        typename F::Unit ahead[ROWS];
        SIMT_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            ahead[row] = next * UNIT < end ? F::load(rows[row], next) : data[row];
        }
        add_unit<F>(data, unit, x, columns, 0, count, sums);
        SIMT_UNROLL
        for (int row = 0; row < ROWS; ++row) data[row] = ahead[row];
        unit = next;
    }
}

template <int ROWS, int MAX>
SIMT_DEVICE void clear(float (&sums)[ROWS][MAX]) {
    SIMT_UNROLL
    for (int row = 0; row < ROWS; ++row) {
        SIMT_UNROLL
        for (int c = 0; c < MAX; ++c) sums[row][c] = 0.0f;
    }
}

// sums[c] = row . column c for c < count; every lane of the wave gets the result.
template <int MAX, class Columns>
SIMT_DEVICE void wave_row(const formats::Block* row, const Columns& x, int columns, int count,
                          float (&sums)[1][MAX]) {
    clear(sums);
    const formats::Block* const rows[1] = {row};
    add_rows<formats::Weights>(rows, x, columns, 0, columns, count, sums);
    simt::wave_sum(sums[0], count);
}

}  // namespace dot
