// Weight formats: one row of a matrix as bytes, decoded in runs of consecutive elements.
//
// Format<TYPE> describes ggml's type number TYPE (ggml-common.h has the layouts). Rounding is that
// of gguf-py: scale products first, then scale * quant, then the minimum, each rounded.
//
//   Block, ELEMENTS          what a block is and how many elements it holds
//   decode(row, k, columns, w)   eight elements from k on, a multiple of 8: a stripe
//   RUN, RUNS, UNIT          a lane takes RUNS runs of RUN elements at a time: a unit of UNIT
//   UNITS                    after so many units the places of runs repeat, UNITS * UNIT later
//   load(row, unit)          the bytes of a unit, in as few and as wide loads as its layout allows
//   run_start(unit, r)       where run r of a unit begins in the row
//   run(data, unit, r, columns, w)   its elements
//
// Every unit of a row belongs to one lane, and a lane's units and runs come in ascending order: this
// map is part of the kparallel path's arithmetic (dot.h).
//
// WEIGHT_FORMAT chooses the format of `formats::Weights`. BLOCK_BYTES (a block on the device, as
// backend_hip/layout.py lays it out) and BLOCK_ELEMENTS are asserted here.
#pragma once
#include "simt.h"

#ifndef WEIGHT_FORMAT
#error "formats.h: define WEIGHT_FORMAT (ggml type number)"
#endif

namespace formats {

// k is a multiple of 8, so eight elements never straddle a block, a sub-block or a nibble half.
constexpr int STRIPE = 8;

template <int TYPE>
struct Format;

// Units of one stripe, for formats whose bytes a lane reads where it needs them.
template <class F>
struct Stripes {
    static constexpr int RUN = STRIPE;
    static constexpr int RUNS = 1;
    static constexpr int UNIT = RUN * RUNS;
    static constexpr int UNITS = 1;
    struct Unit {
        const void* row;
    };
    template <class B>
    SIMT_DEVICE static Unit load(const B* row, uint32_t) {
        return {row};
    }
    SIMT_DEVICE static int run_start(uint32_t unit, int) { return static_cast<int>(unit) * STRIPE; }
    SIMT_DEVICE static void run(const Unit& data, uint32_t unit, int, int columns,
                                float (&w)[RUN]) {
        F::decode(static_cast<const typename F::Block*>(data.row), run_start(unit, 0), columns, w);
    }
};

// F32, F16, BF16: rows of any length; elements past the end decode to zero.
template <class F, class Stored>
struct Plain : Stripes<F> {
    struct Block {
        Stored value;
    };
    static constexpr int ELEMENTS = 1;
    SIMT_DEVICE static void decode(const Block* row, int k, int columns, float (&w)[STRIPE]) {
        SIMT_UNROLL
        for (int i = 0; i < STRIPE; ++i) w[i] = k + i < columns ? F::decode1(row, k + i) : 0.0f;
    }
};

template <>
struct Format<0> : Plain<Format<0>, float> {  // F32
    SIMT_DEVICE static float decode1(const Block* row, int k) { return row[k].value; }
};
template <>
struct Format<1> : Plain<Format<1>, uint16_t> {  // F16
    SIMT_DEVICE static float decode1(const Block* row, int k) {
        return simt::half_to_float(row[k].value);
    }
};
template <>
struct Format<30> : Plain<Format<30>, uint16_t> {  // BF16
    SIMT_DEVICE static float decode1(const Block* row, int k) {
        return simt::bf16_to_float(row[k].value);
    }
};

// Q4_0: (q - 8) d      Q4_1: q d + m
template <int TYPE>
struct Nibbles;
template <>
struct Nibbles<2> {
    uint16_t d;
    uint8_t qs[16];  // element i: low nibble of qs[i]; element i + 16: its high nibble
    SIMT_DEVICE float minimum() const { return 0.0f; }
};
template <>
struct Nibbles<3> {
    uint16_t d;
    uint16_t m;
    uint8_t qs[16];
    SIMT_DEVICE float minimum() const { return simt::half_to_float(m); }
};
template <int TYPE>
struct Q4 : Stripes<Q4<TYPE>> {
    using Block = Nibbles<TYPE>;
    static constexpr int ELEMENTS = 32;
    SIMT_DEVICE static void decode(const Block* row, int k, int, float (&w)[STRIPE]) {
        const Block& block = row[k / 32];
        const float d = simt::half_to_float(block.d);
        const int shift = k % 32 < 16 ? 0 : 4;
        const uint8_t* nibbles = block.qs + k % 16;
        SIMT_UNROLL
        for (int i = 0; i < STRIPE; ++i) {
            const int32_t q = (nibbles[i] >> shift) & 15;
            if constexpr (TYPE == 2) w[i] = d * static_cast<float>(q - 8);
            else w[i] = d * static_cast<float>(q) + block.minimum();
        }
    }
};
template <>
struct Format<2> : Q4<2> {};
template <>
struct Format<3> : Q4<3> {};

// Q5_0: (q - 16) d     Q5_1: q d + m
template <int TYPE>
struct FiveBits;
template <>
struct FiveBits<6> {
    uint16_t d;
    uint8_t qh[4];  // bit i of the little-endian word: fifth bit of element i
    uint8_t qs[16];
    SIMT_DEVICE float minimum() const { return 0.0f; }
};
template <>
struct FiveBits<7> {
    uint16_t d;
    uint16_t m;
    uint8_t qh[4];
    uint8_t qs[16];
    SIMT_DEVICE float minimum() const { return simt::half_to_float(m); }
};
template <int TYPE>
struct Q5 : Stripes<Q5<TYPE>> {
    using Block = FiveBits<TYPE>;
    static constexpr int ELEMENTS = 32;
    SIMT_DEVICE static void decode(const Block* row, int k, int, float (&w)[STRIPE]) {
        const Block& block = row[k / 32];
        const float d = simt::half_to_float(block.d);
        const int shift = k % 32 < 16 ? 0 : 4;
        const uint8_t* qs = block.qs + k % 16;
        const uint32_t high = block.qh[k % 32 / 8];
        SIMT_UNROLL
        for (int i = 0; i < STRIPE; ++i) {
            const int32_t q = ((qs[i] >> shift) & 15) | (((high >> i) & 1) << 4);
            if constexpr (TYPE == 6) w[i] = d * static_cast<float>(q - 16);
            else w[i] = d * static_cast<float>(q) + block.minimum();
        }
    }
};
template <>
struct Format<6> : Q5<6> {};
template <>
struct Format<7> : Q5<7> {};

template <>
struct Format<8> : Stripes<Format<8>> {  // Q8_0: q d
    static constexpr int ELEMENTS = 32;
    struct Block {
        uint16_t d;
        int8_t qs[32];
    };
    SIMT_DEVICE static void decode(const Block* row, int k, int, float (&w)[STRIPE]) {
        const Block& block = row[k / 32];
        const float d = simt::half_to_float(block.d);
        SIMT_UNROLL
        for (int i = 0; i < STRIPE; ++i) w[i] = d * static_cast<float>(block.qs[k % 32 + i]);
    }
};

// Q4_K, Q5_K: (d sc) q - (dmin m), eight sub-blocks of 32. Blocks are whole multiples of 16 bytes.
template <int TYPE>
struct SuperBlock;
template <>
struct SuperBlock<12> {
    uint16_t d;
    uint16_t dmin;
    uint8_t scales[12];  // eight 6-bit scales and eight 6-bit minimums, see scale_of
    uint8_t qs[128];     // sub-blocks 2j and 2j + 1: low and high nibbles of qs[32 j .. 32 j + 31]
};
template <>
struct SuperBlock<13> {
    uint16_t d;
    uint16_t dmin;
    uint8_t scales[12];
    uint8_t qh[32];  // bit j of qh[l]: fifth bit of element l of sub-block j
    uint8_t qs[128];
};
template <int NUMBER>
struct QK {
    static constexpr int TYPE = NUMBER;
    using Block = SuperBlock<TYPE>;
    static constexpr int ELEMENTS = 256;

    // A unit is 16 bytes of quants: 16 elements of an even sub-block and 16 of the odd one after it.
    static constexpr int RUN = 16;
    static constexpr int RUNS = 2;
    static constexpr int UNIT = RUN * RUNS;
    static constexpr int UNITS = 8;
    struct Unit {
        simt::Quad head;    // d, dmin and the scales
        simt::Quad quants;
        simt::Quad fifth;   // Q5_K only
    };
    struct Scale {
        float d;
        float m;
    };

    SIMT_DEVICE static Unit load(const Block* row, uint32_t unit) {
        const Block& block = row[unit / 8];
        Unit data;
        data.head = simt::load16(&block);
        data.quants = simt::load16(block.qs + unit % 8 * 16);
        if constexpr (TYPE == 13) data.fifth = simt::load16(block.qh + unit % 2 * 16);
        return data;
    }
    SIMT_DEVICE static int run_start(uint32_t unit, int r) {
        return static_cast<int>(unit / 8 * 256 + unit % 8 / 2 * 64 + unit % 2 * 16) + r * 32;
    }
    SIMT_DEVICE static void run(const Unit& data, uint32_t unit, int r, int, float (&w)[RUN]) {
        const int pair = static_cast<int>(unit % 8 / 2);
        const Scale scale = scale_of(data.head, pair, r);
        SIMT_UNROLL
        for (int i = 0; i < 4; ++i) {
            const uint32_t fifth = TYPE == 13 ? data.fifth.word[i] : 0u;
            four(data.quants.word[i], fifth, pair, r, scale, w, 4 * i);
        }
    }

    // Of sub-block 2 * pair + odd. Sub-blocks 0-3 hold 6 bits in bytes 0-3 (scale) and 4-7
    // (minimum); 4-7 hold 4 bits in bytes 8-11 and borrow the two top bits of bytes 0-3 and 4-7.
    // Words 1 to 3 of a head are those bytes; both sub-blocks of a pair are unpacked at once.
    SIMT_DEVICE static Scale scale_of(const simt::Quad& head, int pair, int odd) {
        const int shift = pair % 2 * 16;
        const uint32_t first = head.word[1] >> shift;
        const uint32_t second = head.word[2] >> shift;
        const uint32_t third = head.word[3] >> shift;
        // Masks and not branches: lanes of one wave have all four pairs.
        const bool borrows = pair >= 2;
        const uint32_t own = borrows ? 0x0f0fu : 0x3f3fu;
        const uint32_t borrowed = borrows ? 0x3030u : 0u;
        const uint32_t scales = ((borrows ? third : first) & own) | (first >> 2 & borrowed);
        const uint32_t minimums =
            ((borrows ? third >> 4 : second) & own) | (second >> 2 & borrowed);
        const uint16_t d = static_cast<uint16_t>(head.word[0]);
        const uint16_t dmin = static_cast<uint16_t>(head.word[0] >> 16);
        return {simt::half_to_float(d) * simt::field_to_float<6>(scales, odd * 8),
                simt::half_to_float(dmin) * simt::field_to_float<6>(minimums, odd * 8)};
    }

    // Four elements of sub-block 2 * pair + odd from four bytes of quants. d * q is exact (17 bits
    // times 5), so the fused form rounds once, as gguf-py's product and difference do together.
    template <int N>
    SIMT_DEVICE static void four(uint32_t quants, uint32_t fifth, int pair, int odd,
                                 const Scale& scale, float (&w)[N], int at) {
        SIMT_UNROLL
        for (int i = 0; i < 4; ++i) {
            float q;
            if constexpr (TYPE == 13) {
                const uint32_t low = quants >> (odd * 4) & 0x0f0f0f0fu;
                const uint32_t five = low | (fifth >> (2 * pair + odd) & 0x01010101u) << 4;
                q = simt::field_to_float<5>(five >> (i / 2 * 16), i % 2 * 8);
            } else {
                q = simt::field_to_float<4>(quants >> (i / 2 * 16), i % 2 * 8 + odd * 4);
            }
            w[at + i] = simt::fma(scale.d, q, -scale.m);
        }
    }

    SIMT_DEVICE static void decode(const Block* row, int k, int, float (&w)[STRIPE]) {
        const Block& block = row[k / 256];
        const int pair = k % 256 / 64;
        const int odd = k % 64 / 32;
        const int offset = k % 32;
        const Scale scale = scale_of(simt::load16(&block), pair, odd);
        SIMT_UNROLL
        for (int i = 0; i < STRIPE; i += 4) {
            uint32_t fifth = 0;
            if constexpr (TYPE == 13) fifth = simt::load4(block.qh + offset + i);
            four(simt::load4(block.qs + pair * 32 + offset + i), fifth, pair, odd, scale, w, i);
        }
    }
};
template <>
struct Format<12> : QK<12> {};
template <>
struct Format<13> : QK<13> {};

template <>
struct Format<14> {  // Q6_K: (d sc) (q - 32)
    static constexpr int TYPE = 14;
    struct Block {
        uint8_t ql[128];    // per half of 128: quarters 0, 1 low nibbles and 2, 3 high nibbles
        uint8_t qh[64];     // per half of 128: two bits for each quarter in one byte
        int8_t scales[16];  // one per 16 elements
        uint16_t d;
        uint8_t nothing[14];  // the file's blocks end before these (backend_hip/layout.py)
    };
    static constexpr int ELEMENTS = 256;

    // A unit is 16 bytes of ql: 16 elements of quarter 0 or 1 and 16 of the quarter two after it.
    static constexpr int RUN = 16;
    static constexpr int RUNS = 2;
    static constexpr int UNIT = RUN * RUNS;
    static constexpr int UNITS = 8;
    struct Unit {
        simt::Quad low;
        simt::Quad high;
        float d[RUNS];
    };
    SIMT_DEVICE static Unit load(const Block* row, uint32_t unit) {
        const Block& block = row[unit / 8];
        const uint32_t j = unit % 8;
        Unit data;
        data.low = simt::load16(block.ql + j * 16);
        data.high = simt::load16(block.qh + j / 4 * 32 + j % 2 * 16);
        SIMT_UNROLL
        for (int r = 0; r < RUNS; ++r) data.d[r] = scale_of(block, run_start(j, 0) / 16 + 4 * r);
        return data;
    }
    SIMT_DEVICE static int run_start(uint32_t unit, int r) {
        return static_cast<int>(unit / 8 * 256 + unit % 8 / 4 * 128 + unit % 4 / 2 * 32 +
                                unit % 2 * 16) + r * 64;
    }
    SIMT_DEVICE static void run(const Unit& data, uint32_t unit, int r, int, float (&w)[RUN]) {
        const int quarter = static_cast<int>(unit % 4 / 2) + 2 * r;
        SIMT_UNROLL
        for (int i = 0; i < 4; ++i) {
            four(data.low.word[i], data.high.word[i], quarter, data.d[r], w, 4 * i);
        }
    }

    SIMT_DEVICE static float scale_of(const Block& block, int sixteenth) {
        return simt::half_to_float(block.d) * static_cast<float>(block.scales[sixteenth]);
    }

    // Four elements of a quarter from four bytes each of ql and qh.
    template <int N>
    SIMT_DEVICE static void four(uint32_t low, uint32_t high, int quarter, float d, float (&w)[N],
                                 int at) {
        const int shift = quarter / 2 * 4;
        const uint32_t nibbles = low >> shift & 0x0f0f0f0fu;
        const uint32_t q = nibbles | (high >> (2 * quarter) & 0x03030303u) << 4;
        SIMT_UNROLL
        for (int i = 0; i < 4; ++i) {
            w[at + i] = d * (simt::field_to_float<6>(q >> (i / 2 * 16), i % 2 * 8) - 32.0f);
        }
    }

    SIMT_DEVICE static void decode(const Block* row, int k, int, float (&w)[STRIPE]) {
        const Block& block = row[k / 256];
        const int half = k % 256 / 128;
        const int quarter = k % 128 / 32;
        const int offset = k % 32;
        const float d = scale_of(block, k % 256 / 16);
        SIMT_UNROLL
        for (int i = 0; i < STRIPE; i += 4) {
            four(simt::load4(block.ql + half * 64 + quarter % 2 * 32 + offset + i),
                 simt::load4(block.qh + half * 32 + offset + i), quarter, d, w, i);
        }
    }
};

using Weights = Format<WEIGHT_FORMAT>;
using Block = Weights::Block;
static_assert(sizeof(Block) == BLOCK_BYTES, "block size differs from backend_hip/layout.py");
static_assert(Weights::ELEMENTS == BLOCK_ELEMENTS,
              "block length differs from reference/model/quant.py");

SIMT_DEVICE void decode(const Block* row, int k, int columns, float (&w)[STRIPE]) {
    Weights::decode(row, k, columns, w);
}

// First block of a row of `columns` elements, a multiple of the format's block.
template <class F>
SIMT_DEVICE const typename F::Block* row_of(const uint8_t* weights, int64_t row, int columns) {
    return reinterpret_cast<const typename F::Block*>(weights) + row * (columns / F::ELEMENTS);
}
SIMT_DEVICE const Block* row_at(const uint8_t* weights, int row, int columns) {
    return row_of<Weights>(weights, row, columns);
}

}  // namespace formats
