// Products with one column, by blocks that stay: each takes one group of rows after the other and
// keeps the column in shared memory where it fits. The next group's first bytes are asked for before
// this one's sums are reduced, and the first group's before the column is there.
#pragma once
#include "staged.h"
#if DIGITS
#include "digit_column.h"
#endif

#if !defined(ROWS_PER_WAVE) || !defined(STAGE)
#error "one_column.h: define ROWS_PER_WAVE and STAGE, the elements of a column in shared memory"
#endif
static_assert(STAGE % (SIMT_WAVE * 32) == 0, "a chunk is a whole number of steps of a wave");

#if DIGITS
// A compiler that may take more registers takes them, and then fewer blocks are there at a time.
#define ONE_COLUMN_KERNEL(name, ...) SIMT_KERNEL_RESIDENT(BLOCKS_PER_UNIT, name, __VA_ARGS__)
#else
#define ONE_COLUMN_KERNEL(name, ...) SIMT_KERNEL(name, __VA_ARGS__)
#endif

namespace one_column {

constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;

#if DIGITS
using Columns = digit_column::Columns;
template <class F>
using Stream = digit_column::Stream<F, ROWS_PER_WAVE>;
#else
// STAGE elements of the column as floats.
struct Columns : staged::Columns {
    float* held;
    SIMT_DEVICE Columns again() const { return *this; }
    template <int ELEMENTS>
    SIMT_DEVICE static Columns make() {
        SIMT_SHARED(float, held, ELEMENTS);
        return {{held, ELEMENTS}, held};
    }
    template <class Four>
    SIMT_DEVICE void fill(int begin, int end, const Four& four) const {
        staged::fill(held, stride, begin, end, 1, four);
    }
};
template <class F>
using Stream = dot::Stream<F, ROWS_PER_WAVE>;
#endif

using Sums = float[ROWS_PER_WAVE][1];

// `rows_of(first)` gives a wave's rows from row `first` on:
//   start(columns)                    asks for their first bytes
//   add(x, columns, begin, end, sums) adds their products with a chunk of the column
//   store(sums)                       once the sums are whole
// `column()` makes what reads the column, as staged::fill calls it. It is asked for once, after the
// first bytes, and may wait for the whole block. `groups` groups of
// WAVES * ROWS_PER_WAVE rows.
template <class RowsOf, class Column>
SIMT_DEVICE void products(int groups, int columns, const RowsOf& rows_of, const Column& column) {
    const Columns stage = Columns::make<STAGE>();
    const bool fits = columns <= STAGE;
    bool refill = false;
    auto rows = rows_of((simt::block_x() * WAVES + simt::wave()) * ROWS_PER_WAVE);
    rows.start(columns);
    const auto four = column();
    if (fits) {
        stage.fill(0, columns, four);
        simt::sync();
    }
    for (int group = simt::block_x(); group < groups; group += simt::grid_x()) {
        Sums sums;
        dot::clear(sums);
        for (int begin = 0; begin < columns; begin += STAGE) {
            const int end = simt::min(columns, begin + STAGE);
            if (!fits) {
                if (refill) simt::sync();  // all waves have read the chunk before
                stage.fill(begin, end, four);
                simt::sync();
                refill = true;
            }
            rows.add(stage, columns, begin, end, sums);
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

// Asks for `columns` floats that are read only after a wait for the whole block.
SIMT_DEVICE void soon(const float* x, int columns) {
    constexpr int LINE = 32;
    for (int i = simt::thread() * LINE; i < columns; i += SIMT_BLOCK * LINE) simt::soon(x + i);
}

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
SIMT_DEVICE Stream<F> stream_of(const uint8_t* weights, int first, int rows, int columns) {
    Stream<F> stream;
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
