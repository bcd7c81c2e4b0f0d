// Y = X W^T on the matrix unit (--path matrix): weights and activations are rounded to halves, sums are
// float in the unit's own order. Results agree with kparallel within a bound and not bit for bit.
//
// For few columns (matvec_halves.hip has the many): 32 rows and 16 or 32 columns a block; the waves split K,
// each with a tile of its own, so that many bytes are in flight, and their sums are added in ascending order.
#include "formats_tile.h"

namespace matrix {

using fragment::Columns;
using fragment::Rows;
using fragment::Sums;
using simt::Quad;

constexpr int SIDE = 16;  // of a fragment
constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;
static_assert(SIMT_BLOCK == 256, "the tiles below are laid out for 256 threads");

// What a launch is about. x (count, stride) halves, zero from `columns` on; stride is a multiple of 64.
struct Product {
    const uint8_t* weights;
    const uint16_t* x;
    const float* scales;
    float* y;
    int rows;
    int columns;
    int stride;
    int count;

    // Rows and columns past the end repeat the last one; their results are not stored.
    SIMT_DEVICE const formats::Block* row(int index) const {
        return formats::row_at(weights, simt::min(index, rows - 1), columns);
    }
    SIMT_DEVICE const uint16_t* column(int index, int k) const {
        return x + static_cast<int64_t>(simt::min(index, count - 1)) * stride + k;
    }
    SIMT_DEVICE void store(int row, int column, float sum) const {
        if (row < rows && column < count)
            y[static_cast<int64_t>(column) * rows + row] = sum * scales[column];
    }
};

// A thread's share of a tile of activations, `QUADS` quads long, that `THREADS` threads carry.
template <int TILE, int QUADS, int THREADS>
struct Quads {
    static constexpr int OWN = TILE * QUADS / THREADS;
    Quad quads[OWN];
    SIMT_DEVICE void fetch(const Product& p, int thread, int first_column, int k) {
        SIMT_UNROLL
        for (int i = 0; i < OWN; ++i) {
            const int quad = thread + i * THREADS;
            quads[i] = simt::load16(p.column(first_column + quad / QUADS, k + quad % QUADS * 8));
        }
    }
    SIMT_DEVICE void stage(int thread, uint16_t* lines, int stride) const {
        SIMT_UNROLL
        for (int i = 0; i < OWN; ++i) {
            const int quad = thread + i * THREADS;
            simt::store16(lines + quad / QUADS * stride + quad % QUADS * 8, quads[i]);
        }
    }
};

// What a lane of a narrow block holds of 64 k: its row's weights and its share of the columns.
template <int TILE>
struct Step {
    tile::Unit units[4];
    Quads<TILE, 4, SIMT_WAVE> columns[2];
    SIMT_DEVICE void fetch(const Product& p, const formats::Block* row, int first_column, int k) {
        SIMT_UNROLL
        for (int u = 0; u < 4; ++u) units[u].fetch(row, k + u * tile::UNIT, p.columns);
        SIMT_UNROLL
        for (int half = 0; half < 2; ++half)
            columns[half].fetch(p, simt::lane(), first_column, k + half * 32);
    }
    SIMT_DEVICE void stage(int half, int length, uint16_t* row, uint16_t* column_tile, int stride) const {
        SIMT_UNROLL
        for (int u = 0; u < 2; ++u) units[2 * half + u].unpack(length, row + u * tile::UNIT);
        columns[half].stage(simt::lane(), column_tile, stride);
    }
};

// Grid: (tiles of 32 rows, column tiles). A lane dequantises one row.
template <int TILE>
SIMT_DEVICE void narrow(const Product& p) {
    constexpr int ROWS = 32, K_STEP = 64, HALF = 32;  // a step is staged in two halves
    constexpr int STRIDE = HALF + 8, OWN = (ROWS + TILE) * STRIDE;
    constexpr int ROW_PARTS = ROWS / SIDE, COLUMN_PARTS = TILE / SIDE;
    static_assert(ROWS == SIMT_WAVE, "a lane for each row");
    static_assert(WAVES * OWN / 2 >= WAVES * ROWS * TILE, "the sums take the tiles' place");
    SIMT_SHARED(uint32_t, memory, WAVES * OWN / 2);
    const int first_row = simt::block_x() * ROWS, first_column = simt::block_y() * TILE;
    uint16_t* row_tile = reinterpret_cast<uint16_t*>(memory) + simt::wave() * OWN;
    uint16_t* column_tile = row_tile + ROWS * STRIDE;
    const formats::Block* weights = p.row(first_row + simt::lane());

    Sums sums[ROW_PARTS][COLUMN_PARTS];
    SIMT_UNROLL
    for (int r = 0; r < ROW_PARTS; ++r) {
        SIMT_UNROLL
        for (int c = 0; c < COLUMN_PARTS; ++c) fragment::zero(sums[r][c]);
    }
    Step<TILE> step;
    for (int k = simt::wave() * K_STEP; k < p.stride; k += WAVES * K_STEP) {
        step.fetch(p, weights, first_column, k);
        SIMT_UNROLL
        for (int half = 0; half < 2; ++half) {
            step.stage(half, p.columns, row_tile + simt::lane() * STRIDE, column_tile, STRIDE);
            simt::wave_sync();
            SIMT_UNROLL
            for (int at = 0; at < HALF; at += SIDE) {
                Rows rows[ROW_PARTS];
                SIMT_UNROLL
                for (int r = 0; r < ROW_PARTS; ++r)
                    fragment::load(rows[r], row_tile + r * SIDE * STRIDE + at, STRIDE);
                SIMT_UNROLL
                for (int c = 0; c < COLUMN_PARTS; ++c) {
                    Columns part;
                    fragment::load(part, column_tile + c * SIDE * STRIDE + at, STRIDE);
                    SIMT_UNROLL
                    for (int r = 0; r < ROW_PARTS; ++r)
                        fragment::multiply_add(sums[r][c], rows[r], part);
                }
            }
            simt::wave_sync();
        }
    }

    simt::sync();  // all tiles are done with: their memory takes the sums
    float* parts = reinterpret_cast<float*>(memory);
    SIMT_UNROLL
    for (int r = 0; r < ROW_PARTS; ++r) {
        SIMT_UNROLL
        for (int c = 0; c < COLUMN_PARTS; ++c) {
            SIMT_UNROLL
            for (int i = 0; i < fragment::SUMS; ++i) {
                const int column = c * SIDE + fragment::column(i);
                parts[(simt::wave() * TILE + column) * ROWS + r * SIDE + fragment::row(i)] =
                    sums[r][c].value(i);
            }
        }
    }
    simt::sync();
    for (int result = simt::thread(); result < ROWS * TILE; result += SIMT_BLOCK) {
        float sum = 0.0f;
        SIMT_UNROLL
        for (int wave = 0; wave < WAVES; ++wave) sum = sum + parts[wave * ROWS * TILE + result];
        p.store(first_row + result % ROWS, first_column + result / ROWS, sum);
    }
}

}  // namespace matrix

#define MATRIX_KERNEL(name, body)                                                                   \
    SIMT_KERNEL(name, const uint8_t* weights, const uint16_t* x, const float* scales, float* y,      \
                int32_t rows, int32_t columns, int32_t stride, int32_t count) {                      \
        matrix::body(matrix::Product{weights, x, scales, y, rows, columns, stride, count});          \
    }
MATRIX_KERNEL(matvec_batched_16, narrow<16>)
MATRIX_KERNEL(matvec_batched_32, narrow<32>)
