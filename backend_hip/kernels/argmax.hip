// Greedy token: index of the largest logit, the lowest one on ties; -2 when any logit is NaN.
// The result carries the step's stamp, so that a reader can tell a fresh one from a stale one.
#include "flow.h"

constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;
constexpr int32_t NAN_TOKEN = -2;

struct Best {
    float value;
    int32_t index;  // -1: none yet
};

SIMT_DEVICE Best better(Best a, Best b) {
    if (b.index < 0) return a;
    if (a.index < 0) return b;
    const bool second = b.value > a.value || (b.value == a.value && b.index < a.index);
    return second ? b : a;
}

// Best of the wave and whether any lane saw a NaN, in every lane.
SIMT_DEVICE void reduce_wave(Best& best, int32_t& nan_seen) {
    for (int offset = SIMT_WAVE / 2; offset > 0; offset /= 2) {
        best = better(best, Best{simt::shuffle_xor(best.value, offset),
                                 simt::shuffle_xor(best.index, offset)});
        nan_seen |= simt::shuffle_xor(nan_seen, offset);
    }
}

// logits (count); result {token, stamp}. Grid: 1.
SIMT_KERNEL(argmax, const float* logits, const int32_t* step, int32_t* result, int32_t count) {
    SIMT_SHARED(float, values, WAVES);
    SIMT_SHARED(int32_t, indices, WAVES);
    SIMT_SHARED(int32_t, nans, WAVES);
    Best best = {0.0f, -1};
    int32_t nan_seen = 0;
    for (int i = simt::thread(); i < count; i += SIMT_BLOCK) {
        const float value = logits[i];
        if (value != value) nan_seen = 1;
        best = better(best, Best{value, i});
    }
    reduce_wave(best, nan_seen);
    if (simt::lane() == 0) {
        values[simt::wave()] = best.value;
        indices[simt::wave()] = best.index;
        nans[simt::wave()] = nan_seen;
    }
    simt::sync();
    if (simt::wave() != 0) return;
    const bool holds = simt::lane() < WAVES;
    best = holds ? Best{values[simt::lane()], indices[simt::lane()]} : Best{0.0f, -1};
    nan_seen = holds ? nans[simt::lane()] : 0;
    reduce_wave(best, nan_seen);
    if (simt::lane() == 0) {
        result[0] = nan_seen ? NAN_TOKEN : best.index;
        result[1] = step[flow::STAMP];
    }
}
