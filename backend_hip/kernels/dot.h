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

// What reads activations for units has
//   at<F>(part, r)                    where run r of part `part` of a group lies, once for all groups
//   read<F>(c, group, at, i, values)  four elements of column c, from element i of that run on
//   again()                           itself, of which nothing is kept in registers (simt::again)

// Columns that lie one after another in device memory.
struct Consecutive {
    const float* x;
    int columns;
    SIMT_DEVICE Consecutive again() const { return {x, simt::again(columns)}; }
    template <class F>
    SIMT_DEVICE int at(int part, int r) const {
        return F::run_start(static_cast<uint32_t>(part), r);
    }
    template <class F>
    SIMT_DEVICE void read(int c, int group, int at, int i, float (&values)[4]) const {
        const float* column = x + static_cast<int64_t>(c) * columns;
        four<F>(column, group * F::UNITS * F::UNIT + at + i, columns, values);
    }
};

// Lane l takes units l, l + WAVE, ... of its rows; a unit's bytes are asked for while the one before
// is multiplied, the first by `start`. UNITS units are a group, and a lane keeps its place in it.
// SPARING: for so many columns that registers bound the waves of a SIMD. Nothing is asked for ahead, and
// a run is decoded four elements at a time.
template <class F, int ROWS, bool SPARING = false>
struct Stream {
    static constexpr int PIECE = SPARING ? 4 : F::RUN;
    static constexpr int GROUP = F::UNITS * F::UNIT;   // elements
    static constexpr int STEP = SIMT_WAVE / F::UNITS;  // groups that a wave takes at a time
    static_assert(SIMT_WAVE % F::UNITS == 0, "a lane keeps its place in a group");

    const typename F::Block* row[ROWS];
    typename F::Unit data[ROWS];

    SIMT_DEVICE static int part() { return simt::lane() % F::UNITS; }
    SIMT_DEVICE static int first_group() { return simt::lane() / F::UNITS; }
    SIMT_DEVICE static uint32_t unit_of(int group) {
        return static_cast<uint32_t>(group) * F::UNITS | static_cast<uint32_t>(part());
    }
    SIMT_DEVICE void load(int group) {
        SIMT_UNROLL
        for (int r = 0; r < ROWS; ++r) data[r] = F::load(row[r], unit_of(group));
    }
    // Asks for the first unit of rows of `columns` elements.
    SIMT_DEVICE void start(int columns) {
        if (!SPARING && first_group() * GROUP < columns) load(first_group());
    }

    // sums[r][c] += row[r] . column c over one unit for the columns `first` to `last` - 1, in
    // ascending k, one rounding a step. The columns' group `place` belongs to the rows' `group`.
    template <int MAX, class Columns>
    SIMT_DEVICE static void add_unit(const typename F::Unit (&unit)[ROWS], int group, int place,
                                     const Columns& x, int columns, int first, int last,
                                     float (&sums)[ROWS][MAX]) {
        typename F::Unit held[ROWS];
        SIMT_UNROLL
        for (int r = 0; r < ROWS; ++r) held[r] = unit[r];
        add_pieces<0>(held, group, place, x, columns, first, last, sums);
    }

    // From the unit's element `BEGIN` on. Not a loop: compilers unroll none that is so long.
    template <int BEGIN, int MAX, class Columns>
    SIMT_DEVICE static void add_pieces(typename F::Unit (&held)[ROWS], int group, int place,
                                       const Columns& x, int columns, int first, int last,
                                       float (&sums)[ROWS][MAX]) {
        constexpr int RUN = BEGIN / F::RUN, PLACE = BEGIN % F::RUN;
        const int at = x.template at<F>(part(), RUN);
        float w[ROWS][F::RUN];
        SIMT_UNROLL
        for (int r = 0; r < ROWS; ++r) {
            // Else all pieces would be decoded before the first is multiplied.
            if (SPARING && BEGIN > 0) held[r] = simt::words_again(held[r]);
            F::run(held[r], unit_of(group), RUN, columns, w[r]);
        }
        // A place and a condition for each column would fill the scalar registers.
        const Columns here = SPARING ? x.again() : x;
        const int end = SPARING ? simt::again(last) : last;
        SIMT_UNROLL
        for (int c = 0; c < MAX; ++c) {
            if (c < first || c >= end) continue;
            SIMT_UNROLL
            for (int i = PLACE; i < PLACE + PIECE; i += 4) {
                float values[4];
                here.template read<F>(c, place, at, i, values);
                SIMT_UNROLL
                for (int r = 0; r < ROWS; ++r) {
                    SIMT_UNROLL
                    for (int j = 0; j < 4; ++j) {
                        sums[r][c] = simt::fma(w[r][i + j], values[j], sums[r][c]);
                    }
                }
            }
        }
        if constexpr (BEGIN + PIECE < F::UNIT) {
            add_pieces<BEGIN + PIECE>(held, group, place, x, columns, first, last, sums);
        }
    }

    // The same over the elements from `begin` to `end`, which is the rows' end or a multiple of what
    // a wave takes at a time, for the first `count` columns. `x` begins at `begin`.
    template <int MAX, class Columns>
    SIMT_DEVICE void add(const Columns& x, int columns, int begin, int end, int count,
                         float (&sums)[ROWS][MAX]) {
        const int origin = begin / GROUP;
        for (int group = origin + first_group(); group * GROUP < end; group += STEP) {
            typename F::Unit now[ROWS];
            SIMT_UNROLL
            for (int r = 0; r < ROWS; ++r) {
                now[r] = SPARING ? F::load(row[r], unit_of(group)) : data[r];
            }
            if (!SPARING && (group + STEP) * GROUP < columns) load(group + STEP);
            add_unit(now, group, group - origin, x, columns, 0, count, sums);
        }
    }
};

template <int ROWS, int MAX>
SIMT_DEVICE void clear(float (&sums)[ROWS][MAX]) {
    SIMT_UNROLL
    for (int row = 0; row < ROWS; ++row) {
        SIMT_UNROLL
        for (int c = 0; c < MAX; ++c) sums[row][c] = 0.0f;
    }
}

// sums[c] = row . column c for c < count; every lane of the wave gets the result.
template <bool SPARING = false, int MAX, class Columns>
SIMT_DEVICE void wave_row(const formats::Block* row, const Columns& x, int columns, int count,
                          float (&sums)[1][MAX]) {
    clear(sums);
    Stream<formats::Weights, 1, SPARING> stream{{row}, {}};
    stream.start(columns);
    stream.add(x, columns, 0, columns, count, sums);
    simt::wave_sum(sums[0], count);
}

}  // namespace dot
