// Products with routed experts' matrices: W (experts, rows, columns), one (token, place) pair per
// result row. Pair p reads x[p / share]: share = used where x has a row per token, 1 where it has
// one per pair. The arithmetic is dot.h's, so both kernels give the same bits.
#include "dot.h"

#if !defined(MAX_COLS) || !defined(LEAN)
#error "matvec_experts.hip: define MAX_COLS (1 to 64) and LEAN"
#endif

SIMT_DEVICE const formats::Block* expert_row(const uint8_t* weights, int expert, int row, int rows,
                                             int columns) {
    const int64_t blocks = columns / BLOCK_ELEMENTS;
    return reinterpret_cast<const formats::Block*>(weights) +
           (static_cast<int64_t>(expert) * rows + row) * blocks;
}

// Column c is the row of x that pair slots[c] reads.
struct Gathered : dot::Consecutive {
    const int32_t* slots;
    int share;
    SIMT_DEVICE Gathered again() const { return {Consecutive::again(), slots, share}; }
    template <class F>
    SIMT_DEVICE void read(int c, int group, int at, int i, float (&values)[4]) const {
        dot::Consecutive::read<F>(slots[c] / share, group, at, i, values);
    }
};

// One pair at a time: the per-token path. Grid: (ceil(rows / waves per block), pairs).
SIMT_KERNEL(matvec_expert, const uint8_t* weights, const float* x, float* y, const int32_t* chosen,
            int32_t rows, int32_t columns, int32_t share) {
    const int row = simt::block_x() * (SIMT_BLOCK / SIMT_WAVE) + simt::wave();
    if (row >= rows) return;
    const int pair = simt::block_y();
    const dot::Consecutive column{x + static_cast<int64_t>(pair / share) * columns, columns};
    float sum[1][1];
    dot::wave_row(expert_row(weights, chosen[pair], row, rows, columns), column, columns, 1, sum);
    if (simt::lane() == 0) y[static_cast<int64_t>(pair) * rows + row] = sum[0][0];
}

// All pairs of an expert in groups of MAX_COLS: each weight row is decoded once per group, and an
// expert without pairs costs nothing. Grid: (ceil(rows / waves per block), experts).
SIMT_KERNEL(matvec_experts, const uint8_t* weights, const float* x, float* y,
            const int32_t* offsets, const int32_t* slots, int32_t rows, int32_t columns,
            int32_t share) {
    const int row = simt::block_x() * (SIMT_BLOCK / SIMT_WAVE) + simt::wave();
    if (row >= rows) return;
    const int expert = simt::block_y();
    const int end = offsets[expert + 1];
    for (int begin = offsets[expert]; begin < end; begin += MAX_COLS) {
        const int count = simt::min(MAX_COLS, end - begin);
        const Gathered column{{x, columns}, slots + begin, share};
        float sums[1][MAX_COLS];
        dot::wave_row<LEAN != 0>(expert_row(weights, expert, row, rows, columns), column, columns,
                                 count, sums);
        if (simt::lane() == 0) {
            SIMT_UNROLL
            for (int c = 0; c < MAX_COLS; ++c) {
                if (c < count) y[static_cast<int64_t>(slots[begin + c]) * rows + row] = sums[0][c];
            }
        }
    }
}
