// Keys and values of new tokens into the cache, converted to its storage types (kv_type.h).
#include "flow.h"
#include "kv_type.h"

#if !defined(K_TYPE) || !defined(V_TYPE)
#error "kv_write.hip: define K_TYPE and V_TYPE (see kv_type.h)"
#endif
using K = kv::Storage<K_TYPE>;
using V = kv::Storage<V_TYPE>;

// The largest of 32 neighbouring lanes, in each of them; NaN if one holds it.
SIMT_DEVICE float block_maximum(float v) {
    for (int offset = kv::BLOCK / 2; offset > 0; offset /= 2) {
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
        if (i % kv::BLOCK == 0) {
            const int blocks = head_size / kv::BLOCK;
            uint16_t* scales = const_cast<uint16_t*>(kv::scales_of<S>(tensor, cache_rows, width));
            scales[(i / head_size * cache_rows + row) * blocks + i % head_size / kv::BLOCK] =
                simt::float_to_half(scale);
        }
    }
}

// k, v (count, width); keys, values: cache rows. Grid: (ceil(width / block), count).
SIMT_KERNEL(kv_write, const float* k, const float* v, K::Element* keys, V::Element* values,
            const int32_t* step, int32_t width, int32_t head_size, int32_t cache_rows) {
    const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
    if (i >= width) return;
    const int64_t source = static_cast<int64_t>(simt::block_y()) * width + i;
    const int64_t position = flow::position(step, simt::block_y());
    const int64_t row = flow::cache_start(step, simt::block_y()) + position;
    write<K>(keys, k[source], row, i, width, head_size, cache_rows);
    write<V>(values, v[source], row, i, width, head_size, cache_rows);
}
