// q, k, v = W_q n, W_k n, W_v n with n = rms_norm(x), in one launch for one column: the norm in the
// prologue, the three matrices' rows one after another. V may have a format of its own, V_FORMAT.
#include "one_column.h"
#include "rms.h"

#ifndef V_FORMAT
#error "norm_qkv.hip: define V_FORMAT (ggml type number of the V projection)"
#endif
using F = formats::Weights;
using V = formats::Format<V_FORMAT>;
constexpr bool MIXED = V_FORMAT != WEIGHT_FORMAT;

struct Rows {
    // Both are there, so that a wave's choice needs no memory; only one is started.
    one_column::Stream<F> stream;
    one_column::Stream<V> v_stream;
    float* y;
    int first;
    int rows;
    bool is_v;

    SIMT_DEVICE void start(int columns) {
        if (MIXED && is_v) v_stream.start(columns);
        else stream.start(columns);
    }
    SIMT_DEVICE void add(const one_column::Columns& x, int columns, int begin, int end,
                         one_column::Sums& sums) {
        if (MIXED && is_v) v_stream.add(x, columns, begin, end, 1, sums);
        else stream.add(x, columns, begin, end, 1, sums);
    }
    SIMT_DEVICE void store(const one_column::Sums& sums) const {
        SIMT_UNROLL
        for (int r = 0; r < ROWS_PER_WAVE; ++r) {
            if (first + r < rows) y[first + r] = sums[r][0];
        }
    }
};

SIMT_DEVICE Rows rows_of(const uint8_t* weights, float* y, int first, int rows, int columns,
                         bool is_v) {
    return Rows{one_column::stream_of<F>(weights, first, rows, columns),
                one_column::stream_of<V>(weights, first, rows, columns), y, first, rows, is_v};
}

// x, norm_weight (columns); q (q_rows), k and v (kv_rows). q_rows and kv_rows are multiples of
// ROWS_PER_WAVE, so that a wave's rows belong to one matrix. Grid: any number of blocks.
ONE_COLUMN_KERNEL(norm_qkv, const float* x, const float* norm_weight, const uint8_t* q_weights,
            const uint8_t* k_weights, const uint8_t* v_weights, float* q, float* k, float* v,
            int32_t q_rows, int32_t kv_rows, int32_t columns, float epsilon) {
    one_column::products(
        one_column::groups_of(q_rows + 2 * kv_rows), columns,
        [=](int first) {
            const int row = first - q_rows;
            const bool is_v = row >= kv_rows;
            if (row < 0) return rows_of(q_weights, q, first, q_rows, columns, false);
            if (!is_v) return rows_of(k_weights, k, row, kv_rows, columns, false);
            return rows_of(v_weights, v, row - kv_rows, kv_rows, columns, true);
        },
        [=] {
            one_column::soon(norm_weight, columns);
            const float squares = rms::squares_of(x, columns);
            const float scale = rms::inverse_rms(squares, columns, epsilon);
            return one_column::Normed<F>{x, norm_weight, columns, scale};
        });
}
