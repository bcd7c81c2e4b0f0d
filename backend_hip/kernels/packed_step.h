// What the formats of matvec_packed.hip share: a lane's rows and columns, and constants.
//
// Step<TYPE>, one format's share of a superblock for a wave's 16 rows:
//   PER_BLOCK                           steps of a superblock
//   fetch(lines, superblock, n)         asks for the bytes of its n-th step
//   multiply(unit, columns, n, sums)    what they hold times the activations of that superblock
//   first_group()   uses(slot)          a lane's first group of 8 k; whether it reads a slot of sums
#pragma once
#include "formats.h"
#include "fragment.h"
#include "packed.h"

namespace packed {

using fragment::LINES;
using fragment::PARTS;
using fragment::WORDS;
using simt::Quad;

// Pairs of halves.
[[maybe_unused]] constexpr uint32_t HALF_1 = 0x3C003C00u;
[[maybe_unused]] constexpr uint32_t HALF_1_AND_16 = 0x4C003C00u;  // 1 low
[[maybe_unused]] constexpr uint32_t HALF_4 = 0x44004400u;
[[maybe_unused]] constexpr uint32_t HALF_QUARTER = 0x34003400u;
[[maybe_unused]] constexpr uint32_t HALF_64TH = 0x24002400u;
[[maybe_unused]] constexpr uint32_t HALF_64 = 0x54005400u;    // its last bits count 1 / 16
[[maybe_unused]] constexpr uint32_t HALF_1024 = 0x64006400u;  // its last bits count 1
[[maybe_unused]] constexpr uint32_t MINUS_HALF_18 = 0xCC80CC80u;
[[maybe_unused]] constexpr uint32_t MINUS_HALF_64 = 0xD400D400u;
[[maybe_unused]] constexpr uint32_t MINUS_HALF_288 = 0xDC80DC80u;
[[maybe_unused]] constexpr uint32_t MINUS_HALF_4608 = 0xEC80EC80u;
[[maybe_unused]] constexpr uint32_t MINUS_HALF_1024 = 0xE400E400u;
[[maybe_unused]] constexpr float SUM_UNSCALE_32 = 1.0f / SUM_32_SCALE;

// The rows that a lane holds.
template <class B>
struct Lines {
    const B* block[LINES];
};

// The columns that a lane holds, of one superblock in shared memory.
struct Columns {
    // This lane's first group of 8 k, for groups that turn places and those that don't (packed.h).
    const uint8_t* at[LINES][2];

    SIMT_DEVICE Columns(const uint8_t* memory, int first_group) {
        SIMT_UNROLL
        for (int line = 0; line < LINES; ++line) {
            const int straight = place(first_group, fragment::line(line));
            const uint8_t* group = memory + first_group * GROUP_BYTES;
            at[line][0] = group + straight * 16;
            at[line][1] = group + (straight ^ 4) * 16;
        }
    }
    SIMT_DEVICE const uint8_t* of(int line, int group) const {
        return at[line][turn_of(group) / 4] + group * GROUP_BYTES;
    }
    // 16 k from the lane's group `group` on, a multiple of 4.
    SIMT_DEVICE void load(Quad (&to)[LINES][2], int group) const {
        SIMT_UNROLL
        for (int line = 0; line < LINES; ++line) {
            SIMT_UNROLL
            for (int i = 0; i < 2; ++i)
                to[line][i] = simt::load16(of(line, group) + i * GROUP_BYTES);
        }
    }
    // Sums in the lane's slots first_group() + `slot`, + step, ...: hi, lo, hi, lo. `odd`: one slot on.
    SIMT_DEVICE void load_sums(fragment::Own& to, int slot, int step, int odd) const {
        SIMT_UNROLL
        for (int line = 0; line < LINES; ++line) {
            SIMT_UNROLL
            for (int n = 0; n < WORDS; n += 2) {
                const simt::Pair both =
                    simt::load8(of(line, slot + n / 2 * step) + SUMS + odd * GROUP_BYTES);
                to.word[line][n] = both.word[0];
                to.word[line][n + 1] = both.word[1];
            }
        }
    }
    SIMT_DEVICE void move(int nbytes) {
        SIMT_UNROLL
        for (int line = 0; line < LINES; ++line) {
            at[line][0] += nbytes;
            at[line][1] += nbytes;
        }
    }
};

template <int TYPE>
struct Step;

}  // namespace packed
