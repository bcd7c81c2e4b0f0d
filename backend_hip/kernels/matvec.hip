// y = W x for one column, K-parallel: a wave takes ROWS_PER_WAVE rows, lanes stripe K, the column
// lies in shared memory. The decode projection.
#include "staged.h"

#if !defined(ROWS_PER_WAVE) || !defined(STAGE)
#error "matvec.hip: define ROWS_PER_WAVE and STAGE, the elements of a column in shared memory"
#endif
static_assert(STAGE % (SIMT_WAVE * 32) == 0, "a chunk is a whole number of steps of a wave");

struct One {
    const float* x;
    SIMT_DEVICE float operator()(int, int k) const { return x[k]; }
};

// weights (rows, columns) blocks; x (columns); y (rows).
// Grid: ceil(rows / (waves per block * ROWS_PER_WAVE)).
SIMT_KERNEL(matvec, const uint8_t* weights, const float* x, float* y, int32_t rows,
            int32_t columns) {
    SIMT_SHARED(float, stage, STAGE);
    const int first = (simt::block_x() * (SIMT_BLOCK / SIMT_WAVE) + simt::wave()) * ROWS_PER_WAVE;
    const formats::Block* row[ROWS_PER_WAVE];
    SIMT_UNROLL
    for (int r = 0; r < ROWS_PER_WAVE; ++r) {
        // A wave past the end repeats the last row and stores nothing: the block's barriers need it.
        row[r] = formats::row_at(weights, simt::min(first + r, rows - 1), columns);
    }
    float sums[ROWS_PER_WAVE][1];
    dot::clear(sums);
    for (int begin = 0; begin < columns; begin += STAGE) {
        const int end = simt::min(columns, begin + STAGE);
        if (begin > 0) simt::sync();  // all waves have read the chunk before
        staged::fill(stage, STAGE, begin, end, columns, 1, One{x});
        simt::sync();
        const staged::Columns column{stage, begin, STAGE};
        dot::add_rows<formats::Weights>(row, column, columns, begin, end, 1, sums);
    }
    SIMT_UNROLL
    for (int r = 0; r < ROWS_PER_WAVE; ++r) {
        simt::wave_sum(sums[r], 1);
        if (simt::lane() == 0 && first + r < rows) y[first + r] = sums[r][0];
    }
}
