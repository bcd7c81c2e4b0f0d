// Greedy token: index of the largest logit, the lowest one on ties; -2 when any logit is NaN.
// The result carries the step's stamp, so that a reader can tell a fresh one from a stale one.
#include "best.h"
#include "flow.h"

constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;
constexpr int32_t NAN_TOKEN = -2;

// logits (rows, count); result (rows) of {token, stamp}. Grid: (1, rows).
SIMT_KERNEL(argmax, const float* logits, const int32_t* step, int32_t* result, int32_t count) {
    SIMT_SHARED(float, values, WAVES);
    SIMT_SHARED(int32_t, indices, WAVES);
    logits += static_cast<int64_t>(simt::block_y()) * count;
    result += 2 * simt::block_y();
    Best best = {0.0f, -1};
    for (int i = simt::thread(); i < count; i += SIMT_BLOCK) {
        best = better(best, Best{logits[i], i});
    }
    best = wave_best(best);
    if (simt::lane() == 0) {
        values[simt::wave()] = best.value;
        indices[simt::wave()] = best.index;
    }
    simt::sync();
    if (simt::wave() != 0) return;
    const bool holds = simt::lane() < WAVES;
    best = holds ? Best{values[simt::lane()], indices[simt::lane()]} : Best{0.0f, -1};
    best = wave_best(best);
    if (simt::lane() == 0) {
        result[0] = best.value == best.value ? best.index : NAN_TOKEN;
        result[1] = step[flow::STAMP];
    }
}
