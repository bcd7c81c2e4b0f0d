// What the arithmetic of attention works on: shapes of a block, and a lane's way through keys or values.
#pragma once
#include "kv_type.h"
#include "seen.h"

#if !defined(HEAD_SIZE) || !defined(GROUP) || !defined(K_TYPE) || !defined(V_TYPE)
#error "attention_keys.h: define HEAD_SIZE, GROUP (query heads per KV head), K_TYPE and V_TYPE"
#endif
#if !defined(SPLIT_KEYS) || !defined(HEAD_PASSES) || !defined(ROWS_PER_BLOCK)
#error "attention_keys.h: define SPLIT_KEYS, HEAD_PASSES and ROWS_PER_BLOCK (attention_shape.py)"
#endif

namespace attention {

using K = kv::Storage<K_TYPE>;
using V = kv::Storage<V_TYPE>;

constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;

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
constexpr int PITCH = PowerOfTwoFrom<HEADS>::value;  // heads as they lie in memory beside a key
constexpr int BLOCKS = HEAD_SIZE / kv::BLOCK > 0 ? HEAD_SIZE / kv::BLOCK : 1;  // of a head, in q8_0

struct alignas(16) Four {
    float a, b, c, d;
};

// COUNT neighbouring floats, four at a time where a vector is a multiple of four.
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

// One lane's way through the split at `base`. A key that is not visible may never have been written: the
// nearest visible one is loaded in its place. Where a split begins is the same for all lanes; offsets in it
// fit in 32 bits.
template <class S>
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
    // The key `step` behind a lane's own, or the nearest visible one. (So that `own` is added last, or the
    // sums of it and each step would be kept in registers.)
    SIMT_DEVICE int nearest(int own, int step) const {
        return own + simt::max(least - own, simt::min(step, most - own));
    }
    // Whether all keys are visible, for the whole block alike: then none needs a nearest one.
    SIMT_DEVICE bool whole() const { return least == 0 && most == SPLIT_KEYS - 1; }
    // A lane's key, in a split that is WHOLE or not: `own` of the lane, and `step` the same for all lanes.
    template <bool WHOLE>
    SIMT_DEVICE const uint8_t* row(int own, int step) const {
        const int key = WHOLE ? own : nearest(own, step);
        const uint8_t* at = rows + static_cast<uint32_t>(key) * pitch_nbytes;
        return WHOLE ? at + static_cast<uint64_t>(static_cast<uint32_t>(step)) * pitch_nbytes : at;
    }
    template <bool WHOLE>
    SIMT_DEVICE const uint16_t* scales_of(int own, int step) const {
        return scales + (WHOLE ? own + step : nearest(own, step)) * BLOCKS;
    }
};

// A key's scales as they lie in memory, in wide loads where they are as many as fill them.
struct Scales {
    uint32_t word[(BLOCKS + 1) / 2];

    template <int COUNT = BLOCKS>
    SIMT_DEVICE void load(const uint16_t* from) {
        if constexpr (COUNT == 2 || COUNT == 4 || COUNT % 8 == 0) {
            constexpr int WORDS = COUNT < 8 ? COUNT / 2 : 4;
            SIMT_UNROLL
            for (int i = 0; i < COUNT / 2; i += WORDS) {
                kv::Words<WORDS> words;
                words.load(from + 2 * i);
                SIMT_UNROLL
                for (int j = 0; j < WORDS; ++j) word[i + j] = words.word[j];
            }
        } else {
            SIMT_UNROLL
            for (int i = 0; i < COUNT; ++i) {
                word[i / 2] = (i % 2 == 0 ? 0u : word[i / 2]) | static_cast<uint32_t>(from[i]) << i % 2 * 16;
            }
        }
    }
    SIMT_DEVICE float of(int block) const {
        return simt::half_to_float(static_cast<uint16_t>(word[block / 2] >> block % 2 * 16));
    }
};

// What a lane loads in COUNT steps of a map, undecoded, so that all of it is in flight at once. A map says
// where a wave's lanes are: KEYS keys a step, of which a lane reads PIECES pieces of WORDS words, and Beside
// them.
template <class S, class M, int COUNT>
struct Batch {
    kv::Words<M::WORDS> raw[COUNT][M::PIECES];
    typename M::Beside beside[COUNT];

    template <bool WHOLE>
    SIMT_DEVICE void load(const Reader<S>& reader, int step) {
        SIMT_UNROLL
        for (int i = 0; i < COUNT; ++i) {
            const int distance = (step + i) * M::KEYS * WAVES;
            const uint8_t* row = reader.template row<WHOLE>(M::key(0), distance);
            SIMT_UNROLL
            for (int piece = 0; piece < M::PIECES; ++piece) {
                const int at = M::element(piece) * static_cast<int>(sizeof(typename S::Element));
                if (M::inside(piece)) raw[i][piece].load(row + at);
            }
            beside[i].template load<WHOLE>(reader, distance);
        }
    }
};

// A wave's keys in order, two batches of 64 bytes a lane by turns: one on its way, one at work; or one batch of
// a step that is larger. A batch that begins behind the last visible key is not loaded.
template <class S, class M>
struct Stream {
    static constexpr int WANTED = 16 / (M::PIECES * M::WORDS) > 0 ? 16 / (M::PIECES * M::WORDS) : 1;
    static constexpr int COUNT = WANTED < M::STEPS ? WANTED : M::STEPS;  // steps of a batch
    static constexpr bool SINGLE = M::PIECES * M::WORDS > 16 || COUNT == M::STEPS;
    using Part = Batch<S, M, COUNT>;
    Part even, odd;

    // Whether visible keys are in a step or behind it, for the whole wave alike.
    SIMT_DEVICE static bool reaches(const Reader<S>& reader, int step) {
        return step < M::STEPS && M::first(step) <= reader.most;
    }
    SIMT_DEVICE void open(const Reader<S>& reader) {
        if (reader.whole()) {
            even.template load<true>(reader, 0);
            if constexpr (!SINGLE) odd.template load<true>(reader, COUNT);
        } else {
            even.template load<false>(reader, 0);
            if (!SINGLE && reaches(reader, COUNT)) odd.template load<false>(reader, COUNT);
        }
    }
    // work(batch, step) for every batch that is loaded.
    template <class Work>
    SIMT_DEVICE void walk(const Reader<S>& reader, const Work& work) {
        SIMT_UNROLL
        for (int step = 0; step < M::STEPS; step += SINGLE ? COUNT : 2 * COUNT) {
            if (!reaches(reader, step)) break;
            work(even, step);
            if constexpr (SINGLE) {
                if (reaches(reader, step + COUNT)) even.template load<false>(reader, step + COUNT);
                continue;
            }
            if (reaches(reader, step + 2 * COUNT)) even.template load<false>(reader, step + 2 * COUNT);
            if (!reaches(reader, step + COUNT)) break;
            work(odd, step + COUNT);
            if (reaches(reader, step + 3 * COUNT)) odd.template load<false>(reader, step + 3 * COUNT);
        }
    }
};

}  // namespace attention
