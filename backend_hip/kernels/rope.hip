// Rotary position embedding, in place. Angles come from host tables made in float64, because
// float32 sines lose accuracy with the position.
#include "flow.h"

#ifndef ROPE_NEOX
#error "rope.hip: define ROPE_NEOX (0: pairs (0,1), (2,3), ...; 1: pairs j, j + half)"
#endif

// x (count, heads, head_size); cosine, sine (context, half). Grid: (heads, count).
SIMT_KERNEL(rope, float* x, const float* cosine, const float* sine, const int32_t* step,
            int32_t head_size, int32_t half) {
    const int token = simt::block_y();
    const int64_t position = flow::position(step, token);
    const int64_t head = static_cast<int64_t>(token) * simt::grid_x() + simt::block_x();
    float* values = x + head * head_size;
    for (int j = simt::thread(); j < half; j += SIMT_BLOCK) {
#if ROPE_NEOX
        const int first = j;
        const int second = j + half;
#else
        const int first = 2 * j;
        const int second = 2 * j + 1;
#endif
        const float c = cosine[position * half + j];
        const float s = sine[position * half + j];
        const float a = values[first];
        const float b = values[second];
        values[first] = a * c - b * s;
        values[second] = a * s + b * c;
    }
}
