// Attention in two shapes with the arithmetic of attention.h: `attention_rows` for consecutive rows of one
// sequence, which share each key that is read; `attention_split` for rows of any sequences, with a block for
// each split, so that few rows with long contexts fill a GPU.
#include "attention.h"
#include "attention_merge.h"

namespace attention {

constexpr int ROWS = ROWS_PER_BLOCK;
// Blocks that a multiprocessor holds: loads of one hide behind the sums of another.
constexpr int RESIDENT = K_TYPE == 0 || V_TYPE == 0 ? 3 : 4;
constexpr int RESIDENT_ROWS = 3;

// A NaN in place of a result that would lack keys: the grid is too small for the position.
SIMT_DEVICE float missing() { return simt::from_bits(0x7fc00000u); }

}  // namespace attention

// q, out (count, heads, HEAD_SIZE); keys, values: see kv_type.h. Rows are consecutive positions of one
// sequence. window 0: none; else keys at distance >= window are masked.
// Grid: (kv_heads * HEAD_PASSES, ceil(count / ROWS)).
SIMT_KERNEL_RESIDENT(attention::RESIDENT_ROWS, attention_rows, const float* q, const attention::K::Element* keys,
                     const attention::V::Element* values, float* out, const int32_t* step, int32_t count,
                     int32_t kv_heads, int32_t cache_rows, int32_t window, float scale) {
    using namespace attention;
    SIMT_SHARED(float, parts, SHARED);  // of scores, later of mixed values
    SIMT_SHARED(float, factors, FACTORS);
    SIMT_SHARED(float, maxima, WAVES * PITCH);
    SIMT_SHARED(float, sums, WAVES * PITCH);
    SIMT_SHARED(float, held, ROWS * MIXED);  // merged values
    SIMT_SHARED(Merge, merges, ROWS * HEADS);
    const int heads = kv_heads * GROUP;
    const int first_row = simt::block_y() * ROWS;
    const int rows = simt::min(ROWS, count - first_row);
    const int64_t start = flow::cache_start(step, first_row);
    const Side<K> key_side(keys, start, kv_head(), kv_heads, cache_rows);
    const Side<V> value_side(values, start, kv_head(), kv_heads, cache_rows);

    for (int i = simt::thread(); i < rows * MIXED; i += SIMT_BLOCK) held[i] = 0.0f;
    for (int i = simt::thread(); i < rows * HEADS; i += SIMT_BLOCK) merges[i].clear();

    const auto seen_of = [&](int row) { return seen_by(step, first_row + row, window); };
    const int end = seen_of(rows - 1).end;
    for (int base = seen_of(0).first / SPLIT_KEYS * SPLIT_KEYS; base < end; base += SPLIT_KEYS) {
        for (int row = 0; row < rows; ++row) {
            const Seen seen = seen_of(row);
            if (!seen.any(base, SPLIT_KEYS)) continue;
            const KeyReader key_reader(key_side, base, seen);
            const ValueReader value_reader(value_side, base, seen);
            Softmax softmax;
            softmax.open(value_reader);
            KeyStream key_stream;
            key_stream.open(key_reader);
            score(queries(q, first_row + row, heads), head_count(), key_reader, key_stream, parts);
            ValueStream value_stream;  // on their way while the weights are made
            value_stream.open(value_reader);
            simt::sync();
            softmax.read(parts, scale, maxima);
            simt::sync();
            softmax.soften(maxima, factors, sums);
            simt::sync();
            for (int head = simt::thread(); head < HEADS; head += SIMT_BLOCK) {
                merges[row * HEADS + head].take(Softmax::maximum(maxima, head), Softmax::total(sums, head));
            }
            mix(factors, value_reader, value_stream, parts);
            simt::sync();
            for (int i = simt::thread(); i < MIXED; i += SIMT_BLOCK) {
                const Merge& merge = merges[row * HEADS + i / HEAD_SIZE];
                held[row * MIXED + i] = merge.value(held[row * MIXED + i], mixed_value(parts, i));
            }
            simt::sync();  // `parts` are free again
        }
    }
    const int written = head_count() * HEAD_SIZE;
    for (int row = 0; row < rows; ++row) {
        float* target = out + (static_cast<int64_t>(first_row + row) * heads + first_head()) * HEAD_SIZE;
        for (int i = simt::thread(); i < written; i += SIMT_BLOCK) {
            target[i] = held[row * MIXED + i] / merges[row * HEADS + i / HEAD_SIZE].total;
        }
    }
}

// As above for rows of any sequences. partials: see attention_merge.h; with one split the result is final
// and goes to `out`. A row's splits are shared out between `blocks` blocks, each of which takes every
// `blocks`-th and asks for the keys of its next one while it mixes the values of the one before.
// Grid: (kv_heads * HEAD_PASSES, rows * blocks), a row's blocks side by side.
SIMT_KERNEL_RESIDENT(attention::RESIDENT, attention_split, const float* q, const attention::K::Element* keys,
                     const attention::V::Element* values, float* out, float* partials,
                     const int32_t* step, int32_t splits, int32_t blocks, int32_t kv_heads,
                     int32_t cache_rows, int32_t window, float scale) {
    using namespace attention;
    SIMT_SHARED(float, parts, SHARED);  // of scores, later of mixed values
    SIMT_SHARED(float, factors, FACTORS);
    SIMT_SHARED(float, maxima, WAVES * PITCH);
    SIMT_SHARED(float, sums, WAVES * PITCH);
    const int heads = kv_heads * GROUP;
    const int row = simt::block_y() / blocks;
    const simt::Quad fields = flow::fields(step, row);  // one wait for both
    const Seen seen = seen_from(static_cast<int32_t>(fields.word[flow::POSITION]), window);
    const int64_t start = static_cast<int32_t>(fields.word[flow::CACHE]);
    const bool whole = splits > 1 || seen.end <= SPLIT_KEYS;
    const int end = simt::min((seen.end - 1) / SPLIT_KEYS + 1, splits);
    int split = seen.first / SPLIT_KEYS + simt::block_y() % blocks;
    if (split >= end) return;
    const Side<K> key_side(keys, start, kv_head(), kv_heads, cache_rows);
    const Side<V> value_side(values, start, kv_head(), kv_heads, cache_rows);

    KeyStream key_stream;
    key_stream.open(KeyReader(key_side, split * SPLIT_KEYS, seen));
    for (; split < end; split += blocks) {
        const KeyReader key_reader(key_side, split * SPLIT_KEYS, seen);
        const ValueReader value_reader(value_side, split * SPLIT_KEYS, seen);
        Softmax softmax;
        softmax.open(value_reader);
        score(queries(q, row, heads), head_count(), key_reader, key_stream, parts);
        ValueStream value_stream;  // on their way while the weights are made
        value_stream.open(value_reader);
        simt::sync();
        softmax.read(parts, scale, maxima);
        const int next = split + blocks;
        if (next < end) key_stream.open(KeyReader(key_side, next * SPLIT_KEYS, seen));
        simt::sync();
        softmax.soften(maxima, factors, sums);
        simt::sync();
        mix(factors, value_reader, value_stream, parts);
        simt::sync();

        for (int i = simt::thread(); i < head_count() * HEAD_SIZE; i += SIMT_BLOCK) {
            const int head = i / HEAD_SIZE;
            const float value = mixed_value(parts, i);
            if (splits == 1) {
                Merge merge;
                merge.clear();
                merge.take(Softmax::maximum(maxima, head), Softmax::total(sums, head));
                const int64_t at = (static_cast<int64_t>(row) * heads + first_head()) * HEAD_SIZE + i;
                out[at] = whole ? merge.value(0.0f, value) / merge.total : missing();
                continue;
            }
            const int64_t at = partial_at(row, heads, first_head() + head, splits, split, HEAD_SIZE);
            partials[at + i % HEAD_SIZE] = value;
            if (i % HEAD_SIZE == 0) {
                partials[at + HEAD_SIZE] = Softmax::maximum(maxima, head);
                partials[at + HEAD_SIZE + 1] = Softmax::total(sums, head);
            }
        }
        simt::sync();  // `parts` are free again
    }
}
