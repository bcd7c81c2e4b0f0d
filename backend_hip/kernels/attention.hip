// Attention in two shapes with the arithmetic of attention.h: `attention_rows` for consecutive rows of one
// sequence, which share each key that is read; `attention_split` for rows of any sequences, with a block for
// each split, so that few rows with long contexts fill a GPU.
#include "attention.h"
#include "attention_merge.h"

namespace attention {

constexpr int ROWS = ROWS_PER_BLOCK;
// Blocks that a multiprocessor holds: loads of one hide behind the sums of another. As many as there are
// registers for: one that goes through memory costs more than a block brings.
constexpr bool FEW_REGISTERS = K::SCALED && V::SCALED && HEADS <= 4 && HEAD_SIZE <= 128;
constexpr int RESIDENT = K_TYPE == 0 || V_TYPE == 0 || HEAD_SIZE > 128 ? 3 : FEW_REGISTERS ? 5 : 4;
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
    SIMT_SHARED(uint32_t, staged, (Scores::STAGED ? ROWS : 1) * Scores::QUERY);
    SIMT_SHARED(float, parts, PARTS);  // of scores, later of mixed values
    SIMT_SHARED(uint32_t, factors, Mix::FACTORS);
    SIMT_SHARED(float, most, Mix::MOST);
    SIMT_SHARED(float, maxima, WAVES * PITCH);
    SIMT_SHARED(float, sums, WAVES * PITCH);
    SIMT_SHARED(float, held, ROWS * MIXED);  // merged values
    SIMT_SHARED(Merge, merges, ROWS * HEADS);
    const int heads = kv_heads * GROUP;
    const int first_row = simt::block_y() * ROWS;
    const int rows = simt::min(ROWS, count - first_row);

    for (int i = simt::thread(); i < rows * MIXED; i += SIMT_BLOCK) held[i] = 0.0f;
    for (int i = simt::thread(); i < rows * HEADS; i += SIMT_BLOCK) merges[i].clear();
    if constexpr (Scores::STAGED) {
        for (int row = 0; row < rows; ++row) {
            Scores::stage(queries(q, first_row + row, heads), head_count(), staged + row * Scores::QUERY);
        }
        simt::sync();
    }

    const auto seen_of = [&](int row) { return seen_by(step, first_row + row, window); };
    const int end = seen_of(rows - 1).end;
    for (int base = seen_of(0).first / SPLIT_KEYS * SPLIT_KEYS; base < end; base += SPLIT_KEYS) {
        for (int row = 0; row < rows; ++row) {
            const Seen seen = seen_of(row);
            if (!seen.any(base, SPLIT_KEYS)) continue;
            // The same for all rows. Read once, all addresses of a split would be kept over the rows, in
            // more registers than there are.
            const int64_t start = flow::cache_start(step, first_row + row);
            const Side<K> key_side(keys, start, kv_head(), kv_heads, cache_rows);
            const Side<V> value_side(values, start, kv_head(), kv_heads, cache_rows);
            const KeyReader key_reader(key_side, base, seen);
            const ValueReader value_reader(value_side, base, seen);
            Softmax softmax;
            softmax.open(value_reader);
            Scores::Keys key_stream;
            key_stream.open(key_reader);
            Scores::score(queries(q, first_row + row, heads), head_count(),
                          staged + (Scores::STAGED ? row : 0) * Scores::QUERY, key_reader, key_stream, part_at,
                          parts);
            simt::sync();
            Mix::Values value_stream;  // on their way while the weights are made
            value_stream.open(value_reader);
            softmax.read(parts, scale, maxima, most);
            simt::sync();
            softmax.soften(maxima, most, factors, sums);
            simt::sync();
            for (int head = simt::thread(); head < HEADS; head += SIMT_BLOCK) {
                merges[row * HEADS + head].take(Softmax::maximum(maxima, head), Softmax::total(sums, head));
            }
            Mix::mix(factors, most, value_reader, value_stream, parts);
            simt::sync();
            for (int i = simt::thread(); i < MIXED; i += SIMT_BLOCK) {
                const Merge& merge = merges[row * HEADS + i / HEAD_SIZE];
                held[row * MIXED + i] = merge.value(held[row * MIXED + i], Mix::value(parts, i));
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
// and goes to `out`. Grid: (kv_heads * HEAD_PASSES, rows * splits), a row's splits side by side.
SIMT_KERNEL_RESIDENT(attention::RESIDENT, attention_split, const float* q, const attention::K::Element* keys,
                     const attention::V::Element* values, float* out, float* partials,
                     const int32_t* step, int32_t splits, int32_t kv_heads, int32_t cache_rows,
                     int32_t window, float scale) {
    using namespace attention;
    SIMT_SHARED(uint32_t, staged, Scores::QUERY);
    SIMT_SHARED(float, parts, PARTS);  // of scores, later of mixed values
    SIMT_SHARED(uint32_t, factors, Mix::FACTORS);
    SIMT_SHARED(float, most, Mix::MOST);
    SIMT_SHARED(float, maxima, WAVES * PITCH);
    SIMT_SHARED(float, sums, WAVES * PITCH);
    const int heads = kv_heads * GROUP;
    const int row = simt::block_y() / splits;
    const int split = simt::block_y() % splits;
    const int base = split * SPLIT_KEYS;
    const simt::Quad fields = flow::fields(step, row);  // one wait for both
    const Seen seen = seen_from(static_cast<int32_t>(fields.word[flow::POSITION]), window);
    const int64_t start = static_cast<int32_t>(fields.word[flow::CACHE]);
    const bool whole = splits > 1 || seen.end <= SPLIT_KEYS;
    if (!seen.any(base, SPLIT_KEYS) && whole) return;
    const Side<K> key_side(keys, start, kv_head(), kv_heads, cache_rows);
    const Side<V> value_side(values, start, kv_head(), kv_heads, cache_rows);

    const KeyReader key_reader(key_side, base, seen);
    const ValueReader value_reader(value_side, base, seen);
    Scores::Keys key_stream;
    key_stream.open(key_reader);
    Softmax softmax;
    softmax.open(value_reader);
    if constexpr (Scores::STAGED) {
        Scores::stage(queries(q, row, heads), head_count(), staged);
        simt::sync();
    }
    Scores::score(queries(q, row, heads), head_count(), staged, key_reader, key_stream, part_at, parts);
    Mix::Values value_stream;  // on their way while the weights are made
    value_stream.open(value_reader);
    simt::sync();
    softmax.read(parts, scale, maxima, most);
    simt::sync();
    softmax.soften(maxima, most, factors, sums);
    simt::sync();
    Mix::mix(factors, most, value_reader, value_stream, parts);
    simt::sync();

    for (int i = simt::thread(); i < head_count() * HEAD_SIZE; i += SIMT_BLOCK) {
        const int head = i / HEAD_SIZE;
        const float value = Mix::value(parts, i);
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
}
