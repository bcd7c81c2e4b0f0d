// Elementwise operations on the residual stream and inside the feed-forward block.
#include "numeric.h"

#ifndef ACTIVATION
#error "elementwise.hip: define ACTIVATION (0: SiLU, 1: GELU in its tanh form)"
#endif

// y = activation(gate) * up, all (count). y may be gate. Grid: ceil(count / block).
SIMT_KERNEL(gated, const float* gate, const float* up, float* y, int32_t count) {
    const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
    if (i >= count) return;
#if ACTIVATION == 0
    y[i] = numeric::silu(gate[i]) * up[i];
#else
    y[i] = numeric::gelu_tanh(gate[i]) * up[i];
#endif
}

// y = activation(gate) * up for rows of `width`, where up's rows are `up_stride` apart.
// Grid: ceil(count / block), count = rows * width.
SIMT_KERNEL(gated_strided, const float* gate, const float* up, float* y, int32_t count,
            int32_t width, int32_t up_stride) {
    const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
    if (i >= count) return;
    const float other = up[static_cast<int64_t>(i / width) * up_stride + i % width];
#if ACTIVATION == 0
    y[i] = numeric::silu(gate[i]) * other;
#else
    y[i] = numeric::gelu_tanh(gate[i]) * other;
#endif
}
