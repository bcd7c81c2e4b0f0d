// y = W x for one column, K-parallel: a wave takes ROWS_PER_WAVE rows, lanes stripe K. The decode
// projection; `matvec_add` adds the result to the residual stream.
#include "one_column.h"

struct Stored : one_column::MatrixRows<formats::Weights> {
    float* y;
    SIMT_DEVICE Stored(const uint8_t* weights, int first_row, int rows, int columns, float* target)
        : MatrixRows(weights, first_row, rows, columns), y(target) {}
    SIMT_DEVICE void store(const float (&sums)[ROWS_PER_WAVE][1]) const {
        SIMT_UNROLL
        for (int r = 0; r < ROWS_PER_WAVE; ++r) {
            if (first + r < rows) y[first + r] = sums[r][0];
        }
    }
};

struct Added : one_column::MatrixRows<formats::Weights> {
    float* y;
    SIMT_DEVICE Added(const uint8_t* weights, int first_row, int rows, int columns, float* target)
        : MatrixRows(weights, first_row, rows, columns), y(target) {}
    SIMT_DEVICE void store(const float (&sums)[ROWS_PER_WAVE][1]) const {
        SIMT_UNROLL
        for (int r = 0; r < ROWS_PER_WAVE; ++r) {
            if (first + r < rows) y[first + r] = y[first + r] + sums[r][0];
        }
    }
};

template <class Rows>
SIMT_DEVICE void product(const uint8_t* weights, const float* x, float* y, int rows, int columns) {
    SIMT_SHARED(float, stage, STAGE);
    one_column::products(
        stage, one_column::groups_of(rows), columns,
        [=](int first) { return Rows(weights, first, rows, columns, y); }, one_column::Plain{x});
}

// weights (rows, columns) blocks; x (columns); y (rows). Grid: any number of blocks.
SIMT_KERNEL(matvec, const uint8_t* weights, const float* x, float* y, int32_t rows,
            int32_t columns) {
    product<Stored>(weights, x, y, rows, columns);
}

// As matvec; y = y + W x.
SIMT_KERNEL(matvec_add, const uint8_t* weights, const float* x, float* y, int32_t rows,
            int32_t columns) {
    product<Added>(weights, x, y, rows, columns);
}
