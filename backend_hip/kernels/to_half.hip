// Activations for the matrix unit: each token's row as halves, scaled by a power of two.
//
// The largest magnitude of a row becomes 2^14 to 2^15, so that no value overflows (residual streams
// exceed 65,504) and none above 2^-28 of the largest becomes subnormal; the scaling itself is exact.
// A row that is not finite stays as it is, so that it shows in the result.
#include "simt.h"

// x (tokens, columns); halves (tokens, stride), zero from `columns` on; scales (tokens): what a result
// has to be multiplied by. stride is even. Grid: tokens.
SIMT_KERNEL(to_half, const float* x, uint32_t* halves, float* scales, int32_t columns,
            int32_t stride) {
    constexpr int WAVES = SIMT_BLOCK / SIMT_WAVE;
    SIMT_SHARED(float, largest, WAVES);
    const int token = simt::block_x();
    const float* row = x + static_cast<int64_t>(token) * columns;
    uint32_t* to = halves + static_cast<int64_t>(token) * (stride / 2);
    float peak = 0.0f;
    for (int k = simt::thread(); k < columns; k += SIMT_BLOCK) {
        const float magnitude = simt::from_bits(simt::bits(row[k]) & 0x7FFFFFFFu);
        peak = simt::max(peak, magnitude);
    }
    peak = simt::wave_max(peak);
    if (simt::lane() == 0) largest[simt::wave()] = peak;
    simt::sync();
    SIMT_UNROLL
    for (int wave = 0; wave < WAVES; ++wave) peak = simt::max(peak, largest[wave]);

    // Exponent fields: 268 - e takes a value with field e to 2^14; 253 is the last whose inverse is normal.
    const int exponent = static_cast<int>(simt::bits(peak) >> 23);
    const int field = exponent == 255 ? 127 : simt::min(268 - exponent, 253);
    const float factor = simt::from_bits(static_cast<uint32_t>(field) << 23);
    if (simt::thread() == 0) scales[token] = simt::from_bits(static_cast<uint32_t>(254 - field) << 23);
    for (int pair = simt::thread(); pair < stride / 2; pair += SIMT_BLOCK) {
        const int k = 2 * pair;
        const float low = k < columns ? row[k] * factor : 0.0f;
        const float high = k + 1 < columns ? row[k + 1] * factor : 0.0f;
        to[pair] = simt::float_to_half(low) |
                   static_cast<uint32_t>(simt::float_to_half(high)) << 16;
    }
}
