// Expert routing: which experts each token goes to, and which tokens each expert gets.
#include "best.h"
#include "numeric.h"

#ifndef EXPERTS
#error "route.hip: define EXPERTS, the number of experts"
#endif
constexpr int LANE_EXPERTS = (EXPERTS + SIMT_WAVE - 1) / SIMT_WAVE;
static_assert(LANE_EXPERTS <= 32, "a lane keeps its experts' state in one 32-bit mask");

// logits (count, EXPERTS) -> chosen, weights (count, used): the `used` largest, the lowest index
// first among equals; weights are their softmax over all experts, renormalised to sum 1.
// One wave per token. Grid: count.
SIMT_KERNEL(route, const float* logits, int32_t* chosen, float* weights, int32_t used) {
    const int lane = simt::lane();
    const int64_t token = simt::block_x();
    float value[LANE_EXPERTS];
    float largest = simt::from_bits(0xff800000u);
    SIMT_UNROLL
    for (int slot = 0; slot < LANE_EXPERTS; ++slot) {
        const int e = slot * SIMT_WAVE + lane;
        value[slot] = e < EXPERTS ? logits[token * EXPERTS + e] : simt::from_bits(0xff800000u);
        largest = simt::max(largest, value[slot]);
    }
    largest = simt::wave_max(largest);
    float total = 0.0f;
    SIMT_UNROLL
    for (int slot = 0; slot < LANE_EXPERTS; ++slot) {
        if (slot * SIMT_WAVE + lane < EXPERTS) total += numeric::exp(value[slot] - largest);
    }
    total = simt::wave_sum(total);

    uint32_t taken = 0;
    float chosen_total = 0.0f;
    for (int place = 0; place < used; ++place) {
        Best best = {0.0f, -1};
        SIMT_UNROLL
        for (int slot = 0; slot < LANE_EXPERTS; ++slot) {
            const int e = slot * SIMT_WAVE + lane;
            if (e < EXPERTS && !((taken >> slot) & 1u)) best = better(best, Best{value[slot], e});
        }
        best = wave_best(best);
        if (best.index % SIMT_WAVE == lane) taken |= 1u << (best.index / SIMT_WAVE);
        const float probability = numeric::exp(best.value - largest) / total;
        chosen_total += probability;
        if (lane == 0) {
            chosen[token * used + place] = best.index;
            weights[token * used + place] = probability;
        }
    }
    // Lane 0 reads back only what it wrote itself.
    if (lane == 0) {
        for (int place = 0; place < used; ++place) weights[token * used + place] /= chosen_total;
    }
}

// chosen (pairs) -> offsets (EXPERTS + 1), slots (pairs): the places in `chosen` that name expert e,
// ascending, are slots[offsets[e]] to slots[offsets[e + 1] - 1]. Grid: 1.
SIMT_KERNEL(group_by_expert, const int32_t* chosen, int32_t* offsets, int32_t* slots,
            int32_t pairs) {
    SIMT_SHARED(int32_t, start, EXPERTS + 1);
    for (int e = simt::thread(); e < EXPERTS; e += SIMT_BLOCK) {
        int32_t count = 0;
        for (int i = 0; i < pairs; ++i) count += chosen[i] == e ? 1 : 0;
        start[e + 1] = count;
    }
    simt::sync();
    if (simt::thread() == 0) {
        start[0] = 0;
        for (int e = 0; e < EXPERTS; ++e) start[e + 1] += start[e];
    }
    simt::sync();
    for (int e = simt::thread(); e <= EXPERTS; e += SIMT_BLOCK) {
        offsets[e] = start[e];
        if (e == EXPERTS) continue;
        int32_t next = start[e];
        for (int i = 0; i < pairs; ++i) {
            if (chosen[i] == e) slots[next++] = i;
        }
    }
}
