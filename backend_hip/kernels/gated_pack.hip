// activation(gate) * up, packed for the down projection: what `gated` and to_packed do, with the same bits.
#include "numeric.h"
#include "pack_row.h"
#include "partial_sums.h"

#ifndef ACTIVATION
#error "gated_pack.hip: define ACTIVATION (0: SiLU, 1: GELU in its tanh form)"
#endif

// parts (splits, count, 2 * inner): gate, then up, of each token; y (count, inner); to, scales as to_packed.
// inner is a multiple of 256. Grid: count.
SIMT_KERNEL(gated_pack, const float* parts, float* y, uint8_t* to, float* scales, int32_t inner,
            int32_t count, int32_t splits) {
    const int token = simt::block_x();
    const int64_t stride = static_cast<int64_t>(count) * 2 * inner;
    const int64_t first = static_cast<int64_t>(token) * 2 * inner;
    float* row = y + static_cast<int64_t>(token) * inner;
    for (int k = simt::thread(); k < inner; k += SIMT_BLOCK) {
        const float gate = partial_sum(parts, first + k, stride, splits);
        const float up = partial_sum(parts, first + inner + k, stride, splits);
#if ACTIVATION == 0
        row[k] = numeric::silu(gate) * up;
#else
        row[k] = numeric::gelu_tanh(gate) * up;
#endif
    }
    simt::sync();
    packed::pack_row([=](int k) { return row[k]; }, token, inner, to, scales);
}
