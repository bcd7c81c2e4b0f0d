// RMS norm of rows, plain and with a residual sum before it. One block per row and always the same
// number of threads, so that a row's bits do not depend on how many rows there are.
#include "rms.h"

static_assert(SIMT_BLOCK == rms::THREADS, "one group of threads a row");

// x, y (rows, width); weight (width). y may be x. Grid: rows.
SIMT_KERNEL(rms_norm, const float* x, const float* weight, float* y, int32_t width,
            float epsilon) {
    const int64_t row = static_cast<int64_t>(simt::block_x()) * width;
    const float scale = rms::inverse_rms(rms::squares_of(x + row, width), width, epsilon);
    for (int i = simt::thread(); i < width; i += SIMT_BLOCK) {
        y[row + i] = x[row + i] * scale * weight[i];
    }
}

// sum = residual + x, y = rms_norm(sum). `sum` may be `residual` or x. Grid: rows.
SIMT_KERNEL(add_rms_norm, const float* residual, const float* x, const float* weight, float* sum,
            float* y, int32_t width, float epsilon) {
    const int64_t row = static_cast<int64_t>(simt::block_x()) * width;
    float squares = 0.0f;
    for (int i = simt::thread(); i < width; i += SIMT_BLOCK) {
        const float value = residual[row + i] + x[row + i];
        sum[row + i] = value;
        squares = simt::fma(value, value, squares);
    }
    const float scale = rms::inverse_rms(squares, width, epsilon);
    // Each thread reads back only what it wrote itself.
    for (int i = simt::thread(); i < width; i += SIMT_BLOCK) {
        y[row + i] = sum[row + i] * scale * weight[i];
    }
}
