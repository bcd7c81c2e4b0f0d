// fragment.h for gfx12's WMMA (RDNA4 ISA, 7.12): lane l holds line l % 16, k = 8 (l / 16) + i of A and B, and
// of D column l % 16, rows 8 (l / 16) + i.
#pragma once
#include "simt.h"

#if SIMT_WAVE != 32
#error "fragment_amd.h: SIMT_WAVE must be 32, the layout of the w32 matrix instruction"
#endif

namespace fragment {

typedef _Float16 Half8 __attribute__((ext_vector_type(8)));
typedef float Float8 __attribute__((ext_vector_type(8)));

struct Lines { Half8 v; };
struct Rows : Lines {};
struct Columns : Lines {};

struct Sums {
  Float8 v;
  SIMT_DEVICE float value(int i) const { return v[i]; }
};

SIMT_DEVICE void load(Lines& to, const uint16_t* lines, int stride) {
  to.v = *reinterpret_cast<const Half8*>(lines + (simt::lane() % 16) * stride + (simt::lane() / 16) * 8);
}
template <class Layout>
SIMT_DEVICE void load(Lines& to, const uint16_t* lines, int quad) {
  to.v = *reinterpret_cast<const Half8*>(lines + Layout::place(simt::lane() % 16, quad + simt::lane() / 16));
}
SIMT_DEVICE void zero(Sums& d) { d.v = Float8(0.0f); }
SIMT_DEVICE void multiply_add(Sums& d, const Rows& a, const Columns& b) {
  d.v = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a.v, b.v, d.v);
}

// Rows stand where B does, so that a lane's sums belong to the row that it holds.
struct Unit {
  SIMT_DEVICE void multiply_add(float (&d)[SUMS], const Own& rows, const Own& columns) {
    Float8 v;
    SIMT_UNROLL
    for (int i = 0; i < SUMS; ++i) v[i] = d[i];
    v = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(__builtin_bit_cast(Half8, columns),
                                                        __builtin_bit_cast(Half8, rows), v);
    SIMT_UNROLL
    for (int i = 0; i < SUMS; ++i) d[i] = v[i];
  }
};

}  // namespace fragment
