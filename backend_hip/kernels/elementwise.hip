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

// y = a + b, all (count). y may be a or b. Grid: ceil(count / block).
SIMT_KERNEL(add, const float* a, const float* b, float* y, int32_t count) {
    const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
    if (i >= count) return;
    y[i] = a[i] + b[i];
}
