// Elementwise sums, scales and gates of the residual stream and of what feeds it. In place where an
// argument is both input and output; grid: ceil(count / block) unless said otherwise.
#include "numeric.h"
#include "partial_sums.h"

SIMT_DEVICE int element() { return simt::block_x() * SIMT_BLOCK + simt::thread(); }

// y = a + b. y may be a or b.
SIMT_KERNEL(add, const float* a, const float* b, float* y, int32_t count) {
    const int i = element();
    if (i < count) y[i] = a[i] + b[i];
}

// x = x + bias for rows of `width`.
SIMT_KERNEL(add_bias, float* x, const float* bias, int32_t count, int32_t width) {
    const int i = element();
    if (i < count) x[i] = x[i] + bias[i % width];
}

// y = (a + b) * factor. y may be a or b.
SIMT_KERNEL(add_scaled, const float* a, const float* b, float* y, float factor, int32_t count) {
    const int i = element();
    if (i < count) y[i] = (a[i] + b[i]) * factor;
}

// x = x * factor.
SIMT_KERNEL(scale, float* x, float factor, int32_t count) {
    const int i = element();
    if (i < count) x[i] = x[i] * factor;
}

// x = cap * tanh(x / cap).
SIMT_KERNEL(soft_cap, float* x, float cap, int32_t count) {
    const int i = element();
    if (i < count) x[i] = cap * numeric::tanh(x[i] / cap);
}

// x = x * sigmoid(gate), one gate per element.
SIMT_KERNEL(sigmoid_gated, float* x, const float* gate, int32_t count) {
    const int i = element();
    if (i < count) x[i] = x[i] * numeric::sigmoid(gate[i]);
}

// x = x * sigmoid(gate), one gate per row of `width`.
SIMT_KERNEL(sigmoid_gated_rows, float* x, const float* gate, int32_t count, int32_t width) {
    const int i = element();
    if (i < count) x[i] = x[i] * numeric::sigmoid(gate[i / width]);
}

// Heads of [query, gate] pairs apart: both (rows, 2, head_size) -> q, gate (rows, head_size).
SIMT_KERNEL(split_gate, const float* both, float* q, float* gate, int32_t count,
            int32_t head_size) {
    const int i = element();
    if (i >= count) return;
    const int64_t pair = static_cast<int64_t>(i / head_size) * 2 * head_size + i % head_size;
    q[i] = both[pair];
    gate[i] = both[pair + head_size];
}

// y = the sum of `splits` arrays of `count`, one after another in `parts`.
SIMT_KERNEL(sum_parts, const float* parts, float* y, int32_t count, int32_t splits) {
    const int i = element();
    if (i < count) y[i] = partial_sum(parts, i, count, splits);
}
