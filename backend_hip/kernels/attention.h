// THE arithmetic of attention on every path of exact products: causal, grouped heads, optional window.
//
// Keys are cut into splits of SPLIT_KEYS keys, anchored at position 0. Of a split a query gets its maximum
// score, the sum of its weights exp(score - maximum) and the values mixed with those weights: by
// attention_floats.h, or attention_bytes.h for what is stored in q8_0. Splits are merged in ascending order
// with one formula (Merge below), whether one block walks them or they are shared out. A window masks keys,
// it moves no split; a split without a visible key is left out. Orders of addition depend on head size,
// group and storage types alone, never on rows, chunks or grids.
//
// A block serves the heads of one KV head's group, which share each key and value that is read.
#pragma once
#include "attention_keys.h"
#include "numeric.h"

#define Q8_0 2  // of kv_type.h; the matrix unit's bytes need waves of 32 lanes, the rest does not
#if K_TYPE == Q8_0 || V_TYPE == Q8_0
#include "attention_bytes.h"
#endif
#if K_TYPE != Q8_0 || V_TYPE != Q8_0
#include "attention_floats.h"
#endif

namespace attention {

#if K_TYPE == Q8_0
using Scores = ByteScores<K>;
#else
using Scores = FloatScores<K>;
#endif
#if V_TYPE == Q8_0
using Mix = ByteMix<V>;
#else
using Mix = FloatMix<V>;
#endif
#undef Q8_0
static_assert((!K::SCALED && !V::SCALED) || HEAD_SIZE % kv::BLOCK == 0, "attention: a head is whole blocks");

using KeyReader = Reader<K>;
using ValueReader = Reader<V>;

// Shared memory of a block, in words.
constexpr int SCORE_PARTS = SPLIT_KEYS * Scores::PARTS * PITCH;
constexpr int PARTS = SCORE_PARTS > Mix::PARTIAL ? SCORE_PARTS : Mix::PARTIAL;  // of scores, then of values

// A key's parts lie in an order of its own, or lanes that read those of neighbouring keys would meet in the
// same banks. The key is `distance`, the same for all lanes, behind `own`.
SIMT_DEVICE int part_at(int own, int distance, int part) {
    constexpr int COUNT = Scores::PARTS;
    const int turned = distance % COUNT == 0 ? own : own + distance;
    return (own * COUNT + (part ^ (turned & (COUNT - 1)))) * PITCH + distance * (COUNT * PITCH);
}

// From scores to weights, a thread for each key of the split. Two barriers lie between its three parts.
struct Softmax {
    static_assert(SIMT_BLOCK == SPLIT_KEYS, "attention: a thread for each key of a split");
    static constexpr int SAME = SIMT_WAVE / PITCH;  // lanes of a wave that get the same column
    float scores[PITCH];
    Mix::Weigh weigh;
    bool visible;

    SIMT_DEVICE void open(const ValueReader& values) {
        visible = values.visible(simt::thread());
        weigh.open(values);
    }

    // The score of each head: the parts' sums, as a butterfly adds them; then each wave's greatest.
    SIMT_DEVICE void read(const float* parts, float scale, float* maxima, float* most) {
        constexpr int COUNT = Scores::PARTS;
        float v[COUNT][PITCH];
        SIMT_UNROLL
        for (int part = 0; part < COUNT; ++part) copy<PITCH>(parts + part_at(simt::thread(), 0, part), v[part]);
        SIMT_UNROLL
        for (int offset = COUNT / 2; offset > 0; offset /= 2) {
            SIMT_UNROLL
            for (int part = 0; part < offset; ++part) {
                SIMT_UNROLL
                for (int head = 0; head < PITCH; ++head) v[part][head] += v[part + offset][head];
            }
        }
        float greatest[PITCH];
        SIMT_UNROLL
        for (int head = 0; head < PITCH; ++head) {
            scores[head] = v[0][head] * scale;
            greatest[head] = visible ? scores[head] : simt::from_bits(0xff800000u);
        }
        const int first = simt::spread_max<SIMT_WAVE / 2>(greatest);
        if (simt::lane() % SAME == 0) maxima[simt::wave() * PITCH + first] = greatest[0];
        weigh.announce(most);
    }

    SIMT_DEVICE static float maximum(const float* maxima, int head) {
        float greatest = maxima[head];
        SIMT_UNROLL
        for (int wave = 1; wave < WAVES; ++wave) {
            greatest = simt::max(greatest, maxima[wave * PITCH + head]);
        }
        return greatest;
    }

    // What the mixer makes of the weights, 0 where the key is not visible. Each wave's sums of weights, by a
    // butterfly, go to `sums`.
    SIMT_DEVICE void soften(const float* maxima, const float* most, uint32_t* factors, float* sums) {
        float weights[PITCH];
        SIMT_UNROLL
        for (int head = 0; head < PITCH; ++head) {
            weights[head] = visible ? numeric::exp(scores[head] - maximum(maxima, head)) : 0.0f;
        }
        weigh.store(weights, most, factors);
        const int first = simt::spread_sum<SIMT_WAVE / 2>(weights);
        if (simt::lane() % SAME == 0) sums[simt::wave() * PITCH + first] = weights[0];
    }

    // Waves in ascending order.
    SIMT_DEVICE static float total(const float* sums, int head) {
        float total = sums[head];
        SIMT_UNROLL
        for (int wave = 1; wave < WAVES; ++wave) total += sums[wave * PITCH + head];
        return total;
    }
};

// This block's KV head and its first query head.
SIMT_DEVICE int kv_head() { return simt::block_x() / HEAD_PASSES; }
SIMT_DEVICE int first_head() { return kv_head() * GROUP + simt::block_x() % HEAD_PASSES * HEADS; }
// The last pass of a group may hold fewer heads.
SIMT_DEVICE int head_count() { return simt::min(HEADS, (kv_head() + 1) * GROUP - first_head()); }

// The queries of the block's heads of one row of `heads` heads.
SIMT_DEVICE const float* queries(const float* q, int64_t row, int heads) {
    return q + (row * heads + first_head()) * HEAD_SIZE;
}

}  // namespace attention
