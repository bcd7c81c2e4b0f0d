// THE arithmetic of attention on every path of exact products: causal, grouped heads, optional window.
//
// Keys are cut into splits of SPLIT_KEYS keys, anchored at position 0. Of a split a query gets its maximum
// score, the sum of its weights exp(score - maximum) and the values mixed with those weights. Splits are
// merged in ascending order with one formula (Merge below), whether one block walks them or each has a
// block of its own. A window masks keys, it moves no split; a split without a visible key is left out.
// Orders of addition depend on head size, group and storage types alone, never on rows, chunks or grids.
//
// A block serves the heads of one KV head's group, which share each key and value that is read.
#pragma once
#include "kv_type.h"
#include "numeric.h"
#include "seen.h"

#if !defined(HEAD_SIZE) || !defined(GROUP) || !defined(K_TYPE) || !defined(V_TYPE)
#error "attention.h: define HEAD_SIZE, GROUP (query heads per KV head), K_TYPE and V_TYPE"
#endif
#if !defined(SPLIT_KEYS) || !defined(HEAD_PASSES) || !defined(ROWS_PER_BLOCK)
#error "attention.h: define SPLIT_KEYS, HEAD_PASSES and ROWS_PER_BLOCK (attention_shape.py)"
#endif

namespace attention {

using K = kv::Storage<K_TYPE>;
using V = kv::Storage<V_TYPE>;

constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;

struct alignas(16) Four {
    float a, b, c, d;
};

// The least power of two that is not below N. (Not a function: run-time compilers differ in whether one may
// be called where a constant of the file is made.)
template <int N>
struct PowerOfTwoFrom {
    static_assert(N <= 64, "attention: more than the lanes of a wave");
    static constexpr int value =
        N <= 1 ? 1 : N <= 2 ? 2 : N <= 4 ? 4 : N <= 8 ? 8 : N <= 16 ? 16 : N <= 32 ? 32 : 64;
};

// A group with more heads than a block takes is served by HEAD_PASSES blocks, which read its keys again.
constexpr int HEADS = (GROUP + HEAD_PASSES - 1) / HEAD_PASSES;
constexpr int MIXED = HEADS * HEAD_SIZE;              // results of one row
constexpr int PITCH = PowerOfTwoFrom<HEADS>::value;  // floats per key in `weights`: one for each head

// How a wave's lanes lie over rows of HEAD_SIZE elements: LANES of them over a key's row, KEYS rows side by
// side. A lane has PIECES pieces of VECTOR neighbouring elements, LANES * VECTOR apart.
template <class S, int DIMENSIONS>
struct Map {
    static constexpr int WIDEST = S::LOADED < DIMENSIONS ? S::LOADED : DIMENSIONS;
    static constexpr int DIVISOR = HEAD_SIZE & -HEAD_SIZE;  // the largest power of two that divides it
    static constexpr int VECTOR = WIDEST < DIVISOR ? WIDEST : DIVISOR;
    static constexpr int PIECES = DIMENSIONS / VECTOR;
    static constexpr int LANES = PowerOfTwoFrom<(HEAD_SIZE + DIMENSIONS - 1) / DIMENSIONS>::value;
    static constexpr int KEYS = SIMT_WAVE / LANES;
    static constexpr int STEPS = SPLIT_KEYS / (KEYS * WAVES);  // each takes KEYS keys of every wave
    static constexpr int WORDS = VECTOR * static_cast<int>(sizeof(typename S::Element)) / 4;
    static constexpr int PER_WORD = VECTOR / WORDS;
    static_assert(LANES <= SIMT_WAVE, "attention: HEAD_SIZE is at most 16 elements a lane");
    static_assert(STEPS * KEYS * WAVES == SPLIT_KEYS, "attention: a split is whole steps");
    static_assert(!S::SCALED || HEAD_SIZE % kv::BLOCK == 0, "attention: a head is whole blocks");

    SIMT_DEVICE static int part() { return simt::lane() % LANES; }
    SIMT_DEVICE static int element(int piece) { return (piece * LANES + part()) * VECTOR; }
    SIMT_DEVICE static bool inside(int piece) {
        return HEAD_SIZE == LANES * DIMENSIONS || element(piece) < HEAD_SIZE;
    }
    // The key of the split that this lane reads in a step; `first`: that of its wave's lowest lane.
    SIMT_DEVICE static int first(int step) { return (step * WAVES + simt::wave()) * KEYS; }
    SIMT_DEVICE static int key(int step) { return first(step) + simt::lane() / LANES; }
};

// Elements per lane: as many as registers hold for all heads, because what they add up by themselves needs
// no exchange between lanes.
using KeyMap = Map<K, (HEADS <= 4 ? 16 : 8)>;
using ValueMap = Map<V, (HEAD_SIZE > 256 ? 16 : 8)>;

// One KV head's rows of a sequence, from position 0 on.
template <class S>
struct Side {
    const typename S::Element* rows;
    const uint16_t* scales;
    int64_t pitch;  // elements between rows

    SIMT_DEVICE Side(const typename S::Element* tensor, int64_t start, int kv_head, int kv_heads,
                     int64_t cache_rows)
        : rows(tensor + (start * kv_heads + kv_head) * HEAD_SIZE),
          scales(kv::scales_of<S>(tensor, cache_rows, static_cast<int64_t>(kv_heads) * HEAD_SIZE) +
                 (kv_head * cache_rows + start) * (HEAD_SIZE / kv::BLOCK)),
          pitch(static_cast<int64_t>(kv_heads) * HEAD_SIZE) {}
};

// What a lane loads in COUNT steps, undecoded, so that all of it is in flight at once.
template <class S, class M, int COUNT>
struct Batch {
    kv::Words<M::WORDS> raw[COUNT][M::PIECES];
    uint16_t scale[COUNT][M::PIECES];

    SIMT_DEVICE void decode(int i, int piece, float (&x)[M::VECTOR]) const {
        SIMT_UNROLL
        for (int w = 0; w < M::WORDS; ++w) {
            S::decode(raw[i][piece].word[w], x + w * M::PER_WORD);
        }
    }
};

// One lane's way through the split at `base`. A key that is not visible may never have been written: the
// nearest visible one is loaded in its place. Offsets in a split fit in 32 bits.
template <class S, class M>
struct Reader {
    const uint8_t* rows;
    const uint16_t* scales;
    uint32_t pitch_nbytes;
    int least, most;

    SIMT_DEVICE Reader(const Side<S>& side, int base, Seen seen)
        : rows(reinterpret_cast<const uint8_t*>(side.rows + base * side.pitch + M::element(0))),
          scales(side.scales + static_cast<int64_t>(base) * (HEAD_SIZE / kv::BLOCK)),
          pitch_nbytes(static_cast<uint32_t>(side.pitch * sizeof(typename S::Element))),
          least(simt::max(seen.first - base, 0)),
          most(simt::min(seen.end - base, SPLIT_KEYS) - 1) {}

    SIMT_DEVICE bool visible(int key) const {
        return static_cast<uint32_t>(key - least) <= static_cast<uint32_t>(most - least);
    }
    // Whether a step's keys meet the visible ones, for the whole wave alike.
    SIMT_DEVICE bool meets(int step) const {
        return M::first(step) <= most && M::first(step) + M::KEYS > least;
    }
    // What lies behind the last visible key is not loaded: a batch that starts there is not used.
    template <int COUNT>
    SIMT_DEVICE void load_if_reached(Batch<S, M, COUNT>& batch, int step) const {
        if (step < M::STEPS && M::first(step) <= most) load(batch, step);
    }

    template <int COUNT>
    SIMT_DEVICE void load(Batch<S, M, COUNT>& batch, int step) const {
        SIMT_UNROLL
        for (int i = 0; i < COUNT; ++i) {
            const int nearest = simt::max(least, simt::min(M::key(step + i), most));
            const uint64_t key = static_cast<uint32_t>(nearest);
            const uint8_t* row = rows + key * pitch_nbytes;
            SIMT_UNROLL
            for (int piece = 0; piece < M::PIECES; ++piece) {
                if (!M::inside(piece)) continue;
                batch.raw[i][piece].load(row + piece * M::LANES * M::WORDS * 4);
                if constexpr (S::SCALED) {
                    const int block = M::element(piece) / kv::BLOCK;
                    batch.scale[i][piece] = scales[key * (HEAD_SIZE / kv::BLOCK) + block];
                }
            }
        }
    }
};

constexpr int KEYS_AHEAD = KeyMap::PIECES < 4 ? 4 / KeyMap::PIECES : 1;
constexpr int KEY_BATCH = KEYS_AHEAD < KeyMap::STEPS ? KEYS_AHEAD : KeyMap::STEPS;
constexpr int VALUE_BATCH = ValueMap::STEPS < 4 ? ValueMap::STEPS : 4;
using KeyBatch = Batch<K, KeyMap, KEY_BATCH>;
using ValueBatch = Batch<V, ValueMap, VALUE_BATCH>;
using KeyReader = Reader<K, KeyMap>;
using ValueReader = Reader<V, ValueMap>;

// What `score` does with the keys of one batch.
SIMT_DEVICE void score_batch(const float (&q)[HEADS][KeyMap::PIECES][KeyMap::VECTOR], const KeyReader& keys,
                             const KeyBatch& batch, int step, float scale, float* weights) {
    using M = KeyMap;
    SIMT_UNROLL
    for (int i = 0; i < KEY_BATCH; ++i) {
        // The same for a whole wave, whose lanes must all reach the sum.
        if (!keys.meets(step + i)) continue;
        float sums[PITCH];
        SIMT_UNROLL
        for (int head = 0; head < PITCH; ++head) sums[head] = 0.0f;
        SIMT_UNROLL
        for (int piece = 0; piece < M::PIECES; ++piece) {
            if (!M::inside(piece)) continue;
            float x[M::VECTOR];
            batch.decode(i, piece, x);
            SIMT_UNROLL
            for (int head = 0; head < HEADS; ++head) {
                float sum = K::SCALED ? 0.0f : sums[head];
                SIMT_UNROLL
                for (int j = 0; j < M::VECTOR; ++j) sum = simt::fma(q[head][piece][j], x[j], sum);
                if constexpr (K::SCALED) {
                    sum = simt::fma(simt::half_to_float(batch.scale[i][piece]), sum, sums[head]);
                }
                sums[head] = sum;
            }
        }
        // Each lane keeps some heads; where there are more lanes than heads, several keep the same.
        constexpr int KEPT = PITCH > M::LANES ? PITCH / M::LANES : 1;
        constexpr int SAME = PITCH > M::LANES ? 1 : M::LANES / PITCH;
        const int first = simt::spread_sum<M::LANES / 2>(sums);
        SIMT_UNROLL
        for (int k = 0; k < KEPT; ++k) {
            if (M::part() % SAME == 0) weights[M::key(step + i) * PITCH + first + k] = sums[k] * scale;
        }
    }
}

// weights[key * PITCH + head] = scale * query(head) . key for the visible keys of the reader's split.
// `query`: (HEADS, HEAD_SIZE), shared. `ahead` holds the keys from step 0 on.
SIMT_DEVICE void score(const float* query, const KeyReader& keys, float scale, KeyBatch& ahead,
                       float* weights) {
    using M = KeyMap;
    float q[HEADS][M::PIECES][M::VECTOR];
    SIMT_UNROLL
    for (int head = 0; head < HEADS; ++head) {
        SIMT_UNROLL
        for (int piece = 0; piece < M::PIECES; ++piece) {
            SIMT_UNROLL
            for (int i = 0; i < M::VECTOR; ++i) {
                const bool inside = M::inside(piece);
                q[head][piece][i] = inside ? query[head * HEAD_SIZE + M::element(piece) + i] : 0.0f;
            }
        }
    }
    // Two batches by turns: one on its way, one at work.
    KeyBatch behind;
    for (int step = 0; step < M::STEPS; step += 2 * KEY_BATCH) {
        keys.load_if_reached(behind, step + KEY_BATCH);
        score_batch(q, keys, ahead, step, scale, weights);
        if (M::STEPS == KEY_BATCH) break;
        keys.load_if_reached(ahead, step + 2 * KEY_BATCH);
        score_batch(q, keys, behind, step + KEY_BATCH, scale, weights);
    }
}

// Turns one head's scores into weights, by one wave; every lane gets the split's maximum and sum.
SIMT_DEVICE void soften(float* weights, int base, Seen seen, float& maximum, float& sum) {
    maximum = simt::from_bits(0xff800000u);
    SIMT_UNROLL
    for (int key = simt::lane(); key < SPLIT_KEYS; key += SIMT_WAVE) {
        if (seen(base + key)) maximum = simt::max(maximum, weights[key * PITCH]);
    }
    maximum = simt::wave_max(maximum);
    sum = 0.0f;
    SIMT_UNROLL
    for (int key = simt::lane(); key < SPLIT_KEYS; key += SIMT_WAVE) {
        if (!seen(base + key)) continue;
        const float weight = numeric::exp(weights[key * PITCH] - maximum);
        weights[key * PITCH] = weight;
        sum += weight;
    }
    sum = simt::wave_sum(sum);
}

constexpr int HELD = ValueMap::PIECES * ValueMap::VECTOR;  // elements of a head that a lane mixes

// What `mix` does with the values of one batch.
SIMT_DEVICE void mix_batch(const float* weights, const ValueReader& values, const ValueBatch& batch, int step,
                           float (&sums)[HEADS * HELD]) {
    using M = ValueMap;
    SIMT_UNROLL
    for (int i = 0; i < VALUE_BATCH; ++i) {
        const int key = M::key(step + i);
        if (!values.visible(key)) continue;
        float weight[HEADS];
        SIMT_UNROLL
        for (int head = 0; head < HEADS; ++head) weight[head] = weights[key * PITCH + head];
        SIMT_UNROLL
        for (int piece = 0; piece < M::PIECES; ++piece) {
            if (!M::inside(piece)) continue;
            float x[M::VECTOR];
            batch.decode(i, piece, x);
            SIMT_UNROLL
            for (int head = 0; head < HEADS; ++head) {
                float factor = weight[head];
                if constexpr (V::SCALED) factor *= simt::half_to_float(batch.scale[i][piece]);
                SIMT_UNROLL
                for (int j = 0; j < M::VECTOR; ++j) {
                    float& sum = sums[head * HELD + piece * M::VECTOR + j];
                    sum = simt::fma(factor, x[j], sum);
                }
            }
        }
    }
}

// mixed[head * HEAD_SIZE + d] = sum over the split's visible keys of weight * value, by the whole block: each
// lane group takes every (KEYS * WAVES)-th key, then a butterfly inside the wave, then waves in ascending
// order. `partial` is shared, (WAVES, MIXED); its reader must pass a barrier first.
SIMT_DEVICE void mix(const float* weights, const ValueReader& values, ValueBatch& ahead, float* partial) {
    using M = ValueMap;
    float sums[HEADS * HELD];
    SIMT_UNROLL
    for (int i = 0; i < HEADS * HELD; ++i) sums[i] = 0.0f;
    ValueBatch behind;
    for (int step = 0; step < M::STEPS; step += 2 * VALUE_BATCH) {
        values.load_if_reached(behind, step + VALUE_BATCH);
        mix_batch(weights, values, ahead, step, sums);
        if (M::STEPS == VALUE_BATCH) break;
        values.load_if_reached(ahead, step + 2 * VALUE_BATCH);
        mix_batch(weights, values, behind, step + VALUE_BATCH, sums);
    }
    simt::butterfly<SIMT_WAVE / 2, M::LANES>(sums, HEADS * HELD);
    if (simt::lane() >= M::LANES) return;
    SIMT_UNROLL
    for (int head = 0; head < HEADS; ++head) {
        SIMT_UNROLL
        for (int piece = 0; piece < M::PIECES; ++piece) {
            if (!M::inside(piece)) continue;
            float* target = partial + simt::wave() * MIXED + head * HEAD_SIZE + M::element(piece);
            const float* source = sums + head * HELD + piece * M::VECTOR;
            if constexpr (M::VECTOR % 4 == 0) {
                SIMT_UNROLL
                for (int j = 0; j < M::VECTOR; j += 4) {
                    *reinterpret_cast<Four*>(target + j) = {source[j], source[j + 1], source[j + 2], source[j + 3]};
                }
            } else {
                SIMT_UNROLL
                for (int j = 0; j < M::VECTOR; ++j) target[j] = source[j];
            }
        }
    }
}

// Element i of the block's mixed values: waves in ascending order.
SIMT_DEVICE float mixed_value(const float* partial, int i) {
    float sum = partial[i];
    SIMT_UNROLL
    for (int wave = 1; wave < WAVES; ++wave) sum += partial[wave * MIXED + i];
    return sum;
}

// This block's KV head and its first query head.
SIMT_DEVICE int kv_head() { return simt::block_x() / HEAD_PASSES; }
SIMT_DEVICE int first_head() { return kv_head() * GROUP + simt::block_x() % HEAD_PASSES * HEADS; }
// The last pass of a group may hold fewer heads.
SIMT_DEVICE int head_count() { return simt::min(HEADS, (kv_head() + 1) * GROUP - first_head()); }

// The queries of the block's heads of one row of `heads` heads, into shared memory.
SIMT_DEVICE void stage_queries(const float* q, int64_t row, int heads, float* query) {
    const int held = head_count() * HEAD_SIZE;
    const float* source = q + (row * heads + first_head()) * HEAD_SIZE;
    for (int i = simt::thread(); i < MIXED; i += SIMT_BLOCK) query[i] = i < held ? source[i] : 0.0f;
}

}  // namespace attention
