// Writing elements into the KV cache, converted to a storage type of kv_type.h.
#pragma once
#include "kv_type.h"

namespace kv {

// The largest of 32 neighbouring lanes, in each of them; NaN if one holds it.
SIMT_DEVICE float block_maximum(float v) {
    for (int offset = BLOCK / 2; offset > 0; offset /= 2) {
        const float other = simt::shuffle_xor(v, offset);
        if (v < other || other != other) v = other;
    }
    return v;
}

// Element i of a position's row of `width`; all lanes of a wave call it, and where a block shares a scale
// all of its elements are there.
template <class S>
SIMT_DEVICE void write(typename S::Element* tensor, float value, int64_t row, int i, int width,
                       int head_size, int64_t cache_rows) {
    if constexpr (!S::SCALED) {
        tensor[row * width + i] = S::store(value);
    } else {
        // As gguf's q8_0: bytes are chosen with the scale's float32 reciprocal, before it is rounded to
        // float16, and rounded half away from zero. No finite reciprocal: the scale rounds to 0, or it is
        // NaN or infinite and says so in what is read back.
        const float scale = block_maximum(simt::from_bits(simt::bits(value) & 0x7fffffffu)) / 127.0f;
        const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        const bool usable = inverse <= simt::from_bits(0x7f7fffffu) && scale <= simt::from_bits(0x7f7fffffu);
        const float scaled = usable ? value * inverse : 0.0f;
        const float magnitude = scaled < 0.0f ? -scaled : scaled;
        int32_t code = static_cast<int32_t>(magnitude);
        if (magnitude - static_cast<float>(code) >= 0.5f) ++code;
        tensor[row * width + i] = static_cast<int8_t>(scaled < 0.0f ? -code : code);
        if (i % BLOCK == 0) {
            const int blocks = head_size / BLOCK;
            uint16_t* scales = const_cast<uint16_t*>(scales_of<S>(tensor, cache_rows, width));
            scales[(i / head_size * cache_rows + row) * blocks + i % head_size / BLOCK] =
                simt::float_to_half(scale);
        }
    }
}

}  // namespace kv
