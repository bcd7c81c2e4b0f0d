// Weights of the K formats as bytes with a factor and an offset in common: w = factor * quant - offset, both exact.
//
// A lane takes a quarter of a super-block of 256, its part: four runs of 16. A group of RUNS runs has one factor.
//
//   load(block, part)              the bytes of a part
//   run(part, i)                   where its run i lies in the super-block, in runs
//   quants(unit, part, i, word)    four quants of run i
//   affine(unit, part, group)      factor and offset of a group
//   sum(part)                      whose activations meet the offset: 0 or 1, the first or second run of a block of
//                                  32 (as digit_column.h counts them), 2, both
#pragma once
#include "formats.h"

namespace digit_formats {

constexpr int SUPER = 256;
constexpr int RUN = 16;
constexpr int PARTS = 4;
constexpr int RUNS_OF_PART = SUPER / PARTS / RUN;

struct Affine {
    float factor;
    float offset;
};

template <int TYPE>
struct Quants {  // Q4_K and Q5_K: a part is two sub-blocks, the low and the high nibbles of 32 bytes
    using Format = formats::Format<TYPE>;
    using Block = typename Format::Block;
    static constexpr int RUNS = 2;
    static constexpr int FIFTHS = TYPE == 13 ? 2 : 1;

    struct Unit {
        simt::Quad head;
        simt::Quad low[2];
        simt::Quad fifth[FIFTHS];  // Q5_K only
    };
    SIMT_DEVICE static Unit load(const Block& block, int part) {
        Unit unit;
        unit.head = simt::load16(&block);
        SIMT_UNROLL
        for (int i = 0; i < 2; ++i) unit.low[i] = simt::load16(block.qs + part * 32 + i * 16);
        if constexpr (TYPE == 13) {
            SIMT_UNROLL
            for (int i = 0; i < 2; ++i) unit.fifth[i] = simt::load16(block.qh + i * 16);
        }
        return unit;
    }
    SIMT_DEVICE static int run(int part, int i) { return part * RUNS_OF_PART + i; }
    SIMT_DEVICE static uint32_t quants(const Unit& unit, int part, int i, int word) {
        const int odd = i / 2;
        const uint32_t low = unit.low[i % 2].word[word] >> (odd * 4) & 0x0f0f0f0fu;
        if constexpr (TYPE == 12) return low;
        return low | (unit.fifth[i % FIFTHS].word[word] >> (2 * part + odd) & 0x01010101u) << 4;
    }
    SIMT_DEVICE static Affine affine(const Unit& unit, int part, int group) {
        const typename Format::Scale scale = Format::scale_of(unit.head, part, group);
        return {scale.d, scale.m};
    }
    SIMT_DEVICE static int sum(int) { return 2; }
};

template <>
struct Quants<14> {  // Q6_K: a part is 16 columns of the four quarters of a half
    using Format = formats::Format<14>;
    using Block = Format::Block;
    static constexpr int RUNS = 1;

    struct Unit {
        simt::Quad low[2];
        simt::Quad high;
        simt::Pair scales;  // of a half
        uint16_t d;
    };
    SIMT_DEVICE static Unit load(const Block& block, int part) {
        const int half = part / 2, column = part % 2 * 16;
        Unit unit;
        SIMT_UNROLL
        for (int i = 0; i < 2; ++i) unit.low[i] = simt::load16(block.ql + half * 64 + i * 32 + column);
        unit.high = simt::load16(block.qh + half * 32 + column);
        unit.scales = simt::load8(block.scales + half * 8);
        unit.d = block.d;
        return unit;
    }
    SIMT_DEVICE static int run(int part, int i) { return part / 2 * 8 + i * 2 + part % 2; }
    SIMT_DEVICE static uint32_t quants(const Unit& unit, int, int i, int word) {
        const uint32_t nibbles = unit.low[i % 2].word[word] >> (i / 2 * 4) & 0x0f0f0f0fu;
        return nibbles | (unit.high.word[word] >> (2 * i) & 0x03030303u) << 4;
    }
    SIMT_DEVICE static Affine affine(const Unit& unit, int part, int group) {
        const uint32_t pair = unit.scales.word[group / 2] >> (group % 2 * 16 + part % 2 * 8);
        const float scale = static_cast<float>(static_cast<int32_t>(static_cast<int8_t>(pair)));
        const float factor = simt::half_to_float(unit.d) * scale;
        return {factor, 32.0f * factor};
    }
    SIMT_DEVICE static int sum(int part) { return part % 2; }
};

}  // namespace digit_formats
