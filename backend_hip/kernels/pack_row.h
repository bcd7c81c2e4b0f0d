// A row of activations as halves with a scale, as packed.h lays them out.
#pragma once
#include "half_scale.h"
#include "packed.h"

namespace packed {

constexpr int EACH = 8;  // k of a superblock that a lane packs
static_assert(SIMT_WAVE * EACH == K, "a wave packs a superblock");
constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;

struct Split {  // a sum of this lane's and one of another lane's as words hi and lo
    uint32_t hi;
    uint32_t lo;
    SIMT_DEVICE Split(float sum, int mask) {
        const uint16_t high = simt::float_to_half(sum);
        const uint16_t low = simt::float_to_half(sum - simt::half_to_float(high));
        const uint32_t both = high | static_cast<uint32_t>(low) << 16;
        const uint32_t other = simt::shuffle_xor(both, mask);
        hi = (both & 0xFFFFu) | other << 16;
        lo = both >> 16 | (other & 0xFFFF0000u);
    }
    SIMT_DEVICE void store(uint8_t* block, int slot, int column) const {
        // The last two words belong to nothing, but are copied with the rest.
        simt::store16(block + SUMS + slot * GROUP_BYTES + place(slot, column) * 16, {{hi, lo, 0u, 0u}});
    }
};

// Of superblock n of a token's row a wave's lanes hold EACH values one after the other.
SIMT_DEVICE void pack_superblock(const float (&values)[EACH], float factor, int token, int superblocks,
                                 int n, uint8_t* to) {
    const int lane = simt::lane(), column = token % COLUMNS;
    uint8_t* block = to + (static_cast<int64_t>(token / COLUMNS) * superblocks + n) * BYTES;
    uint16_t half[EACH];
    float sum = 0.0f;
    SIMT_UNROLL
    for (int i = 0; i < EACH; ++i) {
        half[i] = simt::float_to_half(values[i] * factor);
        sum = sum + simt::half_to_float(half[i]);
    }
    simt::Quad quad;
    SIMT_UNROLL
    for (int i = 0; i < 4; ++i) {
        const int first = i / 2 * 4 + i % 2;
        quad.word[i] = half[first] | static_cast<uint32_t>(half[first + 2]) << 16;
    }
    simt::store16(block + lane * GROUP_BYTES + place(lane, column) * 16, quad);
    const float of_16 = sum + simt::shuffle_xor(sum, 1);
    const float of_32 = of_16 + simt::shuffle_xor(of_16, 2);
    const Split pair_32(of_32 * SUM_32_SCALE, 4);
    const Split pair_16(of_16 * SUM_16_SCALE, 8);
    if (lane % 8 == 0) pair_32.store(block, slot_32(lane / 8), column);
    if (lane % 2 == 0 && lane % 16 < 8) {
        pair_16.store(block, slot_16(lane / 16 * 4 + lane % 8 / 2), column);
    }
}

// A row of at most TURNS * SIMT_BLOCK * EACH values, a multiple of 256, which the block's threads hold.
template <int TURNS>
struct Row {
    float values[TURNS][EACH];

    // Where a thread's values of a turn begin; past the row's end there are none.
    SIMT_DEVICE static int first(int turn) { return (turn * SIMT_BLOCK + simt::thread()) * EACH; }

    // Every thread of the block must reach it.
    SIMT_DEVICE void pack(int token, int columns, uint8_t* to, float* scales) const {
        float peak = 0.0f;
        SIMT_UNROLL
        for (int turn = 0; turn < TURNS; ++turn) {
            if (first(turn) >= columns) continue;
            SIMT_UNROLL
            for (int i = 0; i < EACH; ++i) peak = half_scale::larger(peak, values[turn][i]);
        }
        const half_scale::Scale scale = half_scale::of_block(peak);
        if (simt::thread() == 0) scales[token] = scale.inverse;
        SIMT_UNROLL
        for (int turn = 0; turn < TURNS; ++turn) {
            if (first(turn) >= columns) continue;
            pack_superblock(values[turn], scale.factor, token, columns / K, turn * WAVES + simt::wave(),
                            to);
        }
    }
};

// Eight values from a boundary of 16 bytes.
SIMT_DEVICE void load_each(float (&values)[EACH], const float* from) {
    SIMT_UNROLL
    for (int half = 0; half < 2; ++half) {
        const simt::Quad quad = simt::load16(from + 4 * half);
        SIMT_UNROLL
        for (int i = 0; i < 4; ++i) values[4 * half + i] = simt::from_bits(quad.word[i]);
    }
}

}  // namespace packed
