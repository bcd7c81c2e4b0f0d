// Activations for matvec_packed.hip: to_half's halves and scales, laid out as packed.h says.
#include "pack_row.h"

// x (tokens, columns); to: packed.h, 16 tokens after the other; scales (tokens): what a result has to
// be multiplied by. columns is a multiple of 256. Grid: tokens.
SIMT_KERNEL(to_packed, const float* x, uint8_t* to, float* scales, int32_t columns) {
    using namespace packed;
    const int token = simt::block_x();
    const float* row = x + static_cast<int64_t>(token) * columns;
    const half_scale::Scale scale = half_scale::of(row, columns);
    if (simt::thread() == 0) scales[token] = scale.inverse;
    for (int n = simt::wave(); n < columns / K; n += WAVES) {
        float values[EACH];
        load_each(values, row + n * K + simt::lane() * EACH);
        pack_superblock(values, scale.factor, token, columns / K, n, to);
    }
}
