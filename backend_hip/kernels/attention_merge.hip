// Merges what attention_split left behind for each split into the result of a row and head.
#include "attention_merge.h"
#include "seen.h"

#if !defined(HEAD_SIZE) || !defined(SPLIT_KEYS)
#error "attention_merge.hip: define HEAD_SIZE and SPLIT_KEYS"
#endif

constexpr int SLOTS = (HEAD_SIZE + SIMT_BLOCK - 1) / SIMT_BLOCK;  // values per thread
constexpr int AHEAD = 4;                                          // splits whose values are in flight

// partials (rows, heads, splits, HEAD_SIZE + 2); out (rows, heads, HEAD_SIZE). Grid: (heads, rows).
SIMT_KERNEL(attention_merge, const float* partials, float* out, const int32_t* step, int32_t splits,
            int32_t window) {
    using namespace attention;
    SIMT_SHARED(float, maxima, SIMT_BLOCK);
    SIMT_SHARED(float, totals, SIMT_BLOCK);
    SIMT_SHARED(float, befores, SIMT_BLOCK);
    SIMT_SHARED(float, nows, SIMT_BLOCK);
    const int thread = simt::thread();
    const int heads = simt::grid_x();
    const int row = simt::block_y();
    const Seen seen = seen_by(step, row, window);
    const int needed = (seen.end - 1) / SPLIT_KEYS + 1;
    const int end = simt::min(needed, splits);
    const float* source = partials + partial_at(row, heads, simt::block_x(), splits, 0, HEAD_SIZE);
    constexpr int PITCH = HEAD_SIZE + PARTIAL_EXTRA;

    float values[SLOTS];
    SIMT_UNROLL
    for (int slot = 0; slot < SLOTS; ++slot) values[slot] = 0.0f;
    Merge merge;
    merge.clear();
    for (int begin = seen.first / SPLIT_KEYS; begin < end; begin += SIMT_BLOCK) {
        const int count = simt::min(SIMT_BLOCK, end - begin);
        const float* batch = source + static_cast<int64_t>(begin) * PITCH;
        if (thread < count) {
            maxima[thread] = batch[static_cast<int64_t>(thread) * PITCH + HEAD_SIZE];
            totals[thread] = batch[static_cast<int64_t>(thread) * PITCH + HEAD_SIZE + 1];
        }
        simt::sync();
        // The factors of split t follow from the largest maximum before it: a thread for each.
        if (thread < count) {
            Merge own = merge;
            for (int i = 0; i < thread; ++i) own.maximum = simt::max(own.maximum, maxima[i]);
            own.take(maxima[thread], totals[thread]);
            befores[thread] = own.before;
            nows[thread] = own.now;
        }
        simt::sync();
        for (int i = 0; i < count; i += AHEAD) {
            float loaded[AHEAD][SLOTS];
            SIMT_UNROLL
            for (int j = 0; j < AHEAD; ++j) {
                SIMT_UNROLL
                for (int slot = 0; slot < SLOTS; ++slot) {
                    const int d = slot * SIMT_BLOCK + thread;
                    const bool there = i + j < count && d < HEAD_SIZE;
                    loaded[j][slot] = there ? batch[static_cast<int64_t>(i + j) * PITCH + d] : 0.0f;
                }
            }
            SIMT_UNROLL
            for (int j = 0; j < AHEAD; ++j) {
                if (i + j >= count) break;
                merge.before = befores[i + j];
                merge.now = nows[i + j];
                merge.total = merge.value(merge.total, totals[i + j]);
                merge.maximum = simt::max(merge.maximum, maxima[i + j]);
                SIMT_UNROLL
                for (int slot = 0; slot < SLOTS; ++slot) {
                    values[slot] = merge.value(values[slot], loaded[j][slot]);
                }
            }
        }
        simt::sync();  // all have read the factors before the next splits overwrite them
    }
    // A NaN where the grid had too few splits for the position: the result would lack keys.
    if (needed > splits) merge.total = simt::from_bits(0x7fc00000u);
    SIMT_UNROLL
    for (int slot = 0; slot < SLOTS; ++slot) {
        const int d = slot * SIMT_BLOCK + thread;
        if (d < HEAD_SIZE) {
            out[(static_cast<int64_t>(row) * heads + simt::block_x()) * HEAD_SIZE + d] =
                values[slot] / merge.total;
        }
    }
}
