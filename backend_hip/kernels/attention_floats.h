// Scores and mixed values of keys and values that are stored as floats, in fused multiply-adds.
#pragma once
#include "attention_keys.h"

namespace attention {

constexpr int FLOAT_PARTS = 4096;  // floats in shared memory, of scores or of mixed values

// The greatest power of two that is not above N.
template <int N>
struct PowerOfTwoTo {
    static constexpr int value = PowerOfTwoFrom<N>::value > N ? PowerOfTwoFrom<N>::value / 2
                                                              : PowerOfTwoFrom<N>::value;
};

// How a wave's lanes lie over rows of HEAD_SIZE elements: LANES of them over a key's row, KEYS rows side by
// side. A lane has PIECES pieces of VECTOR neighbouring elements, LANES * VECTOR apart.
template <class S, int DIMENSIONS>
struct FloatMap {
    struct Beside {
        template <bool WHOLE>
        SIMT_DEVICE void load(const Reader<S>&, int) {}
    };
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

    SIMT_DEVICE static int part() { return simt::lane() % LANES; }
    SIMT_DEVICE static int element(int piece) { return (piece * LANES + part()) * VECTOR; }
    SIMT_DEVICE static bool inside(int piece) {
        return HEAD_SIZE == LANES * DIMENSIONS || element(piece) < HEAD_SIZE;
    }
    // The key of the split that this lane reads in a step; `first`: that of its wave's lowest lane.
    SIMT_DEVICE static int first(int step) { return (step * WAVES + simt::wave()) * KEYS; }
    SIMT_DEVICE static int key(int step) { return first(step) + simt::lane() / LANES; }

    SIMT_DEVICE static void decode(const kv::Words<WORDS>& raw, float (&x)[VECTOR]) {
        SIMT_UNROLL
        for (int w = 0; w < WORDS; ++w) S::decode(raw.word[w], x + w * PER_WORD);
    }
};

// What the lanes of a key leave of its scores goes through shared memory, so that the loop over keys holds
// no exchange that waits: PARTS sums for each key and head, of as many lanes.
template <class S>
struct FloatScores {
    // Elements per lane: as many as registers hold for all heads, because what they add up by themselves
    // needs no exchange between lanes.
    using M = FloatMap<S, (HEADS <= 4 ? 16 : 8)>;
    using Keys = Stream<S, M>;
    static constexpr int MOST_PARTS = FLOAT_PARTS / (SPLIT_KEYS * PITCH);
    static constexpr int PARTS = M::LANES < MOST_PARTS ? M::LANES : MOST_PARTS;
    static constexpr bool STAGED = false;
    static constexpr int QUERY = 1;

    SIMT_DEVICE static void stage(const float*, int, uint32_t*) {}

    // parts[part_at(own, distance, part) + head] = what a key's lanes sum of query(head) . key, for the
    // visible keys of the reader's split. `query`: (heads, HEAD_SIZE), of which the block has `heads`.
    template <class At>
    SIMT_DEVICE static void score(const float* query, int heads, const uint32_t*, const Reader<S>& reader,
                                  Keys& keys, const At& part_at, float* parts) {
        float q[HEADS][M::PIECES][M::VECTOR];
        SIMT_UNROLL
        for (int head = 0; head < HEADS; ++head) {
            SIMT_UNROLL
            for (int piece = 0; piece < M::PIECES; ++piece) {
                // A head that this block does not have gets the last one's query; no one reads its result.
                const float* source = query + simt::min(head, heads - 1) * HEAD_SIZE;
                if (M::inside(piece)) copy<M::VECTOR>(source + M::element(piece), q[head][piece]);
            }
        }
        keys.walk(reader, [&](const typename Keys::Part& batch, int step) {
            SIMT_UNROLL
            for (int i = 0; i < Keys::COUNT; ++i) {
                float sums[PITCH];
                SIMT_UNROLL
                for (int head = 0; head < PITCH; ++head) sums[head] = 0.0f;
                SIMT_UNROLL
                for (int piece = 0; piece < M::PIECES; ++piece) {
                    if (!M::inside(piece)) continue;
                    float x[M::VECTOR];
                    M::decode(batch.raw[i][piece], x);
                    SIMT_UNROLL
                    for (int head = 0; head < HEADS; ++head) {
                        SIMT_UNROLL
                        for (int j = 0; j < M::VECTOR; ++j) {
                            sums[head] = simt::fma(q[head][piece][j], x[j], sums[head]);
                        }
                    }
                }
                simt::butterfly<M::LANES / 2, PARTS>(sums, PITCH);
                if (PARTS == M::LANES || M::part() < PARTS) {
                    put<PITCH>(sums, parts + part_at(M::key(0), (step + i) * M::KEYS * WAVES, M::part()));
                }
            }
        });
    }
};

template <class S>
struct FloatMix {
    using M = FloatMap<S, (HEAD_SIZE > 256 ? 16 : 8)>;
    using Values = Stream<S, M>;
    static constexpr int FACTORS = SPLIT_KEYS * PITCH;
    static constexpr int MOST = 1;
    static constexpr int HELD = M::PIECES * M::VECTOR;  // elements of a head that a lane mixes
    // Lane groups of a wave whose sums go to shared memory; a butterfly before adds those of the others.
    static constexpr int FITTING = FLOAT_PARTS / (WAVES * MIXED);
    static constexpr int GROUPS_THAT_FIT = PowerOfTwoTo<(FITTING < 64 ? FITTING : 64)>::value;
    static constexpr int GROUPS = M::KEYS < GROUPS_THAT_FIT ? M::KEYS : GROUPS_THAT_FIT;
    static constexpr int PARTIAL = GROUPS * WAVES * MIXED;
    static_assert(PARTIAL <= FLOAT_PARTS, "attention: mixed values do not fit");

    // What a key's thread knows of its value before there are weights.
    struct Weigh {
        SIMT_DEVICE void open(const Reader<S>&) {}
        SIMT_DEVICE void announce(float*) const {}
        // factors[key * PITCH + head] = weight.
        SIMT_DEVICE void store(const float (&weights)[PITCH], const float*, uint32_t* factors) const {
            put<PITCH>(weights, reinterpret_cast<float*>(factors) + simt::thread() * PITCH);
        }
    };

    // The sums over the split's visible keys of factor * value, by the whole block: each lane group takes
    // every (KEYS * WAVES)-th key, then a butterfly over the groups of a wave, then (`value`) waves in
    // ascending order. `partial` is shared, (WAVES, GROUPS, MIXED); its reader must pass a barrier first.
    SIMT_DEVICE static void mix(const uint32_t* factors, const float*, const Reader<S>& reader, Values& values,
                                float* partial) {
        float sums[HEADS * HELD];
        SIMT_UNROLL
        for (int i = 0; i < HEADS * HELD; ++i) sums[i] = 0.0f;
        values.walk(reader, [&](const typename Values::Part& batch, int step) {
            SIMT_UNROLL
            for (int i = 0; i < Values::COUNT; ++i) {
                float factor[PITCH];
                copy<PITCH>(reinterpret_cast<const float*>(factors) + M::key(step + i) * PITCH, factor);
                SIMT_UNROLL
                for (int piece = 0; piece < M::PIECES; ++piece) {
                    if (!M::inside(piece)) continue;
                    float x[M::VECTOR];
                    M::decode(batch.raw[i][piece], x);
                    SIMT_UNROLL
                    for (int head = 0; head < HEADS; ++head) {
                        SIMT_UNROLL
                        for (int j = 0; j < M::VECTOR; ++j) {
                            float& sum = sums[head * HELD + piece * M::VECTOR + j];
                            sum = simt::fma(factor[head], x[j], sum);
                        }
                    }
                }
            }
        });
        simt::butterfly<SIMT_WAVE / 2, M::LANES * GROUPS>(sums, HEADS * HELD);
        const int group = simt::lane() / M::LANES;
        if (group >= GROUPS) return;
        SIMT_UNROLL
        for (int head = 0; head < HEADS; ++head) {
            SIMT_UNROLL
            for (int piece = 0; piece < M::PIECES; ++piece) {
                if (!M::inside(piece)) continue;
                float* row = partial + (simt::wave() * GROUPS + group) * MIXED + head * HEAD_SIZE;
                put<M::VECTOR>(sums + head * HELD + piece * M::VECTOR, row + M::element(piece));
            }
        }
    }

    // Element i of the block's mixed values.
    SIMT_DEVICE static float value(const float* partial, int i) {
        float sum = 0.0f;
        SIMT_UNROLL
        for (int wave = 0; wave < WAVES; ++wave) {
            float v[GROUPS];
            SIMT_UNROLL
            for (int group = 0; group < GROUPS; ++group) v[group] = partial[(wave * GROUPS + group) * MIXED + i];
            SIMT_UNROLL
            for (int offset = GROUPS / 2; offset > 0; offset /= 2) {
                SIMT_UNROLL
                for (int group = 0; group < offset; ++group) v[group] += v[group + offset];
            }
            sum = wave == 0 ? v[0] : sum + v[0];
        }
        return sum;
    }
};

}  // namespace attention
