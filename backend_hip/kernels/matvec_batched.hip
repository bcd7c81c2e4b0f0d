// Y = X W^T for up to MAX_COLS columns, K-parallel: a wave takes ROWS_PER_WAVE rows, a unit of
// weights is loaded once however many columns there are, accumulators stay in registers, and there
// is one reduction per column at the end.
//
// STAGE_COLUMNS columns at a time lie in shared memory; 0 reads them from device memory.
#include "staged.h"

#if !defined(MAX_COLS) || !defined(ROWS_PER_WAVE) || !defined(STAGE_COLUMNS) || !defined(LEAN)
#error "matvec_batched.hip: define MAX_COLS (1 to 64), ROWS_PER_WAVE, STAGE_COLUMNS and LEAN"
#endif
static_assert(!LEAN || STAGE_COLUMNS == 0, "staged columns ask for a unit ahead");
static_assert(MAX_COLS >= 1 && MAX_COLS <= 64, "MAX_COLS is 1 to 64");

using F = formats::Weights;
using Stream = dot::Stream<F, ROWS_PER_WAVE, LEAN != 0>;

#if STAGE_COLUMNS > 0
// One step of a wave, so that a unit's bytes stay in registers while the columns pass by.
constexpr int STAGE = SIMT_WAVE * F::UNIT;

SIMT_DEVICE void products(Stream& stream, const float* x, int columns, int count,
                          float (&sums)[ROWS_PER_WAVE][MAX_COLS]) {
    SIMT_SHARED(float, stage, STAGE_COLUMNS * STAGE);
    const int group = simt::lane() / F::UNITS;
    for (int begin = 0; begin < columns; begin += STAGE) {
        const int end = simt::min(columns, begin + STAGE);
        const int at = begin / Stream::GROUP + group;
        const bool inside = at * Stream::GROUP < end;
        F::Unit data[ROWS_PER_WAVE];
        SIMT_UNROLL
        for (int r = 0; r < ROWS_PER_WAVE; ++r) data[r] = stream.data[r];
        if ((at + Stream::STEP) * Stream::GROUP < columns) stream.load(at + Stream::STEP);
        SIMT_UNROLL
        for (int first = 0; first < MAX_COLS; first += STAGE_COLUMNS) {
            if (first >= count) break;
            const int last = simt::min(count, first + STAGE_COLUMNS);
            if (begin + first > 0) simt::sync();  // all waves have read the columns before
            const float* columns_from = x + static_cast<int64_t>(first) * columns;
            staged::fill(stage, STAGE, begin, end, last - first,
                         [=](int c, int k, float (&part)[4]) {
                             const int64_t offset = static_cast<int64_t>(c) * columns;
                             dot::four<F>(columns_from + offset, k, columns, part);
                         });
            simt::sync();
            const staged::Columns column{stage - first * STAGE, STAGE};
            if (inside) {
                Stream::add_unit(data, at, group, column, columns, first, last, sums);
            }
        }
    }
}
#else
SIMT_DEVICE void products(Stream& stream, const float* x, int columns, int count,
                          float (&sums)[ROWS_PER_WAVE][MAX_COLS]) {
    stream.add(dot::Consecutive{x, columns}, columns, 0, columns, count, sums);
}
#endif

// weights (rows, columns) blocks; x (count, columns); y (count, rows); 1 <= count <= MAX_COLS.
// Grid: ceil(rows / (waves per block * ROWS_PER_WAVE)).
SIMT_KERNEL(matvec_batched, const uint8_t* weights, const float* x, float* y, int32_t rows,
            int32_t columns, int32_t count) {
    const int wave = LEAN ? simt::uniform(simt::wave()) : simt::wave();
    const int first = (simt::block_x() * (SIMT_BLOCK / SIMT_WAVE) + wave) * ROWS_PER_WAVE;
    Stream stream;
    SIMT_UNROLL
    for (int r = 0; r < ROWS_PER_WAVE; ++r) {
        // A wave past the end repeats the last row and stores nothing: the block's barriers need it.
        stream.row[r] = formats::row_at(weights, simt::min(first + r, rows - 1), columns);
    }
    stream.start(columns);
    float sums[ROWS_PER_WAVE][MAX_COLS];
    dot::clear(sums);
    products(stream, x, columns, count, sums);
    SIMT_UNROLL
    for (int r = 0; r < ROWS_PER_WAVE; ++r) {
        simt::wave_sum(sums[r], count);
        if (simt::lane() == 0 && first + r < rows) {
            SIMT_UNROLL
            for (int c = 0; c < MAX_COLS; ++c) {
                if (c < count) y[static_cast<int64_t>(c) * rows + first + r] = sums[r][c];
            }
        }
    }
}
