// Products with one column, by blocks that stay: each takes one group of rows after the other and
// keeps the column in shared memory where it fits.
#pragma once
#include "staged.h"

#if !defined(ROWS_PER_WAVE) || !defined(STAGE)
#error "one_column.h: define ROWS_PER_WAVE and STAGE, the elements of a column in shared memory"
#endif
static_assert(STAGE % (SIMT_WAVE * 32) == 0, "a chunk is a whole number of steps of a wave");

namespace one_column {

constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;

// Calls row_of(group) for the rows of each group that is this block's, a struct with
//   template add(x, columns, begin, end, sums)   the product of its rows with a chunk
//   store(sums)                                  once the sums are whole
// and value(k) for the column's elements. `groups` groups of WAVES * ROWS_PER_WAVE rows.
template <class RowsOf, class Value>
SIMT_DEVICE void products(float* stage, int groups, int columns, const RowsOf& rows_of,
                          const Value& value) {
    const bool fits = columns <= STAGE;
    if (fits) {
        staged::fill(stage, STAGE, 0, columns, columns, 1, value);
        simt::sync();
    }
    bool refill = false;
    for (int group = simt::block_x(); group < groups; group += simt::grid_x()) {
        const auto rows = rows_of((group * WAVES + simt::wave()) * ROWS_PER_WAVE);
        float sums[ROWS_PER_WAVE][1];
        dot::clear(sums);
        for (int begin = 0; begin < columns; begin += STAGE) {
            const int end = simt::min(columns, begin + STAGE);
            if (!fits) {
                if (refill) simt::sync();  // all waves have read the chunk before
                staged::fill(stage, STAGE, begin, end, columns, 1, value);
                simt::sync();
                refill = true;
            }
            rows.add(staged::Columns{stage, begin, STAGE}, columns, begin, end, sums);
        }
        SIMT_UNROLL
        for (int r = 0; r < ROWS_PER_WAVE; ++r) simt::wave_sum(sums[r], 1);
        if (simt::lane() == 0) rows.store(sums);
    }
}

// A column as it lies in device memory.
struct Plain {
    const float* x;
    SIMT_DEVICE float operator()(int, int k) const { return x[k]; }
};

// A column normed on the way: x * scale * weight, as rms_norm.hip writes it.
struct Normed {
    const float* x;
    const float* weight;
    float scale;
    SIMT_DEVICE float operator()(int, int k) const { return x[k] * scale * weight[k]; }
};

// ROWS_PER_WAVE rows of one matrix from `first` on. A wave past the end repeats the last row and
// stores nothing: the block's barriers need it.
template <class F>
struct MatrixRows {
    const typename F::Block* row[ROWS_PER_WAVE];
    int first;
    int rows;

    SIMT_DEVICE MatrixRows(const uint8_t* weights, int first_row, int row_count, int columns)
        : first(first_row), rows(row_count) {
        SIMT_UNROLL
        for (int r = 0; r < ROWS_PER_WAVE; ++r) {
            row[r] = formats::row_of<F>(weights, simt::min(first + r, rows - 1), columns);
        }
    }
    SIMT_DEVICE void add(const staged::Columns& x, int columns, int begin, int end,
                         float (&sums)[ROWS_PER_WAVE][1]) const {
        dot::add_rows<F>(row, x, columns, begin, end, 1, sums);
    }
};

SIMT_DEVICE int groups_of(int rows) {
    return (rows + WAVES * ROWS_PER_WAVE - 1) / (WAVES * ROWS_PER_WAVE);
}

}  // namespace one_column
