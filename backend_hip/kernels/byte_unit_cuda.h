// byte_unit.h for NVIDIA: mma.sync.m16n8k32 (PTX ISA, "Matrix fragments for mma.m16n8k32").
#pragma once
#include "simt.h"

namespace byte_unit {

constexpr int COLUMNS = 8;
constexpr int PARTS = 4;
constexpr int ROWS = 2;
constexpr int PAIR_COLUMNS = 2;
constexpr int PAIRS = 2;

SIMT_DEVICE int part() { return simt::lane() % 4; }
SIMT_DEVICE int row_head(int) { return simt::lane() / 8; }
SIMT_DEVICE int row_digit(int i) { return 3 - simt::lane() / 4 % 2 * 2 - i; }
SIMT_DEVICE int column() { return simt::lane() / 4; }

SIMT_DEVICE int32_t pair(const int32_t (&d)[2 * PAIRS], int p) { return d[p] * 256 + d[p + 2]; }
SIMT_DEVICE int pair_head(int) { return simt::lane() / 8; }
SIMT_DEVICE int pair_level(int) { return simt::lane() / 4 % 2; }
SIMT_DEVICE int pair_column(int p) { return simt::lane() % 4 * 2 + p; }

struct Unit {
  SIMT_DEVICE void multiply_add(int32_t (&d)[2 * PAIRS], const uint32_t (&rows)[ROWS][2],
                                const uint32_t (&columns)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(rows[0][0]), "r"(rows[1][0]), "r"(rows[0][1]), "r"(rows[1][1]), "r"(columns[0]), "r"(columns[1]));
  }
};

}  // namespace byte_unit
