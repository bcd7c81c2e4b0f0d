// Where gfx12's matrix unit has rows, columns and k of a fragment: fragment_cpu.h lays them out alike.
#pragma once
#include "simt.h"

namespace fragment {

constexpr int SUMS = 8;

SIMT_DEVICE int row(int i) { return (simt::lane() / 16) * 8 + i; }
SIMT_DEVICE int column(int) { return simt::lane() % 16; }

constexpr int PARTS = 2;
constexpr int LINES = 1;
constexpr int WORDS = 8 / PARTS;
struct Own { uint32_t word[LINES][WORDS]; };

SIMT_DEVICE int part() { return simt::lane() / 16; }
SIMT_DEVICE int line(int) { return simt::lane() % 16; }
SIMT_DEVICE int own_line(int) { return 0; }
SIMT_DEVICE int own_column(int i) { return row(i); }

SIMT_DEVICE uint32_t halves(float low, float high) {
  return simt::float_to_half(low) | (static_cast<uint32_t>(simt::float_to_half(high)) << 16);
}

}  // namespace fragment
