// Activations for matvec_packed.hip: to_half's halves and scales, laid out as packed.h says.
#include "pack_row.h"

// x (tokens, columns); to: packed.h, 16 tokens after the other; scales (tokens): what a result has to
// be multiplied by. columns is a multiple of 256. Grid: tokens.
SIMT_KERNEL(to_packed, const float* x, uint8_t* to, float* scales, int32_t columns) {
    const int token = simt::block_x();
    const float* row = x + static_cast<int64_t>(token) * columns;
    packed::pack_row([=](int k) { return row[k]; }, token, columns, to, scales);
}
