// Elementwise operations on the residual stream and inside the feed-forward block.
#include "numeric.h"
#include "partial_sums.h"

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

// y (count, inner) = activation(gate) * up, from a product's parts (splits, count, 2 * inner): gate, then up,
// of each token. inner is a multiple of 4. Grid: (ceil(inner / 4 / block), count).
SIMT_KERNEL(gated_parts, const float* parts, float* y, int32_t inner, int32_t splits) {
    const int k = 4 * (simt::block_x() * SIMT_BLOCK + simt::thread());
    if (k >= inner) return;
    const int64_t token = simt::block_y(), stride = static_cast<int64_t>(simt::grid_y()) * 2 * inner;
    float gate[4], up[4];
    partial_sums(gate, parts, token * 2 * inner + k, stride, splits);
    partial_sums(up, parts, token * 2 * inner + inner + k, stride, splits);
    simt::Quad result;
    SIMT_UNROLL
    for (int i = 0; i < 4; ++i) {
#if ACTIVATION == 0
        result.word[i] = simt::bits(numeric::silu(gate[i]) * up[i]);
#else
        result.word[i] = simt::bits(numeric::gelu_tanh(gate[i]) * up[i]);
#endif
    }
    simt::store16(y + token * inner + k, result);
}
