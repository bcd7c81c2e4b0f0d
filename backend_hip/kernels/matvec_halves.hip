// Y = X W^T on the matrix unit for many columns: weights and activations lie in device memory as halves
// (weights_to_half.hip, to_half.hip), so that a weight is dequantised once and not once per block of columns.
//
// A block makes a tile of rows and columns over all of K. Steps of K stand in a ring in shared memory: while
// one is multiplied, the next ones are on their way.
#include "fragment.h"

namespace halves {

using fragment::Columns;
using fragment::Rows;
using fragment::Sums;

constexpr int SIDE = 16;  // of a fragment
constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;
constexpr int STAGES = 3;  // of the ring; 16 KiB each fill the 48 KiB that every platform has

// weights (rows, stride) halves, x (count, stride) halves, stride a multiple of 64; y (count, height): the
// results belong to its columns 0 .. rows - 1.
struct Product {
    const uint16_t* weights;
    const uint16_t* x;
    const float* scales;
    float* y;
    int rows;
    int height;
    int stride;
    int count;
};

// Lines of K_STEP halves, without gaps. Quads of a line change places so that the quads at one k of eight
// consecutive lines, which a matrix unit reads at once, lie in eight different groups of banks.
template <int K_STEP>
struct Lines {
    static constexpr int QUADS = K_STEP / 8;
    static constexpr int TURN = 8 / QUADS;  // lines that fill all banks once
    static_assert(QUADS == 4 || QUADS == 8, "a line is 64 or 128 bytes");
    SIMT_DEVICE static int place(int line, int quad) {
        return line * K_STEP + (quad ^ (line / TURN % QUADS)) * 8;
    }
};

// Grid: (column tiles, row tiles): blocks that run together share weights, which are read once.
template <int ROWS, int COLUMNS, int K_STEP, int WAVES_DOWN>
SIMT_DEVICE void multiply(const Product& p) {
    using Lines = halves::Lines<K_STEP>;
    constexpr int LINES = ROWS + COLUMNS, STAGE = LINES * K_STEP;
    constexpr int WAVE_ROWS = ROWS / WAVES_DOWN, WAVE_COLUMNS = COLUMNS / (WAVES / WAVES_DOWN);
    constexpr int ROW_PARTS = WAVE_ROWS / SIDE, COLUMN_PARTS = WAVE_COLUMNS / SIDE;
    constexpr int AT_ONCE = SIMT_BLOCK / Lines::QUADS;  // lines that the block's threads fetch a quad each of
    constexpr int OWN_ROWS = ROWS / AT_ONCE, OWN = LINES / AT_ONCE;
    static_assert(ROWS % AT_ONCE == 0 && COLUMNS % AT_ONCE == 0, "every thread fetches as much");
    static_assert(AT_ONCE % 8 == 0, "a thread's lines have their quads in the same places");
    static_assert(WAVE_ROWS % SIDE == 0 && WAVE_COLUMNS % SIDE == 0, "whole fragments");
    SIMT_SHARED(uint16_t, memory, STAGES * STAGE);

    const int first_row = simt::block_y() * ROWS, first_column = simt::block_x() * COLUMNS;
    const int line = simt::thread() / Lines::QUADS, quad = simt::thread() % Lines::QUADS;
    // Lines past the end repeat the last one; their results are not stored.
    const uint16_t* from[OWN];
    SIMT_UNROLL
    for (int i = 0; i < OWN; ++i) {
        const bool weights = i < OWN_ROWS;
        const int at = weights ? simt::min(first_row + line + i * AT_ONCE, p.rows - 1)
                               : simt::min(first_column + line + (i - OWN_ROWS) * AT_ONCE, p.count - 1);
        from[i] = (weights ? p.weights : p.x) + static_cast<int64_t>(at) * p.stride + quad * 8;
    }
    uint16_t* const own = memory + Lines::place(line, quad);
    simt::Carried carried[OWN];
    const auto stage_of = [](int step) { return step % STAGES * STAGE; };
    const auto fetch = [&](int step) {
        uint16_t* to = own + stage_of(step);
        SIMT_UNROLL
        for (int i = 0; i < OWN; ++i)
            carried[i].fetch(to + i * AT_ONCE * K_STEP, from[i] + static_cast<int64_t>(step) * K_STEP);
    };
    const auto land = [&](int step) {
        uint16_t* to = own + stage_of(step);
        SIMT_UNROLL
        for (int i = 0; i < OWN; ++i) carried[i].land(to + i * AT_ONCE * K_STEP);
    };

    const int wave_row = simt::wave() % WAVES_DOWN * WAVE_ROWS;
    const int wave_column = simt::wave() / WAVES_DOWN * WAVE_COLUMNS;
    Sums sums[ROW_PARTS][COLUMN_PARTS];
    SIMT_UNROLL
    for (int r = 0; r < ROW_PARTS; ++r) {
        SIMT_UNROLL
        for (int c = 0; c < COLUMN_PARTS; ++c) fragment::zero(sums[r][c]);
    }
    const int steps = p.stride / K_STEP;
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) {
            fetch(step);
            land(step);
        }
        simt::carried_group();
    }
    for (int step = 0; step < steps; ++step) {
        // One barrier a step: it ends the writing of this stage and the reading of the one before, which
        // is fetched anew.
        simt::carried_wait<STAGES - 2>();
        simt::sync();
        const int ahead = step + STAGES - 1;
        if (ahead < steps) fetch(ahead);
        simt::carried_group();
        const uint16_t* stage = memory + stage_of(step);
        SIMT_UNROLL
        for (int k = 0; k < K_STEP; k += SIDE) {
            Rows rows[ROW_PARTS];
            SIMT_UNROLL
            for (int r = 0; r < ROW_PARTS; ++r)
                fragment::load<Lines>(rows[r], stage + (wave_row + r * SIDE) * K_STEP, k / 8);
            SIMT_UNROLL
            for (int c = 0; c < COLUMN_PARTS; ++c) {
                Columns part;
                fragment::load<Lines>(part, stage + (ROWS + wave_column + c * SIDE) * K_STEP, k / 8);
                SIMT_UNROLL
                for (int r = 0; r < ROW_PARTS; ++r) fragment::multiply_add(sums[r][c], rows[r], part);
            }
        }
        if (ahead < steps) land(ahead);
    }
    SIMT_UNROLL
    for (int c = 0; c < COLUMN_PARTS; ++c) {
        float scales[fragment::SUMS];
        SIMT_UNROLL
        for (int i = 0; i < fragment::SUMS; ++i) {
            const int column = first_column + wave_column + c * SIDE + fragment::column(i);
            scales[i] = p.scales[simt::min(column, p.count - 1)];
        }
        SIMT_UNROLL
        for (int r = 0; r < ROW_PARTS; ++r) {
            SIMT_UNROLL
            for (int i = 0; i < fragment::SUMS; ++i) {
                const int row = first_row + wave_row + r * SIDE + fragment::row(i);
                const int column = first_column + wave_column + c * SIDE + fragment::column(i);
                if (row < p.rows && column < p.count)
                    p.y[static_cast<int64_t>(column) * p.height + row] = sums[r][c].value(i) * scales[i];
            }
        }
    }
}

// The comma of a template argument list would part the macro's arguments.
SIMT_DEVICE void multiply_64(const Product& p) { multiply<64, 64, 64, 2>(p); }
SIMT_DEVICE void multiply_96(const Product& p) { multiply<128, 96, 32, 2>(p); }
SIMT_DEVICE void multiply_128(const Product& p) { multiply<128, 128, 32, 2>(p); }

}  // namespace halves

#define HALVES_KERNEL(name, blocks, body)                                                                 \
    SIMT_KERNEL_RESIDENT(blocks, name, const uint16_t* weights, const uint16_t* x, const float* scales,   \
                         float* y, int32_t rows, int32_t height, int32_t stride, int32_t count) {         \
        halves::body(halves::Product{weights, x, scales, y, rows, height, stride, count});                \
    }

HALVES_KERNEL(matvec_halves_64, 4, multiply_64)
HALVES_KERNEL(matvec_halves_96, 3, multiply_96)
HALVES_KERNEL(matvec_halves_128, 2, multiply_128)
