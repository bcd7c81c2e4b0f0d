// Activations as matvec_packed.hip reads them: columns of halves, 16 side by side, a superblock of 256 k
// after the other. Written by to_packed.hip.
//
//   halves        (32 groups of 8 k, 16 columns, 8): in each four of k the order is 0, 2, 1, 3
//   sums of 32 k  (4, 16, hi and lo): pairs of sums of neighbouring sub-blocks, for Q4_K and Q5_K
//   sums of 16 k  (8, 16, hi and lo): pairs of sums of groups 8 h + i and 8 h + i + 4 as number
//                 4 h + i, for Q6_K
//
// A sum is taken of the halves, scaled down so that it can't overflow and split: hi its half, lo the
// half of what is left. Every pair is one word, low half first.
#pragma once
#include "simt.h"

namespace packed {

constexpr int K = 256;
constexpr int COLUMNS = 16;
constexpr int GROUP_BYTES = COLUMNS * 16;  // 8 k of all columns
constexpr int SUMS_32 = K / 8 * GROUP_BYTES;
constexpr int PAIR_BYTES = COLUMNS * 8;
constexpr int SUMS_16 = SUMS_32 + 4 * PAIR_BYTES;
constexpr int BYTES = SUMS_16 + 8 * PAIR_BYTES;

// The halves are below 2^15, their sums of 32 below 2^20 and of 16 below 2^19.
constexpr float SUM_32_SCALE = 1.0f / 64;
constexpr float SUM_16_SCALE = 1.0f / 32;

}  // namespace packed
