// A product's result added to the residual stream, its RMS norm, and that norm packed for the next products:
// what add_rms_norm and to_packed do, with the same bits, and nothing between them in device memory.
#include "pack_row.h"
#include "partial_sums.h"
#include "rms.h"

constexpr int LARGEST_WIDTH = 8192;  // backend_hip/fused_batch.py
constexpr int TURNS = LARGEST_WIDTH / (SIMT_BLOCK * packed::EACH);

// x (count, width), the residual stream, which gets the sum of `splits` parts (splits, count, width);
// 0 parts leave it as it is. weight (width); to, scales as to_packed. width is a multiple of 256, at most
// LARGEST_WIDTH. Grid: count.
SIMT_KERNEL(norm_pack, float* x, const float* parts, const float* weight, uint8_t* to, float* scales,
            int32_t width, int32_t count, int32_t splits, float epsilon) {
    using packed::EACH;
    SIMT_SHARED(float, shared, LARGEST_WIDTH);
    const int token = simt::block_x();
    const int64_t start = static_cast<int64_t>(token) * width;
    packed::Row<TURNS> row;
    float weights[TURNS][EACH];
    SIMT_UNROLL
    for (int turn = 0; turn < TURNS; ++turn) {
        const int first = row.first(turn);
        if (first >= width) continue;
        packed::load_each(weights[turn], weight + first);
        packed::load_each(row.values[turn], x + start + first);
        SIMT_UNROLL
        for (int half = 0; half < EACH && splits; half += 4) {
            float added[4];
            partial_sums(added, parts, start + first + half, static_cast<int64_t>(count) * width, splits);
            simt::Quad sum;
            SIMT_UNROLL
            for (int i = 0; i < 4; ++i) {
                float& value = row.values[turn][half + i];
                value = value + added[i];
                sum.word[i] = simt::bits(value);
            }
            simt::store16(x + start + first + half, sum);
        }
        SIMT_UNROLL
        for (int i = 0; i < EACH; ++i) shared[first + i] = row.values[turn][i];
    }
    simt::sync();
    const float scale = rms::inverse_rms(rms::squares_of(shared, width), width, epsilon);
    SIMT_UNROLL
    for (int turn = 0; turn < TURNS; ++turn) {
        SIMT_UNROLL
        for (int i = 0; i < EACH; ++i)
            row.values[turn][i] = row.values[turn][i] * scale * weights[turn][i];
    }
    row.pack(token, width, to, scales);
}
