// Activations for the matrix unit: each token's row as halves, scaled by a power of two.
#include "half_scale.h"

// x (tokens, columns); halves (tokens, stride), zero from `columns` on; scales (tokens): what a result
// has to be multiplied by. stride is even. Grid: tokens.
SIMT_KERNEL(to_half, const float* x, uint32_t* halves, float* scales, int32_t columns,
            int32_t stride) {
    const int token = simt::block_x();
    const float* row = x + static_cast<int64_t>(token) * columns;
    uint32_t* to = halves + static_cast<int64_t>(token) * (stride / 2);
    const half_scale::Scale scale = half_scale::of(row, columns);
    if (simt::thread() == 0) scales[token] = scale.inverse;
    for (int pair = simt::thread(); pair < stride / 2; pair += SIMT_BLOCK) {
        const int k = 2 * pair;
        const float low = k < columns ? row[k] * scale.factor : 0.0f;
        const float high = k + 1 < columns ? row[k + 1] * scale.factor : 0.0f;
        to[pair] = simt::float_to_half(low) |
                   static_cast<uint32_t>(simt::float_to_half(high)) << 16;
    }
}
