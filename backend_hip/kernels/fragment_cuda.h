// fragment.h for NVIDIA: ldmatrix and two mma.sync.m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16").
#pragma once
#include "simt.h"

namespace fragment {

// Four 8 x 8 matrices in the order in which the instruction takes registers. Rows: lines 0-7 and 8-15 at k
// 0-7, then the same at k 8-15. Columns: lines 0-7 at k 0-7 and 8-15, then lines 8-15; an instruction takes two.
// A lane gives the address of line lane % 8 of matrix lane / 8.
struct Lines { uint32_t v[4]; };
struct Rows : Lines {
  SIMT_DEVICE static int line() { return simt::lane() % 16; }
  SIMT_DEVICE static int quad() { return simt::lane() / 16; }
};
struct Columns : Lines {
  SIMT_DEVICE static int line() { return simt::lane() % 8 + simt::lane() / 16 * 8; }
  SIMT_DEVICE static int quad() { return simt::lane() / 8 % 2; }
};

constexpr int SUMS = 8;
struct Sums {
  float v[SUMS];
  SIMT_DEVICE float value(int i) const { return v[i]; }
};

SIMT_DEVICE int row(int i) { return simt::lane() / 4 + (i / 2) % 2 * 8; }
SIMT_DEVICE int column(int i) { return simt::lane() % 4 * 2 + i % 2 + i / 4 * 8; }

SIMT_DEVICE void load_at(Lines& to, const uint16_t* line) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(line));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.v[0]), "=r"(to.v[1]), "=r"(to.v[2]), "=r"(to.v[3])
               : "r"(address)
               : "memory");
}
template <class Operand>
SIMT_DEVICE void load(Operand& to, const uint16_t* lines, int stride) {
  load_at(to, lines + Operand::line() * stride + Operand::quad() * 8);
}
template <class Layout, class Operand>
SIMT_DEVICE void load(Operand& to, const uint16_t* lines, int quad) {
  load_at(to, lines + Layout::place(Operand::line(), quad + Operand::quad()));
}
SIMT_DEVICE void zero(Sums& d) {
  SIMT_UNROLL
  for (int i = 0; i < SUMS; ++i) d.v[i] = 0.0f;
}
SIMT_DEVICE void multiply_add(Sums& d, const Rows& a, const Columns& b) {
  SIMT_UNROLL
  for (int part = 0; part < 2; ++part) {
    float* v = d.v + 4 * part;
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
        : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b.v[2 * part]), "r"(b.v[2 * part + 1]));
  }
}

constexpr int PARTS = 4;
constexpr int LINES = 2;
constexpr int WORDS = 8 / PARTS;
struct Own { uint32_t word[LINES][WORDS]; };

SIMT_DEVICE int part() { return simt::lane() % 4; }
SIMT_DEVICE int line(int i) { return simt::lane() / 4 + 8 * i; }
SIMT_DEVICE int own_line(int i) { return (i / 2) % 2; }
SIMT_DEVICE int own_column(int i) { return column(i); }

struct Unit {
  SIMT_DEVICE void multiply_add(float (&d)[SUMS], const Own& rows, const Own& columns) {
    SIMT_UNROLL
    for (int i = 0; i < LINES; ++i) {
      float* v = d + 4 * i;
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "{%8, %9}, {%0, %1, %2, %3};"
          : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
          : "r"(rows.word[0][0]), "r"(rows.word[1][0]), "r"(rows.word[0][1]), "r"(rows.word[1][1]),
            "r"(columns.word[i][0]), "r"(columns.word[i][1]));
    }
  }
};

SIMT_DEVICE uint32_t halves(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace fragment
