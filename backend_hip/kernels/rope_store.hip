// Queries, keys and values of new tokens from one product's parts: queries normed and turned, keys likewise
// into the cache, values into the cache. What rms_norm, rope and kv_write do, with the same bits.
#include "flow.h"
#include "kv_store.h"
#include "partial_sums.h"
#include "rope_head.h"

#if !defined(K_TYPE) || !defined(V_TYPE)
#error "rope_store.hip: define K_TYPE and V_TYPE (see kv_type.h)"
#endif
using K = kv::Storage<K_TYPE>;
using V = kv::Storage<V_TYPE>;

// parts (splits, count, rows): q_heads queries, then as many keys as values, of each token; q (count,
// q_heads, head_size). Grid: (heads of all three, count).
SIMT_KERNEL(rope_store, const float* parts, float* q, const float* q_norm, const float* k_norm,
            const float* cosine, const float* sine, K::Element* keys, V::Element* values,
            const int32_t* step, int32_t q_heads, int32_t head_size, int32_t half,
            int32_t cache_rows, int32_t count, int32_t splits, float epsilon) {
    SIMT_SHARED(float, head, rope_head::LARGEST);
    SIMT_SHARED(float, turned, rope_head::LARGEST);
    const int token = simt::block_y(), index = simt::block_x(), heads = simt::grid_x();
    const int kv_heads = (heads - q_heads) / 2, width = kv_heads * head_size;
    const int64_t rows = static_cast<int64_t>(heads) * head_size;
    const int64_t at = token * rows + static_cast<int64_t>(index) * head_size;
    const auto value = [=](int i) { return partial_sum(parts, at + i, count * rows, splits); };
    const int64_t position = flow::position(step, token);
    const int64_t row = flow::cache_start(step, token) + position;

    if (index >= q_heads + kv_heads) {
        const int first = (index - q_heads - kv_heads) * head_size;
        for (int i = simt::thread(); i < head_size; i += SIMT_BLOCK)
            kv::write<V>(values, value(i), row, first + i, width, head_size, cache_rows);
        return;
    }
    const bool is_q = index < q_heads;
    rope_head::fill(head, value, is_q ? q_norm : k_norm, head_size, epsilon);
    const float* cosines = cosine + position * half;
    const float* sines = sine + position * half;
    if (is_q) {
        float* to = q + (static_cast<int64_t>(token) * q_heads + index) * head_size;
        rope_head::rotate(head, cosines, sines, head_size, half, [=](int i, float v) { to[i] = v; });
        return;
    }
    rope_head::rotate(head, cosines, sines, head_size, half, [&](int i, float v) { turned[i] = v; });
    simt::sync();
    const int first = (index - q_heads) * head_size;
    for (int i = simt::thread(); i < head_size; i += SIMT_BLOCK)
        kv::write<K>(keys, turned[i], row, first + i, width, head_size, cache_rows);
}
