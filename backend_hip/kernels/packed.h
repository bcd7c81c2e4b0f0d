// Activations as matvec_packed.hip reads them: columns of halves, 16 side by side, a superblock of 256 k
// after the other. Written by to_packed.hip.
//
//   halves  (32 groups of 8 k, 16 columns, 8): in each four of k the order is 0, 2, 1, 3
//   sums    (16 slots, 16 columns, hi, lo and 8 bytes of nothing), where a lane finds them as far apart
//           as its halves:
//     slots 1, 3, 9, 11: of two neighbouring sub-blocks of 32 k each, for Q4_K and Q5_K
//     slot 8 h + 2 i:    of groups 8 h + i and 8 h + i + 4 of 16 k, for Q6_K
//
// In each group and slot column c stands at `place`, because the lanes of a part of a wave read groups that
// lie whole banks apart.
//
// A sum is taken of the halves, scaled down so that it can't overflow and split: hi its half, lo the
// half of what is left. hi and lo are words of two sums each, low half first.
#pragma once
#include "simt.h"

namespace packed {

constexpr int K = 256;
constexpr int COLUMNS = 16;
constexpr int GROUP_BYTES = COLUMNS * 16;  // 8 k of all columns, or a slot
constexpr int SUMS = K / 8 * GROUP_BYTES;
constexpr int BYTES = SUMS + 16 * GROUP_BYTES;

// Where a column stands in a group (or in slot `group`). Lanes that read together read groups that differ
// in bit 1, and in bit 2 or 3; adding such groups changes bits of places alike (exclusive or).
SIMT_DEVICE int turn_of(int group) {
    return 2 * (group >> 1 & 1) + 4 * ((group >> 2 ^ group >> 3) & 1);
}
SIMT_DEVICE int place(int group, int column) { return column ^ turn_of(group); }

SIMT_DEVICE int slot_32(int pair) { return pair / 2 * 8 + pair % 2 * 2 + 1; }
SIMT_DEVICE int slot_16(int pair) { return 2 * pair; }

// The halves are below 2^15, their sums of 32 below 2^20 and of 16 below 2^19.
[[maybe_unused]] constexpr float SUM_32_SCALE = 1.0f / 64;
[[maybe_unused]] constexpr float SUM_16_SCALE = 1.0f / 32;

}  // namespace packed
