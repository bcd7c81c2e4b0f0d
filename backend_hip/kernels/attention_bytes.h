// Scores and mixed values of keys and values in q8_0, in exact products of bytes.
//
// What a block of 32 is multiplied with (a query's elements; of values, a key's weight times the block's
// scale) becomes a whole number of units, cut off towards zero, and that number four signed digits in base
// 256. A unit is a power of two: at most 2^-29 of the largest of the block's 32 elements, or of the largest
// scale among the split's keys. Sums of digits times bytes are whole numbers, so no order of them matters and
// every platform has the same bits; the upper two digits' sum is rounded to a float once, and so is the
// lower two's.
#pragma once
#include "attention_keys.h"
#include "byte_unit.h"

namespace attention {

constexpr int LEVELS = byte_unit::DIGITS / 2;  // pairs of digits
constexpr int TILES = (HEADS + byte_unit::HEADS - 1) / byte_unit::HEADS;

// Units of numbers up to `largest`, whose bits are given: numbers of less than 2^30 of them.
struct Scale {
    uint32_t exponent;

    // As small as both powers of two below can be.
    SIMT_DEVICE explicit Scale(uint32_t largest) : exponent(largest >> 23) {
        if (exponent < 30u) exponent = 30u;
    }
    SIMT_DEVICE bool finite() const { return exponent < 255u; }
    SIMT_DEVICE float units() const { return simt::from_bits((283u - exponent) << 23); }  // in 1
    // What a pair of digits counts; NaN where there is no number of units.
    SIMT_DEVICE float unit(int level) const {
        const uint32_t shift = level == 0 ? 16u : 0u;
        return finite() ? simt::from_bits((exponent - 29u + shift) << 23) : simt::from_bits(0x7fc00000u);
    }
    // The digits of x, lowest first.
    SIMT_DEVICE uint32_t digits(float x) const {
        const int32_t number = finite() ? static_cast<int32_t>(x * units()) : 0;
        return (static_cast<uint32_t>(number) + 0x00808080u) ^ 0x00808080u;
    }
};

// The rows that a lane holds, made of four numbers' digits.
struct Pick {
    uint32_t both, first, second;

    SIMT_DEVICE Pick() {
        const int a = byte_unit::row_digit(0), b = byte_unit::row_digit(byte_unit::ROWS - 1);
        both = simt::selector(a, 4 + a, b, 4 + b);
        first = simt::selector(0, 1, 4, 5);
        second = simt::selector(2, 3, 6, 7);
    }
    template <int ROWS>
    SIMT_DEVICE void operator()(const simt::Quad& numbers, uint32_t (&rows)[ROWS][byte_unit::WORDS],
                                int word) const {
        const uint32_t low = simt::permute(numbers.word[0], numbers.word[1], both);
        const uint32_t high = simt::permute(numbers.word[2], numbers.word[3], both);
        rows[0][word] = simt::permute(low, high, first);
        if constexpr (ROWS == 2) rows[ROWS - 1][word] = simt::permute(low, high, second);
    }
};

// A lane reads its part of each block of the key that is its column, and the scales of the keys that its
// sums belong to.
struct ByteMap {
    struct Beside {
        Scales of[byte_unit::PAIR_COLUMNS];

        template <bool WHOLE, class S>
        SIMT_DEVICE void load(const Reader<S>& reader, int distance) {
            SIMT_UNROLL
            for (int i = 0; i < byte_unit::PAIR_COLUMNS; ++i) {
                const int own = first(0) + byte_unit::pair_column(i);
                of[i].load(reader.template scales_of<WHOLE>(own, distance));
            }
        }
    };
    static constexpr int KEYS = byte_unit::COLUMNS;
    static constexpr int STEPS = SPLIT_KEYS / (KEYS * WAVES);
    static constexpr int PIECES = BLOCKS;
    static constexpr int WORDS = byte_unit::WORDS;

    SIMT_DEVICE static int element(int piece) {
        return piece * kv::BLOCK + byte_unit::part() * (4 * byte_unit::WORDS);
    }
    SIMT_DEVICE static bool inside(int) { return true; }
    SIMT_DEVICE static int first(int step) { return (step * WAVES + simt::wave()) * KEYS; }
    SIMT_DEVICE static int key(int step) { return first(step) + byte_unit::column(); }
};

template <class S>
struct ByteScores {
    using Keys = Stream<S, ByteMap>;
    static constexpr int PARTS = LEVELS;
    static constexpr bool STAGED = true;
    // Numbers (HEADS, HEAD_SIZE), then the bits of the largest of each block.
    static constexpr int QUERY = (MIXED + HEADS * BLOCKS + 3) / 4 * 4;  // so that the next row is aligned

    // The query's numbers, by the whole block; a barrier must follow.
    SIMT_DEVICE static void stage(const float* query, int heads, uint32_t* staged) {
        constexpr int VECTOR = 4, LANES = kv::BLOCK / VECTOR;  // of a block
        for (int base = 0; base < MIXED / VECTOR; base += SIMT_BLOCK) {
            const int at = (base + simt::thread()) * VECTOR;
            const bool inside = at < MIXED;
            const int head = simt::min(inside ? at / HEAD_SIZE : 0, heads - 1);
            float x[VECTOR];
            copy<VECTOR>(query + head * HEAD_SIZE + (inside ? at % HEAD_SIZE : 0), x);
            uint32_t largest = 0;
            SIMT_UNROLL
            for (int i = 0; i < VECTOR; ++i) {
                const uint32_t magnitude = simt::bits(x[i]) & 0x7fffffffu;
                largest = magnitude > largest ? magnitude : largest;
            }
            SIMT_UNROLL
            for (int offset = LANES / 2; offset > 0; offset /= 2) {
                const uint32_t other = simt::shuffle_xor(largest, offset);
                largest = other > largest ? other : largest;
            }
            if (!inside) continue;
            const Scale scale(largest);
            SIMT_UNROLL
            for (int i = 0; i < VECTOR; ++i) staged[at + i] = scale.digits(x[i]);
            if (at % kv::BLOCK == 0) staged[MIXED + at / kv::BLOCK] = largest;
        }
    }

    // parts[part_at(own, distance, level) + head]: two digits' part of query(head) . key, blocks in ascending
    // order.
    template <class At>
    SIMT_DEVICE static void score(const float*, int, const uint32_t* staged, const Reader<S>& reader,
                                  Keys& keys, const At& part_at, float* parts) {
        uint32_t rows[TILES][BLOCKS][byte_unit::ROWS][byte_unit::WORDS];
        float unit[TILES][BLOCKS][byte_unit::PAIRS];
        const Pick pick;
        SIMT_UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
            const int head = simt::min(tile * byte_unit::HEADS + byte_unit::row_head(0), HEADS - 1);
            SIMT_UNROLL
            for (int block = 0; block < BLOCKS; ++block) {
                const uint32_t* source = staged + head * HEAD_SIZE + ByteMap::element(block);
                SIMT_UNROLL
                for (int w = 0; w < byte_unit::WORDS; ++w) {
                    pick(simt::load16(source + 4 * w), rows[tile][block], w);
                }
                SIMT_UNROLL
                for (int p = 0; p < byte_unit::PAIRS; ++p) {
                    const int of = simt::min(tile * byte_unit::HEADS + byte_unit::pair_head(p), HEADS - 1);
                    const Scale scale(staged[MIXED + of * BLOCKS + block]);
                    unit[tile][block][p] = scale.unit(byte_unit::pair_level(p));
                }
            }
        }
        byte_unit::Unit product;
        keys.walk(reader, [&](const typename Keys::Part& batch, int step) {
            SIMT_UNROLL
            for (int i = 0; i < Keys::COUNT; ++i) {
                SIMT_UNROLL
                for (int tile = 0; tile < TILES; ++tile) {
                    float sums[byte_unit::PAIRS];
                    SIMT_UNROLL
                    for (int p = 0; p < byte_unit::PAIRS; ++p) sums[p] = 0.0f;
                    SIMT_UNROLL
                    for (int block = 0; block < BLOCKS; ++block) {
                        int32_t d[2 * byte_unit::PAIRS];
                        SIMT_UNROLL
                        for (int32_t& sum : d) sum = 0;
                        product.multiply_add(d, rows[tile][block], batch.raw[i][block].word);
                        SIMT_UNROLL
                        for (int p = 0; p < byte_unit::PAIRS; ++p) {
                            const Scales& scales = batch.beside[i].of[p % byte_unit::PAIR_COLUMNS];
                            const float factor = scales.of(block) * unit[tile][block][p];
                            sums[p] = simt::fma(static_cast<float>(byte_unit::pair(d, p)), factor, sums[p]);
                        }
                    }
                    SIMT_UNROLL
                    for (int p = 0; p < byte_unit::PAIRS; ++p) {
                        const int head = tile * byte_unit::HEADS + byte_unit::pair_head(p);
                        const int own = ByteMap::first(0) + byte_unit::pair_column(p);
                        const int distance = (step + i) * ByteMap::KEYS * WAVES;
                        if (PITCH % byte_unit::HEADS == 0 || head < PITCH) {
                            parts[part_at(own, distance, byte_unit::pair_level(p)) + head] = sums[p];
                        }
                    }
                }
            }
        });
    }
};

// Waves share out the blocks of a head; each takes all of the split's keys.
template <class S>
struct ByteMix {
    static constexpr int CHUNKS = SPLIT_KEYS / byte_unit::DEPTH;
    static constexpr int KEYS = 4 * byte_unit::WORDS;                // of a chunk, of one lane
    static constexpr int ELEMENTS = kv::BLOCK / byte_unit::COLUMNS;  // of a block, of one lane, neighbours
    static constexpr int FACTORS = BLOCKS * PITCH * SPLIT_KEYS;
    static constexpr int PASSES = (BLOCKS + WAVES - 1) / WAVES;  // blocks of one wave
    static constexpr int COLUMNS = PowerOfTwoFrom<BLOCKS>::value;
    static constexpr int MOST = WAVES * COLUMNS;
    static constexpr int PARTIAL = LEVELS * MIXED;
    static_assert(ELEMENTS == 2 || ELEMENTS == 4, "attention: no load of this width");

    struct Weigh {
        Scales scales;

        SIMT_DEVICE void open(const Reader<S>& reader) {
            scales.load(reader.template scales_of<false>(simt::thread(), 0));
        }
        // most[wave * COLUMNS + block] = bits of the largest scale of a wave's keys.
        SIMT_DEVICE void announce(float* most) const {
            float largest[COLUMNS];
            SIMT_UNROLL
            for (int i = 0; i < COLUMNS; ++i) {
                const float scale = i < BLOCKS ? scales.of(i) : 0.0f;
                // One that is not finite counts as infinite: a NaN would be dropped.
                largest[i] = scale == scale ? scale : simt::from_bits(0x7f800000u);
            }
            const int first = simt::spread_max<SIMT_WAVE / 2>(largest);
            if (simt::lane() % (SIMT_WAVE / COLUMNS) == 0) most[simt::wave() * COLUMNS + first] = largest[0];
        }
        // factors[(block * PITCH + head) * SPLIT_KEYS + key] = digits of weight * scale.
        SIMT_DEVICE void store(const float (&weights)[PITCH], const float* most, uint32_t* factors) const {
            SIMT_UNROLL
            for (int block = 0; block < BLOCKS; ++block) {
                const Scale units = units_of(most, block);
                const float scale = scales.of(block);
                SIMT_UNROLL
                for (int head = 0; head < PITCH; ++head) {
                    factors[(block * PITCH + head) * SPLIT_KEYS + simt::thread()] =
                        units.digits(weights[head] * scale);
                }
            }
        }
    };

    SIMT_DEVICE static Scale units_of(const float* most, int block) {
        float largest = most[block];
        SIMT_UNROLL
        for (int wave = 1; wave < WAVES; ++wave) largest = simt::max(largest, most[wave * COLUMNS + block]);
        return Scale(simt::bits(largest));
    }

    // A lane's elements of one block, of all keys.
    struct Values {
        static constexpr int SHARE = 4 / ELEMENTS;  // keys in a word
        uint32_t raw[CHUNKS][KEYS / SHARE];

        SIMT_DEVICE void open(const Reader<S>& reader) {
            if (BLOCKS < WAVES && simt::wave() >= BLOCKS) return;
            // With several blocks a wave, distances for both ways would take too many registers.
            if (PASSES == 1 && reader.whole()) load<true>(reader, simt::wave());
            else load<false>(reader, simt::wave());
        }
        template <bool WHOLE>
        SIMT_DEVICE void load(const Reader<S>& reader, int block) {
            Reader<S> from = reader;
            from.rows += block * kv::BLOCK + byte_unit::column() * ELEMENTS;
            SIMT_UNROLL
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                SIMT_UNROLL
                for (int i = 0; i < KEYS; ++i) {
                    const int own = byte_unit::part() * KEYS, distance = chunk * byte_unit::DEPTH + i;
                    const uint8_t* source = from.template row<WHOLE>(own, distance);
                    uint32_t& word = raw[chunk][i / SHARE];
                    if constexpr (ELEMENTS == 4) {
                        word = simt::load4(source);
                    } else {
                        const uint32_t half = *reinterpret_cast<const uint16_t*>(source);
                        word = i % SHARE == 0 ? half : word | half << 16;
                    }
                }
            }
        }
        // Columns of the matrix unit: of each element, a chunk's keys.
        SIMT_DEVICE void columns(int chunk, uint32_t (&to)[ELEMENTS][byte_unit::WORDS]) const {
            SIMT_UNROLL
            for (int w = 0; w < byte_unit::WORDS; ++w) {
                const uint32_t* from = raw[chunk] + 4 / SHARE * w;
                if constexpr (ELEMENTS == 4) {
                    const uint32_t firsts = simt::selector(0, 4, 1, 5), lasts = simt::selector(2, 6, 3, 7);
                    const uint32_t even = simt::selector(0, 1, 4, 5), odd = simt::selector(2, 3, 6, 7);
                    const uint32_t low = simt::permute(from[0], from[1], firsts);
                    const uint32_t high = simt::permute(from[2], from[3], firsts);
                    const uint32_t lower = simt::permute(from[0], from[1], lasts);
                    const uint32_t higher = simt::permute(from[2], from[3], lasts);
                    to[0][w] = simt::permute(low, high, even);
                    to[1][w] = simt::permute(low, high, odd);
                    to[ELEMENTS - 2][w] = simt::permute(lower, higher, even);
                    to[ELEMENTS - 1][w] = simt::permute(lower, higher, odd);
                } else {
                    to[0][w] = simt::permute(from[0], from[1], simt::selector(0, 2, 4, 6));
                    to[1][w] = simt::permute(from[0], from[1], simt::selector(1, 3, 5, 7));
                }
            }
        }
    };

    // partial[level * MIXED + head * HEAD_SIZE + d]: two digits' part of the sum over the split's visible keys
    // of weight * value. Its reader must pass a barrier first.
    SIMT_DEVICE static void mix(const uint32_t* factors, const float* most, const Reader<S>& reader,
                                Values& values, float* partial) {
        const Pick pick;
        byte_unit::Unit product;
        SIMT_UNROLL
        for (int pass = 0; pass < PASSES; ++pass) {
            const int block = pass * WAVES + simt::wave();
            if (BLOCKS % WAVES != 0 && block >= BLOCKS) break;
            int32_t d[TILES][ELEMENTS][2 * byte_unit::PAIRS];
            SIMT_UNROLL
            for (int i = 0; i < TILES * ELEMENTS * 2 * byte_unit::PAIRS; ++i) (&d[0][0][0])[i] = 0;
            SIMT_UNROLL
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                uint32_t columns[ELEMENTS][byte_unit::WORDS];
                values.columns(chunk, columns);
                SIMT_UNROLL
                for (int tile = 0; tile < TILES; ++tile) {
                    const int head = simt::min(tile * byte_unit::HEADS + byte_unit::row_head(0), PITCH - 1);
                    const uint32_t* source = factors + (block * PITCH + head) * SPLIT_KEYS +
                                             chunk * byte_unit::DEPTH + byte_unit::part() * KEYS;
                    uint32_t rows[byte_unit::ROWS][byte_unit::WORDS];
                    SIMT_UNROLL
                    for (int w = 0; w < byte_unit::WORDS; ++w) pick(simt::load16(source + 4 * w), rows, w);
                    SIMT_UNROLL
                    for (int i = 0; i < ELEMENTS; ++i) product.multiply_add(d[tile][i], rows, columns[i]);
                }
            }
            if (pass + 1 < PASSES && block + WAVES < BLOCKS) {
                values.template load<false>(reader, block + WAVES);
            }
            const Scale units = units_of(most, block);
            SIMT_UNROLL
            for (int tile = 0; tile < TILES; ++tile) {
                SIMT_UNROLL
                for (int p = 0; p < byte_unit::PAIRS; ++p) {
                    const int head = tile * byte_unit::HEADS + byte_unit::pair_head(p);
                    const int level = byte_unit::pair_level(p);
                    float mixed[ELEMENTS];
                    SIMT_UNROLL
                    for (int i = 0; i < ELEMENTS; ++i) {
                        mixed[i] = static_cast<float>(byte_unit::pair(d[tile][i], p)) * units.unit(level);
                    }
                    float* target = partial + level * MIXED + head * HEAD_SIZE + block * kv::BLOCK;
                    if (HEADS % byte_unit::HEADS == 0 || head < HEADS) {
                        put<ELEMENTS>(mixed, target + byte_unit::pair_column(p) * ELEMENTS);
                    }
                }
            }
        }
    }

    SIMT_DEVICE static float value(const float* partial, int i) { return partial[i] + partial[MIXED + i]; }
};

}  // namespace attention
