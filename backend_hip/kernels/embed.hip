// x[t] = scale * table[token t]: one row of the embedding table per token, dequantised.
#include "flow.h"
#include "formats.h"

// table (vocabulary, width) blocks; x (count, width). Grid: (ceil(width / 8 / block), count).
SIMT_KERNEL(embed, const uint8_t* table, const int32_t* step, float* x, int32_t width,
            float scale) {
    const int k = (simt::block_x() * SIMT_BLOCK + simt::thread()) * formats::STRIPE;
    if (k >= width) return;
    const int token = simt::block_y();
    float w[formats::STRIPE];
    formats::decode(formats::row_at(table, flow::token(step, token), width), k, width, w);
    SIMT_UNROLL
    for (int i = 0; i < formats::STRIPE; ++i) {
        if (k + i < width) x[static_cast<int64_t>(token) * width + k + i] = w[i] * scale;
    }
}
