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
// side. A lane has PIECES pieces of VECTOR neighbouring elements, LANES * VECTOR apart. WITH_SCALES: it loads
// the scale of each.
template <class S, int DIMENSIONS, bool WITH_SCALES>
struct Map {
    static constexpr bool SCALES = WITH_SCALES;
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
using KeyMap = Map<K, (HEADS <= 4 ? 16 : 8), K::SCALED>;
using ValueMap = Map<V, (HEAD_SIZE > 256 ? 16 : 8), false>;

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
    uint16_t scale[M::SCALES ? COUNT : 1][M::PIECES];

    SIMT_DEVICE void decode(int i, int piece, float (&x)[M::VECTOR]) const {
        SIMT_UNROLL
        for (int w = 0; w < M::WORDS; ++w) {
            S::decode(raw[i][piece].word[w], x + w * M::PER_WORD);
        }
    }
};

// One lane's way through the split at `base`. A key that is not visible may never have been written: the
// nearest visible one is loaded in its place. Where a split begins is the same for all lanes; offsets in it
// fit in 32 bits.
template <class S, class M>
struct Reader {
    const uint8_t* rows;
    const uint16_t* scales;
    uint32_t pitch_nbytes;
    int least, most;

    SIMT_DEVICE Reader(const Side<S>& side, int base, Seen seen)
        : rows(reinterpret_cast<const uint8_t*>(side.rows + base * side.pitch)),
          scales(side.scales + static_cast<int64_t>(base) * (HEAD_SIZE / kv::BLOCK)),
          pitch_nbytes(static_cast<uint32_t>(side.pitch * sizeof(typename S::Element))),
          least(simt::max(seen.first - base, 0)),
          most(simt::min(seen.end - base, SPLIT_KEYS) - 1) {}

    SIMT_DEVICE bool visible(int key) const {
        return static_cast<uint32_t>(key - least) <= static_cast<uint32_t>(most - least);
    }
    // Whether visible keys are in a step or behind it, for the whole wave alike.
    SIMT_DEVICE bool reaches(int step) const { return step < M::STEPS && M::first(step) <= most; }
    // What lies behind the last visible key is not loaded: a batch that starts there is not used.
    template <int COUNT>
    SIMT_DEVICE void load_if_reached(Batch<S, M, COUNT>& batch, int step) const {
        if (reaches(step)) load(batch, step);
    }

    template <int COUNT>
    SIMT_DEVICE void load(Batch<S, M, COUNT>& batch, int step) const {
        SIMT_UNROLL
        for (int i = 0; i < COUNT; ++i) {
            const int nearest = simt::max(least, simt::min(M::key(step + i), most));
            const uint32_t key = static_cast<uint32_t>(nearest);
            SIMT_UNROLL
            for (int piece = 0; piece < M::PIECES; ++piece) {
                if (!M::inside(piece)) continue;
                const uint32_t element = static_cast<uint32_t>(M::element(piece));
                const uint32_t at = key * pitch_nbytes + element * sizeof(typename S::Element);
                batch.raw[i][piece].load(rows + at);
                if constexpr (M::SCALES) {
                    batch.scale[i][piece] = scales[key * (HEAD_SIZE / kv::BLOCK) + element / kv::BLOCK];
                }
            }
        }
    }
};

// Two batches of 64 bytes a lane each are on their way or at work.
template <class M>
struct Ahead {
    static constexpr int WANTED = 16 / (M::PIECES * M::WORDS) > 0 ? 16 / (M::PIECES * M::WORDS) : 1;
    static constexpr int STEPS = WANTED < M::STEPS ? WANTED : M::STEPS;
};
using KeyReader = Reader<K, KeyMap>;
using ValueReader = Reader<V, ValueMap>;

// A reader's two batches by turns: `work(batch, step)` for every batch that a visible key is in or behind.
template <class S, class M>
struct Stream {
    static constexpr int COUNT = Ahead<M>::STEPS;
    Batch<S, M, COUNT> even, odd;

    SIMT_DEVICE void open(const Reader<S, M>& reader) {
        reader.load(even, 0);
        reader.load_if_reached(odd, COUNT);
    }
    template <class Work>
    SIMT_DEVICE void walk(const Reader<S, M>& reader, const Work& work) {
        SIMT_UNROLL
        for (int step = 0; step < M::STEPS; step += 2 * COUNT) {
            if (!reader.reaches(step)) break;
            work(even, step);
            reader.load_if_reached(even, step + 2 * COUNT);
            if (!reader.reaches(step + COUNT)) break;
            work(odd, step + COUNT);
            reader.load_if_reached(odd, step + 3 * COUNT);
        }
    }
};
using KeyStream = Stream<K, KeyMap>;
using ValueStream = Stream<V, ValueMap>;

// Four neighbouring floats, or fewer where a vector is no multiple of four.
template <int COUNT>
SIMT_DEVICE void copy(const float* from, float* to) {
    if constexpr (COUNT % 4 == 0) {
        SIMT_UNROLL
        for (int i = 0; i < COUNT; i += 4) {
            const Four four = *reinterpret_cast<const Four*>(from + i);
            to[i] = four.a;
            to[i + 1] = four.b;
            to[i + 2] = four.c;
            to[i + 3] = four.d;
        }
    } else {
        SIMT_UNROLL
        for (int i = 0; i < COUNT; ++i) to[i] = from[i];
    }
}
template <int COUNT>
SIMT_DEVICE void put(const float* from, float* to) {
    if constexpr (COUNT % 4 == 0) {
        SIMT_UNROLL
        for (int i = 0; i < COUNT; i += 4) {
            *reinterpret_cast<Four*>(to + i) = {from[i], from[i + 1], from[i + 2], from[i + 3]};
        }
    } else {
        SIMT_UNROLL
        for (int i = 0; i < COUNT; ++i) to[i] = from[i];
    }
}

// The greatest power of two that is not above N.
template <int N>
struct PowerOfTwoTo {
    static constexpr int value = PowerOfTwoFrom<N>::value > N ? PowerOfTwoFrom<N>::value / 2
                                                              : PowerOfTwoFrom<N>::value;
};

// What the lanes of a key leave of its scores goes through shared memory, so that the loop over keys holds
// no exchange that waits: PARTS sums for each key and head, of as many lanes.
constexpr int SHARED = 4096;  // floats for the parts of scores, later for those of mixed values
constexpr int MOST_PARTS = SHARED / (SPLIT_KEYS * PITCH);
constexpr int PARTS = KeyMap::LANES < MOST_PARTS ? KeyMap::LANES : MOST_PARTS;

// A key's parts lie in an order of its own, or lanes that read those of neighbouring keys would meet in the
// same banks.
SIMT_DEVICE int part_at(int key, int part) { return (key * PARTS + (part ^ (key & (PARTS - 1)))) * PITCH; }

// parts[part_at(key, part) + head] = what a key's lanes sum of query(head) . key, for the visible keys of
// the reader's split. `query`: (heads, HEAD_SIZE), of which the block has `heads`.
SIMT_DEVICE void score(const float* query, int heads, const KeyReader& keys, KeyStream& stream, float* parts) {
    using M = KeyMap;
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
    stream.walk(keys, [&](const Batch<K, M, KeyStream::COUNT>& batch, int step) {
        SIMT_UNROLL
        for (int i = 0; i < KeyStream::COUNT; ++i) {
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
            simt::butterfly<M::LANES / 2, PARTS>(sums, PITCH);
            if (PARTS == M::LANES || M::part() < PARTS) {
                put<PITCH>(sums, parts + part_at(M::key(step + i), M::part()));
            }
        }
    });
}

constexpr int FACTOR_BLOCKS = V::SCALED ? HEAD_SIZE / kv::BLOCK : 1;
constexpr int FACTOR_PITCH = SPLIT_KEYS * PITCH + 8;  // lanes of neighbouring blocks meet in no bank
constexpr int FACTORS = FACTOR_BLOCKS * FACTOR_PITCH;

// A row's scales, in one load where there is one of that width.
template <int COUNT>
SIMT_DEVICE void load_scales(const uint16_t* from, uint16_t (&scales)[COUNT]) {
    if constexpr (COUNT == 2 || COUNT == 4 || COUNT == 8) {
        kv::Words<COUNT / 2> words;
        words.load(from);
        for (int i = 0; i < COUNT; ++i) scales[i] = static_cast<uint16_t>(words.word[i / 2] >> i % 2 * 16);
    } else {
        for (int i = 0; i < COUNT; ++i) scales[i] = from[i];
    }
}

// From scores to weights, a thread for each key of the split. Two barriers lie between its three parts.
struct Softmax {
    static_assert(SIMT_BLOCK == SPLIT_KEYS, "attention: a thread for each key of a split");
    static constexpr int SAME = SIMT_WAVE / PITCH;  // lanes of a wave that get the same column
    float scores[PITCH];
    uint16_t value_scales[FACTOR_BLOCKS];
    bool visible;

    // Loads what the values of this thread's key are scaled by.
    SIMT_DEVICE void open(const ValueReader& values) {
        visible = values.visible(simt::thread());
        if constexpr (V::SCALED) {
            const int nearest = simt::max(values.least, simt::min(simt::thread(), values.most));
            const uint16_t* source = values.scales + nearest * FACTOR_BLOCKS;
            load_scales<FACTOR_BLOCKS>(source, value_scales);
        }
    }

    // The score of each head: the parts' sums, as a butterfly adds them; then each wave's greatest.
    SIMT_DEVICE void read(const float* parts, float scale, float* maxima) {
        float v[PARTS][PITCH];
        SIMT_UNROLL
        for (int part = 0; part < PARTS; ++part) copy<PITCH>(parts + part_at(simt::thread(), part), v[part]);
        SIMT_UNROLL
        for (int offset = PARTS / 2; offset > 0; offset /= 2) {
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
    }

    SIMT_DEVICE static float maximum(const float* maxima, int head) {
        float greatest = maxima[head];
        SIMT_UNROLL
        for (int wave = 1; wave < WAVES; ++wave) {
            greatest = simt::max(greatest, maxima[wave * PITCH + head]);
        }
        return greatest;
    }

    // factors[block * FACTOR_PITCH + key * PITCH + head] = weight, times the scale of the block of values;
    // 0 where the key is not visible. Each wave's sums of weights go to `sums`.
    SIMT_DEVICE void soften(const float* maxima, float* factors, float* sums) {
        float weights[PITCH];
        SIMT_UNROLL
        for (int head = 0; head < PITCH; ++head) {
            weights[head] = visible ? numeric::exp(scores[head] - maximum(maxima, head)) : 0.0f;
        }
        SIMT_UNROLL
        for (int block = 0; block < FACTOR_BLOCKS; ++block) {
            float scaled[PITCH];
            SIMT_UNROLL
            for (int head = 0; head < PITCH; ++head) {
                scaled[head] = weights[head];
                if constexpr (V::SCALED) scaled[head] *= simt::half_to_float(value_scales[block]);
            }
            put<PITCH>(scaled, factors + block * FACTOR_PITCH + simt::thread() * PITCH);
        }
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

constexpr int HELD = ValueMap::PIECES * ValueMap::VECTOR;  // elements of a head that a lane mixes
// Lane groups of a wave whose sums go to shared memory; a butterfly before adds those of the others.
constexpr int GROUPS_THAT_FIT = PowerOfTwoTo<(SHARED < 64 * WAVES * MIXED ? SHARED / (WAVES * MIXED) : 64)>::value;
constexpr int GROUPS = ValueMap::KEYS < GROUPS_THAT_FIT ? ValueMap::KEYS : GROUPS_THAT_FIT;
static_assert(GROUPS * WAVES * MIXED <= SHARED, "attention: mixed values do not fit");

// mixed[head * HEAD_SIZE + d] = sum over the split's visible keys of factor * value, by the whole block: each
// lane group takes every (KEYS * WAVES)-th key, then a butterfly over the groups of a wave, then waves in
// ascending order. `partial` is shared, (WAVES, GROUPS, MIXED); its reader must pass a barrier first.
SIMT_DEVICE void mix(const float* factors, const ValueReader& values, ValueStream& stream, float* partial) {
    using M = ValueMap;
    float sums[HEADS * HELD];
    SIMT_UNROLL
    for (int i = 0; i < HEADS * HELD; ++i) sums[i] = 0.0f;
    stream.walk(values, [&](const Batch<V, M, ValueStream::COUNT>& batch, int step) {
        SIMT_UNROLL
        for (int i = 0; i < ValueStream::COUNT; ++i) {
            SIMT_UNROLL
            for (int piece = 0; piece < M::PIECES; ++piece) {
                if (!M::inside(piece)) continue;
                const int block = V::SCALED ? M::element(piece) / kv::BLOCK : 0;
                float factor[PITCH], x[M::VECTOR];
                copy<PITCH>(factors + block * FACTOR_PITCH + M::key(step + i) * PITCH, factor);
                batch.decode(i, piece, x);
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

// Element i of the block's mixed values: the rest of each wave's butterfly, then waves in ascending order.
SIMT_DEVICE float mixed_value(const float* partial, int i) {
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
