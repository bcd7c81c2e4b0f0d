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
    static constexpr int QUADS = 4 / PARTS;  // of this lane: part(), part() + PARTS, ...
    static constexpr int QH = 128;           // where a block's upper bits begin
    simt::EvenQuad low[LINES][QUADS];
    simt::EvenQuad high[LINES];
    int8_t scales[LINES][QUADS][2];  // of a quad's low and high nibbles
    uint16_t d[LINES];
    uint32_t shift[LINES];

    SIMT_DEVICE void fetch(const Lines& rows, int superblock, int half) {
        const int part = fragment::part();
        SIMT_UNROLL
        for (int line = 0; line < LINES; ++line) {
            const formats::Block* block = rows.block[line] + superblock;
            const simt::Even at(block);
            simt::Even low_at = at, high_at = at;
            low_at.from += 16 * part;
            high_at.from += 16 * (part % 2);
            shift[line] = at.shift();
            SIMT_UNROLL
            for (int j = 0; j < QUADS; ++j) {
                low[line][j].fetch(low_at, 64 * half + 16 * PARTS * j);
                SIMT_UNROLL
                for (int upper = 0; upper < 2; ++upper)
                    scales[line][j][upper] = (block->scales + part)[8 * half + PARTS * j + 4 * upper];
            }
            high[line].fetch(high_at, QH + 32 * half);
            d[line] = block->d;
        }
    }

    // Quad j holds elements of quarter `quarter()` + PARTS / 2 * j in its low nibbles, and of the
    // quarter two after it in its high ones; both at 16 * (part() % 2).
    SIMT_DEVICE static int quarter() { return PARTS == 4 ? fragment::part() / 2 : 0; }
    SIMT_DEVICE static int first_group() { return 2 * fragment::part(); }

    // What a group's fields are multiplied with, and what takes the 1024 away: sc / 4, and sc / 64 for
    // high nibbles, which stay where they are and count 16 times.
    struct Scale {
        uint32_t times;
        uint32_t plus;
        SIMT_DEVICE Scale(int8_t scale, bool upper) {
            // 1152 + sc twice: a product of integers that carries nothing from half to half.
            const uint32_t placed =
                static_cast<uint32_t>(static_cast<int32_t>(scale)) * 0x00010001u + HALF_1152;
            times = upper ? simt::fma2(placed, HALF_64TH, MINUS_HALF_18)
                          : simt::fma2(placed, HALF_QUARTER, MINUS_HALF_288);
            plus = simt::fma2(times, MINUS_HALF_1024, 0u);
        }
    };

    SIMT_DEVICE void multiply(fragment::Unit& unit, const Columns& x, int half,
                              float (&sums)[fragment::SUMS]) const {
        float lower[fragment::SUMS], upper_bits[fragment::SUMS];
        SIMT_UNROLL
        for (int i = 0; i < fragment::SUMS; ++i) lower[i] = upper_bits[i] = 0.0f;
        multiply_minimums(unit, x, half, lower);
        uint32_t fields[LINES][4];
        SIMT_UNROLL
        for (int line = 0; line < LINES; ++line) {
            const Quad bits = high[line].quad(shift[line]);
            SIMT_UNROLL
            for (int i = 0; i < 4; ++i) fields[line][i] = bits.word[i] >> (2 * quarter());
        }
        SIMT_UNROLL
        for (int j = 0; j < QUADS; ++j) {
            Quad nibbles[LINES];
            SIMT_UNROLL
            for (int line = 0; line < LINES; ++line) nibbles[line] = low[line][j].quad(shift[line]);
            SIMT_UNROLL
            for (int upper = 0; upper < 2; ++upper) {
                Quad columns[LINES][2];
                x.load(columns, 16 * half + 2 * PARTS * j + 8 * upper);
                SIMT_UNROLL
                for (int n = 0; n < 8; n += WORDS) {
                    fragment::Own four, two, part;
                    SIMT_UNROLL
                    for (int line = 0; line < LINES; ++line) {
                        const Scale scale(scales[line][j][upper], upper);
                        SIMT_UNROLL
                        for (int w = 0; w < WORDS; ++w) {
                            const int pair = n + w, by = pair % 2 * 8;
                            four.word[line][w] =
                                simt::fma2(simt::masked_or(nibbles[line].word[pair / 2] >> by,
                                                           upper ? 0x00f000f0u : 0x000f000fu,
                                                           HALF_1024),
                                           scale.times, scale.plus);
                            two.word[line][w] =
                                simt::fma2(simt::masked_or(fields[line][pair / 2] >> (by + PARTS * j),
                                                           upper ? 0x00300030u : 0x00030003u,
                                                           HALF_1024),
                                           scale.times, scale.plus);
                            part.word[line][w] = columns[line][pair / 4].word[pair % 4];
                        }
                    }
                    unit.multiply_add(lower, four, part);
                    unit.multiply_add(upper_bits, two, part);
                }
            }
        }
        SIMT_UNROLL
        for (int i = 0; i < fragment::SUMS; ++i) {
            const float four_d = 4.0f * simt::half_to_float(d[fragment::own_line(i)]);
            sums[i] = simt::fma(four_d, simt::fma(16.0f, upper_bits[i], lower[i]), sums[i]);
        }
    }

    // -256 sc of a lane's groups: in units of d / 4, and of sums that are scaled by 2^-5.
    SIMT_DEVICE void multiply_minimums(fragment::Unit& unit, const Columns& x, int half,
                                       float (&lower)[fragment::SUMS]) const {
        fragment::Own minimums, sums_of_x;
        SIMT_UNROLL
        for (int line = 0; line < LINES; ++line) {
            SIMT_UNROLL
            for (int j = 0; j < QUADS; ++j) {
                const uint32_t both =
                    simt::permute(Scale(scales[line][j][0], false).plus,
                                  Scale(scales[line][j][1], true).plus, simt::selector(0, 1, 4, 5));
                minimums.word[line][2 * j] = simt::fma2(both, HALF_1_AND_16, 0u);
                minimums.word[line][2 * j + 1] = minimums.word[line][2 * j];
            }
        }
        x.load_sums(sums_of_x, 8 * half, 2 * PARTS);
        unit.multiply_add(lower, minimums, sums_of_x);
    }
};

}  // namespace packed
