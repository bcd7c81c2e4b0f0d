// Each token's experts' outputs, scaled, weighted and added in the order of its routing.
#include "simt.h"

// y (count * used, width), chosen, weights (count, used), scales (experts) -> out (count, width).
// Grid: (ceil(width / block), count).
SIMT_KERNEL(combine_experts, const float* y, const int32_t* chosen, const float* weights,
            const float* scales, float* out, int32_t width, int32_t used) {
    const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
    if (i >= width) return;
    const int64_t token = simt::block_y();
    float total = 0.0f;
    for (int place = 0; place < used; ++place) {
        const int64_t pair = token * used + place;
        const float part = y[pair * width + i] * scales[chosen[pair]] * weights[pair];
        total = place == 0 ? part : total + part;
    }
    out[token * width + i] = total;
}
