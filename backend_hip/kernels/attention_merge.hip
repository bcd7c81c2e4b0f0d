// Merges what attention_split left behind for each split into the result of a row and head.
#include "attention_merge.h"
#include "seen.h"

#if !defined(HEAD_SIZE) || !defined(SPLIT_KEYS)
#error "attention_merge.hip: define HEAD_SIZE and SPLIT_KEYS"
#endif

constexpr int SLOTS = (HEAD_SIZE + SIMT_BLOCK - 1) / SIMT_BLOCK;  // values per thread
constexpr int AHEAD = 16 / SLOTS;                                 // splits whose values are in flight
constexpr int COMPARED = 8;                                       // maxima that are read at once

// This thread's values of AHEAD neighbouring splits.
struct Values {
    float of[AHEAD][SLOTS];

    // From split i of `count`, whose values are `pitch` floats apart; 0 behind the last.
    SIMT_DEVICE void load(const float* batch, int pitch, int i, int count) {
        SIMT_UNROLL
        for (int j = 0; j < AHEAD; ++j) {
            SIMT_UNROLL
            for (int slot = 0; slot < SLOTS; ++slot) {
                const int d = slot * SIMT_BLOCK + simt::thread();
                const bool there = i + j < count && d < HEAD_SIZE;
                of[j][slot] = there ? batch[static_cast<int64_t>(i + j) * pitch + d] : 0.0f;
            }
        }
    }
};

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
        Values even, odd;  // one on its way, one at work
        even.load(batch, PITCH, 0, count);
        simt::sync();
        // The factors of split t follow from the largest maximum before it: a thread for each.
        if (thread < count) {
            Merge own = merge;
            for (int i = 0; i < thread; i += COMPARED) {
                SIMT_UNROLL
                for (int j = 0; j < COMPARED; ++j) {
                    if (i + j < thread) own.maximum = simt::max(own.maximum, maxima[i + j]);
                }
            }
            own.take(maxima[thread], totals[thread]);
            befores[thread] = own.before;
            nows[thread] = own.now;
        }
        simt::sync();
        const auto take = [&](const Values& loaded, int i) {
            SIMT_UNROLL
            for (int j = 0; j < AHEAD; ++j) {
                if (i + j >= count) break;
                merge.before = befores[i + j];
                merge.now = nows[i + j];
                merge.total = merge.value(merge.total, totals[i + j]);
                merge.maximum = simt::max(merge.maximum, maxima[i + j]);
                SIMT_UNROLL
                for (int slot = 0; slot < SLOTS; ++slot) {
                    values[slot] = merge.value(values[slot], loaded.of[j][slot]);
                }
            }
        };
        for (int i = 0; i < count; i += 2 * AHEAD) {
            odd.load(batch, PITCH, i + AHEAD, count);
            take(even, i);
            even.load(batch, PITCH, i + 2 * AHEAD, count);
            take(odd, i + AHEAD);
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
