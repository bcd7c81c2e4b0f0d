// Q6_K for matvec_packed.hip: a step is half a superblock, 128 k.
//
// A weight is d sc (q - 32), and sc q is not exact in a half. Its lower four and upper two bits are
// multiplied apart: with q = n + 16 h both sc n and sc h are. The 32 is a minimum as in Q4_K: 32 sc
// times the sum of each group of 16 activations. All is in units of d / 4 and d * 4.
#pragma once
#include "packed.h"
#include "packed_step.h"

namespace packed {

using fragment::LINES;
using fragment::PARTS;
using fragment::WORDS;

struct Step {
    static constexpr int PER_BLOCK = 2;
    static constexpr int QUADS = 4 / PARTS;
    simt::EvenQuad low[LINES][QUADS];
    simt::EvenQuad high[LINES];
    int8_t scales[LINES][QUADS][2];  // of a quad's low and high nibbles
    uint16_t d[LINES];
    const formats::Block* at[LINES];

    SIMT_DEVICE void fetch(const Lines& rows, int superblock, int half) {
        const int part = fragment::part();
        SIMT_UNROLL
        for (int line = 0; line < LINES; ++line) {
            const formats::Block* block = rows.block[line] + superblock;
            SIMT_UNROLL
            for (int j = 0; j < QUADS; ++j) {
                const int quad = part + PARTS * j;
                low[line][j].fetch(block->ql + 64 * half + 16 * quad);
                SIMT_UNROLL
                for (int upper = 0; upper < 2; ++upper)
                    scales[line][j][upper] = block->scales[8 * half + quad + 4 * upper];
            }
            high[line].fetch(block->qh + 32 * half + 16 * (part % 2));
            d[line] = block->d;
            at[line] = block;
        }
    }

    // Quad j holds elements of quarter `quarter()` + PARTS / 2 * j in its low nibbles, and of the
    // quarter two after it in its high ones; both at 16 * (part() % 2).
    SIMT_DEVICE static int quarter() { return PARTS == 4 ? fragment::part() / 2 : 0; }
    SIMT_DEVICE static int first_group() { return 4 * quarter() + 2 * (fragment::part() % 2); }
    SIMT_DEVICE static int first_pair() { return fragment::part(); }

    SIMT_DEVICE void multiply(fragment::Unit& unit, const Columns& x, int half,
                              float (&sums)[fragment::SUMS]) const {
        // 1152 + sc twice: a product of integers that carries nothing from half to half.
        uint32_t scale[LINES][QUADS][2], offset[LINES][QUADS][2];
        fragment::Own minimums;
        uint32_t fields[LINES][4];
        SIMT_UNROLL
        for (int line = 0; line < LINES; ++line) {
            SIMT_UNROLL
            for (int j = 0; j < QUADS; ++j) {
                SIMT_UNROLL
                for (int upper = 0; upper < 2; ++upper) {
                    const uint32_t placed =
                        static_cast<uint32_t>(static_cast<int32_t>(scales[line][j][upper])) *
                            0x00010001u + HALF_1152;
                    // sc / 4; high nibbles stay where they are and count 16 times: sc / 64.
                    scale[line][j][upper] =
                        upper ? simt::fma2(placed, HALF_64TH, MINUS_HALF_18)
                              : simt::fma2(placed, HALF_QUARTER, MINUS_HALF_288);
                    offset[line][j][upper] = simt::fma2(scale[line][j][upper], MINUS_HALF_1024, 0u);
                }
                // -256 sc of both groups: in units of d / 4, and of sums that are scaled by 2^-5.
                const uint32_t both = simt::permute(offset[line][j][0], offset[line][j][1],
                                                    simt::selector(0, 1, 4, 5));
                minimums.word[line][2 * j] = simt::fma2(both, HALF_1_AND_16, 0u);
                minimums.word[line][2 * j + 1] = minimums.word[line][2 * j];
            }
            const Quad bits = high[line].quad(at[line]);
            SIMT_UNROLL
            for (int i = 0; i < 4; ++i) fields[line][i] = bits.word[i] >> (2 * quarter());
        }
        float lower[fragment::SUMS], upper_bits[fragment::SUMS];
        SIMT_UNROLL
        for (int i = 0; i < fragment::SUMS; ++i) lower[i] = upper_bits[i] = 0.0f;
        SIMT_UNROLL
        for (int j = 0; j < QUADS; ++j) {
            Quad nibbles[LINES];
            SIMT_UNROLL
            for (int line = 0; line < LINES; ++line) nibbles[line] = low[line][j].quad(at[line]);
            SIMT_UNROLL
            for (int upper = 0; upper < 2; ++upper) {
                Quad columns[LINES][2];
                x.load(columns, 16 * half + 2 * PARTS * j + 8 * upper);
                SIMT_UNROLL
                for (int n = 0; n < 8; n += WORDS) {
                    fragment::Own four, two, part;
                    SIMT_UNROLL
                    for (int line = 0; line < LINES; ++line) {
                        SIMT_UNROLL
                        for (int w = 0; w < WORDS; ++w) {
                            const int pair = n + w, shift = pair % 2 * 8;
                            const uint32_t q = nibbles[line].word[pair / 2] >> shift;
                            const uint32_t h = fields[line][pair / 2] >> (shift + PARTS * j);
                            four.word[line][w] =
                                simt::fma2(simt::masked_or(q, upper ? 0x00f000f0u : 0x000f000fu, HALF_1024),
                                           scale[line][j][upper], offset[line][j][upper]);
                            two.word[line][w] =
                                simt::fma2(simt::masked_or(h, upper ? 0x00300030u : 0x00030003u, HALF_1024),
                                           scale[line][j][upper], offset[line][j][upper]);
                            part.word[line][w] = columns[line][pair / 4].word[pair % 4];
                        }
                    }
                    unit.multiply_add(lower, four, part);
                    unit.multiply_add(upper_bits, two, part);
                }
            }
        }
        fragment::Own sums_of_x;
        x.load_sums(sums_of_x, SUMS_16, 4 * half, PARTS);
        unit.multiply_add(lower, minimums, sums_of_x);
        SIMT_UNROLL
        for (int i = 0; i < fragment::SUMS; ++i) {
            const float four_d = 4.0f * simt::half_to_float(d[fragment::own_line(i)]);
            sums[i] = simt::fma(four_d, simt::fma(16.0f, upper_bits[i], lower[i]), sums[i]);
        }
    }
};

}  // namespace packed
