// Y = X W^T for up to MAX_COLS columns, K-parallel: one wave per row, each decoded stripe applied
// to all active columns, accumulators in registers, one reduction per column at the end. Every
// weight row is read and decoded once however many columns there are.
#include "dot.h"

#ifndef MAX_COLS
#error "matvec_batched.hip: define MAX_COLS (1 to 64)"
#endif
static_assert(MAX_COLS >= 1 && MAX_COLS <= 64, "MAX_COLS is 1 to 64");

// weights (rows, columns) blocks; x (count, columns); y (count, rows); 1 <= count <= MAX_COLS.
SIMT_KERNEL(matvec_batched, const uint8_t* weights, const float* x, float* y, int32_t rows,
            int32_t columns, int32_t count) {
    const int row = simt::block_x() * (SIMT_BLOCK / SIMT_WAVE) + simt::wave();
    if (row >= rows) return;
    float sums[MAX_COLS];
    dot::wave_row(formats::row_at(weights, row, columns), dot::Consecutive{x, columns}, columns, count, sums);
    if (simt::lane() == 0) {
        SIMT_UNROLL
        for (int c = 0; c < MAX_COLS; ++c) {
            if (c < count) y[static_cast<int64_t>(c) * rows + row] = sums[c];
        }
    }
}
