// Storage types of the KV cache, by the codes of KV_TYPES in backend_hip/kv_types.py.
//
//   0 f32
//   1 f16    rounded to nearest even on write
//   2 q8_0   blocks of 32 signed bytes along the head with one f16 scale: value = scale * byte
//
// A cache tensor is rows of (KV heads, head size) elements, a sequence's one after another. Scales lie
// behind all rows, (KV heads, rows, head size / 32): the scales of one head's neighbouring keys are
// neighbours, so that a wave that reads those keys reads few sectors, and bytes stay aligned for wide loads.
#pragma once
#include "simt.h"

namespace kv {

constexpr int BLOCK = 32;  // elements that share a scale

// 4 * WORDS bytes as they lie in memory, whose address is a multiple of their number.
template <int WORDS>
struct Words {
    static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "kv: no load of this width");
    uint32_t word[WORDS];
    SIMT_DEVICE void load(const void* p) {
        if constexpr (WORDS == 4) {
            const simt::Quad bits = simt::load16(p);
            for (int i = 0; i < 4; ++i) word[i] = bits.word[i];
        } else if constexpr (WORDS == 2) {
            const simt::Pair bits = simt::load8(p);
            for (int i = 0; i < 2; ++i) word[i] = bits.word[i];
        } else {
            word[0] = simt::load4(p);
        }
    }
};

// LOADED: elements in 16 bytes. decode(word, x) gives the elements of one word. (Of q8_0 products are made
// of bytes as they are.)
template <int TYPE>
struct Storage;

template <>
struct Storage<0> {
    using Element = float;
    static constexpr bool SCALED = false;
    static constexpr int LOADED = 4;
    SIMT_DEVICE static Element store(float value) { return value; }
    SIMT_DEVICE static void decode(uint32_t word, float* x) { x[0] = simt::from_bits(word); }
};

template <>
struct Storage<1> {
    using Element = uint16_t;
    static constexpr bool SCALED = false;
    static constexpr int LOADED = 8;
    SIMT_DEVICE static Element store(float value) { return simt::float_to_half(value); }
    SIMT_DEVICE static void decode(uint32_t word, float* x) { simt::halves_to_floats(word, x); }
};

template <>
struct Storage<2> {
    using Element = int8_t;
    static constexpr bool SCALED = true;
};

// Where the scales of a cache tensor of `rows` rows of `width` elements begin.
template <class S>
SIMT_DEVICE const uint16_t* scales_of(const typename S::Element* tensor, int64_t rows, int64_t width) {
    return reinterpret_cast<const uint16_t*>(tensor + rows * width);
}

}  // namespace kv
