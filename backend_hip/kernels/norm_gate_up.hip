// inner = activation(W_gate n) * (W_up n) with n = rms_norm(x), in one launch for one column: a wave
// takes the same row of both matrices.
#include "numeric.h"
#include "one_column.h"
#include "rms.h"

#ifndef ACTIVATION
#error "norm_gate_up.hip: define ACTIVATION (0: SiLU, 1: GELU in its tanh form)"
#endif
static_assert(ROWS_PER_WAVE == 2, "one row of each matrix");
using F = formats::Weights;

struct Pair {
    one_column::Stream<F> stream;
    float* y;
    int index;
    int rows;
    SIMT_DEVICE void start(int columns) { stream.start(columns); }
    SIMT_DEVICE void add(const one_column::Columns& x, int columns, int begin, int end,
                         one_column::Sums& sums) {
        stream.add(x, columns, begin, end, 1, sums);
    }
    SIMT_DEVICE void store(const one_column::Sums& sums) const {
        if (index >= rows) return;
#if ACTIVATION == 0
        y[index] = numeric::silu(sums[0][0]) * sums[1][0];
#else
        y[index] = numeric::gelu_tanh(sums[0][0]) * sums[1][0];
#endif
    }
};

// x, norm_weight (columns); inner (rows). Grid: any number of blocks.
ONE_COLUMN_KERNEL(norm_gate_up, const float* x, const float* norm_weight, const uint8_t* gate,
            const uint8_t* up, float* inner, int32_t rows, int32_t columns, float epsilon) {
    one_column::products(
        one_column::groups_of(2 * rows), columns,
        [=](int first) {
            // A wave past the end repeats the last row and stores nothing.
            const int row = simt::min(first / 2, rows - 1);
            Pair pair;
            pair.stream.row[0] = formats::row_at(gate, row, columns);
            pair.stream.row[1] = formats::row_at(up, row, columns);
            pair.y = inner;
            pair.index = first / 2;
            pair.rows = rows;
            return pair;
        },
        [=] {
            one_column::soon(norm_weight, columns);
            const float squares = rms::squares_of(x, columns);
            const float scale = rms::inverse_rms(squares, columns, epsilon);
            return one_column::Normed<F>{x, norm_weight, columns, scale};
        });
}
