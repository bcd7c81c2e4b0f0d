// fragment.h for the CPU runtime: each lane computes its own results, laid out as on gfx12. A result is one
// chain of fma in ascending k.
#pragma once
#include "simt.h"

namespace fragment {

struct Rows { float v[16][8]; };  // by k: the eight rows that this lane's results need
struct Columns { float v[16]; };

constexpr int SUMS = 8;
struct Sums {
  float v[SUMS];
  SIMT_DEVICE float value(int i) const { return v[i]; }
};

SIMT_DEVICE int row(int i) { return (simt::lane() / 16) * 8 + i; }
SIMT_DEVICE int column(int) { return simt::lane() % 16; }

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
SIMT_DEVICE void zero(Sums& d) {
  for (int i = 0; i < SUMS; ++i) d.v[i] = 0.0f;
}
SIMT_DEVICE void multiply_add(Sums& d, const Rows& a, const Columns& b) {
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < SUMS; ++i) d.v[i] = simt::fma(a.v[k][i], b.v[k], d.v[i]);
}

SIMT_DEVICE uint32_t halves(float low, float high) {
  return simt::float_to_half(low) | (static_cast<uint32_t>(simt::float_to_half(high)) << 16);
}

}  // namespace fragment
