// Weights as halves in device memory, for products that use each of them many times.
#include "formats_tile.h"

// halves (taken, stride): rows `first` .. first + taken - 1 of a matrix of `columns` columns, zero from
// `columns` on. stride is a multiple of tile::UNIT. Grid: ceil(taken * stride / UNIT / SIMT_BLOCK).
SIMT_KERNEL(weights_to_half, const uint8_t* weights, uint16_t* halves, int32_t first, int32_t taken,
            int32_t columns, int32_t stride) {
    const int units = stride / tile::UNIT;
    const int64_t index = static_cast<int64_t>(simt::block_x()) * SIMT_BLOCK + simt::thread();
    const int row = static_cast<int>(static_cast<uint32_t>(index) / static_cast<uint32_t>(units));
    if (row >= taken) return;
    const int k = static_cast<int>(index - static_cast<int64_t>(row) * units) * tile::UNIT;
    tile::Unit unit;
    unit.fetch(formats::row_at(weights, first + row, columns), k, columns);
    unit.unpack(columns, halves + static_cast<int64_t>(row) * stride + k);
}
