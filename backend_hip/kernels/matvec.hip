// y = W x for one column, K-parallel: a wave takes ROWS_PER_WAVE rows, lanes stripe K. The decode
// projection; `matvec_add` adds the result to the residual stream.
#include "one_column.h"

using F = formats::Weights;

template <bool ADD>
struct Rows {
    one_column::Stream<F> stream;
    float* y;
    int first;
    int rows;
    SIMT_DEVICE void start(int columns) { stream.start(columns); }
    SIMT_DEVICE void add(const one_column::Columns& x, int columns, int begin, int end,
                         one_column::Sums& sums) {
        stream.add(x, columns, begin, end, 1, sums);
    }
    SIMT_DEVICE void store(const one_column::Sums& sums) const {
        SIMT_UNROLL
        for (int r = 0; r < ROWS_PER_WAVE; ++r) {
            if (first + r < rows) y[first + r] = ADD ? y[first + r] + sums[r][0] : sums[r][0];
        }
    }
};

template <bool ADD>
SIMT_DEVICE void product(const uint8_t* weights, const float* x, float* y, int rows, int columns) {
    one_column::products(
        one_column::groups_of(rows), columns,
        [=](int first) {
            return Rows<ADD>{one_column::stream_of<F>(weights, first, rows, columns), y, first,
                             rows};
        },
        [=] { return one_column::Plain<F>{x, columns}; });
}

// weights (rows, columns) blocks; x (columns); y (rows). Grid: any number of blocks.
ONE_COLUMN_KERNEL(matvec, const uint8_t* weights, const float* x, float* y, int32_t rows,
            int32_t columns) {
    product<false>(weights, x, y, rows, columns);
}

// As matvec; y = y + W x.
ONE_COLUMN_KERNEL(matvec_add, const uint8_t* weights, const float* x, float* y, int32_t rows,
            int32_t columns) {
    product<true>(weights, x, y, rows, columns);
}
