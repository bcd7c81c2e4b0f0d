// q, k, v = W_q n, W_k n, W_v n with n = rms_norm(x), in one launch for one column: the norm in the
// prologue, the three matrices' rows one after another. V may have a format of its own, V_FORMAT.
#include "rms.h"
#include "one_column.h"

#ifndef V_FORMAT
#error "norm_qkv.hip: define V_FORMAT (ggml type number of the V projection)"
#endif
using V = formats::Format<V_FORMAT>;

// ROWS_PER_WAVE rows of whichever matrix they belong to. A wave past the end repeats the last row
// and stores nothing: the block's barriers need it.
struct Rows {
    const uint8_t* weights;
    float* y;
    int first;
    int rows;
    bool is_v;

    template <class F>
    SIMT_DEVICE void add_as(const staged::Columns& x, int columns, int begin, int end,
                            float (&sums)[ROWS_PER_WAVE][1]) const {
        const typename F::Block* row[ROWS_PER_WAVE];
        SIMT_UNROLL
        for (int r = 0; r < ROWS_PER_WAVE; ++r) {
            row[r] = formats::row_of<F>(weights, simt::min(first + r, rows - 1), columns);
        }
        dot::add_rows<F>(row, x, columns, begin, end, 1, sums);
    }
    SIMT_DEVICE void add(const staged::Columns& x, int columns, int begin, int end,
                         float (&sums)[ROWS_PER_WAVE][1]) const {
        if (V_FORMAT != WEIGHT_FORMAT && is_v) add_as<V>(x, columns, begin, end, sums);
        else add_as<formats::Weights>(x, columns, begin, end, sums);
    }
    SIMT_DEVICE void store(const float (&sums)[ROWS_PER_WAVE][1]) const {
        SIMT_UNROLL
        for (int r = 0; r < ROWS_PER_WAVE; ++r) {
            if (first + r < rows) y[first + r] = sums[r][0];
        }
    }
};

// x, norm_weight (columns); q (q_rows), k and v (kv_rows). q_rows and kv_rows are multiples of
// ROWS_PER_WAVE, so that a wave's rows belong to one matrix. Grid: any number of blocks.
SIMT_KERNEL(norm_qkv, const float* x, const float* norm_weight, const uint8_t* q_weights,
            const uint8_t* k_weights, const uint8_t* v_weights, float* q, float* k, float* v,
            int32_t q_rows, int32_t kv_rows, int32_t columns, float epsilon) {
    SIMT_SHARED(float, stage, STAGE);
    const float scale = rms::inverse_rms(rms::squares_of(x, columns), columns, epsilon);
    one_column::products(
        stage, one_column::groups_of(q_rows + 2 * kv_rows), columns,
        [=](int first) {
            if (first < q_rows) return Rows{q_weights, q, first, q_rows, false};
            const int row = first - q_rows;
            if (row < kv_rows) return Rows{k_weights, k, row, kv_rows, false};
            return Rows{v_weights, v, row - kv_rows, kv_rows, true};
        },
        one_column::Normed{x, norm_weight, scale});
}
