// Q4_K and Q5_K for matvec_packed.hip: a step is one superblock of 256 k.
//
// A weight is d (sc q) - dmin m. sc q is at most 63 * 31, exact in a half, so the scale of a sub-block
// costs nothing: sums of (sc q) x over all of a superblock take d once. Its minimums are one product
// more, m with the sums of each sub-block's activations.
#pragma once
#include "packed.h"
#include "packed_step.h"

namespace packed {

template <int TYPE>
struct StepK45 {
    using F = formats::Format<TYPE>;
    static constexpr int PER_BLOCK = 1;
    static constexpr int QUADS = 8 / PARTS;
    static constexpr bool FIVE = TYPE == 13;
    Quad head[LINES];  // d, dmin and twelve bytes of scales
    Quad quants[LINES][QUADS];
    Quad fifth[LINES];  // Q5_K only

    SIMT_DEVICE void fetch(const Lines<typename F::Block>& rows, int superblock, int) {
        SIMT_UNROLL
        for (int line = 0; line < LINES; ++line) {
            const typename F::Block* block = rows.block[line] + superblock;
            head[line] = simt::load16(block);
            SIMT_UNROLL
            for (int j = 0; j < QUADS; ++j)
                quants[line][j] = simt::load16(block->qs + 16 * (fragment::part() + PARTS * j));
            if constexpr (FIVE)
                fifth[line] = simt::load16(block->qh + 16 * (fragment::part() % 2));
        }
    }

    // Quad j of a lane lies in pair of sub-blocks `pair()` + PARTS / 2 * j, its half part() % 2.
    SIMT_DEVICE static int pair() { return PARTS == 4 ? fragment::part() / 2 : 0; }

    SIMT_DEVICE static int first_group() { return 8 * pair() + 2 * (fragment::part() % 2); }
    SIMT_DEVICE static bool uses(int slot) { return (slot & 5) == 1; }  // 1, 3, 9, 11

    // Scales of sub-blocks 0-3 and 4-7 as bytes, minimums likewise; formats.h has the layout.
    struct Bytes {
        uint32_t scales[2];
        uint32_t minimums[2];
        SIMT_DEVICE explicit Bytes(const Quad& head) {
            const uint32_t first = head.word[1], second = head.word[2], third = head.word[3];
            scales[0] = first & 0x3f3f3f3fu;
            scales[1] = (third & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u);
            minimums[0] = second & 0x3f3f3f3fu;
            minimums[1] = (third >> 4 & 0x0f0f0f0fu) | (second >> 2 & 0x30303030u);
        }
    };

    SIMT_DEVICE void multiply(fragment::Unit& unit, const Columns& x, int,
                              float (&sums)[fragment::SUMS]) const {
        uint32_t scales[LINES][2];
        float d[LINES], dmin[LINES];
        fragment::Own minimums;
        SIMT_UNROLL
        for (int line = 0; line < LINES; ++line) {
            const Bytes bytes(head[line]);
            scales[line][0] = bytes.scales[0];
            scales[line][1] = bytes.scales[1];
            d[line] = simt::half_to_float(static_cast<uint16_t>(head[line].word[0]));
            dmin[line] =
                -SUM_UNSCALE_32 * simt::half_to_float(static_cast<uint16_t>(head[line].word[0] >> 16));
            // A lane owns pairs part(), part() + PARTS, ... of sub-blocks; each meets hi and lo.
            SIMT_UNROLL
            for (int n = 0; n < WORDS; n += 2) {
                const int byte = 2 * (fragment::part() % 2);
                const bool upper = PARTS == 4 ? fragment::part() / 2 == 1 : n / 2 == 1;
                const uint32_t own = upper ? bytes.minimums[1] : bytes.minimums[0];
                const uint32_t placed =
                    simt::permute(own, HALF_1024, simt::selector(byte, 5, byte + 1, 5));
                minimums.word[line][n] = simt::fma2(placed, HALF_1, MINUS_HALF_1024);
                minimums.word[line][n + 1] = minimums.word[line][n];
            }
        }
        float products[fragment::SUMS];
        SIMT_UNROLL
        for (int i = 0; i < fragment::SUMS; ++i) products[i] = 0.0f;
        fragment::Own sums_of_x;
        x.load_sums(sums_of_x, 0, 8, 1);
        unit.multiply_add(products, minimums, sums_of_x);
        SIMT_UNROLL
        for (int i = 0; i < fragment::SUMS; ++i) {
            sums[i] = simt::fma(dmin[fragment::own_line(i)], products[i], sums[i]);
            products[i] = 0.0f;
        }

        SIMT_UNROLL
        for (int j = 0; j < QUADS; ++j) {
            SIMT_UNROLL
            for (int odd = 0; odd < 2; ++odd) {
                Quad columns[LINES][2];
                x.load(columns, 4 * PARTS * j + 4 * odd);
                uint32_t scale[LINES], offset[LINES];
                SIMT_UNROLL
                for (int line = 0; line < LINES; ++line) {
                    const int at = 2 * (PARTS / 2 * j);  // sub-block, less this lane's 2 pair()
                    const int byte = 2 * pair() + at % 4 + odd;
                    // In Q4_K an odd sub-block's nibbles stay where they are and count 16 times.
                    const bool sixteen = !FIVE && odd;
                    const uint32_t placed =
                        simt::permute(scales[line][at / 4], sixteen ? HALF_64 : HALF_1024,
                                      simt::selector(byte, 5, byte, 5));
                    scale[line] =
                        simt::fma2(placed, HALF_1, sixteen ? MINUS_HALF_64 : MINUS_HALF_1024);
                    offset[line] = simt::fma2(scale[line], MINUS_HALF_1024, 0u);
                }
                SIMT_UNROLL
                for (int n = 0; n < 8; n += WORDS) {
                    fragment::Own rows, part;
                    SIMT_UNROLL
                    for (int line = 0; line < LINES; ++line) {
                        SIMT_UNROLL
                        for (int w = 0; w < WORDS; ++w) {
                            const int at = n + w;
                            rows.word[line][w] = simt::fma2(integers(line, j, odd, at), scale[line],
                                                            offset[line]);
                            part.word[line][w] = columns[line][at / 4].word[at % 4];
                        }
                    }
                    unit.multiply_add(products, rows, part);
                }
            }
        }
        SIMT_UNROLL
        for (int i = 0; i < fragment::SUMS; ++i) {
            const int line = fragment::own_line(i);
            sums[i] = simt::fma(d[line], products[i], sums[i]);
        }
    }

    // 1024 + q as two halves (Q4_K, odd: 1024 + 16 q): bytes 0 and 2, or 1 and 3, of word n / 2.
    SIMT_DEVICE uint32_t integers(int line, int j, int odd, int n) const {
        const uint32_t word = quants[line][j].word[n / 2];
        const int shift = n % 2 * 8;
        if constexpr (FIVE) {
            const uint32_t bits = fifth[line].word[n / 2] >> (2 * pair());
            const int at = 2 * (PARTS / 2 * j) + odd;  // of a bit, to be moved to 4
            const uint32_t moved = at < 4 ? bits << (4 - at) : bits >> (at - 4);
            const uint32_t five = (word >> (4 * odd) & 0x0f0f0f0fu) | (moved & 0xf0f0f0f0u);
            return simt::masked_or(five >> shift, 0x001f001fu, HALF_1024);
        } else {
            return simt::masked_or(word >> shift, odd ? 0x00f000f0u : 0x000f000fu, HALF_1024);
        }
    }
};

template <>
struct Step<12> : StepK45<12> {};
template <>
struct Step<13> : StepK45<13> {};

}  // namespace packed
