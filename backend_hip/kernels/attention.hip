// Causal attention with grouped heads, online softmax and an optional sliding window, for prefill
// and decode alike: one wave per (query head, token), tiles of SIMT_WAVE keys anchored at position
// 0, so that neither the chunk nor the window moves a tile and with it the rounding.
#include "flow.h"
#include "kv_type.h"
#include "numeric.h"

#if !defined(HEAD_SIZE) || !defined(K_TYPE) || !defined(V_TYPE)
#error "attention.hip: define HEAD_SIZE, K_TYPE and V_TYPE"
#endif
static_assert(SIMT_BLOCK == SIMT_WAVE, "attention runs one wave per block");
using K = kv::Storage<K_TYPE>;
using V = kv::Storage<V_TYPE>;

constexpr int TILE = SIMT_WAVE;
constexpr int SLOTS = (HEAD_SIZE + SIMT_WAVE - 1) / SIMT_WAVE;  // value elements per lane

// q, out (count, heads, HEAD_SIZE); keys, values: cache rows of
// (kv_heads, HEAD_SIZE), a sequence's one after another.
// window 0: none; else keys at distance >= window are masked. Grid: (heads, count).
SIMT_KERNEL(attention, const float* q, const K::Element* keys, const V::Element* values, float* out,
            const int32_t* step, int32_t kv_heads, int32_t window, float scale) {
    SIMT_SHARED(float, query, HEAD_SIZE);
    SIMT_SHARED(float, weight, TILE);
    const int lane = simt::lane();
    const int heads = simt::grid_x();
    const int kv_head = simt::block_x() / (heads / kv_heads);
    const int64_t row_size = static_cast<int64_t>(kv_heads) * HEAD_SIZE;
    const int position = flow::position(step, simt::block_y());
    const int64_t head = static_cast<int64_t>(simt::block_y()) * heads + simt::block_x();
    const int64_t start = flow::cache_start(step, simt::block_y()) * row_size;
    keys += start + static_cast<int64_t>(kv_head) * HEAD_SIZE;
    values += start + static_cast<int64_t>(kv_head) * HEAD_SIZE;

    for (int d = lane; d < HEAD_SIZE; d += SIMT_WAVE) query[d] = q[head * HEAD_SIZE + d];
    simt::wave_sync();

    // Tiles before the window are skipped whole; the first and the last hold a visible key each,
    // so a tile's maximum is always finite.
    const int first_key = window > 0 && position >= window ? position - window + 1 : 0;
    float maximum = simt::from_bits(0xff800000u);
    float total = 0.0f;
    float mixed[SLOTS];
    SIMT_UNROLL
    for (int slot = 0; slot < SLOTS; ++slot) mixed[slot] = 0.0f;

    for (int tile = first_key / TILE * TILE; tile <= position; tile += TILE) {
        const int key = tile + lane;
        const bool visible = key >= first_key && key <= position;
        float score = simt::from_bits(0xff800000u);
        if (visible) {
            score = 0.0f;
            const K::Element* stored = keys + key * row_size;
            for (int d = 0; d < HEAD_SIZE; ++d) {
                score = simt::fma(query[d], K::load(stored[d]), score);
            }
            score *= scale;
        }
        const float tile_maximum = simt::wave_max(score);
        const float next = simt::max(maximum, tile_maximum);
        const float correction = numeric::exp(maximum - next);  // 0 at the first tile
        const float p = visible ? numeric::exp(score - next) : 0.0f;
        total = total * correction + simt::wave_sum(p);
        weight[lane] = p;
        simt::wave_sync();
        // Rows past `position` are not written yet and may hold anything, NaN included.
        const int count = simt::min(TILE, position + 1 - tile);
        SIMT_UNROLL
        for (int slot = 0; slot < SLOTS; ++slot) {
            const int d = slot * SIMT_WAVE + lane;
            if (d < HEAD_SIZE) {
                float sum = mixed[slot] * correction;
                for (int j = 0; j < count; ++j) {
                    sum = simt::fma(weight[j], V::load(values[(tile + j) * row_size + d]), sum);
                }
                mixed[slot] = sum;
            }
        }
        simt::wave_sync();  // all lanes have read `weight` before the next tile overwrites it
        maximum = next;
    }
    SIMT_UNROLL
    for (int slot = 0; slot < SLOTS; ++slot) {
        const int d = slot * SIMT_WAVE + lane;
        if (d < HEAD_SIZE) out[head * HEAD_SIZE + d] = mixed[slot] / total;
    }
}
