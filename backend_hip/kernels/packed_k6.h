// Q6_K for matvec_packed.hip: a step is half a superblock, 128 k.
//
// A weight is d sc (q - 32), and sc q is not exact in a half. Its lower four and upper two bits are
// multiplied apart: with q = n + 16 h both sc n and 16 sc h are. The 32 is a minimum as in Q4_K: 32 sc
// times the sum of each group of 16 activations. All is in units of d / 4.
#pragma once
#include "packed.h"
#include "packed_step.h"

namespace packed {

template <>
struct Step<14> {
    using Block = formats::Format<14>::Block;
    static constexpr int PER_BLOCK = 2;
    static constexpr int QUADS = 4 / PARTS;  // of this lane: part(), part() + PARTS, ...
    Quad low[LINES][QUADS];
    Quad high[LINES];
    simt::Pair scales[LINES];  // the eight of this half
    uint16_t d[LINES];

    SIMT_DEVICE void fetch(const Lines<Block>& rows, int superblock, int half) {
        const int part = fragment::part();
        SIMT_UNROLL
        for (int line = 0; line < LINES; ++line) {
            const Block* block = rows.block[line] + superblock;
            SIMT_UNROLL
            for (int j = 0; j < QUADS; ++j)
                low[line][j] = simt::load16(block->ql + 64 * half + 16 * (part + PARTS * j));
            high[line] = simt::load16(block->qh + 32 * half + 16 * (part % 2));
            scales[line] = simt::load8(block->scales + 8 * half);
            d[line] = block->d;
        }
    }

    // Quad j holds elements of quarter `quarter()` + PARTS / 2 * j in its low nibbles, and of the
    // quarter two after it in its high ones; both at 16 * (part() % 2).
    SIMT_DEVICE static int quarter() { return PARTS == 4 ? fragment::part() / 2 : 0; }
    SIMT_DEVICE static int first_group() { return 2 * fragment::part(); }
    SIMT_DEVICE static bool uses(int slot) { return slot % 2 == 0; }

    // What a group's fields are multiplied with, and what takes away the 1024 or 64 that they stand on.
    struct Scale {
        uint32_t nibbles, minus_nibbles;  // sc / 4; sc / 64 for high ones, which stay and count 16 times
        uint32_t bits, minus_bits;        // 4 sc; h counts 16 times and is a quarter of a unit
        // Of the quads j: byte part() + PARTS j of a word for low nibbles, and of the next for high ones.
        SIMT_DEVICE Scale(const simt::Pair& scales, int j, bool upper) {
            // 1024 + 128 + sc twice, as the byte is without a sign once it has moved up by 128.
            const int byte = fragment::part() + PARTS * j;
            const uint32_t placed = simt::permute(scales.word[upper] ^ 0x80808080u, HALF_1024,
                                                  simt::selector(byte, 5, byte, 5));
            nibbles = upper ? simt::fma2(placed, HALF_64TH, MINUS_HALF_18)
                            : simt::fma2(placed, HALF_QUARTER, MINUS_HALF_288);
            minus_nibbles = simt::fma2(nibbles, MINUS_HALF_1024, 0u);
            bits = simt::fma2(placed, HALF_4, MINUS_HALF_4608);
            minus_bits = simt::fma2(bits, MINUS_HALF_64, 0u);
        }
    };

    SIMT_DEVICE void multiply(fragment::Unit& unit, const Columns& x, int half,
                              float (&sums)[fragment::SUMS]) const {
        float products[fragment::SUMS];
        SIMT_UNROLL
        for (int i = 0; i < fragment::SUMS; ++i) products[i] = 0.0f;
        multiply_minimums(unit, x, half, products);
        uint32_t fields[LINES][4];
        SIMT_UNROLL
        for (int line = 0; line < LINES; ++line) {
            SIMT_UNROLL
            for (int i = 0; i < 4; ++i) fields[line][i] = high[line].word[i] >> (2 * quarter());
        }
        SIMT_UNROLL
        for (int j = 0; j < QUADS; ++j) {
            SIMT_UNROLL
            for (int upper = 0; upper < 2; ++upper) {
                Quad columns[LINES][2];
                x.load(columns, 16 * half + 2 * PARTS * j + 8 * upper);
                SIMT_UNROLL
                for (int n = 0; n < 8; n += WORDS) {
                    fragment::Own four, two, part;
                    SIMT_UNROLL
                    for (int line = 0; line < LINES; ++line) {
                        const Scale scale(scales[line], j, upper);
                        SIMT_UNROLL
                        for (int w = 0; w < WORDS; ++w) {
                            const int pair = n + w, by = pair % 2 * 8;
                            four.word[line][w] =
                                simt::fma2(simt::masked_or(low[line][j].word[pair / 2] >> by,
                                                           upper ? 0x00f000f0u : 0x000f000fu,
                                                           HALF_1024),
                                           scale.nibbles, scale.minus_nibbles);
                            // The two bits, at bit 4 of a half.
                            const uint32_t word = fields[line][pair / 2];
                            const int at = by + PARTS * j + 4 * upper;
                            const uint32_t placed = at < 4 ? word << (4 - at) : word >> (at - 4);
                            two.word[line][w] =
                                simt::fma2(simt::masked_or(placed, 0x00300030u, HALF_64), scale.bits,
                                           scale.minus_bits);
                            part.word[line][w] = columns[line][pair / 4].word[pair % 4];
                        }
                    }
                    unit.multiply_add(products, four, part);
                    unit.multiply_add(products, two, part);
                }
            }
        }
        SIMT_UNROLL
        for (int i = 0; i < fragment::SUMS; ++i) {
            const float four_d = 4.0f * simt::half_to_float(d[fragment::own_line(i)]);
            sums[i] = simt::fma(four_d, products[i], sums[i]);
        }
    }

    // -256 sc of a lane's groups: in units of d / 4, and of sums that are scaled by 2^-5.
    SIMT_DEVICE void multiply_minimums(fragment::Unit& unit, const Columns& x, int half,
                                       float (&products)[fragment::SUMS]) const {
        fragment::Own minimums, sums_of_x;
        SIMT_UNROLL
        for (int line = 0; line < LINES; ++line) {
            SIMT_UNROLL
            for (int j = 0; j < QUADS; ++j) {
                const uint32_t both =
                    simt::permute(Scale(scales[line], j, false).minus_nibbles,
                                  Scale(scales[line], j, true).minus_nibbles,
                                  simt::selector(0, 1, 4, 5));
                minimums.word[line][2 * j] = simt::fma2(both, HALF_1_AND_16, 0u);
                minimums.word[line][2 * j + 1] = minimums.word[line][2 * j];
            }
        }
        x.load_sums(sums_of_x, 8 * half, 2 * PARTS, 0);
        unit.multiply_add(products, minimums, sums_of_x);
    }
};

}  // namespace packed
