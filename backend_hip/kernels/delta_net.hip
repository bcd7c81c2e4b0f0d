// The gated delta net's recurrence: one block per value head walks the chunk's tokens with the state
// in registers, so that it is loaded and stored once per chunk and head. A thread owns one value
// column of the state; nothing is reduced across threads, so chunking never changes a bit.
#include "flow.h"
#include "numeric.h"

#ifndef STATE_SIZE
#error "delta_net.hip: define STATE_SIZE (keys and values per head)"
#endif
static_assert(SIMT_BLOCK == STATE_SIZE, "one thread per value column");

// q, k (count, key_heads, STATE_SIZE); v: rows of v_stride with the heads' values one after
// another; log_decay, beta (count, heads); memory: per sequence (heads, STATE_SIZE keys,
// STATE_SIZE values); out (count, heads, STATE_SIZE). Value head h reads key head h mod key_heads.
// `count` rows per sequence. Grid: (heads, sequences).
SIMT_KERNEL(delta_rule, const float* q, const float* k, const float* v, const float* log_decay,
            const float* beta, float* memory, float* out, const int32_t* step, int32_t key_heads,
            int32_t v_stride, int32_t count) {
    SIMT_SHARED(float, key, STATE_SIZE);
    SIMT_SHARED(float, query, STATE_SIZE);
    const int column = simt::thread();
    const int head = simt::block_x();
    const int heads = simt::grid_x();
    const int64_t first = static_cast<int64_t>(simt::block_y()) * count;
    const int64_t sequence = flow::sequence(step, static_cast<int>(first));
    q += first * key_heads * STATE_SIZE;
    k += first * key_heads * STATE_SIZE;
    v += first * v_stride;
    log_decay += first * heads;
    beta += first * heads;
    out += first * heads * STATE_SIZE;
    memory += sequence * heads * STATE_SIZE * STATE_SIZE;
    float* stored = memory + static_cast<int64_t>(head) * STATE_SIZE * STATE_SIZE + column;
    float state[STATE_SIZE];
    SIMT_UNROLL
    for (int i = 0; i < STATE_SIZE; ++i) state[i] = stored[static_cast<int64_t>(i) * STATE_SIZE];

    for (int64_t token = 0; token < count; ++token) {
        const int64_t source = (token * key_heads + head % key_heads) * STATE_SIZE + column;
        key[column] = k[source];
        query[column] = q[source];
        simt::sync();
        const float decay = numeric::exp(log_decay[token * heads + head]);
        float seen = 0.0f;
        SIMT_UNROLL
        for (int i = 0; i < STATE_SIZE; ++i) {
            state[i] *= decay;
            seen = simt::fma(state[i], key[i], seen);
        }
        // Makes the compiler read the keys from LDS again: STATE_SIZE of them held in registers beside
        // as many state elements are more than a lane has (256), and spill.
        simt::wave_sync();
        const float value = v[token * v_stride + static_cast<int64_t>(head) * STATE_SIZE + column];
        const float delta = (value - seen) * beta[token * heads + head];
        float result = 0.0f;
        SIMT_UNROLL
        for (int i = 0; i < STATE_SIZE; ++i) {
            state[i] = simt::fma(key[i], delta, state[i]);
            result = simt::fma(state[i], query[i], result);
        }
        out[(token * heads + head) * STATE_SIZE + column] = result;
        simt::sync();  // all threads have read key and query before the next token's are written
    }
    SIMT_UNROLL
    for (int i = 0; i < STATE_SIZE; ++i) stored[static_cast<int64_t>(i) * STATE_SIZE] = state[i];
}
