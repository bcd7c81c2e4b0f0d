// A product's result added to the residual stream, its RMS norm, and that norm packed for the next products:
// what add_rms_norm and to_packed do, with the same bits, and nothing between them in device memory.
#include "pack_row.h"
#include "partial_sums.h"
#include "rms.h"

constexpr int LARGEST_WIDTH = 8192;  // backend_hip/fused_batch.py

// x (count, width), the residual stream, which gets the sum of `splits` parts (splits, count, width);
// 0 parts leave it as it is. weight (width); to, scales as to_packed. width is a multiple of 256, at most
// LARGEST_WIDTH. Grid: count.
SIMT_KERNEL(norm_pack, float* x, const float* parts, const float* weight, uint8_t* to, float* scales,
            int32_t width, int32_t count, int32_t splits, float epsilon) {
    SIMT_SHARED(float, row, LARGEST_WIDTH);
    const int token = simt::block_x();
    const int64_t first = static_cast<int64_t>(token) * width;
    for (int k = simt::thread(); k < width; k += SIMT_BLOCK) {
        float value = x[first + k];
        if (splits) {
            value = value + partial_sum(parts, first + k, static_cast<int64_t>(count) * width, splits);
            x[first + k] = value;
        }
        row[k] = value;
    }
    simt::sync();
    const float scale = rms::inverse_rms(rms::squares_of(row, width), width, epsilon);
    packed::pack_row([=](int k) { return row[k] * scale * weight[k]; }, token, width, to, scales);
}
