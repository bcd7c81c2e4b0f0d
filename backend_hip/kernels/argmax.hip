// Greedy token: index of the largest logit, the lowest one on ties; -2 when any logit is NaN.
// Many blocks pass over a vocabulary once, one block reduces what they found. The result carries the step's
// stamp, so that a reader can tell a fresh one from a stale one.
#include "best.h"
#include "flow.h"

constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;
constexpr int32_t NAN_TOKEN = -2;

// The block's best, in the first wave.
SIMT_DEVICE Best block_best(Best best) {
    SIMT_SHARED(float, values, WAVES);
    SIMT_SHARED(int32_t, indices, WAVES);
    best = wave_best(best);
    if (simt::lane() == 0) {
        values[simt::wave()] = best.value;
        indices[simt::wave()] = best.index;
    }
    simt::sync();
    if (simt::wave() != 0) return best;
    const bool holds = simt::lane() < WAVES;
    best = holds ? Best{values[simt::lane()], indices[simt::lane()]} : Best{0.0f, -1};
    return wave_best(best);
}

// logits (rows, count); found (rows, blocks). Grid: (blocks, rows); a block takes neighbouring logits.
SIMT_KERNEL(argmax_blocks, const float* logits, Best* found, int32_t count) {
    logits += static_cast<int64_t>(simt::block_y()) * count;
    const int share = (count + simt::grid_x() - 1) / simt::grid_x();
    const int begin = simt::block_x() * share;
    const int end = simt::min(begin + share, count);
    Best best = {0.0f, -1};
    for (int i = begin + simt::thread(); i < end; i += SIMT_BLOCK) {
        best = better(best, Best{logits[i], i});
    }
    best = block_best(best);
    if (simt::thread() == 0) found[simt::block_y() * simt::grid_x() + simt::block_x()] = best;
}

// found (rows, blocks); result (rows) of {token, stamp}. Grid: (1, rows).
SIMT_KERNEL(argmax, const Best* found, const int32_t* step, int32_t* result, int32_t blocks) {
    found += simt::block_y() * blocks;
    result += 2 * simt::block_y();
    Best best = {0.0f, -1};
    for (int i = simt::thread(); i < blocks; i += SIMT_BLOCK) best = better(best, found[i]);
    best = block_best(best);
    if (simt::thread() == 0) {
        result[0] = best.value == best.value ? best.index : NAN_TOKEN;
        result[1] = step[flow::STAMP];
    }
}
