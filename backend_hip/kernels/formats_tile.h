// Weights for the matrix unit: 16 consecutive elements of a row as halves, in two steps, so that a
// kernel can fetch the next block's bytes while it multiplies this one's.
//
// A half is formats.h's float rounded once more to nearest even. The K formats, Q8_0 and F16 are
// fetched in wide words; the others are decoded by formats.h when they are unpacked.
#pragma once
#include "formats.h"
#include "fragment.h"

namespace tile {

constexpr int UNIT = 16;  // elements; never straddles a block, a sub-block or a nibble half

using simt::Quad;
using formats::Block;
using formats::Weights;

#if WEIGHT_FORMAT == 12 || WEIGHT_FORMAT == 13 || WEIGHT_FORMAT == 14
// Half of a unit of formats.h, which holds 16 elements in each of two sub-blocks or quarters.
using Raw = Weights::Unit;
SIMT_DEVICE uint32_t unit_of(int at) {
    const uint32_t k = static_cast<uint32_t>(at);
#if WEIGHT_FORMAT == 14
    return k / 256 * 8 + k % 256 / 128 * 4 + k % 64 / 16;
#else
    return k / 256 * 8 + k % 256 / 64 * 2 + k % 32 / 16;
#endif
}
SIMT_DEVICE void fetch(Raw& raw, const Block* row, int k, int) { raw = Weights::load(row, unit_of(k)); }
SIMT_DEVICE void values(const Raw& raw, int k, int columns, float (&w)[UNIT]) {
#if WEIGHT_FORMAT == 14
    (void)columns;
    const float d = k % 128 < 64 ? raw.d[0] : raw.d[1];  // a computed index would cost scratch memory
    SIMT_UNROLL
    for (int i = 0; i < 4; ++i)
        Weights::four(raw.low.word[i], raw.high.word[i], k % 128 / 32, d, w, 4 * i);
#else
    Weights::run(raw, unit_of(k), k % 64 / 32, columns, w);
#endif
}

#elif WEIGHT_FORMAT == 8  // Q8_0
struct Raw {
    Quad quants;
    uint16_t d;
};
SIMT_DEVICE void fetch(Raw& raw, const Block* row, int k, int) {
    const Block& block = row[k / 32];
    raw.quants = simt::load16_at_even(block.qs + k % 32);
    raw.d = block.d;
}
SIMT_DEVICE void values(const Raw& raw, int, int, float (&w)[UNIT]) {
    const float d = simt::half_to_float(raw.d);
    SIMT_UNROLL
    for (int i = 0; i < UNIT; ++i) {
        // Two's complement moved up by 128, so that a byte is not negative.
        const uint32_t moved = raw.quants.word[i / 4] ^ 0x80808080u;
        w[i] = d * (simt::field_to_float<8>(moved >> (i % 4 / 2 * 16), i % 2 * 8) - 128.0f);
    }
}

#elif WEIGHT_FORMAT == 1  // F16: the file's bits
struct Raw {
    Quad half[2];
};
SIMT_DEVICE void fetch(Raw& raw, const Block* row, int k, int columns) {
    if (columns % 8 == 0) {  // rows start at multiples of 16 bytes; a unit may be half past the end
        raw.half[0] = simt::load16(row + k);
        raw.half[1] = Quad{{0u, 0u, 0u, 0u}};
        if (k + UNIT / 2 < columns) raw.half[1] = simt::load16(row + k + UNIT / 2);
        return;
    }
    SIMT_UNROLL
    for (int i = 0; i < UNIT / 2; ++i) {
        const int at = k + 2 * i;
        const uint32_t low = at < columns ? row[at].value : 0u;
        const uint32_t high = at + 1 < columns ? row[at + 1].value : 0u;
        raw.half[i / 4].word[i % 4] = low | (high << 16);
    }
}

#else
using Raw = const Block*;
SIMT_DEVICE void fetch(Raw& raw, const Block* row, int, int) { raw = row; }
SIMT_DEVICE void values(const Raw& raw, int k, int columns, float (&w)[UNIT]) {
    SIMT_UNROLL
    for (int part = 0; part < UNIT; part += formats::STRIPE) {
        float stripe[formats::STRIPE];
        Weights::decode(raw, k + part, columns, stripe);
        SIMT_UNROLL
        for (int i = 0; i < formats::STRIPE; ++i) w[part + i] = stripe[i];
    }
}
#endif

// One thread's 16 elements; zero where they lie behind the end of the row.
struct Unit {
    Raw raw;
    int k;
    SIMT_DEVICE void fetch(const Block* row, int at, int columns) {
        k = at;
        if (at < columns) tile::fetch(raw, row, at, columns);
    }
    // `to`: 16 halves from a 16-byte boundary.
    SIMT_DEVICE void unpack(int columns, uint16_t* to) const {
        Quad halves[2] = {{{0u, 0u, 0u, 0u}}, {{0u, 0u, 0u, 0u}}};
        if (k < columns) {
#if WEIGHT_FORMAT == 1
            halves[0] = raw.half[0];
            halves[1] = raw.half[1];
#else
            float w[UNIT];
            values(raw, k, columns, w);
            SIMT_UNROLL
            for (int i = 0; i < UNIT / 2; ++i)
                halves[i / 4].word[i % 4] = fragment::halves(w[2 * i], w[2 * i + 1]);
#endif
        }
        simt::store16(to, halves[0]);
        simt::store16(to + UNIT / 2, halves[1]);
    }
};

}  // namespace tile
