// What the delta net's recurrence reads: convolved channels, unit keys and queries, decay and beta.
#include "flow.h"
#include "numeric.h"

// Causal depthwise convolution over the tokens, then SiLU. One thread per channel walks the chunk;
// `tail`, per sequence (taps - 1, channels), holds the inputs before it, oldest first, and is
// replaced by its last. x, y: `count` rows of (channels) per sequence; kernel (channels, taps).
// Grid: (ceil(channels / block), sequences).
SIMT_KERNEL(convolve, const float* x, const float* kernel, float* tail, float* y,
            const int32_t* step, int32_t channels, int32_t count, int32_t taps) {
    const int channel = simt::block_x() * SIMT_BLOCK + simt::thread();
    if (channel >= channels) return;
    const int history = taps - 1;
    const int first = simt::block_y() * count;
    x += static_cast<int64_t>(first) * channels;
    y += static_cast<int64_t>(first) * channels;
    tail += static_cast<int64_t>(flow::sequence(step, first)) * history * channels;
    // Input at token t of the chunk; negative t is history.
    for (int64_t t = 0; t < count; ++t) {
        float sum = 0.0f;
        for (int tap = 0; tap < taps; ++tap) {
            const int64_t at = t + tap - history;
            const float value = at < 0 ? tail[(at + history) * channels + channel]
                                       : x[at * channels + channel];
            sum = simt::fma(value, kernel[static_cast<int64_t>(channel) * taps + tap], sum);
        }
        y[t * channels + channel] = numeric::silu(sum);
    }
    // Ascending, so that a chunk shorter than the history shifts it without overtaking itself.
    for (int64_t i = 0; i < history; ++i) {
        const int64_t at = count - history + i;
        tail[i * channels + channel] = at < 0 ? tail[(at + history) * channels + channel]
                                              : x[at * channels + channel];
    }
}

// y = x / sqrt(sum(x^2) + epsilon) / divisor per head; x's rows are x_stride apart, y is
// (count, heads, size). One wave per head. Grid: (heads, count).
SIMT_KERNEL(unit_heads, const float* x, float* y, int32_t size, int32_t x_stride, float epsilon,
            float divisor) {
    const float* source = x + static_cast<int64_t>(simt::block_y()) * x_stride +
                          static_cast<int64_t>(simt::block_x()) * size;
    float* target = y + (static_cast<int64_t>(simt::block_y()) * simt::grid_x() + simt::block_x()) *
                            size;
    float squares = 0.0f;
    for (int i = simt::lane(); i < size; i += SIMT_WAVE) {
        squares = simt::fma(source[i], source[i], squares);
    }
    const float length = simt::sqrt(simt::wave_sum(squares) + epsilon);
    for (int i = simt::lane(); i < size; i += SIMT_WAVE) target[i] = source[i] / length / divisor;
}

// beta = sigmoid(beta) and log_decay = softplus(alpha + bias) * a for rows of `heads`.
// Grid: ceil(count / block), count = tokens * heads.
SIMT_KERNEL(delta_gates, const float* alpha, const float* bias, const float* a, float* beta,
            float* log_decay, int32_t count, int32_t heads) {
    const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
    if (i >= count) return;
    beta[i] = numeric::sigmoid(beta[i]);
    log_decay[i] = numeric::softplus(alpha[i] + bias[i % heads]) * a[i % heads];
}
