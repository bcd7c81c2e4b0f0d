// byte_unit.h for gfx12's WMMA (RDNA4 ISA, 7.12), two of 16 k: lane l holds line l % 16, k = 8 (l / 16) + i of A
// and B, and of D column l % 16, rows 8 (l / 16) + i.
#pragma once
#include "simt.h"

#if SIMT_WAVE != 32
#error "byte_unit_amd.h: SIMT_WAVE must be 32, the layout of the w32 matrix instruction"
#endif

namespace byte_unit {

typedef int Int2 __attribute__((ext_vector_type(2)));
typedef int Int8 __attribute__((ext_vector_type(8)));

struct Unit {
  SIMT_DEVICE void multiply_add(int32_t (&d)[2 * PAIRS], const uint32_t (&rows)[ROWS][4],
                                const uint32_t (&columns)[4]) {
    Int8 v;
    SIMT_UNROLL
    for (int i = 0; i < 8; ++i) v[i] = d[i];
    SIMT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Int2 a = {static_cast<int>(rows[0][2 * half]), static_cast<int>(rows[0][2 * half + 1])};
      const Int2 b = {static_cast<int>(columns[2 * half]), static_cast<int>(columns[2 * half + 1])};
      v = __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(true, a, true, b, v, false);
    }
    SIMT_UNROLL
    for (int i = 0; i < 8; ++i) d[i] = v[i];
  }
};

}  // namespace byte_unit
