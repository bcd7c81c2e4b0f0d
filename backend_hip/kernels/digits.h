// Floats as whole numbers of a common unit, and those as three signed digits in base 256, for exact products of
// bytes: sums of digits times bytes are whole numbers, so no order of them matters.
//
// A number is the nearest. The unit is a power of two, at most 2^-21 of the largest magnitude among the floats that
// share it, so that a number is off by at most 2^-22 of that.
#pragma once
#include "simt.h"

namespace digits {

constexpr int COUNT = 3;
constexpr uint32_t ONES = 0x01010101u;

// Units of numbers up to `largest`, whose bits are given: numbers of at most 2^22 of them.
struct Scale {
    uint32_t exponent;

    // As small as both powers of two below can be.
    SIMT_DEVICE explicit Scale(uint32_t largest) : exponent(largest >> 23) {
        if (exponent < 22u) exponent = 22u;
    }
    // What the lowest digit counts; NaN where one of the floats is none.
    SIMT_DEVICE float unit() const {
        return simt::from_bits(exponent < 255u ? (exponent - 21u) << 23 : 0x7fc00000u);
    }
    // The digits of x, lowest first, in three bytes. In 1.5 * 2^23 + number the number's bits are the last ones.
    SIMT_DEVICE uint32_t digits(float x) const {
        const float units = simt::from_bits((275u - exponent) << 23);  // in 1
        const uint32_t number = simt::bits(simt::fma(x, units, 12582912.0f)) - 0x4b400000u;
        return (number + 0x00808080u) ^ 0x00808080u;
    }
};

// The bits of the larger magnitude.
SIMT_DEVICE uint32_t larger(uint32_t largest, float x) {
    const uint32_t magnitude = simt::bits(x) & 0x7fffffffu;
    return magnitude > largest ? magnitude : largest;
}

// Digit d of four numbers, given by their digits, in word d.
SIMT_DEVICE void by_digit(const uint32_t (&number)[4], uint32_t (&words)[COUNT]) {
    const uint32_t lower = simt::selector(0, 4, 1, 5), upper = simt::selector(2, 6, 2, 6);
    const uint32_t first = simt::selector(0, 1, 4, 5), second = simt::selector(2, 3, 6, 7);
    const uint32_t low01 = simt::permute(number[0], number[1], lower);
    const uint32_t low23 = simt::permute(number[2], number[3], lower);
    const uint32_t high01 = simt::permute(number[0], number[1], upper);
    const uint32_t high23 = simt::permute(number[2], number[3], upper);
    words[0] = simt::permute(low01, low23, first);
    words[1] = simt::permute(low01, low23, second);
    words[2] = simt::permute(high01, high23, first);
}

// The float that sums of digits make, in units of `unit`: the lower two's sum rounds, and what all make.
SIMT_DEVICE float value(const int32_t (&sums)[COUNT], float unit) {
    const float low = static_cast<float>(sums[1] * 256 + sums[0]);
    return simt::fma(static_cast<float>(sums[2]), 65536.0f, low) * unit;
}

}  // namespace digits
