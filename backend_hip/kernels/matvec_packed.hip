// Y = X W^T on the matrix unit for a few columns, with weights of a K format as they are in the file:
// integers, exact in halves, which go from memory into the unit's registers. Activations are rounded to
// halves (packed.h); sums are float in the unit's own order.
//
// The waves of a block share 16 rows and 16 columns: each takes every eighth superblock of K, with the
// next one's bytes asked for while it multiplies, and their sums are added in ascending order.
#define SIMT_RESIDENT 2
#include "packed_step.h"  // here, because flattened headers appear once, whatever #if surrounds them
#if WEIGHT_FORMAT == 14
#include "packed_k6.h"
#else
#include "packed_k45.h"
#endif

namespace packed {

constexpr int SIDE = 16;
constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;
static_assert(SIMT_BLOCK == SIDE * SIDE, "a thread for each result of a tile");

// Of a wave's step.
SIMT_DEVICE int superblock(int step) { return simt::wave() + step / Step::PER_BLOCK * WAVES; }

}  // namespace packed

// weights (rows, columns); x as to_packed writes it; scales (count); y (count, rows). Grid: (tiles of
// 16 rows, tiles of 16 columns).
SIMT_KERNEL(matvec_packed, const uint8_t* weights, const uint8_t* x, const float* scales, float* y,
            int32_t rows, int32_t columns, int32_t count) {
    using namespace packed;
    const int first_row = simt::block_x() * SIDE, first_column = simt::block_y() * SIDE;
    const int superblocks = columns / K;
    // Rows and columns past the end repeat the last one; their results are not stored.
    Lines lines;
    Columns all;
    const uint8_t* tile = x + static_cast<int64_t>(simt::block_y()) * superblocks * BYTES;
    SIMT_UNROLL
    for (int i = 0; i < fragment::LINES; ++i) {
        const int row = simt::min(first_row + fragment::line(i), rows - 1);
        lines.block[i] = formats::row_at(weights, row, columns);
        const int column = simt::min(fragment::line(i), count - 1 - first_column);
        all.at[i] = tile + column * 16 + Step::first_group() * GROUP_BYTES;
    }

    fragment::Unit unit;
    float sums[fragment::SUMS];
    SIMT_UNROLL
    for (int i = 0; i < fragment::SUMS; ++i) sums[i] = 0.0f;
    // Two steps with names of their own: a register that is being loaded can't be moved without waiting.
    Step even, odd;
    const int own = (superblocks - simt::wave() + WAVES - 1) / WAVES * Step::PER_BLOCK;
    if (own > 0) even.fetch(lines, superblock(0), 0);
    for (int step = 0; step < own; step += 2) {
        constexpr int SECOND = Step::PER_BLOCK - 1;  // the odd step's place in its superblock
        if (step + 1 < own) odd.fetch(lines, superblock(step + 1), SECOND);
        even.multiply(unit, all.later(superblock(step)), 0, sums);
        if (step + 1 == own) break;
        if (step + 2 < own) even.fetch(lines, superblock(step + 2), 0);
        odd.multiply(unit, all.later(superblock(step + 1)), SECOND, sums);
    }

    SIMT_SHARED(float, parts, WAVES * SIDE * SIDE);
    SIMT_UNROLL
    for (int i = 0; i < fragment::SUMS; ++i)
        parts[(simt::wave() * SIDE + fragment::own_column(i)) * SIDE +
              fragment::line(fragment::own_line(i))] = sums[i];
    simt::sync();
    float sum = 0.0f;
    SIMT_UNROLL
    for (int wave = 0; wave < WAVES; ++wave)
        sum = sum + parts[wave * SIDE * SIDE + simt::thread()];
    const int row = first_row + simt::thread() % SIDE, column = first_column + simt::thread() / SIDE;
    if (row < rows && column < count)
        y[static_cast<int64_t>(column) * rows + row] = sum * scales[column];
}
