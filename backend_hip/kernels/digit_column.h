// One activation column as digits in block-shared memory, and its products with weights of the K formats.
//
// This is the arithmetic of the path digits. Products of bytes are exact; a group's sum becomes a float (digits.h)
// and joins a lane's chain, then its offset times the group's activations. Lane l takes part l % 4 of super-blocks
// l / 4, l / 4 + WAVE / 4, ...; nothing that an architecture chooses changes a bit.
#pragma once
#include "digit_formats.h"
#include "digits.h"
#include "dot.h"

#if !defined(AHEAD)
#error "digit_column.h: define AHEAD, the steps whose weights are on their way"
#endif

namespace digit_column {

using digit_formats::PARTS;
using digit_formats::RUN;
using digit_formats::RUNS_OF_PART;
using digit_formats::SUPER;

constexpr int BLOCK = 32;  // activations with a unit in common: two runs
constexpr int SUPERS = SIMT_WAVE / PARTS;  // super-blocks that a wave takes at a time

// Words of a super-block's digits: a run's digit is 16 bytes. The runs that four lanes read together are
// neighbours, and super-blocks lie half of all banks apart.
constexpr int ROW = PARTS * 4;
constexpr int STRIDE = digits::COUNT * RUNS_OF_PART * ROW + 16;
SIMT_DEVICE int place(int run) { return run % RUNS_OF_PART * ROW + run / RUNS_OF_PART * 4; }
constexpr int DIGIT = RUNS_OF_PART * ROW;  // words from a digit to the next

// Of each block of 32: what its lowest digit counts; the sums of its first run, its second and both.
struct Beside {
    float unit;
    float sum[3];
};

struct Columns {
    uint32_t* words;
    simt::Quad* beside;

    template <int ELEMENTS>
    SIMT_DEVICE static Columns make() {
        SIMT_SHARED(uint32_t, words, ELEMENTS / SUPER * STRIDE);
        SIMT_SHARED(simt::Quad, beside, ELEMENTS / BLOCK);
        return {words, beside};
    }

    // Elements `begin` to `end`, whole super-blocks, a run by each thread. All threads of the block take part;
    // `four` as for staged::fill.
    template <class Four>
    SIMT_DEVICE void fill(int begin, int end, const Four& four) const {
        const int runs = (end - begin) / RUN;
        for (int base = 0; base < runs; base += SIMT_BLOCK) {
            const bool inside = base + simt::thread() < runs;
            const int run = inside ? base + simt::thread() : simt::thread() % 2;
            float x[4][4];
            uint32_t largest = 0;
            SIMT_UNROLL
            for (int i = 0; i < 4; ++i) {
                four(0, begin + run * RUN + 4 * i, x[i]);
                SIMT_UNROLL
                for (int j = 0; j < 4; ++j) largest = digits::larger(largest, x[i][j]);
            }
            const uint32_t other = simt::shuffle_xor(largest, 1);
            const digits::Scale scale(other > largest ? other : largest);
            simt::Quad quad[digits::COUNT];
            int32_t sums[digits::COUNT] = {0, 0, 0};
            SIMT_UNROLL
            for (int i = 0; i < 4; ++i) {
                uint32_t number[4], word[digits::COUNT];
                SIMT_UNROLL
                for (int j = 0; j < 4; ++j) number[j] = scale.digits(x[i][j]);
                digits::by_digit(number, word);
                SIMT_UNROLL
                for (int d = 0; d < digits::COUNT; ++d) {
                    quad[d].word[i] = word[d];
                    sums[d] = simt::dot4(word[d], digits::ONES, sums[d]);
                }
            }
            const float unit = scale.unit();
            const float own = digits::value(sums, unit), second = simt::shuffle_xor(own, 1);
            if (!inside) continue;
            uint32_t* to = words + run / (SUPER / RUN) * STRIDE + place(run % (SUPER / RUN));
            SIMT_UNROLL
            for (int d = 0; d < digits::COUNT; ++d) simt::store16(to + d * DIGIT, quad[d]);
            if (run % 2 == 0) {
                const simt::Quad bits = {{simt::bits(unit), simt::bits(own), simt::bits(second),
                                          simt::bits(own + second)}};
                simt::store16(beside + run / 2, bits);
            }
        }
    }
};

// As dot::Stream, for one column. The bytes of AHEAD steps are on their way at a time.
template <class F, int ROWS>
struct Stream {
    using Q = digit_formats::Quants<F::TYPE>;
    static_assert(STAGE % (AHEAD * SUPERS * SUPER) == 0, "a chunk begins with the first slot");

    const typename F::Block* row[ROWS];
    typename Q::Unit data[AHEAD][ROWS];

    SIMT_DEVICE static int part() { return simt::lane() % PARTS; }
    SIMT_DEVICE static int first() { return simt::lane() / PARTS; }
    SIMT_DEVICE void load(int slot, int super, int columns) {
        if (super * SUPER >= columns) return;
        SIMT_UNROLL
        for (int r = 0; r < ROWS; ++r) data[slot][r] = Q::load(row[r][super], part());
    }
    SIMT_DEVICE void start(int columns) {
        SIMT_UNROLL
        for (int slot = 0; slot < AHEAD; ++slot) load(slot, first() + slot * SUPERS, columns);
    }

    // One step; `place_of` is the super-block's number in the chunk.
    SIMT_DEVICE static void add_unit(const typename Q::Unit (&unit)[ROWS], int place_of, const Columns& x,
                                     float (&sums)[ROWS][1]) {
        const uint32_t* words = x.words + place_of * STRIDE;
        SIMT_UNROLL
        for (int group = 0; group < RUNS_OF_PART / Q::RUNS; ++group) {
            int32_t found[ROWS][digits::COUNT];
            SIMT_UNROLL
            for (int r = 0; r < ROWS; ++r) {
                SIMT_UNROLL
                for (int d = 0; d < digits::COUNT; ++d) found[r][d] = 0;
            }
            SIMT_UNROLL
            for (int i = group * Q::RUNS; i < (group + 1) * Q::RUNS; ++i) {
                simt::Quad quad[digits::COUNT];
                SIMT_UNROLL
                for (int d = 0; d < digits::COUNT; ++d) {
                    quad[d] = simt::load16(words + place(Q::run(part(), i)) + d * DIGIT);
                }
                SIMT_UNROLL
                for (int w = 0; w < 4; ++w) {
                    SIMT_UNROLL
                    for (int r = 0; r < ROWS; ++r) {
                        const uint32_t quants = Q::quants(unit[r], part(), i, w);
                        SIMT_UNROLL
                        for (int d = 0; d < digits::COUNT; ++d) {
                            found[r][d] = simt::dot4(quants, quad[d].word[w], found[r][d]);
                        }
                    }
                }
            }
            const int block = place_of * (SUPER / BLOCK) + Q::run(part(), group * Q::RUNS) / 2;
            const simt::Quad beside = simt::load16(x.beside + block);
            const float scale = simt::from_bits(beside.word[0]);
            const int which = Q::sum(part());
            const float sum = simt::from_bits(which == 0 ? beside.word[1] : which == 1 ? beside.word[2] : beside.word[3]);
            SIMT_UNROLL
            for (int r = 0; r < ROWS; ++r) {
                const digit_formats::Affine w = Q::affine(unit[r], part(), group);
                sums[r][0] = simt::fma(w.factor, digits::value(found[r], scale), sums[r][0]);
                sums[r][0] = simt::fma(-w.offset, sum, sums[r][0]);
            }
        }
    }

    // Over the elements from `begin` to `end`, as dot::Stream::add.
    SIMT_DEVICE void add(const Columns& x, int columns, int begin, int end, int, float (&sums)[ROWS][1]) {
        const int origin = begin / SUPER;
        for (int super = origin + first(); super * SUPER < end; super += AHEAD * SUPERS) {
            SIMT_UNROLL
            for (int slot = 0; slot < AHEAD; ++slot) {
                const int own = super + slot * SUPERS;
                if (own * SUPER >= end) break;
                add_unit(data[slot], own - origin, x, sums);
                load(slot, own + AHEAD * SUPERS, columns);
            }
        }
    }
};

}  // namespace digit_column
