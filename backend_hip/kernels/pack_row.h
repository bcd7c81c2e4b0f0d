// A row of activations as halves with a scale, as packed.h lays them out.
#pragma once
#include "half_scale.h"
#include "packed.h"

namespace packed {

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
        uint8_t* to = block + SUMS + slot * GROUP_BYTES + place(slot, column) * 16;
        uint32_t* words = reinterpret_cast<uint32_t*>(to);
        words[0] = hi;
        words[1] = lo;
    }
};

// value(k) for k < columns, a multiple of 256, is the row of `token`; it is asked for twice. The whole block
// works on it, and every thread must reach it.
template <class Value>
SIMT_DEVICE void pack_row(Value value, int token, int columns, uint8_t* to, float* scales) {
    static_assert(SIMT_WAVE * 8 == K, "a lane packs 8 of a superblock's k");
    const int lane = simt::lane();
    const half_scale::Scale scale = half_scale::of(value, columns);
    if (simt::thread() == 0) scales[token] = scale.inverse;
    const int superblocks = columns / K;
    uint8_t* tile = to + static_cast<int64_t>(token / COLUMNS) * superblocks * BYTES;
    const int column = token % COLUMNS;
    for (int n = simt::wave(); n < superblocks; n += SIMT_BLOCK / SIMT_WAVE) {
        uint8_t* block = tile + static_cast<int64_t>(n) * BYTES;
        uint16_t half[8];
        float sum = 0.0f;
        SIMT_UNROLL
        for (int i = 0; i < 8; ++i) {
            half[i] = simt::float_to_half(value(n * K + lane * 8 + i) * scale.factor);
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
}

}  // namespace packed
