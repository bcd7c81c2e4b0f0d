// What a command flow is told about its rows: one device array of int32, copied from the host before
// the flow's kernels, so that a captured graph reads all that changes between replays from memory.
//
// A row is one token of one sequence. Rows of a prefill chunk belong to one sequence and ascend in
// position; in a decode step of several sequences every row belongs to another one.
#pragma once
#include "simt.h"

namespace flow {

enum Field : int32_t {
    STAMP = 0,  // step number; travels with the argmax result
    ROWS = 4,   // the rows start here
};

enum RowField : int32_t {
    TOKEN = 0,     // token id
    POSITION = 1,  // absolute position in its sequence
    CACHE = 2,     // row of the KV cache that holds position 0 of its sequence
    SEQUENCE = 3,  // which recurrent state is its sequence's
    FIELDS = 4,
};

SIMT_DEVICE int32_t field(const int32_t* step, int row, RowField which) {
    return step[ROWS + FIELDS * row + which];
}
SIMT_DEVICE int32_t token(const int32_t* step, int row) { return field(step, row, TOKEN); }
SIMT_DEVICE int32_t position(const int32_t* step, int row) { return field(step, row, POSITION); }
SIMT_DEVICE int32_t sequence(const int32_t* step, int row) { return field(step, row, SEQUENCE); }
// All of a row's fields, in one load.
SIMT_DEVICE simt::Quad fields(const int32_t* step, int row) {
    return simt::load16(step + ROWS + FIELDS * row);
}
// Cache rows are counted in 64 bits, because all that follows multiplies them.
SIMT_DEVICE int64_t cache_start(const int32_t* step, int row) { return field(step, row, CACHE); }

}  // namespace flow
