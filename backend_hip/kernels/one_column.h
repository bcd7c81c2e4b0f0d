// Products with one column, by blocks that stay: each takes one group of rows after the other and
// keeps the column in shared memory where it fits. The next group's first bytes are asked for before
// this one's sums are reduced, and the first group's before the column is there.
#pragma once
#include "staged.h"

#if !defined(ROWS_PER_WAVE) || !defined(STAGE)
#error "one_column.h: define ROWS_PER_WAVE and STAGE, the elements of a column in shared memory"
#endif
static_assert(STAGE % (SIMT_WAVE * 32) == 0, "a chunk is a whole number of steps of a wave");

namespace one_column {

constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;

using Sums = float[ROWS_PER_WAVE][1];

// `rows_of(first)` gives a wave's rows from row `first` on:
//   start(columns)                    asks for their first bytes
//   add(x, columns, begin, end, sums) adds their products with a chunk of the column
//   store(sums)                       once the sums are whole
// `column(fill)` makes what reads the column: fill calls it as staged::fill does. It is asked for
// once, after the first bytes, and may wait for the whole block. `groups` groups of
// WAVES * ROWS_PER_WAVE rows.
template <class RowsOf, class Column>
SIMT_DEVICE void products(float* stage, int groups, int columns, const RowsOf& rows_of,
                          const Column& column) {
    const bool fits = columns <= STAGE;
    bool refill = false;
    auto rows = rows_of((simt::block_x() * WAVES + simt::wave()) * ROWS_PER_WAVE);
    rows.start(columns);
    const auto four = column();
    if (fits) {
        staged::fill(stage, STAGE, 0, columns, 1, four);
        simt::sync();
    }
    for (int group = simt::block_x(); group < groups; group += simt::grid_x()) {
        Sums sums;
        dot::clear(sums);
        for (int begin = 0; begin < columns; begin += STAGE) {
            const int end = simt::min(columns, begin + STAGE);
            if (!fits) {
                if (refill) simt::sync();  // all waves have read the chunk before
                staged::fill(stage, STAGE, begin, end, 1, four);
                simt::sync();
                refill = true;
            }
            rows.add(staged::Columns{stage, STAGE}, columns, begin, end, sums);
        }
        auto next = rows_of(((group + simt::grid_x()) * WAVES + simt::wave()) * ROWS_PER_WAVE);
        if (group + simt::grid_x() < groups) next.start(columns);
        SIMT_UNROLL
        for (int r = 0; r < ROWS_PER_WAVE; ++r) simt::wave_sum(sums[r], 1);
        if (simt::lane() == 0) rows.store(sums);
        rows = next;
    }
}

// A column as it lies in device memory.
template <class F>
struct Plain {
    const float* x;
    int columns;
    SIMT_DEVICE void operator()(int, int k, float (&part)[4]) const {
        dot::four<F>(x, k, columns, part);
    }
};

// A column normed on the way: x * scale * weight, as rms_norm.hip writes it.
template <class F>
struct Normed {
    const float* x;
    const float* weight;
    int columns;
    float scale;
    SIMT_DEVICE void operator()(int, int k, float (&part)[4]) const {
        float value[4];
        float factor[4];
        dot::four<F>(x, k, columns, value);
        dot::four<F>(weight, k, columns, factor);
        SIMT_UNROLL
        for (int i = 0; i < 4; ++i) part[i] = value[i] * scale * factor[i];
    }
};

// The rows of one matrix from `first` on, as products() wants them, but for `store`. A wave past the
// end repeats the last row: the block's barriers need it.
template <class F>
SIMT_DEVICE dot::Stream<F, ROWS_PER_WAVE> stream_of(const uint8_t* weights, int first, int rows,
                                                    int columns) {
    dot::Stream<F, ROWS_PER_WAVE> stream;
    SIMT_UNROLL
    for (int r = 0; r < ROWS_PER_WAVE; ++r) {
        stream.row[r] = formats::row_of<F>(weights, simt::min(first + r, rows - 1), columns);
    }
    return stream;
}

SIMT_DEVICE int groups_of(int rows) {
    return (rows + WAVES * ROWS_PER_WAVE - 1) / (WAVES * ROWS_PER_WAVE);
}

}  // namespace one_column
