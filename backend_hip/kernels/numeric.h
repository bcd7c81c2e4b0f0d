// Elementary functions built from fma, multiplication and bit patterns only, so that their results
// are bit-equal on every platform (offline AMD builds have no tanhf, libraries differ in last bits).
#pragma once
#include "simt.h"

namespace numeric {

// e^x within 2 ulp for all x (checked against float64 by the op tests). Cody-Waite reduction and
// the degree-5 minimax polynomial of Cephes expf (Moshier 1989).
SIMT_DEVICE float exp(float x) {
    if (x != x) return x;
    if (x > 88.8f) return simt::from_bits(0x7f800000u);
    if (x < -104.0f) return 0.0f;
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const float n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    float r = simt::fma(n, -0.693359375f, x);
    r = simt::fma(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = simt::fma(p, r, 1.3981999507e-3f);
    p = simt::fma(p, r, 8.3334519073e-3f);
    p = simt::fma(p, r, 4.1665795894e-2f);
    p = simt::fma(p, r, 1.6666665459e-1f);
    p = simt::fma(p, r, 5.0000001201e-1f);
    p = simt::fma(p, r * r, r) + 1.0f;
    // Two powers of two, because 2^n alone overflows at n = 128 and is subnormal below -126.
    const int32_t half = static_cast<int32_t>(n) / 2;
    const int32_t rest = static_cast<int32_t>(n) - half;
    return p * simt::from_bits(static_cast<uint32_t>(half + 127) << 23) *
           simt::from_bits(static_cast<uint32_t>(rest + 127) << 23);
}

// Cephes tanhf: a polynomial near zero, 1 - 2 / (e^2x + 1) elsewhere.
SIMT_DEVICE float tanh(float x) {
    const float magnitude = x < 0.0f ? -x : x;
    if (magnitude < 0.625f) {
        const float square = x * x;
        float p = -5.70498872745e-3f;
        p = simt::fma(p, square, 2.06390887954e-2f);
        p = simt::fma(p, square, -5.37397155531e-2f);
        p = simt::fma(p, square, 1.33314422036e-1f);
        p = simt::fma(p, square, -3.33332819422e-1f);
        return simt::fma(p * square, x, x);
    }
    const float result = 1.0f - 2.0f / (exp(2.0f * magnitude) + 1.0f);
    return x < 0.0f ? -result : result;
}

// ln x for 1 <= x <= 2, within 2 ulp: Cephes logf's polynomial.
SIMT_DEVICE float log_one_to_two(float x) {
    const bool upper = x > 1.41421356237309504880f;
    const float m = upper ? 0.5f * x - 1.0f : x - 1.0f;
    float p = 7.0376836292e-2f;
    p = simt::fma(p, m, -1.1514610310e-1f);
    p = simt::fma(p, m, 1.1676998740e-1f);
    p = simt::fma(p, m, -1.2420140846e-1f);
    p = simt::fma(p, m, 1.4249322787e-1f);
    p = simt::fma(p, m, -1.6668057665e-1f);
    p = simt::fma(p, m, 2.0000714765e-1f);
    p = simt::fma(p, m, -2.4999993993e-1f);
    p = simt::fma(p, m, 3.3333331174e-1f);
    const float square = m * m;
    float tail = p * m * square;
    if (upper) tail -= 2.12194440e-4f;
    tail = simt::fma(-0.5f, square, tail);
    return upper ? m + tail + 0.693359375f : m + tail;
}

// ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|). Where 1 + t rounds, ln(u) * t / (u - 1) with u = 1 + t
// undoes the rounding (Kahan).
SIMT_DEVICE float softplus(float x) {
    const float t = exp(x < 0.0f ? x : -x);
    const float u = 1.0f + t;
    const float log1p = u == 1.0f ? t : log_one_to_two(u) * (t / (u - 1.0f));
    return x > 0.0f ? x + log1p : log1p;
}

SIMT_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// x / (1 + e^-x). For x far below zero e^-x is infinite and the quotient is -0.
SIMT_DEVICE float silu(float x) { return x / (1.0f + exp(-x)); }

// x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).
SIMT_DEVICE float gelu_tanh(float x) {
    const float inner = 0.797884560802865356f * x * (1.0f + 0.044715f * x * x);
    return 0.5f * x * (1.0f + tanh(inner));
}

}  // namespace numeric
