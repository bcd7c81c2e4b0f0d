// Y = X W^T with one thread walking all of K per row: nothing runs in parallel along K.
// Kept selectable (--path serial) so that its cost can be shown beside kparallel. The order of
// additions differs from kparallel, so results agree within a bound and not bit for bit.
#include "formats.h"

#ifndef MAX_COLS
#error "matvec_serial.hip: define MAX_COLS (1 to 64)"
#endif
static_assert(MAX_COLS >= 1 && MAX_COLS <= 64, "MAX_COLS is 1 to 64");

// acc + w . x over one stripe, in ascending k. Columns past the end of a plain row are not read.
SIMT_DEVICE float stripe(const float (&w)[formats::STRIPE], const float* x, int k, int columns,
                         float acc) {
    SIMT_UNROLL
    for (int i = 0; i < formats::STRIPE; ++i) {
        if (BLOCK_ELEMENTS > 1 || k + i < columns) acc = simt::fma(w[i], x[k + i], acc);
    }
    return acc;
}

// Arguments as matvec_batched. Grid: ceil(rows / SIMT_BLOCK).
SIMT_KERNEL(matvec_serial, const uint8_t* weights, const float* x, float* y, int32_t rows,
            int32_t columns, int32_t count) {
    const int row = simt::block_x() * SIMT_BLOCK + simt::thread();
    if (row >= rows) return;
    const formats::Block* blocks = formats::row_at(weights, row, columns);
    float sums[MAX_COLS];
    SIMT_UNROLL
    for (int c = 0; c < MAX_COLS; ++c) sums[c] = 0.0f;
    for (int k = 0; k < columns; k += formats::STRIPE) {
        float w[formats::STRIPE];
        formats::decode(blocks, k, columns, w);
        SIMT_UNROLL
        for (int c = 0; c < MAX_COLS; ++c) {
            if (c < count) {
                sums[c] = stripe(w, x + static_cast<int64_t>(c) * columns, k, columns, sums[c]);
            }
        }
    }
    SIMT_UNROLL
    for (int c = 0; c < MAX_COLS; ++c) {
        if (c < count) y[static_cast<int64_t>(c) * rows + row] = sums[c];
    }
}
