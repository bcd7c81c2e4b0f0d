// byte_unit.h for the CPU runtime: each lane computes its own sums, laid out as on gfx12.
#pragma once
#include "simt.h"

namespace byte_unit {

// The lanes of a wave show each other their operands in two turns: a turn's memory is written again only
// after every lane has passed the other turn's meeting, so one meeting a product is enough.
struct Unit {
  static constexpr int LINES = 16, OWN = DEPTH / PARTS;
  static constexpr int TURN = 2 * LINES * DEPTH;
  int8_t* shown;  // this wave's: rows, then columns, of two turns
  int turn = 0;
  SIMT_DEVICE Unit() {
    SIMT_SHARED(int8_t, memory, SIMT_BLOCK / SIMT_WAVE * 2 * TURN);
    shown = memory + simt::wave() * 2 * TURN;
  }
  SIMT_DEVICE void multiply_add(int32_t (&d)[2 * PAIRS], const uint32_t (&rows)[ROWS][OWN / 4],
                                const uint32_t (&columns)[OWN / 4]) {
    int8_t* const row_at = shown + turn * TURN;
    int8_t* const column_at = row_at + LINES * DEPTH;
    const int at = column() * DEPTH + part() * OWN;
    for (int i = 0; i < OWN; ++i) {
      row_at[at + i] = static_cast<int8_t>(rows[0][i / 4] >> i % 4 * 8);
      column_at[at + i] = static_cast<int8_t>(columns[i / 4] >> i % 4 * 8);
    }
    simt::wave_sync();
    for (int i = 0; i < 2 * PAIRS; ++i) {
      const int8_t* a = row_at + (part() * 2 * PAIRS + i) * DEPTH;
      const int8_t* b = column_at + column() * DEPTH;
      for (int k = 0; k < DEPTH; ++k) d[i] += a[k] * b[k];
    }
    turn ^= 1;
  }
};

}  // namespace byte_unit
