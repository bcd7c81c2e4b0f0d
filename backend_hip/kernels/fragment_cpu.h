// fragment.h for the CPU runtime: each lane computes its own results, laid out as on gfx12. A result is one
// chain of fma in ascending k.
#pragma once
#include "simt.h"

namespace fragment {

struct Rows { float v[16][8]; };  // by k: the eight rows that this lane's results need
struct Columns { float v[16]; };

struct Sums {
  float v[SUMS];
  SIMT_DEVICE float value(int i) const { return v[i]; }
};

SIMT_DEVICE void load(Rows& to, const uint16_t* lines, int stride) {
  for (int i = 0; i < 8; ++i) {
    const uint16_t* line = lines + row(i) * stride;
    for (int k = 0; k < 16; ++k) to.v[k][i] = simt::half_to_float(line[k]);
  }
}
SIMT_DEVICE void load(Columns& to, const uint16_t* lines, int stride) {
  const uint16_t* line = lines + column(0) * stride;
  for (int k = 0; k < 16; ++k) to.v[k] = simt::half_to_float(line[k]);
}
template <class Layout>
SIMT_DEVICE void load(Rows& to, const uint16_t* lines, int quad) {
  for (int i = 0; i < 8; ++i)
    for (int k = 0; k < 16; ++k)
      to.v[k][i] = simt::half_to_float(lines[Layout::place(row(i), quad + k / 8) + k % 8]);
}
template <class Layout>
SIMT_DEVICE void load(Columns& to, const uint16_t* lines, int quad) {
  for (int k = 0; k < 16; ++k)
    to.v[k] = simt::half_to_float(lines[Layout::place(column(0), quad + k / 8) + k % 8]);
}
SIMT_DEVICE void zero(Sums& d) {
  for (int i = 0; i < SUMS; ++i) d.v[i] = 0.0f;
}
SIMT_DEVICE void multiply_add(Sums& d, const Rows& a, const Columns& b) {
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < SUMS; ++i) d.v[i] = simt::fma(a.v[k][i], b.v[k], d.v[i]);
}

// The lanes of a wave show each other their operands in two turns: a turn's memory is written again only
// after every lane has passed the other turn's meeting, so one meeting a product is enough.
struct Unit {
  static constexpr int SIDE = 16, TURN = 2 * SIDE * SIDE;
  float* shown;  // this wave's: rows and columns of two turns, each by k
  int turn = 0;
  SIMT_DEVICE Unit() {
    SIMT_SHARED(float, memory, SIMT_BLOCK / SIMT_WAVE * 2 * TURN);
    shown = memory + simt::wave() * 2 * TURN;
  }
  SIMT_DEVICE void multiply_add(float (&d)[SUMS], const Own& rows, const Own& columns) {
    float* const row_at = shown + turn * TURN;
    float* const column_at = row_at + SIDE * SIDE;
    for (int i = 0; i < 2 * WORDS; ++i) {
      const int at = (2 * WORDS * part() + i) * SIDE + line(0), shift = i % 2 * 16;
      row_at[at] = simt::half_to_float(static_cast<uint16_t>(rows.word[0][i / 2] >> shift));
      column_at[at] = simt::half_to_float(static_cast<uint16_t>(columns.word[0][i / 2] >> shift));
    }
    simt::wave_sync();
    for (int k = 0; k < SIDE; ++k)
      for (int i = 0; i < SUMS; ++i)
        d[i] = simt::fma(row_at[k * SIDE + line(0)], column_at[k * SIDE + own_column(i)], d[i]);
    turn ^= 1;
  }
};

}  // namespace fragment
