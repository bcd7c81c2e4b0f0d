// The scale of an RMS norm, by groups of NORM_THREADS threads whatever the block's size, so that a
// row's bits depend neither on how many rows there are nor on which kernel norms it.
#pragma once
#include "simt.h"

namespace rms {

constexpr int THREADS = 128;
constexpr int WAVES = THREADS / SIMT_WAVE;
static_assert(SIMT_BLOCK % THREADS == 0, "a block is whole groups of threads");
constexpr int GROUPS = SIMT_BLOCK / THREADS;

// This thread's place in its group.
SIMT_DEVICE int place() { return simt::thread() % THREADS; }

// The sum over the group of each thread's `squares`, turned into 1 / sqrt(mean + epsilon). Every
// thread of the block takes part.
SIMT_DEVICE float inverse_rms(float squares, int32_t width, float epsilon) {
    SIMT_SHARED(float, partial, GROUPS * WAVES);
    const float wave_total = simt::wave_sum(squares);
    if (simt::lane() == 0) partial[simt::wave()] = wave_total;
    simt::sync();
    const int first = simt::thread() / THREADS * WAVES;
    float total = 0.0f;
    for (int i = 0; i < WAVES; ++i) total += partial[first + i];
    return 1.0f / simt::sqrt(total / static_cast<float>(width) + epsilon);
}

// This thread's share of the squares of a row.
SIMT_DEVICE float squares_of(const float* x, int32_t width) {
    constexpr int AT_ONCE = 32;  // loads on their way
    float squares = 0.0f;
    int i = place();
    for (; i + (AT_ONCE - 1) * THREADS < width; i += AT_ONCE * THREADS) {
        float values[AT_ONCE];
        SIMT_UNROLL
        for (int j = 0; j < AT_ONCE; ++j) values[j] = x[i + j * THREADS];
        SIMT_UNROLL
        for (int j = 0; j < AT_ONCE; ++j) squares = simt::fma(values[j], values[j], squares);
    }
    for (; i < width; i += THREADS) squares = simt::fma(x[i], x[i], squares);
    return squares;
}

}  // namespace rms
