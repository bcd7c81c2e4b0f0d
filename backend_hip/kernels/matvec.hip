// y = W x for one column, K-parallel: one wave per row, lanes stripe K. The decode projection.
#include "dot.h"

// weights (rows, columns) blocks; x (columns); y (rows). Grid: ceil(rows / waves per block).
SIMT_KERNEL(matvec, const uint8_t* weights, const float* x, float* y, int32_t rows,
            int32_t columns) {
    const int row = simt::block_x() * (SIMT_BLOCK / SIMT_WAVE) + simt::wave();
    if (row >= rows) return;  // whole waves only, so no lane waits for one that left
    float sum[1];
    dot::wave_row(formats::row_at(weights, row, columns), dot::Consecutive{x, columns}, columns, 1, sum);
    if (simt::lane() == 0) y[row] = sum[0];
}
