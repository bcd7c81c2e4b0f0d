// Weight formats: one row of a matrix as bytes, decoded eight consecutive elements at a time.
//
// WEIGHT_FORMAT is ggml's type number; BLOCK_BYTES and BLOCK_ELEMENTS come from
// reference/model/quant.py and are asserted here. Layouts are ggml's (ggml-common.h). Rounding is
// that of gguf-py: scale products first, then scale * quant, then the minimum, each rounded.
#pragma once
#include "simt.h"

#ifndef WEIGHT_FORMAT
#error "formats.h: define WEIGHT_FORMAT (ggml type number)"
#endif

namespace formats {

// k is a multiple of 8, so eight elements never straddle a block, a sub-block or a nibble half.
constexpr int STRIPE = 8;

#if WEIGHT_FORMAT == 0  // F32
struct Block { float value; };
SIMT_DEVICE float decode1(const Block* row, int k) { return row[k].value; }
#define FORMAT_IS_PLAIN
constexpr int ELEMENTS = 1;
#elif WEIGHT_FORMAT == 1  // F16
struct Block { uint16_t value; };
SIMT_DEVICE float decode1(const Block* row, int k) { return simt::half_to_float(row[k].value); }
#define FORMAT_IS_PLAIN
constexpr int ELEMENTS = 1;
#elif WEIGHT_FORMAT == 30  // BF16
struct Block { uint16_t value; };
SIMT_DEVICE float decode1(const Block* row, int k) { return simt::bf16_to_float(row[k].value); }
#define FORMAT_IS_PLAIN
constexpr int ELEMENTS = 1;

#elif WEIGHT_FORMAT == 2 || WEIGHT_FORMAT == 3  // Q4_0: (q - 8) d      Q4_1: q d + m
constexpr int ELEMENTS = 32;
struct Block {
    uint16_t d;
#if WEIGHT_FORMAT == 3
    uint16_t m;
#endif
    uint8_t qs[16];  // element i: low nibble of qs[i]; element i + 16: its high nibble
};
SIMT_DEVICE void decode(const Block* row, int k, float (&w)[STRIPE]) {
    const Block& block = row[k / 32];
    const float d = simt::half_to_float(block.d);
    const int shift = k % 32 < 16 ? 0 : 4;
    const uint8_t* qs = block.qs + k % 16;
    SIMT_UNROLL
    for (int i = 0; i < STRIPE; ++i) {
        const int32_t q = (qs[i] >> shift) & 15;
#if WEIGHT_FORMAT == 2
        w[i] = d * static_cast<float>(q - 8);
#else
        w[i] = d * static_cast<float>(q) + simt::half_to_float(block.m);
#endif
    }
}

#elif WEIGHT_FORMAT == 6 || WEIGHT_FORMAT == 7  // Q5_0: (q - 16) d     Q5_1: q d + m
constexpr int ELEMENTS = 32;
struct Block {
    uint16_t d;
#if WEIGHT_FORMAT == 7
    uint16_t m;
#endif
    uint8_t qh[4];   // bit i of the little-endian word: fifth bit of element i
    uint8_t qs[16];
};
SIMT_DEVICE void decode(const Block* row, int k, float (&w)[STRIPE]) {
    const Block& block = row[k / 32];
    const float d = simt::half_to_float(block.d);
    const int shift = k % 32 < 16 ? 0 : 4;
    const uint8_t* qs = block.qs + k % 16;
    const uint32_t high = block.qh[k % 32 / 8];
    SIMT_UNROLL
    for (int i = 0; i < STRIPE; ++i) {
        const int32_t q = ((qs[i] >> shift) & 15) | (((high >> i) & 1) << 4);
#if WEIGHT_FORMAT == 6
        w[i] = d * static_cast<float>(q - 16);
#else
        w[i] = d * static_cast<float>(q) + simt::half_to_float(block.m);
#endif
    }
}

#elif WEIGHT_FORMAT == 8  // Q8_0: q d
constexpr int ELEMENTS = 32;
struct Block {
    uint16_t d;
    int8_t qs[32];
};
SIMT_DEVICE void decode(const Block* row, int k, float (&w)[STRIPE]) {
    const Block& block = row[k / 32];
    const float d = simt::half_to_float(block.d);
    SIMT_UNROLL
    for (int i = 0; i < STRIPE; ++i) w[i] = d * static_cast<float>(block.qs[k % 32 + i]);
}

#elif WEIGHT_FORMAT == 12 || WEIGHT_FORMAT == 13  // Q4_K, Q5_K: (d sc) q - (dmin m)
constexpr int ELEMENTS = 256;
struct Block {
    uint16_t d;
    uint16_t dmin;
    uint8_t scales[12];  // eight 6-bit scales and eight 6-bit minimums, see below
#if WEIGHT_FORMAT == 13
    uint8_t qh[32];  // bit j of qh[l]: fifth bit of element l of sub-block j
#endif
    uint8_t qs[128];  // sub-blocks 2j and 2j + 1: low and high nibbles of qs[32 j .. 32 j + 31]
};
SIMT_DEVICE void decode(const Block* row, int k, float (&w)[STRIPE]) {
    const Block& block = row[k / 256];
    const int sub = k % 256 / 32;
    const int offset = k % 32;
    // Sub-blocks 0-3 hold 6 bits in bytes 0-3 (scale) and 4-7 (minimum); 4-7 hold 4 bits in bytes
    // 8-11 and borrow the two top bits of bytes 0-3 and 4-7.
    const uint8_t* s = block.scales;
    uint32_t scale;
    uint32_t minimum;
    if (sub < 4) {
        scale = s[sub] & 63u;
        minimum = s[sub + 4] & 63u;
    } else {
        scale = (s[sub + 4] & 15u) | ((s[sub - 4] >> 6) << 4);
        minimum = (s[sub + 4] >> 4) | ((s[sub] >> 6) << 4);
    }
    const float d = simt::half_to_float(block.d) * static_cast<float>(scale);
    const float m = simt::half_to_float(block.dmin) * static_cast<float>(minimum);
    const uint8_t* qs = block.qs + sub / 2 * 32 + offset;
    const int shift = sub % 2 * 4;
    SIMT_UNROLL
    for (int i = 0; i < STRIPE; ++i) {
        int32_t q = (qs[i] >> shift) & 15;
#if WEIGHT_FORMAT == 13
        q |= ((block.qh[offset + i] >> sub) & 1) << 4;
#endif
        w[i] = d * static_cast<float>(q) - m;
    }
}

#elif WEIGHT_FORMAT == 14  // Q6_K: (d sc) (q - 32)
constexpr int ELEMENTS = 256;
struct Block {
    uint8_t ql[128];    // per half of 128: quarters 0, 1 low nibbles and 2, 3 high nibbles
    uint8_t qh[64];     // per half of 128: two bits for each quarter in one byte
    int8_t scales[16];  // one per 16 elements
    uint16_t d;
};
SIMT_DEVICE void decode(const Block* row, int k, float (&w)[STRIPE]) {
    const Block& block = row[k / 256];
    const int half = k % 256 / 128;
    const int quarter = k % 128 / 32;
    const int offset = k % 32;
    const float d = simt::half_to_float(block.d) * static_cast<float>(block.scales[k % 256 / 16]);
    const uint8_t* ql = block.ql + half * 64 + quarter % 2 * 32 + offset;
    const uint8_t* qh = block.qh + half * 32 + offset;
    const int shift = quarter / 2 * 4;
    SIMT_UNROLL
    for (int i = 0; i < STRIPE; ++i) {
        const int32_t q = ((ql[i] >> shift) & 15) | (((qh[i] >> (2 * quarter)) & 3) << 4);
        w[i] = d * static_cast<float>(q - 32);
    }
}
#else
#error "formats.h: no decoder for this WEIGHT_FORMAT"
#endif

static_assert(sizeof(Block) == BLOCK_BYTES, "block size differs from reference/model/quant.py");
static_assert(ELEMENTS == BLOCK_ELEMENTS, "block length differs from reference/model/quant.py");

#ifdef FORMAT_IS_PLAIN
// Rows of any length; elements past the end decode to zero.
SIMT_DEVICE void decode(const Block* row, int k, int columns, float (&w)[STRIPE]) {
    SIMT_UNROLL
    for (int i = 0; i < STRIPE; ++i) w[i] = k + i < columns ? decode1(row, k + i) : 0.0f;
}
#else
SIMT_DEVICE void decode(const Block* row, int k, int, float (&w)[STRIPE]) { decode(row, k, w); }
#endif

// First block of a row of `columns` elements, a multiple of BLOCK_ELEMENTS.
SIMT_DEVICE const Block* row_at(const uint8_t* weights, int row, int columns) {
    return reinterpret_cast<const Block*>(weights) +
           static_cast<int64_t>(row) * (columns / BLOCK_ELEMENTS);
}

}  // namespace formats
