// Y = X W^T on the matrix unit for a few columns, with weights of a K format as they are in the file:
// integers, exact in halves, which go from memory into the unit's registers. Activations are rounded to
// halves (packed.h) and staged in shared memory; sums are float in the unit's own order.
//
// Up to three matrices that meet the same activations share a launch, the third in a format of its own.
// A wave takes 16 rows, a block 128 of one matrix, 16 columns and one of `splits` parts of K; the parts'
// results lie one after another and are added in ascending order by whoever reads them (partial_sums.h).
#include "packed_step.h"
#include "packed_k45.h"
#include "packed_k6.h"

#if !defined(LAST_FORMAT) || !defined(STAGED_SUPERBLOCKS)
#error "matvec_packed.hip: define LAST_FORMAT (ggml type of the third matrix) and STAGED_SUPERBLOCKS"
#endif

namespace packed {

constexpr int SIDE = 16;
constexpr int ROWS = SIDE * (SIMT_BLOCK / SIMT_WAVE);
constexpr int STAGED = STAGED_SUPERBLOCKS;
constexpr int QUADS = BYTES / 16 / SIMT_BLOCK;  // of a superblock's activations, by each thread
static_assert(QUADS * SIMT_BLOCK * 16 == BYTES && SIMT_BLOCK * 16 == SIDE * GROUP_BYTES,
              "a thread copies the same column of every sixteenth group");

// One block's share of a launch.
struct Share {
    const uint8_t* activations;  // of its 16 columns, from its first superblock on
    int columns;                 // of the 16 that are there
    int first, count;            // superblocks of K
};

// Asks for up to STAGED superblocks of activations, from the share's `from` on.
template <int TYPE>
SIMT_DEVICE void stage(uint8_t* memory, const Share& share, int from) {
    const int group = simt::thread() / COLUMNS;
    if (place(group, simt::thread() % COLUMNS) >= share.columns) return;
    const int end = simt::min(share.count - from, STAGED);
    for (int n = 0; n < end; ++n) {
        const uint8_t* block = share.activations + static_cast<int64_t>(from + n) * BYTES;
        SIMT_UNROLL
        for (int i = 0; i < QUADS; ++i) {
            const int at = (i * SIMT_BLOCK + simt::thread()) * 16;
            if (at < SUMS || Step<TYPE>::uses(group)) simt::copy16(memory + n * BYTES + at, block + at);
        }
    }
}

// A wave's rows from `first_row` on times the share's activations.
template <int TYPE>
SIMT_DEVICE void multiply(fragment::Unit& unit, uint8_t* memory, const uint8_t* weights, int first_row,
                          int rows, int columns, const Share& share, float (&sums)[fragment::SUMS]) {
    using F = formats::Format<TYPE>;
    constexpr int PER_BLOCK = Step<TYPE>::PER_BLOCK;
    constexpr int PER_STAGE = STAGED * PER_BLOCK;
    // Rows past the end repeat the last one; their results are not stored.
    Lines<typename F::Block> lines;
    SIMT_UNROLL
    for (int i = 0; i < LINES; ++i) {
        const int row = simt::min(first_row + fragment::line(i), rows - 1);
        lines.block[i] = formats::row_of<F>(weights, row, columns) + share.first;
    }
    const bool has_rows = first_row < rows;
    const int steps = share.count * PER_BLOCK;

    // Two steps with names of their own: a register that is being loaded can't be moved without waiting.
    Step<TYPE> even, odd;
    if (has_rows) even.fetch(lines, 0, 0);
    stage<TYPE>(memory, share, 0);
    const auto enter = [&](int step) {
        if (step % PER_STAGE) return;
        simt::copies_done();
        simt::sync();  // and every wave has left the other buffer
        const int next = step / PER_BLOCK + STAGED;
        if (next < share.count)
            stage<TYPE>(memory + next / STAGED % 2 * STAGED * BYTES, share, next);
    };
    const auto columns_of = [&](int step) {
        return Columns(memory + step / PER_BLOCK % (2 * STAGED) * BYTES, Step<TYPE>::first_group());
    };
    for (int step = 0; step < steps; step += 2) {
        constexpr int SECOND = PER_BLOCK - 1;  // the odd step's place in its superblock
        if (has_rows && step + 1 < steps) odd.fetch(lines, (step + 1) / PER_BLOCK, SECOND);
        enter(step);
        if (has_rows) even.multiply(unit, columns_of(step), 0, sums);
        if (step + 1 == steps) break;
        if (has_rows && step + 2 < steps) even.fetch(lines, (step + 2) / PER_BLOCK, 0);
        enter(step + 1);
        if (has_rows) odd.multiply(unit, columns_of(step + 1), SECOND, sums);
    }
}

SIMT_DEVICE int blocks_of(int rows) { return (rows + ROWS - 1) / ROWS; }

}  // namespace packed

// first, second, third (rows, columns); x as to_packed writes it; scales (count); y (splits, count, all
// rows). Grid: (tiles of 128 rows of each matrix, splits * (tiles of 16 columns)), the columns fastest.
SIMT_KERNEL_RESIDENT(2, matvec_packed, const uint8_t* first, const uint8_t* second, const uint8_t* third,
                     const uint8_t* x, const float* scales, float* y, int32_t first_rows,
                     int32_t second_rows, int32_t third_rows, int32_t columns, int32_t count,
                     int32_t splits) {
    using namespace packed;
    SIMT_SHARED(uint8_t, memory, 2 * STAGED * BYTES);
    const int tiles = (count + SIDE - 1) / SIDE, superblocks = columns / K;
    const int split = simt::block_y() / tiles, tile = simt::block_y() - split * tiles;
    int block = simt::block_x();

    const uint8_t* weights = first;
    int rows = first_rows, before = 0;  // of this block's matrix, and of those before it
    const int in_first = blocks_of(first_rows), in_second = blocks_of(second_rows);
    const bool last = block >= in_first + in_second;
    if (last) {
        weights = third;
        rows = third_rows;
        before = first_rows + second_rows;
        block -= in_first + in_second;
    } else if (block >= in_first) {
        weights = second;
        rows = second_rows;
        before = first_rows;
        block -= in_first;
    }

    Share share;
    share.first = split * superblocks / splits;
    share.count = (split + 1) * superblocks / splits - share.first;
    share.columns = simt::min(count - tile * SIDE, SIDE);
    share.activations = x + (static_cast<int64_t>(tile) * superblocks + share.first) * BYTES;

    fragment::Unit unit;
    float sums[fragment::SUMS];
    SIMT_UNROLL
    for (int i = 0; i < fragment::SUMS; ++i) sums[i] = 0.0f;
    const int row = block * ROWS + simt::wave() * SIDE;
    if (LAST_FORMAT != WEIGHT_FORMAT && last)
        multiply<LAST_FORMAT>(unit, memory, weights, row, rows, columns, share, sums);
    else multiply<WEIGHT_FORMAT>(unit, memory, weights, row, rows, columns, share, sums);

    const int64_t all_rows = static_cast<int64_t>(first_rows) + second_rows + third_rows;
    float* results = y + (static_cast<int64_t>(split) * count + tile * SIDE) * all_rows + before;
    SIMT_UNROLL
    for (int i = 0; i < fragment::SUMS; ++i) {
        const int own = row + fragment::line(fragment::own_line(i)), column = fragment::own_column(i);
        if (own < rows && column < share.columns)
            results[column * all_rows + own] = sums[i] * scales[tile * SIDE + column];
    }
}
