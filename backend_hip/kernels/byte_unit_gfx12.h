// Where gfx12's matrix unit has rows, columns and sums of a product of bytes: byte_unit_cpu.h lays them out alike.
#pragma once
#include "simt.h"

namespace byte_unit {

constexpr int COLUMNS = 16;
constexpr int PARTS = 2;
constexpr int ROWS = 1;
constexpr int PAIR_COLUMNS = 1;
constexpr int PAIRS = 4;

SIMT_DEVICE int part() { return simt::lane() / 16 % 2; }
SIMT_DEVICE int row_head(int) { return simt::lane() % 16 / 4; }
SIMT_DEVICE int row_digit(int) { return 3 - simt::lane() % 4; }
SIMT_DEVICE int column() { return simt::lane() % 16; }

SIMT_DEVICE int32_t pair(const int32_t (&d)[2 * PAIRS], int p) { return d[2 * p] * 256 + d[2 * p + 1]; }
SIMT_DEVICE int pair_head(int p) { return part() * 2 + p / 2; }
SIMT_DEVICE int pair_level(int p) { return p % 2; }
SIMT_DEVICE int pair_column(int) { return column(); }

}  // namespace byte_unit
