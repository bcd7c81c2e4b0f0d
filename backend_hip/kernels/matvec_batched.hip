// Y = X W^T for up to MAX_COLS columns, K-parallel: a wave takes ROWS_PER_WAVE rows, a unit of
// weights is loaded once however many columns there are, accumulators stay in registers, and there
// is one reduction per column at the end.
//
// STAGE_COLUMNS columns at a time lie in shared memory; 0 reads them from device memory.
#include "staged.h"

#if !defined(MAX_COLS) || !defined(ROWS_PER_WAVE) || !defined(STAGE_COLUMNS)
#error "matvec_batched.hip: define MAX_COLS (1 to 64), ROWS_PER_WAVE and STAGE_COLUMNS"
#endif
static_assert(MAX_COLS >= 1 && MAX_COLS <= 64, "MAX_COLS is 1 to 64");

struct Many {
    const float* x;
    int columns;
    SIMT_DEVICE float operator()(int c, int k) const {
        return x[static_cast<int64_t>(c) * columns + k];
    }
};

#if STAGE_COLUMNS > 0
// One step of a wave, so that a unit's bytes stay in registers while the columns pass by.
constexpr int STAGE = SIMT_WAVE * formats::Weights::UNIT;

template <int ROWS>
SIMT_DEVICE void products(const formats::Block* const (&row)[ROWS], const float* x, int columns,
                          int count, float (&sums)[ROWS][MAX_COLS]) {
    using F = formats::Weights;
    SIMT_SHARED(float, stage, STAGE_COLUMNS * STAGE);
    for (int begin = 0; begin < columns; begin += STAGE) {
        const int end = simt::min(columns, begin + STAGE);
        const int unit = begin / F::UNIT + simt::lane();
        const bool inside = unit * F::UNIT < end;
        F::Unit data[ROWS];
        SIMT_UNROLL
        for (int r = 0; r < ROWS; ++r) data[r] = F::load(row[r], inside ? unit : 0);
        SIMT_UNROLL
        for (int group = 0; group < MAX_COLS; group += STAGE_COLUMNS) {
            if (group >= count) break;
            const int last = simt::min(count, group + STAGE_COLUMNS);
            if (begin + group > 0) simt::sync();  // all waves have read the group before
            const Many value{x + static_cast<int64_t>(group) * columns, columns};
            staged::fill(stage, STAGE, begin, end, columns, last - group, value);
            simt::sync();
            const staged::Columns column{stage - group * STAGE, begin, STAGE};
            if (inside) dot::add_unit<F>(data, unit, column, columns, group, last, sums);
        }
    }
}
#else
template <int ROWS>
SIMT_DEVICE void products(const formats::Block* const (&row)[ROWS], const float* x, int columns,
                          int count, float (&sums)[ROWS][MAX_COLS]) {
    const dot::Consecutive column{x, columns};
    dot::add_rows<formats::Weights>(row, column, columns, 0, columns, count, sums);
}
#endif

// weights (rows, columns) blocks; x (count, columns); y (count, rows); 1 <= count <= MAX_COLS.
// Grid: ceil(rows / (waves per block * ROWS_PER_WAVE)).
SIMT_KERNEL(matvec_batched, const uint8_t* weights, const float* x, float* y, int32_t rows,
            int32_t columns, int32_t count) {
    const int first = (simt::block_x() * (SIMT_BLOCK / SIMT_WAVE) + simt::wave()) * ROWS_PER_WAVE;
    const formats::Block* row[ROWS_PER_WAVE];
    SIMT_UNROLL
    for (int r = 0; r < ROWS_PER_WAVE; ++r) {
        // A wave past the end repeats the last row and stores nothing: the block's barriers need it.
        row[r] = formats::row_at(weights, simt::min(first + r, rows - 1), columns);
    }
    float sums[ROWS_PER_WAVE][MAX_COLS];
    dot::clear(sums);
    products(row, x, columns, count, sums);
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
