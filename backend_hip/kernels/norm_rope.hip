// RoPE of queries and keys in one launch, with the norm of each head before it where NORMED.
#include "flow.h"
#include "rms.h"

#if !defined(ROPE_NEOX) || !defined(NORMED)
#error "norm_rope.hip: define ROPE_NEOX (as rope.hip) and NORMED (0 or 1)"
#endif
static_assert(SIMT_BLOCK == rms::THREADS, "one group of threads a head");
constexpr int LARGEST_HEAD = 512;

// q (count, q_heads, head_size), k (count, k_heads, head_size), in place; cosine, sine (context,
// half). Head sizes up to 512. Grid: (q_heads + k_heads, count).
SIMT_KERNEL(norm_rope, float* q, float* k, const float* q_norm, const float* k_norm,
            const float* cosine, const float* sine, const int32_t* step, int32_t q_heads,
            int32_t head_size, int32_t half, float epsilon) {
    SIMT_SHARED(float, head, LARGEST_HEAD);
    const int token = simt::block_y();
    const bool is_q = simt::block_x() < q_heads;
    const int k_heads = simt::grid_x() - q_heads;
    const int64_t index = is_q ? static_cast<int64_t>(token) * q_heads + simt::block_x()
                               : static_cast<int64_t>(token) * k_heads + simt::block_x() - q_heads;
    float* values = (is_q ? q : k) + index * head_size;
#if NORMED
    const float* weight = is_q ? q_norm : k_norm;
    const float scale = rms::inverse_rms(rms::squares_of(values, head_size), head_size, epsilon);
    for (int i = simt::thread(); i < head_size; i += SIMT_BLOCK) {
        head[i] = values[i] * scale * weight[i];
    }
#else
    (void)q_norm;
    (void)k_norm;
    (void)epsilon;
    for (int i = simt::thread(); i < head_size; i += SIMT_BLOCK) head[i] = values[i];
#endif
    simt::sync();
    const int64_t position = flow::position(step, token);
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
        const float a = head[first];
        const float b = head[second];
        values[first] = a * c - b * s;
        values[second] = a * s + b * c;
    }
    for (int i = 2 * half + simt::thread(); i < head_size; i += SIMT_BLOCK) values[i] = head[i];
}
