// What the matrix unit gives at best, for limits that speed is compared with: no engine launches this.
// Every wave repeats CHAINS independent products of fragments that it holds in registers, so neither memory
// nor the wait for a sum is in the way. By the instruction that fragment.h has: mma.sync on NVIDIA, which is
// not the fastest of Hopper's.
#include "fragment.h"

constexpr int CHAINS = 8;

// sums[thread of the grid] = all of the thread's results added. The halves of a pair of row r are r / 16 and
// (15 - r) / 16, a chain's columns 1 + chain: a result is rounds * 7.5 * (1 + chain), whatever its place.
SIMT_KERNEL(matrix_rate, float* sums, int32_t rounds) {
    fragment::Own rows, columns[CHAINS];
    float held[CHAINS][fragment::SUMS];
    SIMT_UNROLL
    for (int i = 0; i < fragment::LINES; ++i) {
        SIMT_UNROLL
        for (int n = 0; n < fragment::WORDS; ++n) {
            const float row = static_cast<float>(fragment::line(i));
            rows.word[i][n] = fragment::halves(row / 16.0f, (15.0f - row) / 16.0f);
            SIMT_UNROLL
            for (int chain = 0; chain < CHAINS; ++chain) {
                const float value = static_cast<float>(1 + chain);
                columns[chain].word[i][n] = fragment::halves(value, value);
            }
        }
    }
    SIMT_UNROLL
    for (int chain = 0; chain < CHAINS; ++chain) {
        SIMT_UNROLL
        for (int i = 0; i < fragment::SUMS; ++i) held[chain][i] = 0.0f;
    }
    fragment::Unit unit;
    for (int round = 0; round < rounds; ++round) {
        SIMT_UNROLL
        for (int chain = 0; chain < CHAINS; ++chain)
            unit.multiply_add(held[chain], rows, columns[chain]);
    }
    float sum = 0.0f;
    SIMT_UNROLL
    for (int chain = 0; chain < CHAINS; ++chain) {
        SIMT_UNROLL
        for (int i = 0; i < fragment::SUMS; ++i) sum = sum + held[chain][i];
    }
    sums[static_cast<int64_t>(simt::block_x()) * SIMT_BLOCK + simt::thread()] = sum;
}
