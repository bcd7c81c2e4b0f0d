// Keys or values of q8_0 written out as f16, for a control of what reading q8_0 in place saves: no engine
// launches this. Layout: kv_type.h. Grid: (count * width / ELEMENTS threads, sequences).
#include "kv_type.h"

constexpr int ELEMENTS = 16;  // of a thread, within one block of a scale

// from: q8_0 tensor, to: f16 tensor, both of `rows` positions of `heads` heads of `size`, a multiple of 32.
// A sequence has `context` of the positions, of which the first `count` are written.
SIMT_KERNEL(expand_kv, const int8_t* from, uint16_t* to, int32_t rows, int32_t context, int32_t count,
            int32_t heads, int32_t size) {
    const uint32_t group = static_cast<uint32_t>(simt::block_x()) * SIMT_BLOCK + simt::thread();
    const uint32_t width = heads * size, groups_a_row = width / ELEMENTS;
    const uint32_t position = group / groups_a_row, first = group % groups_a_row * ELEMENTS;
    if (position >= static_cast<uint32_t>(count)) return;
    const int64_t row = static_cast<int64_t>(simt::block_y()) * context + position;
    const uint32_t head = first / size, block = first % size / kv::BLOCK, blocks = size / kv::BLOCK;
    const uint16_t* scales = kv::scales_of<kv::Storage<2>>(from, rows, width);
    const float scale =
        simt::half_to_float(scales[(static_cast<int64_t>(head) * rows + row) * blocks + block]);
    const int64_t at = row * width + first;
    const simt::Quad bytes = simt::load16(from + at);
    SIMT_UNROLL
    for (int half = 0; half < 2; ++half) {
        simt::Quad packed;
        SIMT_UNROLL
        for (int word = 0; word < 2; ++word) {
            float values[4];
            simt::signed_bytes_to_floats(bytes.word[2 * half + word], values);
            SIMT_UNROLL
            for (int i = 0; i < 2; ++i) {
                const uint32_t low = simt::float_to_half(scale * values[2 * i]);
                const uint32_t high = simt::float_to_half(scale * values[2 * i + 1]);
                packed.word[2 * word + i] = low | (high << 16);
            }
        }
        simt::store16(to + at + 8 * half, packed);
    }
}
