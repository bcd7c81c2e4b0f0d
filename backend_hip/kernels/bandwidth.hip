// What the memory gives at best, for limits that speed is compared with: no engine launches these.
// A block takes SIMT_BLOCK * SHARE pieces of 16 bytes, each thread SHARE of them a block's width apart,
// with all its loads under way at once. Grid: pieces / (SIMT_BLOCK * SHARE) blocks, without a rest.
#include "simt.h"

constexpr int SHARE = 8;

SIMT_DEVICE int64_t first_piece() {
    return static_cast<int64_t>(simt::block_x()) * SIMT_BLOCK * SHARE + simt::thread();
}

// target = source.
SIMT_KERNEL(copy_pieces, const simt::Quad* source, simt::Quad* target) {
    const int64_t first = first_piece();
    simt::Quad held[SHARE];
    SIMT_UNROLL
    for (int i = 0; i < SHARE; ++i) held[i] = simt::load16(source + first + i * SIMT_BLOCK);
    SIMT_UNROLL
    for (int i = 0; i < SHARE; ++i) simt::store16(target + first + i * SIMT_BLOCK, held[i]);
}

// sums[thread of the grid] = exclusive or of all words that the thread read, so that no read is dropped.
SIMT_KERNEL(read_pieces, const simt::Quad* source, uint32_t* sums) {
    const int64_t first = first_piece();
    simt::Quad held[SHARE];
    SIMT_UNROLL
    for (int i = 0; i < SHARE; ++i) held[i] = simt::load16(source + first + i * SIMT_BLOCK);
    uint32_t sum = 0;
    SIMT_UNROLL
    for (int i = 0; i < SHARE; ++i) {
        sum ^= held[i].word[0] ^ held[i].word[1] ^ held[i].word[2] ^ held[i].word[3];
    }
    sums[static_cast<int64_t>(simt::block_x()) * SIMT_BLOCK + simt::thread()] = sum;
}
