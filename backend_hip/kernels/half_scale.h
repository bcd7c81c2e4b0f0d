// The power of two that scales a row of activations for the matrix unit.
//
// The largest magnitude of a row becomes 2^14 to 2^15, so that no value overflows (residual streams
// exceed 65,504) and none above 2^-28 of the largest becomes subnormal; the scaling itself is exact.
// A row that is not finite stays as it is, so that it shows in the result.
#pragma once
#include "simt.h"

namespace half_scale {

struct Scale {
    float factor;
    float inverse;
};

// The larger of a magnitude and that of a value; a NaN is dropped.
SIMT_DEVICE float larger(float peak, float value) {
    return simt::max(peak, simt::from_bits(simt::bits(value) & 0x7FFFFFFFu));
}

// Of the row whose values the threads of the block share, from the largest magnitude of each one's. Every
// thread must reach it.
SIMT_DEVICE Scale of_block(float peak) {
    constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;
    SIMT_SHARED(float, largest, WAVES);
    peak = simt::wave_max(peak);
    if (simt::lane() == 0) largest[simt::wave()] = peak;
    simt::sync();
    SIMT_UNROLL
    for (int wave = 0; wave < WAVES; ++wave) peak = simt::max(peak, largest[wave]);

    // Exponent fields: 268 - e takes a value with field e to 2^14; 253 is the last whose inverse is normal.
    const int exponent = static_cast<int>(simt::bits(peak) >> 23);
    const int field = exponent == 255 ? 127 : simt::min(268 - exponent, 253);
    return {simt::from_bits(static_cast<uint32_t>(field) << 23),
            simt::from_bits(static_cast<uint32_t>(254 - field) << 23)};
}

// Of a row (columns): the whole block works on it, and every thread must reach it.
SIMT_DEVICE Scale of(const float* row, int columns) {
    float peak = 0.0f;
    for (int k = simt::thread(); k < columns; k += SIMT_BLOCK) peak = larger(peak, row[k]);
    return of_block(peak);
}

}  // namespace half_scale
