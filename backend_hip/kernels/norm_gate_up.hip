// inner = activation(W_gate n) * (W_up n) with n = rms_norm(x), in one launch for one column: a wave
// takes the same row of both matrices.
#include "rms.h"
#include "numeric.h"
#include "one_column.h"

#ifndef ACTIVATION
#error "norm_gate_up.hip: define ACTIVATION (0: SiLU, 1: GELU in its tanh form)"
#endif
static_assert(ROWS_PER_WAVE == 2, "one row of each matrix");

struct Pair {
    const formats::Block* row[2];
    int index;
    int rows;
    float* y;
    SIMT_DEVICE void add(const staged::Columns& x, int columns, int begin, int end,
                         float (&sums)[2][1]) const {
        dot::add_rows<formats::Weights>(row, x, columns, begin, end, 1, sums);
    }
    SIMT_DEVICE void store(const float (&sums)[2][1]) const {
        if (index >= rows) return;
#if ACTIVATION == 0
        y[index] = numeric::silu(sums[0][0]) * sums[1][0];
#else
        y[index] = numeric::gelu_tanh(sums[0][0]) * sums[1][0];
#endif
    }
};

// x, norm_weight (columns); inner (rows). Grid: any number of blocks.
SIMT_KERNEL(norm_gate_up, const float* x, const float* norm_weight, const uint8_t* gate,
            const uint8_t* up, float* inner, int32_t rows, int32_t columns, float epsilon) {
    SIMT_SHARED(float, stage, STAGE);
    const float scale = rms::inverse_rms(rms::squares_of(x, columns), columns, epsilon);
    one_column::products(
        stage, one_column::groups_of(2 * rows), columns,
        [=](int first) {
            const int index = first / 2;
            const int row = simt::min(index, rows - 1);
            return Pair{{formats::row_at(gate, row, columns), formats::row_at(up, row, columns)},
                        index, rows, inner};
        },
        one_column::Normed{x, norm_weight, scale});
}
