// What the formats of matvec_packed.hip share: a lane's rows and columns, and constants.
#pragma once
#include "formats.h"
#include "fragment.h"
#include "packed.h"

namespace packed {

using simt::Quad;

// Pairs of halves.
[[maybe_unused]] constexpr uint32_t HALF_1 = 0x3C003C00u;
[[maybe_unused]] constexpr uint32_t HALF_1_AND_16 = 0x4C003C00u;  // 1 low
[[maybe_unused]] constexpr uint32_t HALF_QUARTER = 0x34003400u;
[[maybe_unused]] constexpr uint32_t HALF_64TH = 0x24002400u;
[[maybe_unused]] constexpr uint32_t HALF_64 = 0x54005400u;    // its last bits count 1 / 16
[[maybe_unused]] constexpr uint32_t HALF_1024 = 0x64006400u;  // its last bits count 1
[[maybe_unused]] constexpr uint32_t HALF_1152 = 0x64806480u;
[[maybe_unused]] constexpr uint32_t MINUS_HALF_18 = 0xCC80CC80u;
[[maybe_unused]] constexpr uint32_t MINUS_HALF_64 = 0xD400D400u;
[[maybe_unused]] constexpr uint32_t MINUS_HALF_288 = 0xDC80DC80u;
[[maybe_unused]] constexpr uint32_t MINUS_HALF_1024 = 0xE400E400u;
[[maybe_unused]] constexpr float SUM_UNSCALE_32 = 1.0f / SUM_32_SCALE;

// The rows that a lane holds.
struct Lines {
    const formats::Block* block[fragment::LINES];
};

// The columns that a lane holds, of one superblock: pointers that differ by lane, and offsets that don't.
struct Columns {
    const uint8_t* at[fragment::LINES];  // this lane's first group of 8 k

    // 16 k from the lane's group `group` on.
    SIMT_DEVICE void load(Quad (&to)[fragment::LINES][2], int group) const {
        SIMT_UNROLL
        for (int line = 0; line < fragment::LINES; ++line) {
            SIMT_UNROLL
            for (int i = 0; i < 2; ++i)
                to[line][i] = simt::load16(at[line] + (group + i) * GROUP_BYTES);
        }
    }
    // Sums in the lane's slots `slot`, `slot` + step, ...: hi, lo, hi, lo.
    SIMT_DEVICE void load_sums(fragment::Own& to, int slot, int step) const {
        SIMT_UNROLL
        for (int line = 0; line < fragment::LINES; ++line) {
            SIMT_UNROLL
            for (int n = 0; n < fragment::WORDS; ++n)
                to.word[line][n] =
                    simt::load4(at[line] + SUMS + (slot + n / 2 * step) * GROUP_BYTES + n % 2 * 4);
        }
    }
    SIMT_DEVICE Columns later(int superblocks) const {
        Columns there;
        SIMT_UNROLL
        for (int line = 0; line < fragment::LINES; ++line) {
            there.at[line] = at[line] + static_cast<int64_t>(superblocks) * BYTES;
        }
        return there;
    }
};

}  // namespace packed
