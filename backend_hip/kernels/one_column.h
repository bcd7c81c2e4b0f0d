// Products with one column, by blocks that stay: each takes one group of rows after the other and
// keeps the column in shared memory where it fits. Weights are asked for DEPTH steps ahead, across
// the ends of rows, so that memory never waits for arithmetic.
#pragma once
#include "staged.h"

#if !defined(ROWS_PER_WAVE) || !defined(STAGE) || !defined(DEPTH)
#error "one_column.h: define ROWS_PER_WAVE, STAGE (elements of a column in shared memory) and DEPTH"
#endif
static_assert(STAGE % (SIMT_WAVE * 32) == 0, "a chunk is a whole number of steps of a wave");

namespace one_column {

constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;

using Sums = float[ROWS_PER_WAVE][1];

// The rows of one matrix that a wave takes together. A wave past the end repeats the last row.
template <class F>
struct Matrix {
    using Stream = dot::Stream<F, ROWS_PER_WAVE>;
    struct Slot {
        typename F::Unit unit[ROWS_PER_WAVE];
    };
    const typename F::Block* row[ROWS_PER_WAVE];

    SIMT_DEVICE static Matrix at(const uint8_t* weights, int first, int rows, int columns) {
        Matrix matrix;
        SIMT_UNROLL
        for (int r = 0; r < ROWS_PER_WAVE; ++r) {
            matrix.row[r] = formats::row_of<F>(weights, simt::min(first + r, rows - 1), columns);
        }
        return matrix;
    }
    SIMT_DEVICE void load(Slot& slot, int step) const {
        const uint32_t unit = Stream::unit_of(Stream::first_group() + step * Stream::STEP);
        SIMT_UNROLL
        for (int r = 0; r < ROWS_PER_WAVE; ++r) slot.unit[r] = F::load(row[r], unit);
    }
    SIMT_DEVICE static bool holds(int step, int columns) {
        return (Stream::first_group() + step * Stream::STEP) * Stream::GROUP < columns;
    }
    // `origin`: the step with which what x holds begins.
    SIMT_DEVICE static void add(const Slot& slot, const staged::Columns& x, int columns, int step,
                                int origin, Sums& sums) {
        const int group = Stream::first_group() + step * Stream::STEP;
        const int place = Stream::first_group() + (step - origin) * Stream::STEP;
        Stream::add_unit(slot.unit, group, place, x, columns, 0, 1, sums);
    }
    static constexpr int ELEMENTS = Stream::STEP * Stream::GROUP;  // of a step
};

// `rows_of(first)` gives the rows of a wave from row `first` on:
//   Slot, ELEMENTS, holds(step, columns), load(slot, step), add(slot, x, columns, step, origin, sums)
//                as Matrix has them
//   store(sums)  once the sums are whole
// `column()` makes what fills the column (see staged::fill); it is called once, after the first
// weights were asked for, and may wait for the whole block. `groups` groups of
// WAVES * ROWS_PER_WAVE rows.
//
// Steps of all rows follow one another through DEPTH slots. A slot is filled again as soon as it was
// multiplied and never copied, because a copy would wait for the memory.
template <class RowsOf, class Column>
SIMT_DEVICE void products(float* stage, int groups, int columns, const RowsOf& rows_of,
                          const Column& column) {
    using Rows = decltype(rows_of(0));
    const auto first_of = [](int group) { return (group * WAVES + simt::wave()) * ROWS_PER_WAVE; };
    const int steps = (columns + Rows::ELEMENTS - 1) / Rows::ELEMENTS;

    int ahead_group = simt::block_x();
    int ahead_step = 0;
    Rows ahead = rows_of(first_of(ahead_group));
    typename Rows::Slot slots[DEPTH];
    const auto fetch = [&](typename Rows::Slot& slot) {
        if (ahead_group >= groups) return;
        if (ahead.holds(ahead_step, columns)) ahead.load(slot, ahead_step);
        if (++ahead_step == steps) {
            ahead_step = 0;
            ahead_group += simt::grid_x();
            ahead = rows_of(first_of(ahead_group));
        }
    };
    SIMT_UNROLL
    for (int i = 0; i < DEPTH; ++i) fetch(slots[i]);

    const auto four = column();
    const bool fits = columns <= STAGE;
    if (fits) {
        staged::fill(stage, STAGE, 0, columns, 1, four);
        simt::sync();
    }
    constexpr int CHUNK = STAGE / Rows::ELEMENTS;  // steps that the stage holds
    const staged::Columns x{stage, STAGE};
    int group = simt::block_x();
    int step = 0;
    int origin = 0;
    Rows rows = rows_of(first_of(group));
    Sums sums;
    dot::clear(sums);
    while (group < groups) {
        SIMT_UNROLL
        for (int i = 0; i < DEPTH; ++i) {
            if (group >= groups) break;
            if (!fits && step % CHUNK == 0) {
                origin = step;
                const int begin = step * Rows::ELEMENTS;
                simt::sync();  // all waves have read the chunk before
                staged::fill(stage, STAGE, begin, simt::min(columns, begin + STAGE), 1, four);
                simt::sync();
            }
            if (rows.holds(step, columns)) rows.add(slots[i], x, columns, step, origin, sums);
            fetch(slots[i]);
            if (++step < steps) continue;
            SIMT_UNROLL
            for (int r = 0; r < ROWS_PER_WAVE; ++r) simt::wave_sum(sums[r], 1);
            if (simt::lane() == 0) rows.store(sums);
            dot::clear(sums);
            step = 0;
            group += simt::grid_x();
            rows = rows_of(first_of(group));
        }
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

SIMT_DEVICE int groups_of(int rows) {
    return (rows + WAVES * ROWS_PER_WAVE - 1) / (WAVES * ROWS_PER_WAVE);
}

}  // namespace one_column
