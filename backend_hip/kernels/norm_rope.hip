// RoPE of queries and keys in one launch, with the norm of each head before it where NORMED.
#include "flow.h"
#include "rope_head.h"

// q (count, q_heads, head_size), k (count, k_heads, head_size), in place; cosine, sine (context,
// half). Head sizes up to rope_head::LARGEST. Grid: (q_heads + k_heads, count).
SIMT_KERNEL(norm_rope, float* q, float* k, const float* q_norm, const float* k_norm,
            const float* cosine, const float* sine, const int32_t* step, int32_t q_heads,
            int32_t head_size, int32_t half, float epsilon) {
    SIMT_SHARED(float, head, rope_head::LARGEST);
    const int token = simt::block_y();
    const bool is_q = simt::block_x() < q_heads;
    const int k_heads = simt::grid_x() - q_heads;
    const int64_t index = is_q ? static_cast<int64_t>(token) * q_heads + simt::block_x()
                               : static_cast<int64_t>(token) * k_heads + simt::block_x() - q_heads;
    float* values = (is_q ? q : k) + index * head_size;
    rope_head::fill(head, [=](int i) { return values[i]; }, is_q ? q_norm : k_norm, head_size, epsilon);
    const int64_t position = static_cast<int64_t>(flow::position(step, token)) * half;
    rope_head::rotate(head, cosine + position, sine + position, head_size, half,
                      [=](int i, float value) { values[i] = value; });
}
