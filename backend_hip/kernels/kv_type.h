// Storage types of the KV cache: 0 float32, 1 float16 (rounded to nearest even on write).
#pragma once
#include "simt.h"

namespace kv {

template <int TYPE>
struct Storage;

template <>
struct Storage<0> {
    using Element = float;
    SIMT_DEVICE static float load(Element stored) { return stored; }
    SIMT_DEVICE static Element store(float value) { return value; }
};

template <>
struct Storage<1> {
    using Element = uint16_t;
    SIMT_DEVICE static float load(Element stored) { return simt::half_to_float(stored); }
    SIMT_DEVICE static Element store(float value) { return simt::float_to_half(value); }
};

}  // namespace kv
